#!/usr/bin/env bash
# Rehearse a launch of MindSpeed on CPU and gloo, with and without CommFuse: are results equal,
# what is fused, which collectives remain? Needs no NPU and no CANN, and measures no time.
#
#   export MINDSPEED_HOME=... MINDSPEED_LLM_HOME=... MEGATRON_HOME=...     checkouts of the three,
#                          of two where Megatron-LM's own pretrain_gpt.py is launched
#   bash scripts/rehearse_on_cpu.sh --rehearse-scale -- my_pretrain.sh     your launch script
#   bash scripts/rehearse_on_cpu.sh -- torchrun ... pretrain_gpt.py ...    or its command line
#   bash scripts/rehearse_on_cpu.sh --help                                 all options
#
# Sets up .venv and .venv-npu by itself; needs a C compiler and make, also for Megatron's helpers.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment cpu npu

if [ ! -e "$NPU_VENV/.installed-cann_stubs" ]; then
    echo "A rehearsal needs torch_npu." >&2
    exit 2
fi
once "$NPU_VENV" "$REQUIREMENTS/rehearse.txt" install_npu_file

export LD_LIBRARY_PATH="$NPU_VENV/cann${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$NPU_VENV/bin/python" -m mindspeed_patches.rehearsal "$@"
