"""Which layers of a Megatron model are fused, and that it computes what it does without."""

from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.runtime.collective_transport import CollectiveTransport
from mindspeed_patches.start_report import StartReport
from scripts.cpu_pretraining import training_worker
from tests.megatron.models import BF16, EXPERTS, RECOMPUTED, Case
from tests.megatron.training import Trainer, launched, layout, told


@dataclass(frozen=True)
class Fused(Case):
    """A case, which of its layers are fused, and the beginning of the reason for all others."""

    eval: bool = False
    fused: tuple[str, ...] = ("qkv", "proj", "fc1", "fc2", "output")
    left: dict[str, str] = field(default_factory=dict)

    @property
    def rounds(self) -> bool:
        """Attention in blocks is rounded otherwise than Megatron's."""
        return "attention" in self.launch or "ulysses" in self.launch


def gradients(case: Fused, report: StartReport | None = None) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step; the report, if any, says what was fused in it."""
    trainer, lines = Trainer(case, packed=case.documents and report is not None), []
    if report is not None and case.fused:  # else the report ends the training
        lines = told(report, trainer.models)
    for line in lines:
        name, whole = line.split(": ")[1], "1 of 1 fused"
        if case.eval and name == "attention":
            whole = "0 of 1 fused; 1 not: attention dropout is 0.1"  # as it trains
        elif name not in case.fused:
            whole = f"0 of 1 fused; 1 not: {case.left[name]}"
        assert line.startswith(f"CommFuse: {name}: {whole}"), (line, case)
    trainer.accumulate(forward_only=case.eval)
    if trainer.config.gradient_accumulation_fusion:
        # Without it a weight has a rounded gradient of its own first.
        linears = [weight for name, weight in trainer.weights().items() if ".linear_" in name]
        assert all(weight.grad_added_to_main_grad for weight in linears if weight.dim() == 2)
    return trainer.gradients()


def counted(case: Fused, calls: Any) -> None:
    """Each layer was called once, and once more to recompute it."""
    assert {name for name, path in calls if path == "fused"} == set(case.fused), (calls, case)
    reasons = {name: path for name, path in calls if path != "fused"}
    assert reasons.keys() == case.left.keys(), (calls, case)
    assert all(reasons[name].startswith(text) for name, text in case.left.items()), (reasons, case)
    granularity = case.options.get("recompute_granularity")
    if granularity != "selective" and "experts" not in reasons:
        times = 1 + (granularity == "full")
        own = {name: 1 if name == "output" else times for name, _ in calls}
        assert {name: count for (name, _), count in calls.items()} == own, (calls, case)


def compared(rank: int, cases: list[Fused]) -> None:
    """Megatron's bits; with attention those of collectives, and Megatron's up to rounding."""
    with layout(cases[0]):
        for case in cases:
            compare(case)


def compare(case: Fused) -> None:
    with mock.patch("mindspeed_patches.wrappers._logger") as logger:
        own, forms = gradients(case), []
        for collectives in (False, True)[: 1 + case.rounds]:
            made = mock.patch.object(
                training_worker, "CollectiveTransport", wraps=CollectiveTransport
            )
            with made as over, launched(case, collectives) as (linears, report):
                forms.append(gradients(case, report))
            assert over.called is collectives
            counted(case, linears.calls)
    # What the report says is not logged again; only it does not look into Ulysses.
    assert case.rounds or not case.fused or not logger.warning.called, case
    for name, value in forms[0].items():
        expected = own[name]
        assert torch.equal(value, (forms[1] if case.rounds else own)[name]), (name, case)
        largest = float(expected.abs().max())
        assert largest > 0 or case.frozen or case.eval, (name, case)
        tolerance = 4e-2 if "bf16" in case.options else 1e-5
        difference = float((value.float() - expected.float()).abs().max())
        assert difference <= tolerance * largest, (name, difference, largest, case)


HALF_SUMS = {"grad_reduce_in_fp32": False}
BIASES = {"add_bias_linear": True, "add_qkv_bias": True}
SELECTIVE = {"recompute_granularity": "selective"}
ACCUMULATED = {"gradient_accumulation_fusion": True}
GENERAL = {"attention_mask_type": "general"}
WHOLE = {"sequence_parallel": False}
SCALED = {"softmax_scale": 0.2, "rotary_interleaved": True}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 16,
    "rope_type": "rope",
}
NO_TRANSFER = (
    "without sequence parallelism the forward has no transfer (Megatron hides that of the "
    "backward behind wgrad; --sequence-parallel has both)"
)
ALL_REDUCE = (
    "without sequence parallelism its all-reduce stays Megatron's, because from three ranks on a "
    "fused sum may have another order (--sequence-parallel fuses it"
)
ALL_WHOLE = dict.fromkeys(("qkv", "fc1", "output"), NO_TRANSFER) | dict.fromkeys(
    ("proj", "fc2"), ALL_REDUCE
)
NOT_LISTED = "is not in the list of layers to fuse"
OF_DATA = "its mask is that of the data (--attention-mask-type general"
AGAIN = "selective recomputation runs core attention separately"


def heads(queries: int, groups: int) -> dict[str, int]:
    return {"num_attention_heads": queries, "num_query_groups": groups, "kv_channels": 8}


LINEAR = Fused(tensor=2, launch="--commfuse-chunks 2")
LINEARS = [
    LINEAR,
    LINEAR.but(BIASES, frozen="weight"),
    LINEAR.but(BIASES | RECOMPUTED | BF16),
    LINEAR.but(ACCUMULATED | RECOMPUTED | BIASES | BF16),
    LINEAR.but(ACCUMULATED | BF16 | HALF_SUMS),
    LINEAR.but(ACCUMULATED, tied=True),
    LINEAR.but(BIASES, norm_column=True),
    LINEAR.but(WHOLE | BIASES, fused=(), left=ALL_WHOLE),
    LINEAR.but(
        LATENT,
        fused=("q_down", "q_up", "kv_down", "kv_up", "proj", "fc1", "fc2", "output"),
    ),
    LINEAR.but(
        EXPERTS,
        fused=("qkv", "proj", "shared_fc1", "shared_fc2", "output"),
        left={"experts": "expert layers are left to the token dispatcher"},
    ),
]

FUSED = LINEAR.fused
TENSOR = replace(
    LINEAR, launch=f"{LINEAR.launch} --commfuse-attention", fused=(*FUSED, "attention")
)
ATTENTION = [
    TENSOR.but(BIASES, mask="no_mask"),
    TENSOR.but(BF16, rotary="two"),
    TENSOR.but(RECOMPUTED | {"softmax_scale": 0.2} | heads(4, 2)),
    TENSOR.but(
        {"attention_dropout": 0.1},
        fused=FUSED,
        left={"attention": "attention dropout is 0.1"},
        eval=True,
    ),
    TENSOR.but(SELECTIVE, fused=FUSED, left={"attention": AGAIN}),
    TENSOR.but(WHOLE, fused=(), left=ALL_WHOLE | {"attention": ALL_REDUCE}),
    replace(
        TENSOR,
        launch=f"{TENSOR.launch} --commfuse-layers qkv",
        fused=("qkv",),
        left={"attention": f"proj {NOT_LISTED}"}
        | {name: f"{name} {NOT_LISTED}" for name in ("proj", "fc1", "fc2", "output")},
    ),
]

ULYSSES = "--commfuse-ulysses --commfuse-lanes 1"
JOINED = Fused(
    context=2,
    launch=f"{ULYSSES} --commfuse-chunks 2",
    options=heads(4, 2),
    norms=True,
    fused=("qkv", "ulysses", "proj"),
)
PACKED = JOINED.but({"reset_attention_mask": True, "reset_position_ids": True})
CORE = replace(
    JOINED,
    launch=f"{JOINED.launch} --commfuse-layers fc1",
    fused=("ulysses",),
    left={f"{name} of ulysses": f"{name} {NOT_LISTED}" for name in ("qkv", "proj")},
)

EXCHANGED = [
    JOINED,
    JOINED.but(heads(6, 2), launch=ULYSSES, rotary="none", norms=False, mask="no_mask"),
    JOINED.but(heads(4, 4) | BIASES | SCALED, rotary="two"),
    JOINED.but(RECOMPUTED | BF16 | {"add_qkv_bias": True}),
    JOINED.but(ACCUMULATED | RECOMPUTED),
    JOINED.but(BIASES, frozen="linear_qkv.weight"),
    replace(JOINED, frozen="linear_proj.weight", eval=True),
    replace(PACKED, rotary="two"),
    PACKED.but(GENERAL | {"reset_position_ids": False}),
    PACKED.but(BIASES | RECOMPUTED, norm_column=True),
    JOINED.but(
        heads(4, 1) | RECOMPUTED,
        fused=("ulysses", "proj"),
        left={"qkv of ulysses": "1 query groups are not divisible by 2 ranks: key heads are rep"},
    ),
    replace(
        CORE,
        launch=f"{ULYSSES} --commfuse-layers qkv,fc1",
        fused=("qkv", "ulysses"),
        left={"proj of ulysses": f"proj {NOT_LISTED}"},
    ),
    CORE.but(heads(6, 3)),  # repeated although there are more than ranks
    CORE.but(PACKED.options | heads(4, 1) | RECOMPUTED, rotary="none"),
    JOINED.but(SELECTIVE, fused=("ulysses",), left=dict.fromkeys(CORE.left, AGAIN)),
    JOINED.but(GENERAL, fused=(), left={"ulysses": OF_DATA}),
]

THREE_LANES = "--commfuse-ulysses --commfuse-lanes 3"
FOUR = [
    JOINED.but(heads(8, 4), context=4, launch=THREE_LANES),
    PACKED.but(heads(4, 4), context=4),
    CORE.but(heads(8, 2), context=4, launch=f"{THREE_LANES} --commfuse-layers fc1"),
]
TWO_BY_TWO = replace(
    PACKED,
    tensor=2,
    rotary="none",
    fused=(*FUSED, "ulysses"),
    left=dict.fromkeys(CORE.left, "a tensor-parallel group of 2 shares the weights"),
)


@pytest.mark.parametrize(
    "cases",
    [LINEARS, ATTENTION, EXCHANGED, FOUR, [TWO_BY_TWO]],
    ids=["linear layers", "attention", "exchange of heads", "among four ranks", "two by two"],
)
def test_a_fused_model_computes_what_megatrons_does(ranks, cases: list[Fused]) -> None:
    ranks(cases[0].size).run(compared, cases)
