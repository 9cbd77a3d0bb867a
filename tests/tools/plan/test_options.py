"""What the options of a launch mean: the training, its form, what stands against CommFuse."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from commfuse_npu.tools.plan.asked_launch import AskedLaunch, NotSimulated, training_of
from commfuse_npu.tools.plan.launch_plan import plan_launch
from commfuse_npu.tools.plan.obstacles import obstacles
from tests.tools.plan.launches import (
    EXPERTS,
    FUSED,
    MODEL,
    SERVER,
    SIZES,
    TP,
    ULYSSES,
    asked,
)

ONE = f"--nproc_per_node 8 {MODEL}"
FOUR = f"{ONE} {TP}"
FOUR_16 = f"{FOUR} --swiglu --bf16 --global-batch-size 16"
ALONE = f"{FUSED} --tensor-model-parallel-size 1 --attention-dropout 0.0"
ATTENTION = f"{FUSED} --commfuse-attention --attention-dropout 0.0"
DP = "--commfuse-dp --use-distributed-optimizer --nproc_per_node"
PP = "--pipeline-model-parallel-size 2"
EACH = "--num-layers-per-virtual-pipeline-stage 1"
FULL = f"{FOUR_16} {PP} --recompute-granularity full --recompute-method"
LATENT = "--multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 8"
MOE = f"{FOUR_16} --num-experts 4"


def layers(launch: AskedLaunch) -> str:
    """The layers that are fused | that are not."""
    found = obstacles(launch).layers
    sides = ([x.layer for x in found if bool(x.reason) == kept] for kept in (False, True))
    return " | ".join(" ".join(name.replace(" ", "_") for name in side) for side in sides)


def remarks(launch: AskedLaunch) -> list[str]:
    """What stands against a launch, and what in it is not as meant."""
    found, plan = obstacles(launch), plan_launch(launch, SERVER)
    return [*filter(None, [found.fused]), *plan.problems, *found.notes]


def recomputed(launch: AskedLaunch) -> list[int]:
    """The number of layers of every chunk that are run again."""
    job = training_of(launch)
    return [job.recomputed_layers(place) for place in range(len(job.places))]


def too(launch: AskedLaunch) -> list[str]:
    """Our other options that can be given."""
    return list(obstacles(launch).also)


def paired(launch: AskedLaunch) -> tuple[str, str, float | None]:
    """What stands against overlap, and against forwards in it, and how much has a partner."""
    against = obstacles(launch)
    return against.overlap, against.own_schedule, against.paired


def places(launch: AskedLaunch) -> list[dict[str, float]]:
    """The layers of every chunk."""
    return list(training_of(launch).places)


def chunks(launch: AskedLaunch) -> int:
    return launch.schedule.chunks


DENSE = "qkv proj fc1 fc2 output"
SP = f"{FOUR} --commfuse-chunks 1"
MOES = f"{SP} {EXPERTS}"
MLA = f"{SP} {LATENT} --v-head-dim 8"
# A question, and its answer for launches.
VALUES: list[tuple[Callable[[AskedLaunch], Any], dict[str, Any]]] = [
    (layers, {
        SP: f"{DENSE} | ",
        f"{ONE} --tensor-model-parallel-size 4 --commfuse-chunks 1": f" | {DENSE}",
        f"{ONE} --sequence-parallel": f" | {DENSE}",
        # Experts in each layer, no dense one.
        MOES: "qkv proj output | experts",
        f"{MOES} --first-k-dense-replace 0": "qkv proj output | experts",
        f"{MOES} --first-k-dense-replace 3": f"{DENSE} | experts",
        f"{MOES} --spec x.longcat_spec s": f"{DENSE} | experts",
        f"{MOES} --moe-shared-expert-intermediate-size 64":
            "qkv proj shared_fc1 shared_fc2 output | experts",
        f"{MOES} --n-shared-experts 1 --moe-alltoall-overlap-comm":
            "qkv proj output | shared_fc1 shared_fc2 experts",
        MLA: "q_up kv_up proj fc1 fc2 output | ",
        f"{MLA} --mla-up-proj-tp-overlap": "proj fc1 fc2 output | q_up kv_up",
        f"{SP} --mtp-num-layers 1": "qkv proj fc1 fc2 eh_proj output | ",
        f"{SP} --commfuse-layers qkv,output": "qkv output | proj fc1 fc2",
        f"{SP} --defer-embedding-wgrad-compute": "qkv proj fc1 fc2 | output",
        f"{SP} --full-attention-interval 4":
            "q,_k,_v_apart delta-net_in delta-net_out proj fc1 fc2 output | ",
        f"{SP} --spec x.deepseek4_spec s": "fc1 fc2 output | CSA's_q_up,_o_down CSA's_o_up",
        # Short blocks stay Megatron's, if their limit is not lifted.
        f"{FOUR} --seq-length 1024": f" | {DENSE}",
        f"{FOUR} --seq-length 2048 --hidden-size 32768": f"{DENSE} | ",
        f"{FOUR} --seq-length 1024 --commfuse-tuning on": f"{DENSE} | ",
    }),
    (remarks, {
        f"A=b torchrun --nproc_per_node 2 -m mindspeed_patches.launch x/pretrain_gpt.py "
        f"{FUSED}": [],
        f"{ATTENTION} --recompute-granularity full": [],
        f"{FUSED} --schedules-method other --output-layer-slice-num 1 --pre-tockens 4096": [],
        f"{ALONE} {DP} 2": [],
        f"{ALONE} {ULYSSES} --commfuse-ulysses": [],
        f"{FUSED} --num-attention-heads 6 --kv-channels 16": [],
        "--config --commfuse-attention": [],  # the launchers switch dropout off
    }),
    (too, {
        FOUR: ["--commfuse-attention", "--commfuse-dp"],
        f"{FOUR} --commfuse-attention": ["--commfuse-dp"],
        f"{FOUR} --attention-dropout 0.1": ["--commfuse-dp"],
        f"{FOUR} --context-parallel-size 2": ["--commfuse-dp"],
        f"{FOUR} {ULYSSES}": ["--commfuse-ulysses", "--commfuse-dp"],
        f"{FOUR} --nproc_per_node 4": ["--commfuse-attention"],
        "--config --nproc_per_node 16": ["--commfuse-attention", "--commfuse-dp"],
        ONE: ["--commfuse-dp"],  # at TP 1 nothing else is fused
        f"{ONE} --use-custom-fsdp": [],
        f"{FOUR} --use-ascend-coc": [],
    }),
    (paired, {
        f"{FOUR} --global-batch-size 16": ("", "", 7 / 8),
        f"{FOUR} --global-batch-size 2": ("", "", 0.0),
        f"{FOUR_16} --stage dpo": ("", "--stage dpo: it has a pipeline schedule of its own", 7 / 8),
        f"{FOUR_16} --moe-fb-overlap": ("--moe-fb-overlap: it overlaps the same forwards and "
                                        "backwards; leave one of the two out", "", 7 / 8),
        f"{FOUR} {PP} --global-batch-size 8": ("", "", 5 / 8),
        f"{FOUR} {PP} --global-batch-size 4": ("", "", 1 / 4),
        f"{FOUR} {PP} {EACH} --global-batch-size 8": ("", "", 11 / 16),
        f"{FOUR} {PP} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 7":
            ("", "", None),
        f"{ONE} --global-batch-size 64":
            ("no tensor, expert or context parallelism, so nothing to hide", "", None),
        f"{ONE} --num-experts 8 --expert-model-parallel-size 4 --global-batch-size 64":
            ("", "", 7 / 8),
    }),
    (places, {
        FOUR_16: [{"dense": 4}],
        f"{FOUR_16} {PP}": [{"dense": 2}] * 2,
        f"{FOUR_16} {PP} {EACH}": [{"dense": 1}] * 4,
        f"{FOUR_16} --noop-layers 0,3 {PP}": [{"none": 1, "dense": 1}] * 2,
        MOE: [{"experts": 4}],
        f"{MOE} --first-k-dense-replace 1 --moe-layer-freq 1": [{"dense": 1, "experts": 3}],
        f"{MOE} --moe-layer-freq 2": [{"experts": 2, "dense": 2}],
        f"{MOE} --moe-layer-freq -1 --first-k-dense-replace -1": [{"experts": 4}],
    }),
    (recomputed, {
        f"{FOUR_16} {PP}": [0, 0],
        f"{FULL} uniform --recompute-num-layers 1": [2, 2],
        f"{FULL} block --recompute-num-layers 1": [1, 1],
        f"{FULL} block --recompute-num-layers 1 {EACH}": [1] * 4,
        # Of a stage, the first chunk's.
        f"{FULL} block --recompute-num-layers 1 {EACH} --enable-recompute-layers-per-pp-rank":
            [1, 1, 0, 0],
        f"{FOUR_16} {PP} --recompute-granularity selective": [0, 0],
    }),
    (chunks, {"--config": 2, "--config --commfuse-tuning on": 1}),
]  # fmt: skip


def rows(table: Iterable[tuple[Callable[..., Any], dict[str, Any]]]) -> list[Any]:
    return [
        pytest.param(question, line, answer, id=f"{question.__name__}: {line[-60:]}")
        for question, answers in table
        for line, answer in answers.items()
    ]


@pytest.mark.parametrize(("question", "line", "expected"), rows(VALUES))
def test_an_answer(question: Callable[[AskedLaunch], Any], line: str, expected: Any) -> None:
    assert question(asked(line)) == expected


def refused(launch: AskedLaunch) -> str:
    """What refuses ``--use-commfuse``, with a way out."""
    return obstacles(launch).fused


def noted(launch: AskedLaunch) -> str:
    """What is not as meant in a launch that starts."""
    against = obstacles(launch)
    assert against.fused == ""
    return "\n".join(against.notes)


def unsimulated(launch: AskedLaunch) -> str:
    with pytest.raises(NotSimulated) as caught:
        training_of(launch)
    return str(caught.value)


def layer(launch: AskedLaunch) -> str:
    return "\n".join(map(str, obstacles(launch).layers))


def verdict(launch: AskedLaunch) -> str:
    plan = plan_launch(launch, SERVER)
    notes = [note for note in plan.notes if "simulated" in note]
    return "\n".join([plan.verdict, *notes])


MANY = f"{FOUR} --global-batch-size 64 --bf16"
WIDE = f"{MODEL} {TP} --tensor-model-parallel-size 16 --nproc_per_node 16"
# A question, and the words of its answers, in their order.
WORDS: list[tuple[Callable[[AskedLaunch], str], dict[str, tuple[str, ...]]]] = [
    (refused, {
        ALONE: ("--tensor-model-parallel-size 1: a group of one transfers nothing; choose at "
                "least 2, or",),
        f"{ALONE} {DP} 2 --commfuse-attention":
            ("--commfuse-attention needs --tensor-model-parallel-size of at least 2: it is fused",),
        f"{SIZES} --commfuse-layers proj":
            ("without --sequence-parallel no layer would be fused: each keeps Megatron's own ",),
        f"{FUSED} --output-layer-slice-num=2": ("--output-layer-slice-num 2: it runs the output",),
        f"{FUSED} --commfuse-attention":
            ("--commfuse-attention with --attention-dropout 0.1, Megatron's default: the fused "
             "attention has no dropout; pass --attention-dropout 0.0 or leave --commfuse-atten",),
        f"{ATTENTION} --commfuse-layers qkv,fc1":
            ("--commfuse-attention: proj is not among --commfuse-layers; add it, or leave ",),
        f"{ALONE} --commfuse-dp --nproc_per_node 2":
            ("--commfuse-dp needs --use-distributed-optimizer: without it gradients are all-red",),
        f"{ALONE} --commfuse-ulysses --context-parallel-size 2":
            ("--commfuse-ulysses needs --context-parallel-algo ulysses_cp_algo, not megatron_cp",),
        f"{FUSED} --qat-scheme w4 --lora-target-modules linear_qkv":
            ("--qat-scheme w4: quantization-aware training quantizes inside the linear layers; ",
             "leave one of the two out; --lora-target-modules linear_qkv: LoRA wraps the linear"),
    }),
    (noted, {
        f"pretrain_gpt.py {FUSED}": ("--use-commfuse is given to the script itself, which does not "
                                     "know it; start -m mindspeed_patches.launch SCRIPT",),
        f"{ATTENTION} --recompute-activations": ("--commfuse-attention has no effect: selective "
                                                 "recomputation runs core attention separately",),
        f"{ATTENTION} --recompute-granularity selective": ("has no effect: selective recomputati",),
        f"{SIZES} {DP} 1 --commfuse-attention --attention-dropout 0.0":
            ("--commfuse-attention has no effect: without sequence parallelism its all-reduce",),
        f"{ALONE} {DP} 1": ("--commfuse-dp has no effect: DP 1 transfers nothing",),
        f"{FUSED} --spec mine.spec layer_spec":
            ("--spec mine.spec layer_spec is not read: it is judged as Megatron's GPTModel",),
        f"{FUSED} --spec mindspeed_llm.x.mamba_spec layer_spec": ("it is judged as Megatron's",),
    }),
    (layer, {
        f"{SIZES} --commfuse-layers proj": ("proj: Megatron's own forward, because without seq",),
        f"{FOUR} --seq-length 1024":
            ("qkv: Megatron's own forward, because a block has fewer than 2500 rows",),
        MOE: ("experts: Megatron's own forward, because expert layers are left to the token",),
    }),
    (unsimulated, {
        f"{FOUR} --stage dpo": ("--stage dpo: ",),
        f"{FOUR} --noop-layers 0,1,2,3": ("--noop-layers leaves no layer",),
        f"{FOUR} --spec mindspeed_llm.tasks.models.spec.mamba_spec layer_spec": ("state-space",),
        f"{FOUR} --context-parallel-size 2 --context-parallel-algo hybrid_cp_algo": ("hybrid_cp",),
        f"{FOUR} --context-parallel-size 2 {LATENT} --v-head-dim 8":
            ("latent attention with context",),
    }),
    (verdict, {
        f"{MANY} {EXPERTS}": ("Add `--commfuse-overlap`", "16 ranks of experts"),
        f"{MANY} --full-attention-interval 4": ("Add ", "as if every layer had full attention"),
        f"{MANY} --tp-2d": ("Add ", "--tp-2d: linear layers cut in two dimensions"),
        f"{MANY} --nproc_per_node 16 --tensor-model-parallel-size 16":
            ("Add ", "a group of 16 spans nodes of 8 NPUs"),
        f"{FOUR} --tensor-model-parallel-size 1":
            ("Nothing to change. Overlap: no tensor, expert or context parallelism, so nothing ",),
        # Short blocks: nothing would be fused.
        f"{WIDE} --enable-cuda-graph": ("Nothing to change. Overlap: --enable-cuda-graph: ",),
        f"{WIDE} --enable-cuda-graph --commfuse-chunks 1 --commfuse-layers qkv":
            ("Add `--use-commfuse`: fused layers. The gain is", "spans"),
    }),
]  # fmt: skip


@pytest.mark.parametrize(("question", "line", "words"), rows(WORDS))
def test_an_answer_in_words(
    question: Callable[[AskedLaunch], str], line: str, words: tuple[str, ...]
) -> None:
    text, *rest = question(asked(line)).partition(words[0])[1:]
    assert text, "the first words"
    remaining = "".join(rest)
    assert words[0] not in remaining, "once"
    assert all(word in remaining for word in words[1:])
