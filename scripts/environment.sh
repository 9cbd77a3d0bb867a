# Sourced by the other scripts: creates a virtual environment in .venv with pinned packages.
#
#   prepare_environment cpu [test] [npu] [core]
#
# The first call installs everything; a later one installs what has changed or was not completed.
# Packages are installed without their dependencies, each pinned in scripts/requirements:
# megatron-core alone would require some 60 packages that nothing here imports.
#
# "npu" is a second environment, .venv-npu, for tests/npu: torch_npu alone, with the packages of
# .venv behind it, and stand-ins for CANN. In .venv itself torch_npu would break `import torch`. If
# it cannot be created, the rest continues without it.
#
# "core" is a third one, .venv-core, with the newest megatron-core, which needs Python 3.12. Without
# python3.12 or a CPU build of torch for it, the rest continues without it, too.
#
#   PYTHON         the interpreter of a new environment, 3.10 to 3.13; default python3
#   COMMFUSE_VENV  its folder; default .venv in the repository

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${COMMFUSE_VENV:-$ROOT/.venv}"
NPU_VENV="$VENV-npu"
CORE_VENV="$VENV-core"
REQUIREMENTS="$ROOT/scripts/requirements"

prepare_environment() {
    local name npu=false core=false
    create_environment || return
    # Before installing: from Python 3.12 on megatron-core is built, and its setup.py runs python3.
    export PATH="$VENV/bin:$PATH"
    # torch first, so that no other package can bring in a different one.
    once "$VENV" "$REQUIREMENTS/torch.txt" install_torch || return
    for name in "$@"; do
        if [ "$name" = npu ]; then npu=true && continue; fi
        if [ "$name" = core ]; then core=true && continue; fi
        once "$VENV" "$REQUIREMENTS/$name.txt" install_file || return
    done
    once "$VENV" "$ROOT/setup.py" install_project || return
    # One thread per rank, because ranks share the cores. torch_npu without CANN breaks
    # `import torch`. If torch is a CUDA build, it must not find a GPU.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
        CUDA_VISIBLE_DEVICES=
    if "$npu" && ! prepare_npu_environment; then
        echo "No $NPU_VENV (see above): tests/npu will be skipped." >&2
    fi
    if "$core" && ! prepare_core_environment; then
        echo "No $CORE_VENV (see above): the test on the newest Megatron core will be skipped." >&2
    fi
}

create_environment() {
    local python="${PYTHON:-python3}"
    [ ! -e "$VENV/bin/pip" ] || return 0
    if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
        echo "The pinned packages are for Python 3.10 to 3.13; $python is" \
            "$("$python" --version 2>&1). Set PYTHON to one of these." >&2
        return 2
    fi
    "$python" -m venv "$VENV"
}

# once VENV FILE COMMAND: run COMMAND FILE, unless it already succeeded in VENV with the same FILE.
once() {
    local marker
    marker="$1/.installed-$(basename "${2%.*}")"
    cmp -s "$2" "$marker" && return
    echo "Installing ${2#"$ROOT/"} into $1 (once)" >&2
    "$3" "$2" && cp "$2" "$marker"
}

# The CPU build has a few hundred MB; PyPI's Linux build depends on CUDA.
install_torch() {
    local version source error cpu_builds=https://download.pytorch.org/whl/cpu log="$VENV/torch.log"
    version="$(sed -n 's/^torch==//p' "$1")"
    if install_packages "torch==$version+cpu" 2>"$log"; then
        source="the configured indexes"
    elif install_packages --timeout 15 --retries 1 --index-url "$cpu_builds" \
        "torch==$version+cpu" 2>>"$log"; then
        source="$cpu_builds"
    elif [ -n "${CPU_BUILD_ONLY:-}" ]; then
        echo "No CPU build of torch $version for this Python was found (why: $log)." >&2
        return 1
    else
        source="the configured indexes, with its dependencies"
        echo "torch $version+cpu is neither on the configured indexes nor can it be had from" \
            "$cpu_builds (why: $log). Installing torch $version with its dependencies; on Linux" \
            "CUDA is one, 3 GB to download and 5 GB on disk, and tests/npu cannot run. To avoid" \
            "that, stop here and point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a CPU build." >&2
        "$VENV/bin/python" -m pip install --disable-pip-version-check --requirement "$1" >&2 || return
    fi
    install_file "$1" || return
    if ! error="$("$VENV/bin/python" -c 'import torch' 2>&1)"; then
        echo "torch $version, from $source, cannot be imported: ${error##*$'\n'}. Remove $VENV and" \
            "start again." >&2
        return 1
    fi
    echo "torch $version is from $source." >&2
}

install_file() {
    install_packages --requirement "$1"
}

install_project() {
    install_packages --no-build-isolation --editable "$ROOT"
}

install_packages() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
}

prepare_core_environment() {
    local VENV="$CORE_VENV" PYTHON=python3.12 CPU_BUILD_ONLY=yes
    if [ ! -e "$VENV/bin/pip" ] && ! python3.12 --version >/dev/null 2>&1; then
        echo "The newest Megatron core needs python3.12, which was not found." >&2
        return 1
    fi
    create_environment && once "$VENV" "$REQUIREMENTS/torch.txt" install_torch &&
        once "$VENV" "$REQUIREMENTS/core.txt" install_file
}

prepare_npu_environment() {
    local site
    site="$(site_packages "$VENV")" || return
    if [ -e "$site/torch/lib/libtorch_cuda.so" ]; then
        # Both register allocator options under the same names, and the process aborts.
        echo "torch_npu cannot be loaded beside a torch with CUDA." >&2
        return 1
    fi
    [ -e "$NPU_VENV/bin/python" ] || "$VENV/bin/python" -m venv --without-pip "$NPU_VENV" || return
    once "$NPU_VENV" "$REQUIREMENTS/npu.txt" install_npu || return
    once "$NPU_VENV" "$ROOT/mindspeed_patches/rehearsal/cann_stubs.py" write_cann_stubs
}

install_npu() {
    rm -f "$NPU_VENV/.installed-cann_stubs" # they belong to one version of torch_npu
    install_npu_file "$1"
}

write_cann_stubs() {
    "$NPU_VENV/bin/python" "$1" "$NPU_VENV/cann"
}

install_npu_file() {
    PIP_PYTHON="$NPU_VENV/bin/python" install_file "$1" || return
    site_packages "$VENV" >"$(site_packages "$NPU_VENV")/behind.pth"
}

site_packages() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}
