# Sourced by the other scripts: a virtual environment in .venv with pinned packages.
#
#   prepare_environment cpu [test] [npu]
#
# The first call installs, later ones notice that nothing has changed.  Packages are installed
# without resolving dependencies, each pinned in scripts/requirements: megatron-core alone would
# bring some 60 packages that nothing here imports, and any other torch several GB of CUDA.
#
# "npu" is another environment beside it, .venv-npu, for tests/npu: torch_npu and nothing else, with
# the packages of .venv behind it, and stand-ins for CANN. In .venv itself torch_npu would break
# every `import torch`. If it cannot be made, the rest goes on without.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${COMMFUSE_VENV:-$ROOT/.venv}"
NPU_VENV="$VENV-npu"

prepare_environment() {
    local set file npu=false changed=() python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
        echo "The pinned packages are for Python 3.11; $python is" \
            "$("$python" --version 2>&1). Set PYTHON to a python3.11." >&2
        return 2
    fi
    # torch first: with it in place nothing can bring in another one.
    for set in torch "$@"; do
        if [ "$set" = npu ]; then npu=true && continue; fi
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
    if "$npu" && ! prepare_npu_environment; then
        echo "No $NPU_VENV (see above): tests/npu will be skipped." >&2
    fi
}

prepare_npu_environment() {
    local file="$ROOT/scripts/requirements/npu.txt" site
    if ! cmp -s "$file" "$NPU_VENV/.installed-npu"; then
        echo "Installing torch_npu into $NPU_VENV (once)" >&2
        "$VENV/bin/python" -m venv --without-pip "$NPU_VENV" || return
        PIP_PYTHON="$NPU_VENV/bin/python" install_packages --requirement "$file" || return
        site="$(site_packages "$NPU_VENV")" || return
        site_packages "$VENV" >"$site/behind.pth" || return
        cp "$file" "$NPU_VENV/.installed-npu"
    fi
    site="$(site_packages "$NPU_VENV")" || return
    "$VENV/bin/python" "$ROOT/mindspeed_patches/rehearsal/cann_stubs.py" \
        --site-packages "$site" "$NPU_VENV/cann" >/dev/null
}

site_packages() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

install_packages() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}
