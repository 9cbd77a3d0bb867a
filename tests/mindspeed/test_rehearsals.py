"""The real MindSpeed-LLM on CPU: the same bits with CommFuse, and no collective in its layers.

Each case runs the rehearsal command as a user does.  It needs checkouts (see ``SKIPPED``);
``MINDSPEED_LLM_HOME`` and the other variables choose the versions.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from mindspeed_patches.rehearsal.records import Record, read_records

LAYERS = ("qkv", "proj", "fc1", "fc2", "output")
"""The fused layers of a Llama."""

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(f"{os.environ.get('COMMFUSE_VENV') or ROOT / '.venv'}-npu")
HOMES = ("MINDSPEED_HOME", "MINDSPEED_LLM_HOME", "MEGATRON_HOME")

MODEL = """
    --use-mcore-models --sequence-parallel --num-layers 2 --hidden-size 64 --ffn-hidden-size 128
    --num-attention-heads 4 --tokenizer-type NullTokenizer --vocab-size 4607 --seq-length 64
    --max-position-embeddings 64 --make-vocab-size-divisible-by 1 --micro-batch-size 2
    --global-batch-size 8 --lr 1e-3 --train-iters 10 --lr-decay-style cosine --min-lr 1e-8
    --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0.0
    --hidden-dropout 0.0 --init-method-std 0.01 --position-embedding-type rope
    --normalization RMSNorm --use-fused-rmsnorm --swiglu --use-fused-swiglu
    --use-fused-rotary-pos-emb --use-flash-attn --no-masked-softmax-fusion
    --attention-softmax-in-fp32 --clip-grad 1.0 --bf16 --mock-data --split 100,0,0
    --distributed-backend nccl --tensor-model-parallel-size 2
"""
PLAIN_WGRAD = "--no-gradient-accumulation-fusion"
LOCAL = "--transformer-impl local"
ENGINE = "--transformer-impl transformer_engine"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

NAIVE = f"{LOCAL} {PLAIN_WGRAD}"

LATENT = (
    "--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec --multi-latent-attention "
    "--qk-layernorm --qk-pos-emb-head-dim 16 --qk-head-dim 32 --q-lora-rank 32 --kv-lora-rank 32 "
    "--v-head-dim 32 --shape-order BNSD"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --n-shared-experts 1 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none "
    "--first-k-dense-replace 1 --moe-layer-freq 1"
)
OF_LATENT = ("q_up", "kv_up", "proj", "fc1", "fc2", "output")
OF_EXPERTS = (*LAYERS, "shared_fc1", "shared_fc2")

FOUR = "--tensor-model-parallel-size 4 --commfuse-chunks 2"

CASES = {
    "local": (2, NAIVE, LAYERS),
    "transformer_engine": (2, f"{ENGINE} {PLAIN_WGRAD}", LAYERS),
    "gradient_accumulation_fusion": (2, LOCAL, LAYERS),
    "distributed_optimizer": (4, f"{NAIVE} --use-distributed-optimizer", LAYERS),
    "collectives": (4, f"{NAIVE} {FOUR}", LAYERS),
    "batches": (4, f"{NAIVE} {FOUR} --commfuse-lanes 3", LAYERS),
    "pipeline": (4, f"{ENGINE} {PLAIN_WGRAD} --pipeline-model-parallel-size 2", LAYERS),
    "latent": (2, f"{NAIVE} {LATENT}", OF_LATENT),
    "latent_transformer_engine": (2, f"{ENGINE} {PLAIN_WGRAD} {LATENT}", OF_LATENT),
    "latent_split": (2, f"{NAIVE} {LATENT} --mla-mm-split", OF_LATENT),
    "latent_zero_memory": (2, f"{LOCAL} {LATENT} --mla-zero-memory", OF_LATENT),
    "shared_experts": (2, f"{NAIVE} {EXPERTS}", OF_EXPERTS),
    "shared_experts_recomputed": (2, f"{LOCAL} {EXPERTS} {RECOMPUTE}", OF_EXPERTS),
    "prediction": (2, f"{NAIVE} --mtp-num-layers 1", (*LAYERS, "eh_proj")),
}
"""Processes, what is added to the model's options, and all kinds of layers that are fused."""


ULYSSES = "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo --commfuse-ulysses"
ALONE = "--tensor-model-parallel-size 1"
PACKED = "--reset-attention-mask --reset-position-ids --fix-sub-seq-length 24"
"""Documents of 24, 24 and 16 tokens: half of the sequence of 64 ends in the second one."""
SAME_POSITIONS = PACKED.replace("--reset-position-ids", "--attention-mask-type general")

ATTENTION_CASES = {
    "attention": (2, f"{NAIVE} --commfuse-attention"),
    "ulysses": (2, f"{NAIVE} {ULYSSES} {ALONE}"),
    "ulysses_transformer_engine": (2, f"{ENGINE} {PLAIN_WGRAD} {ULYSSES} {ALONE}"),
    "packed_attention": (2, f"{NAIVE} {PACKED} --commfuse-attention"),
    "packed_ulysses": (2, f"{NAIVE} {PACKED} {ULYSSES} {ALONE}"),
    "packed_ulysses_without_new_positions": (2, f"{NAIVE} {SAME_POSITIONS} {ULYSSES} {ALONE}"),
    "packed_ulysses_and_tensor_parallel": (4, f"{NAIVE} {PACKED} {ULYSSES} {RECOMPUTE}"),
}
"""Processes, and what is added to the model's options in fp32."""


SEVERAL = MODEL.replace("--micro-batch-size 2", "--micro-batch-size 1")
"""Enough micro-batches to pair them, also with replicas."""
STAGES = "--pipeline-model-parallel-size 2 --commfuse-overlap-memory"
VIRTUAL = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
)
SWAPPED = (
    "--hidden-size 256 --ffn-hidden-size 256 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 4 --global-batch-size 16 --swap-attention"
)
"""Activations of half a MiB: smaller ones stay on the device."""
LORA = (
    "--lora-r 8 --lora-alpha 16 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2"
)
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TURNS = {
    "plain": (2, PLAIN_WGRAD),
    "recomputed_dropout": (2, f"{PLAIN_WGRAD} {RECOMPUTE} --hidden-dropout 0.1"),
    "gradient_accumulation_fusion": (2, ""),
    "swapped_recompute": (2, f"{PLAIN_WGRAD} {SWAPPED} {RECOMPUTE}"),
    "swapped_virtual_stages": (4, f"{PLAIN_WGRAD} {VIRTUAL} {SWAPPED}"),
    "latent": (2, f"{PLAIN_WGRAD} {LATENT}"),
    "experts_recompute": (2, f"{PLAIN_WGRAD} --num-layers 3 {EXPERTS} {RECOMPUTE}"),
    "grouped_experts": (2, f"{PLAIN_WGRAD} {EXPERTS} --moe-grouped-gemm"),
    "grouped_experts_fusion": (
        2,
        f"{EXPERTS} --moe-grouped-gemm --gemm-gradient-accumulation-fusion",
    ),
    "prediction_recompute": (2, f"{PLAIN_WGRAD} --mtp-num-layers 1 {RECOMPUTE}"),
    "activation_function": (2, f"{PLAIN_WGRAD} --recompute-activation-function"),
    "lora": (2, f"{PLAIN_WGRAD} {LORA}"),
    "pipeline": (4, f"{PLAIN_WGRAD} {STAGES}"),
    "packed_pipeline_recompute": (4, f"{PLAIN_WGRAD} {STAGES} {RECOMPUTE} {PACKED}"),
    "virtual_pipeline": (4, f"{PLAIN_WGRAD} {VIRTUAL}"),
    "distributed_optimizer": (4, f"{PLAIN_WGRAD} {SHARDED}"),
}
"""Processes, and what is added to the model's options, for forward-backward overlap."""


LAUNCHES = {
    "phi35/pretrain_phi35_moe_ptd.sh": "a virtual pipeline with experts",
    "qwen25/tune_qwen25_72b_16k_full_pack.sh": "packed fine-tuning with recomputation",
    "qwen25/pretrain_qwen25_72b_4k_pack_A3.sh": "packed, with recomputed activation functions",
    "deepseek2_lite/tune_deepseek2_lite_16b_full_ptd_16p.sh": "experts with recomputation",
    "deepseek3/tune_deepseek3_671b_4k_full_A3_ptd.sh": "shared experts' gathers overlapped, too",
    "deepseek3/tune_deepseek3_671b_4k_lora_A3_ptd.sh": "LoRA",
    "qwen3_moe/dpo_qwen3_30b_a3b_16K_A3_ptd.sh": "preference training, with a reference model",
}
"""Launch scripts of MindSpeed-LLM 26.1.0, below ``examples/mcore``, and their kinds."""


REPLICAS = "--use-distributed-optimizer --commfuse-dp"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 40000"

DATA_PARALLEL_CASES = {
    "replicas": (2, f"{NAIVE} {REPLICAS} {ALONE}"),
    "replicas_overlapped": (2, f"{NAIVE} {REPLICAS} {OVERLAP} {ALONE}"),
    "replicas_of_experts": (
        2,
        f"{NAIVE} {REPLICAS} {EXPERTS} --expert-model-parallel-size 2 {ALONE}",
    ),
    "replicas_of_sequences": (
        2,
        f"{NAIVE} {REPLICAS} --context-parallel-size 2 "
        f"--context-parallel-algo ulysses_cp_algo {ALONE}",
    ),
    "replicas_and_tensor_parallel": (4, f"{NAIVE} {REPLICAS} {OVERLAP}"),
}
"""Processes, and what is added to the model's options; two replicas each."""


def why_not(*homes: str) -> str | None:
    """The reason why rehearsals with these checkouts cannot run here, or ``None``."""
    missing = [name for name in homes if not os.environ.get(name)]
    if missing:
        return (
            f"set {', '.join(missing)} to checkouts of MindSpeed, MindSpeed-LLM, Megatron-LM "
            "(bash scripts/rehearse_on_cpu.sh -- x.py says which belong together)"
        )
    if not (ENVIRONMENT / ".installed-rehearse").exists():
        return f"no {ENVIRONMENT}; bash scripts/rehearse_on_cpu.sh --help makes it"
    return None


SKIPPED = why_not(*HOMES)
pytestmark = [
    pytest.mark.skipif(SKIPPED is not None, reason=str(SKIPPED)),
    pytest.mark.timeout(1500),
]


def rehearse(folder: Path, *words: str, code: int = 0) -> str:
    """What a rehearsal with this exit code printed."""
    done = subprocess.run(
        ["bash", "scripts/rehearse_on_cpu.sh", "--output", str(folder), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def rehearsed(
    folder: Path, processes: int, options: str, iterations: int, model: str = MODEL
) -> tuple[list[Record], list[Record]]:
    """Records of both runs, which are equal (up to rounding, with CommFuse's attention)."""
    if ALONE in options:
        model = model.replace("--sequence-parallel", "")
    rounds = "--commfuse-attention" in options or "--commfuse-ulysses" in options
    if rounds:
        model = model.replace("--bf16", "")
    launch = f"torchrun --nproc_per_node {processes} pretrain_gpt.py {model} {options}"
    printed = rehearse(folder, "--iterations", str(iterations), "--", *launch.split())
    verdict = "losses equal within 1e-06 relative: True" if rounds else "identical: True\n"
    assert verdict in printed
    reference, commfuse = (read_records(folder / way) for way in ("reference", "commfuse"))
    assert len(reference) == len(commfuse) == processes
    return reference, commfuse


def gathers_and_scatters(records: list[Record], group: str) -> int:
    """Number of all-gathers and reduce-scatters of tensors on groups whose names start so."""
    kind = re.compile(rf"{group}.*: _?(all_gather|reduce_scatter)(?!.*_object)")
    return sum(n for r in records for name, n in r.collectives.items() if kind.match(name))


def paths(records: list[Record], *layers: str) -> set[str]:
    """The paths that calls of these layers took."""
    return {path for r in records for name, path, _ in r.calls if name in layers}


def assert_always_fused(records: list[Record], folder: Path, *layers: str) -> None:
    """All calls of these layers were fused, and the log says so of each."""
    log = (folder / "commfuse" / "log.txt").read_text("utf-8")
    for layer in layers:
        assert paths(records, layer) == {"fused"}
        assert re.search(rf"^CommFuse: {layer}: (\d+) of \1 fused$", log, re.MULTILINE), log


@pytest.mark.parametrize("case", CASES)
def test_commfuse_changes_no_bit_and_leaves_no_collective(case: str, tmp_path: Path) -> None:
    processes, options, fused = CASES[case]
    reference, commfuse = rehearsed(tmp_path, processes, options, iterations=5)
    assert set().union(*(r.fused for r in commfuse)) == set(fused)
    assert_always_fused(commfuse, tmp_path, *fused)
    left = gathers_and_scatters(commfuse, "tensor")
    assert gathers_and_scatters(reference, "tensor") > left
    # The embedding has one of each: 5 steps of 4 micro-batches, on the ranks of a group.
    assert fused != LAYERS or left == 2 * 5 * 4 * (4 if FOUR in options else 2)


@pytest.mark.parametrize("case", TURNS)
def test_micro_batches_that_take_turns_change_no_bit(case: str, tmp_path: Path) -> None:
    processes, options = TURNS[case]
    options = f"{LOCAL} {options} --commfuse-overlap"
    reference, commfuse = rehearsed(tmp_path, processes, options, iterations=3, model=SEVERAL)
    assert all(record.overlapped > 0 for record in commfuse)
    assert all(record.overlapped == 0 for record in reference)
    if case == "recomputed_dropout":
        log = (tmp_path / "commfuse" / "log.txt").read_text("utf-8")
        assert "recomputations of 2 checkpoints leave out the last GEMM" in log


@pytest.mark.parametrize("script", LAUNCHES)
def test_launches_as_they_are_take_turns(script: str, tmp_path: Path) -> None:
    path = Path(os.environ["MINDSPEED_LLM_HOME"]) / "examples" / "mcore" / script
    if not path.is_file():
        pytest.skip(f"this MindSpeed-LLM has no {script}")
    flags = "--commfuse-overlap --commfuse-overlap-memory"
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"(?<=train_gpt\.py)", f" {flags}", path.read_text("utf-8")), "utf-8")
    limits = ("--rehearse-scale", "--processes", "4", "--iterations", "3")
    printed = rehearse(tmp_path / "records", *limits, "--", str(copy))
    assert printed.endswith("identical: True\n")
    assert all(record.overlapped > 0 for record in read_records(tmp_path / "records" / "commfuse"))


@pytest.mark.parametrize("case", DATA_PARALLEL_CASES)
def test_buckets_change_no_bit_and_leave_no_collective(case: str, tmp_path: Path) -> None:
    processes, options = DATA_PARALLEL_CASES[case]
    reference, commfuse = rehearsed(tmp_path, processes, options, iterations=4)
    for name in ("gradients", "parameters"):
        taken = paths(commfuse, name)
        assert "fused" in taken
        # Experts are sharded over other groups than the dense parameters.
        assert len(taken) == (2 if EXPERTS in options else 1)
    assert gathers_and_scatters(reference, "data parallel") > 0
    assert gathers_and_scatters(commfuse, "data parallel") == 0


@pytest.mark.parametrize("case", ATTENTION_CASES)
def test_attention_changes_no_loss_in_fp32(case: str, tmp_path: Path) -> None:
    processes, options = ATTENTION_CASES[case]
    _, commfuse = rehearsed(tmp_path, processes, options, iterations=10)
    assert_always_fused(commfuse, tmp_path, "ulysses" if ULYSSES in options else "attention")
    if ULYSSES in options and ALONE in options:
        assert paths(commfuse, "qkv", "proj") == {"fused"}


def test_a_launch_that_would_fuse_nothing_ends_on_all_ranks(tmp_path: Path) -> None:
    launch = f"pretrain_gpt.py {MODEL} {NAIVE} --commfuse-layers kv_up"
    rehearse(tmp_path, "--iterations", "1", "--", *launch.split(), code=1)
    log = (tmp_path / "commfuse" / "log.txt").read_text("utf-8")
    assert log.count("IncompatibleOptionsError: --use-commfuse would fuse nothing:") == 2
    reason = "qkv is not in the list of layers to fuse (add qkv to --commfuse-layers)"
    assert f"  qkv: 0 of 2 fused; 2 not: {reason}" in log
    assert "iteration        1/" not in log


def test_other_bits_are_noticed(tmp_path: Path) -> None:
    """Partial sums in fp32 are rounded once; the collective rounds every sum."""
    options = "--commfuse-reduce-dtype float32 --tensor-model-parallel-size 4"
    launch = f"pretrain_gpt.py {MODEL} {NAIVE} {options}"
    printed = rehearse(tmp_path, "--iterations", "2", "--", *launch.split(), code=1)
    assert "differs after the training: " in printed


def test_a_launch_script_of_ours_at_small_scale(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "pretrain_llama3_8b_ptd.sh")
    mock = "--mock-data --tokenizer-type NullTokenizer --vocab-size 4607"
    limits = ("--rehearse-scale", "--processes", "2", "--iterations", "2")
    printed = rehearse(tmp_path, *limits, "--", script, *mock.split())
    assert "--hidden-size 4096 -> " in printed
    assert_always_fused(read_records(tmp_path / "commfuse"), tmp_path, *LAYERS)
