"""Trainings with overlap on the installed Megatron core, compared with its own order.

    PYTHONPATH=/path/of/core:. python -m tests.megatron.cores [KIND...]

prints a line for each of these kinds: bits are compared after three steps.
"""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from mindspeed_patches.core_pieces import Piece
from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.fb_overlap.pipeline_schedule import OverlappedSchedule
from tests.distributed.ranks import Ranks, forkserver
from tests.megatron.models import DISTRIBUTED, EXPERTS, LENGTH, RECOMPUTED, Case
from tests.megatron.training import Trainer, layout

LAYERS = {"num_layers": 2}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
FREED = {"deallocate_pipeline_outputs": True}
DISPATCHED = EXPERTS | {
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
TP = Case(tensor=2, microbatches=4, options=LAYERS)
PP = Case(stages=2, microbatches=8, options=LAYERS)
EP = Case(experts=2, replicas=2, microbatches=4, options=DISPATCHED | DISTRIBUTED | LAYERS)
VPP = Case(stages=2, chunks=2, microbatches=4)
BESIDE = {"moe_shared_expert_overlap": True}
HYBRID = TP.but({"num_layers": 4}, pattern="*-|*-")
RECOMPUTED_TP = TP.but(RECOMPUTED | DROPOUT)
# The default dispatcher would refuse it, although there are no experts.
VARIABLE = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
LENGTHS = LENGTH, LENGTH // 2
KINDS = {
    "TP 2": (TP.but({"sequence_parallel": False}),),
    "TP 2, SP": (TP,),
    "TP 2, SP, recomputed, dropout": (RECOMPUTED_TP,),
    "EP 2, recomputed, distributed optimizer": (EP.but(RECOMPUTED),),
    "PP 2": (PP,),
    "PP 2 x VPP 2": (VPP,),
    "PP 2 x TP 2, SP": (replace(TP, stages=2, microbatches=6),),
    "PP 2 x TP 2, SP, groups passed": (replace(TP, stages=2, microbatches=6, groups=True),),
    "TP 2, SP, variable lengths, recomputed": (replace(TP.but(RECOMPUTED), lengths=LENGTHS),),
    "PP 2 x TP 2, SP, variable lengths": (replace(TP.but(VARIABLE), stages=2, lengths=LENGTHS),),
    "TP 2, SP, two models": (RECOMPUTED_TP, TP),
    "EP 2, overlapped shared experts, recomputed": (EP.but(RECOMPUTED | BESIDE),),
    "TP 2, SP, hybrid model, recomputed": (replace(HYBRID.but(RECOMPUTED), pattern="*-*-"),),
    "PP 2 x TP 2, SP, hybrid model": (replace(HYBRID, stages=2, microbatches=6),),
}
"""One case for each model."""


class InOrder:
    """Runs the two sides of a pair one after the other."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, forward: Any, backward: Any) -> tuple[Any, Any]:
        self.runs += 1
        result = backward()
        return forward(), result


@dataclass(frozen=True)
class Ran:
    """What ran beside what in the steps after the first one, on this rank.

    Attributes:
        pairs: how often a forward or a recomputation ran beside a backward of the first model.
        ahead: recomputations that ran ahead of their gradients.
        waited: the most weight gradients of a micro-batch that waited.
        printed: what was printed.
    """

    pairs: int
    ahead: int
    waited: int
    printed: str


def hides(case: Case) -> bool:
    """Whether a pair has something to hide."""
    return case.tensor > 1 or case.experts > 1


def bits(cases: Sequence[Case], steps: int) -> list[str]:
    """Those of models that are trained in turns."""
    trainers = [Trainer(case) for case in cases]
    return [trainer.run(1) for _ in range(steps) for trainer in trainers]


def compare(rank: int, *cases: Case, steps: int = 3, clock: Sequence[float] = ()) -> Ran:
    """Train in Megatron's order and overlapped, and compare all bits.

    Args:
        cases: of models in the same layout.
        clock: the times that the clock returns.
    """
    # Megatron's interleaved schedule frees outputs while gloo still sends them.
    kept = [
        replace(case, options={k: v for k, v in case.options.items() if k not in FREED})
        for case in cases
    ]
    printed, overlapping = io.StringIO(), Overlapping(plain_pipelines=True)
    overlapping.clock = iter(clock).__next__ if clock else None
    pairs: Any = InOrder()
    with layout(cases[0]):
        own = bits(kept, steps)
        if hides(cases[0]):
            overlapping.start()
        else:  # only the schedule: the sides of a pair run in order
            mock.patch(
                "megatron.core.pipeline_parallel.get_forward_backward_func",
                return_value=lambda **step: OverlappedSchedule(pairs, **step).run(),
            ).start()
        try:
            with redirect_stdout(printed):
                ours = bits(cases, steps)
        finally:
            overlapping.stop()
            mock.patch.stopall()
    assert ours == own
    pairs = overlapping.overlap if hides(cases[0]) else pairs
    return Ran(
        0 if pairs is None else pairs.runs,
        overlapping.recomputation.ahead.count,
        overlapping.weight_gradients.most,
        printed.getvalue(),
    )


def lacking(case: Case) -> str | None:
    """What a case needs and this version does not have; ``None`` if it has all."""
    needed = []
    if case.groups:
        needed.append(Piece("megatron.core.process_groups_config.ProcessGroupCollection"))
    if case.pattern is not None:
        arguments = "config hybrid_stack_spec vocab_size max_sequence_length"
        needed.append(Piece("megatron.core.models.hybrid.hybrid_model.HybridModel", arguments))
    return next((found for piece in needed if (found := piece.difference())), None)


def main(kinds: Sequence[str]) -> None:
    """Print what ran of each kind on rank 0."""
    from megatron.core import __version__

    forkserver.set_forkserver_preload(
        ["torch.distributed", "scripts.cpu_pretraining.training_worker"]
    )
    groups: dict[int, Ranks] = {}
    for kind in kinds or KINDS:
        cases = KINDS[kind]
        if why := lacking(cases[0]):
            print(f"{__version__} | {kind} | - ({why})", flush=True)
            continue
        ranks = groups.setdefault(cases[0].size, Ranks(cases[0].size))
        ran: Ran = ranks.run(compare, *cases)[0]
        print(
            f"{__version__} | {kind} | same bits, {ran.pairs} pairs, {ran.ahead} ahead, "
            f"{ran.waited} weight gradients",
            flush=True,
        )
    for ranks in groups.values():
        ranks.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
