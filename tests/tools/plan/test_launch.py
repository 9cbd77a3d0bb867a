"""``commfuse-npu plan`` of a launch: its fastest form, what stands against others, its training."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools.plan.asked_launch import ask_about, training_of
from commfuse_npu.tools.plan.launch_plan import plan_launch
from commfuse_npu.tools.simulate.experts import Experts
from commfuse_npu.tools.simulate.footprint import footprint
from commfuse_npu.tools.simulate.step import TrainingStep
from commfuse_npu.tools.simulate.training import Training
from commfuse_npu.tools.simulate.variants import MEGATRON, REFERENCE
from tests.tools.answers import answer
from tests.tools.plan.launches import CONFIG, MODEL, SERVER, TP, asked
from tests.tools.plan.reports import assert_consistent, typical

Plan = Callable[..., dict[str, Any]]
MANY = "--global-batch-size 64 --bf16"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A function that runs ``plan`` on a launch with given options and returns its JSON."""

    def ask(options: str, *words: str, code: int = 0) -> dict[str, Any]:
        launch = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {options}".split()
        report = answer(tmp_path, "plan", *words, "--", *launch, code=code)
        assert_consistent(report)
        return report

    return ask


def by_flags(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {form["flags"].split(" ")[0]: form for form in found["forms"]}


def test_the_fastest_form_that_can_be_launched_is_named(plan: Plan, capsys) -> None:
    report = plan(f"{TP} {MANY}")
    forms = by_flags(report)
    assert capsys.readouterr().out.startswith(report["verdict"])
    assert not any(form["obstacle"] for form in forms.values())
    times = {flag: typical(form) for flag, form in forms.items()}
    assert times["--use-commfuse"] < times[""]
    assert {"--use-ascend-coc", "--use-ascend-mc2"} < set(forms)
    assert report["notes"][0].startswith("no --vocab-size: simulated with 32,000 tokens; for its")
    assert (
        forms["--commfuse-overlap"]["remark"] == "97 % of a stage's forwards run beside gradients"
    )
    vocabulary = plan(f"{TP} {MANY} --padded-vocab-size 128256")
    assert typical(by_flags(vocabulary)[""]) > times[""]
    assert not [note for note in vocabulary["notes"] if "vocab" in note]


@pytest.mark.parametrize(
    ("options", "present", "change"),
    [
        ("--use-ascend-coc --coc-parallel-num 2", "CoC in 2 slices",
         "Replace `--use-ascend-coc` by `--commfuse-overlap`: "),
        # One slice is MindSpeed's default, without overlap.
        ("--use-ascend-coc", "Megatron's order",
         "Replace `--use-ascend-coc` by `--commfuse-overlap`: "),
        ("--tensor-model-parallel-size 8 --use-ascend-coc --coc-fused-kernel", "CoC's kernel",
         "Replace `--coc-fused-kernel --use-ascend-coc` by `--commfuse-overlap`: "),
        ("--use-ascend-mc2 --use-commfuse", "MC2",
         "Replace `--use-ascend-mc2` by `--commfuse-overlap`: "),
        # One micro-batch has no forward beside its gradients.
        ("--use-ascend-mc2 --global-batch-size 2", "MC2", "Nothing to change. "),
        ("--use-ascend-mc2 --commfuse-overlap", "MC2", "Leave out `--use-ascend-mc2`: "),
        ("--commfuse-overlap", "overlap", "Nothing to change."),
        ("--use-commfuse --commfuse-overlap", "overlap and fused layers", "Nothing to change."),
        ("--seq-length 1024 --commfuse-chunks 1 --use-commfuse --enable-cuda-graph "
         "--hidden-size 2048", "fused layers", "Replace `--use-commfuse` by `--use-ascend-mc2`: "),
        ("", "Megatron's order", "Add `--commfuse-overlap`: "),
        ("--pipeline-model-parallel-size 2 --optimize-send-recv-comm --num-layers 32 "
         "--recompute-granularity full", "Megatron's order",
         "Add `--use-commfuse --commfuse-overlap`: "),
        ("--enable-cuda-graph --unaligned-linear", "Megatron's order", "Add `--use-ascend-mc2`: "),
        # No other form is a hundredth faster.
        ("--use-ascend-mc2 --enable-cuda-graph", "MC2", "Nothing to change. Overlap: --enable-cu"),
    ],
)  # fmt: skip
def test_the_verdict_names_the_change_to_the_fastest_form(
    plan: Plan, options: str, present: str, change: str
) -> None:
    report = plan(f"{TP} {MANY} {options}")
    assert report["verdict"].startswith(change)
    assert [form["name"] for form in report["forms"] if form["used"]] == [present]


def test_a_step_is_taken_apart(plan: Plan, capsys) -> None:
    report = plan(f"{TP} {MANY}")
    shares = [float(share) for share in re.findall(r"([\d.]+) %", report["step"])]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert "TP transfers" in report["step"]
    assert "TFLOP/s per NPU" in report["step"]
    assert report["step"] in capsys.readouterr().out


def test_an_option_without_effect_is_no_form_to_leave(plan: Plan) -> None:
    report = plan(f"{TP} {MANY} --tensor-model-parallel-size 1 --use-ascend-coc")
    reason = "Overlap: no tensor, expert or context parallelism, so nothing to hide."
    assert report["verdict"] == f"Nothing to change. {reason}"


def test_a_form_that_gains_nothing_says_why(plan: Plan) -> None:
    """A slow host, short blocks, a single micro-batch, a plain pipeline."""
    narrow = "--hidden-size 1024 --seq-length 1024 --micro-batch-size 1"
    slow = by_flags(plan(f"{TP} {MANY} {narrow}"))
    assert slow["--commfuse-overlap"]["remark"].startswith("the host is slower than the device, ")
    assert slow["--use-commfuse"]["remark"].startswith("blocks of 256 rows are shorter than ")
    lone = by_flags(plan(f"{TP} --global-batch-size 2 --bf16"))["--commfuse-overlap"]["remark"]
    assert lone.endswith("give --global-batch-size 4 or more, or a smaller --micro-batch-size")
    stages = plan(f"{TP} {MANY} --pipeline-model-parallel-size 2")["forms"]
    plain = next(form for form in stages if form["flags"] == "--commfuse-overlap")
    assert plain["remark"].endswith("which takes --commfuse-overlap-memory here")


def test_what_sequence_parallelism_would_bring_is_said(plan: Plan) -> None:
    alone = TP.replace("--sequence-parallel", "")
    report = plan(f"{alone} {MANY} --use-ascend-coc --coc-fused-kernel")
    assert report["notes"][-1].startswith("with --sequence-parallel added and overlap a step takes")
    # CoC is not simulated without it, so Megatron's order is compared.
    assert "less time than in Megatron's order (CoC's kernel, as now, is" in report["verdict"]
    assert not any("--sequence-parallel added" in note for note in plan(f"{TP} {MANY}")["notes"])


def test_forms_that_do_not_fit_an_npu_are_marked(plan: Plan, capsys) -> None:
    stages = f"{TP} {MANY} --pipeline-model-parallel-size 2"
    tight = plan(f"{stages} --num-layers 48")
    assert tight["verdict"].startswith("Add `--use-ascend-mc2`: ")
    assert capsys.readouterr().out.count(", too much") == 1
    none = plan(f"{stages} --num-layers 96")
    assert none["verdict"].endswith("GiB of an NPU are usable.")
    assert not any(form["fits"] for form in none["forms"])
    named = {form["name"]: form["memory_bytes"] for form in tight["forms"]}
    sizes = [named[name] for name in ("Megatron's order", "overlap", "overlap, more in flight")]
    assert sizes[0] < sizes[1] <= tight["usable_bytes"] < sizes[2]
    # Without more memory a plain pipeline has no forwards beside gradients; a virtual one has.
    virtual = plan(f"{stages} --num-virtual-stages-per-pipeline-rank 2")
    ours = {"--commfuse-overlap", "--commfuse-overlap --commfuse-overlap-memory"}
    found = [ours & {form["flags"] for form in report["forms"]} for report in (tight, virtual)]
    assert found == [ours, {"--commfuse-overlap"}]
    # A schedule of its own has none either way.
    schedule = {form["name"]: form for form in plan(f"{stages} --optimize-send-recv-comm")["forms"]}
    obstacle = schedule["overlap, more in flight"]["obstacle"]
    assert schedule["overlap"]["remark"] == f"no forward runs beside gradients: {obstacle}"
    own = plan(f"{stages} --num-virtual-stages-per-pipeline-rank 2 --optimize-send-recv-comm")
    megatron, longer = (typical(by_flags(own)[flag]) for flag in ("", "--commfuse-overlap"))
    assert typical(by_flags(virtual)["--commfuse-overlap"]) < longer < megatron


def test_scripts_start_from_mindspeed_llms_root(tmp_path: Path, monkeypatch) -> None:
    """As its examples expect, which source other files; they see the variables of the shell."""
    monkeypatch.setenv("RANKS", "4")
    examples = tmp_path / "examples"
    examples.mkdir()
    (tmp_path / "pretrain_gpt.py").touch()
    (tmp_path / "sizes.sh").write_text(f"SIZES='{TP} {MODEL}'\n", "utf-8")
    started = "torchrun --nproc_per_node $RANKS pretrain_gpt.py $SIZES"
    (examples / "it.sh").write_text(f"source sizes.sh\ncd $(dirname $0)/..\n{started}\n")
    report = answer(tmp_path, "plan", str(examples / "it.sh"))
    assert report["layout"].startswith("TP 4, PP 1, CP 1, EP 1, DP 1")


def test_another_machine_has_other_times(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    server = plan(f"{TP} {MANY}")
    other = plan(f"{TP} {MANY}", "--hardware", "ascend_910c_supernode")
    assert typical(by_flags(server)[""]) != typical(by_flags(other)[""])
    for name, expected in (("Ascend910", other), ("310P3", server)):
        npus = [(name, "OK")] * 2
        monkeypatch.setattr("commfuse_npu.tools.plan.plan_command.listed_npus", lambda _, n=npus: n)
        assert plan(f"{TP} {MANY}")["hardware"] == expected["hardware"]


def test_what_would_be_fused_and_what_is_wrong_is_listed(plan: Plan, capsys) -> None:
    report = plan(f"{TP} {MANY} --use-commfuse")
    assert [layer["reason"] for layer in report["layers"]] == [""] * 5
    printed = capsys.readouterr().out
    assert "Note: --use-commfuse is given to the script itself, which does not know" in printed
    assert f"forward, per rank ({report['schedule']}):\n  qkv: fused\n" in printed
    assert plan(f"{TP} {MANY} --unaligned-linear")["layers"]
    printed = capsys.readouterr().out
    assert "per rank" not in printed
    assert printed.count("it replaces Megatron's column- and row-parallel linear layers") == 1
    # Another form that is refused leaves the list of layers.
    plan(f"{TP} {MANY} --use-nanopipe")
    plan(f"{TP} {MANY} --enable-cuda-graph")
    assert capsys.readouterr().out.count("per rank") == 1
    split = plan(f"{TP} {MANY} --use-commfuse --commfuse-attention")
    rough = "--commfuse-attention: simulated without splitting attention by queries"
    assert rough in split["notes"]
    wrong = plan("--tensor-model-parallel-size 3 --sequence-parallel", code=1)
    assert wrong["verdict"].startswith("As it is, the launch would fail at its start: 16 attention")
    assert (wrong["layers"], wrong["schedule"]) == ([], "")
    assert f"\nerror: {wrong['problems'][0]}\n" in capsys.readouterr().out


def test_a_configuration_is_the_launch_of_its_launcher(tmp_path: Path) -> None:
    report = answer(tmp_path, "plan", str(CONFIG), "--", "--commfuse-chunks", "4")
    assert report["name"] == "llama3_8b"
    assert report["layout"].startswith("TP 8, PP 1, CP 1, EP 1, DP 1, sequence parallel")
    assert "4 chunks" in report["schedule"]


# ------------------------------------------------------------------- its training

SIZES = f"--nproc_per_node 8 {MODEL} {TP} --swiglu --bf16 --global-batch-size 16"
FULL = "--recompute-granularity full --recompute-method"
OVERLAPS = "--overlap-grad-reduce --overlap-param-gather"


def training(options: str = "") -> Training:
    return training_of(asked(f"{SIZES} {options}"))


def milliseconds(of: Training) -> float:
    return 1e3 * TrainingStep(SERVER.machine(), of).time(MEGATRON)


def test_experts_take_the_options_of_megatron() -> None:
    line = (
        "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 96 --n-shared-experts 2 "
        "--expert-model-parallel-size 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
    )
    own = training(f"{line} --expert-tensor-parallel-size 1")
    for tensor, job in ((4, training(line)), (1, own)):
        expected = Experts(8, 3, 96, 192, 2, tensor, grouped=True, gathers=False, halves=2)
        assert job.shape.experts == expected
    assert (own.expert_replicas, own.expert_stride) == (4, 2)
    assert training("--num-experts 8").shape.experts.gathers  # type: ignore[union-attr]


def test_time_and_memory_follow_the_options() -> None:
    plain, noop, full = (
        training(options) for options in ("", "--noop-layers 3", f"{FULL} uniform")
    )
    assert milliseconds(noop) < milliseconds(plain) < milliseconds(full)
    each = training("--no-sequence-parallel").shape.parameters()[0]

    def bytes_of(of: Training) -> tuple[float, ...]:
        return tuple(footprint(of, MEGATRON, SERVER))[:4]

    weights, gradients, adam, activations = bytes_of(plain)
    assert weights - bytes_of(noop)[0] == 2 * each
    assert gradients == 2 * weights
    assert bytes_of(full)[3] < activations
    assert bytes_of(replace(plain, distributed=False))[2] == adam * plain.layout.dp
    assert bytes_of(replace(plain, reuses=True))[2] == adam * 10 / 12
    for option in ("--fp16", "--grad-reduce-in-bf16"):
        assert bytes_of(training(option))[:2] == (weights, weights)
    needs = footprint(plain, MEGATRON, SERVER)
    state = needs.weights + needs.gradients
    assert needs.first_step == state + max(needs.optimizer / 3 + needs.activations, needs.optimizer)


def test_gradients_that_do_not_overlap_are_exposed() -> None:
    both = training(OVERLAPS)
    none = replace(both, overlaps=(False, False))
    forms = both, replace(both, overlaps=(False, True)), none, replace(none, distributed=False)
    steps = [TrainingStep(SERVER.machine(), form) for form in forms]
    times = [step.breakdown(REFERENCE).dp for step in steps]
    assert times == sorted(set(times)), "longer each time"
    # Those of --fp16 have two bytes each.
    short = TrainingStep(SERVER.machine(), training(f"{OVERLAPS} --fp16")).breakdown(REFERENCE)
    assert short.dp < times[0]


def test_layers_without_operation_hide_no_transfers() -> None:
    """The transfers of the other layers' gradients end as late, wherever those layers are."""
    exposed = {
        TrainingStep(SERVER.machine(), training(f"{OVERLAPS} --noop-layers {removed}"))
        .breakdown(REFERENCE)
        .dp
        for removed in ("0,1", "2,3")
    }
    assert len(exposed) == 1


DEEPSEEK_V3 = (
    "--nproc_per_node 1 --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
    "--num-attention-heads 128 --vocab-size 129280 --seq-length 4096 --swiglu --bf16 "
    "--micro-batch-size 1 --global-batch-size 1 --max-position-embeddings 4096 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 2048 --n-shared-experts 1 --first-k-dense-replace 3 --moe-layer-freq 1 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--untie-embeddings-and-output-weights"
)


def test_deepseek_v3_has_671_billion() -> None:
    """Latent attention, experts and shared experts; 671 B in arXiv 2412.19437, with embeddings."""
    job = training_of(asked(DEEPSEEK_V3))
    assert sum(job.parameters(0)) == pytest.approx(671e9, rel=1e-3)


def test_deterministic_reductions_take_longer() -> None:
    line = f"torchrun --nproc_per_node 8 pretrain_gpt.py {MODEL} {TP} --global-batch-size 8 --bf16"

    def seconds(words: str, **variables: str) -> float:
        launch = ask_about(None, words.split(), variables)
        return plan_launch(launch, SERVER).forms[0].seconds

    exact = {seconds(line, HCCL_DETERMINISTIC="TRUE"), seconds(f"HCCL_DETERMINISTIC=strict {line}"),
             seconds(f"{line} --npu-deterministic")}  # fmt: skip
    (slower,) = exact
    assert seconds(f"HCCL_DETERMINISTIC=false {line}", HCCL_DETERMINISTIC="true") < slower
