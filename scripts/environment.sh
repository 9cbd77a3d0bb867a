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
    local sets=(torch "$@") files=() set stamp wanted python="${PYTHON:-python3}"
    for set in "${sets[@]}"; do
        files+=("$ROOT/scripts/requirements/$set.txt")
    done
    if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        echo "The pinned packages are for Python 3.11; $python is" \
            "$("$python" --version 2>&1). Set PYTHON to a python3.11." >&2
        return 2
    fi
    wanted="$(cat "${files[@]}" "$ROOT/setup.py" | cksum)"
    stamp="$VENV/.installed-$(IFS=-; echo "${sets[*]}")"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing into $VENV (once)" >&2
        "$python" -m venv "$VENV" || return
        # torch first: with it in place nothing can bring in another one.
        for set in "${files[@]}"; do
            "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
                --requirement "$set" || return
        done
        if ! "$VENV/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'
        then
            echo "The installed torch is not a CPU build. Point pip at an index with CPU builds" \
                "(PIP_INDEX_URL), remove $VENV and start again." >&2
            return 2
        fi
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
            --no-build-isolation --editable "$ROOT" || return
        echo "$wanted" > "$stamp"
    fi
    export PATH="$VENV/bin:$PATH"
    # One thread per rank: ranks share the cores. And a torch_npu without CANN breaks `import torch`.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCH_DEVICE_BACKEND_AUTOLOAD=0
}
