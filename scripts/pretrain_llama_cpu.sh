#!/usr/bin/env bash
# Pretrain a small Llama on CPU with the real megatron-core and fused tensor-parallel layers.
#
#   bash scripts/pretrain_llama_cpu.sh                       2 processes, about two minutes
#   bash scripts/pretrain_llama_cpu.sh --compare             plain and fused: the same bits?
#   bash scripts/pretrain_llama_cpu.sh --help                all options
#
# Defaults are in configs/llama_tiny.yaml. Sets up .venv by itself.
set -eu
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment cpu
cd "$ROOT"

for option in "$@"; do
    case "$option" in -h | --help) exec python -m scripts.cpu_pretraining "$option" ;; esac
done
processes="$(python -m scripts.cpu_pretraining.processes "$@")"

# All ranks are on this machine: talk over loopback, whatever its host name resolves to.
case "$(uname)" in Darwin) loopback=lo0 ;; *) loopback=lo ;; esac
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$loopback}"

exec python -m torch.distributed.run --nnodes 1 --nproc_per_node "$processes" \
    --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:0 --local_addr 127.0.0.1 \
    -m scripts.cpu_pretraining "$@"
