# Sourced by the other scripts: a virtual environment in .venv with pinned packages.
#
#   prepare_environment cpu [test]
#
# The first call installs, later ones notice that nothing has changed.  Packages are installed
# without resolving dependencies, each pinned in scripts/requirements: megatron-core alone would
# bring some 60 packages that nothing here imports, and any other torch several GB of CUDA.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${COMMFUSE_VENV:-$ROOT/.venv}"

prepare_environment() {
    local set file changed=() python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        echo "The pinned packages are for Python 3.11; $python is" \
            "$("$python" --version 2>&1). Set PYTHON to a python3.11." >&2
        return 2
    fi
    # torch first: with it in place nothing can bring in another one.
    for set in torch "$@"; do
        file="$ROOT/scripts/requirements/$set.txt"
        cmp -s "$file" "$VENV/.installed-$set" || changed+=("$set")
    done
    if [ "${#changed[@]}" -gt 0 ]; then
        echo "Installing ${changed[*]} into $VENV (once)" >&2
        "$python" -m venv "$VENV" || return
        for set in "${changed[@]}"; do
            file="$ROOT/scripts/requirements/$set.txt"
            install_packages --requirement "$file" || return
            cp "$file" "$VENV/.installed-$set"
        done
        if ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'
        then
            echo "The installed torch is not a CPU build. Point pip at an index with CPU builds" \
                "(PIP_INDEX_URL), remove $VENV and start again." >&2
            return 2
        fi
        install_packages --no-build-isolation --editable "$ROOT" || return
    fi
    export PATH="$VENV/bin:$PATH"
    # One thread per rank: ranks share the cores. And a torch_npu without CANN breaks `import torch`.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCH_DEVICE_BACKEND_AUTOLOAD=0
}

install_packages() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}
