"""A whole training step, from the layers that it repeats.

A layer's forward and backward are simulated event by event for one tensor-parallel group, which
stands for all of them; a stage is its layers one after the other; the pipeline is played by its
dependencies; data-parallel buckets overlap with the layers.  So a step of 4,096 NPUs costs hardly
more than one of 8.

Left out, for want of figures: transfers of different groups do not slow each other down where they
share links (between nodes they mostly do not), and switches do not block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeVar

from commfuse_npu.hardware.machine import ITEM_BYTES, Machine
from commfuse_npu.plan import Schedule
from commfuse_npu.tools.simulate import llama, turns
from commfuse_npu.tools.simulate.data_parallel import (
    GRADIENT_BYTES,
    DataParallel,
    Exchanged,
    buckets,
    exchanged,
    exposed_gather,
    exposed_scatter,
)
from commfuse_npu.tools.simulate.group import Group, Played
from commfuse_npu.tools.simulate.llama import BACKWARD_ATTENTION, Attended, LayerShape
from commfuse_npu.tools.simulate.pipeline_parallel import one_forward_one_backward
from commfuse_npu.tools.simulate.rank import Ran, Rank
from commfuse_npu.tools.simulate.ulysses import Ulysses
from commfuse_npu.tools.simulate.variants import COMPUTE_ONLY, Variant

__all__ = ["PARTS", "LayerTime", "Layout", "Part", "Recompute", "Shared", "Step", "StepTime",
           "Training"]  # fmt: skip

Recompute = Literal["none", "full"]
Part = Literal["forward", "backward"]
PARTS: tuple[Part, Part] = ("forward", "backward")

_Found = TypeVar("_Found")

Shared = dict[Hashable, Any]


class Layout(NamedTuple):
    """Parallel sizes; ``vpp``: chunks of layers per pipeline stage, interleaved from 2 on."""

    tp: int
    cp: int
    dp: int
    pp: int
    vpp: int = 1

    @property
    def npus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True)
class Training:
    """What is trained, and how it is laid out.

    Attributes:
        layers: of every pipeline stage.
        parameters: of the whole model, without the input embedding, which does no arithmetic.
        layer_parameters: of one layer.
        sequence, micro_batch: tokens and sequences of a micro-batch.
        micro_batches: per step and data-parallel replica.
        groups: query groups of the model.
        tied: whether input and output share one table of the vocabulary.
        ulysses: whether context parallelism exchanges heads instead of passing keys around.
        fuse_ulysses: whether CommFuse's variants fuse these exchanges.
        data_parallel: how gradients and parameters are exchanged.
        vpp: chunks of layers per pipeline stage; they divide the layers of every stage.
    """

    layers: tuple[int, ...]
    hidden: int
    feed_forward: int
    qkv: int
    vocabulary: int
    key_value: int
    parameters: int
    layer_parameters: int
    sequence: int
    micro_batch: int
    micro_batches: int
    tp: int
    cp: int
    dp: int
    groups: int = 1
    tied: bool = False
    ulysses: bool = False
    fuse_ulysses: bool = False
    recompute: Recompute = "none"
    data_parallel: DataParallel = "overlapped"
    vpp: int = 1

    @property
    def layout(self) -> Layout:
        return Layout(self.tp, self.cp, self.dp, len(self.layers), self.vpp)

    @property
    def npus(self) -> int:
        return self.layout.npus

    @property
    def tokens(self) -> int:
        """Of a step, on all NPUs."""
        return self.sequence * self.micro_batch * self.micro_batches * self.dp

    @property
    def flops(self) -> float:
        """Model FLOP of a step: 6 per parameter and token, and 6 * S * H per layer and token for
        causal attention; recomputation does not count (PaLM's model FLOPs utilization)."""
        attention = 6.0 * sum(self.layers) * self.hidden * self.sequence
        return self.tokens * (6.0 * self.parameters + attention)

    @property
    def shape(self) -> LayerShape:
        return LayerShape(
            sequence=self.sequence // self.cp,
            attended=self.sequence,
            batch=self.micro_batch,
            hidden=self.hidden,
            feed_forward=self.feed_forward,
            qkv=self.qkv,
            vocabulary=self.vocabulary,
            ranks=self.tp,
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and of its parts.

    Attributes:
        layer_forward, layer_backward: of one layer of one micro-batch.
        waiting: seconds of a layer, forward and backward, in which the engine stood still.
        data_parallel: what of the step its buckets leave exposed.
    """

    seconds: float
    layer_forward: float
    layer_backward: float
    waiting: float
    data_parallel: float

    @property
    def layer(self) -> float:
        return self.layer_forward + self.layer_backward


class LayerTime(NamedTuple):
    """Seconds of a layer, and of waiting in it.

    ``pair``: where forward and backward of two micro-batches run side by side, of a layer of both,
    and of what a stage has besides.
    """

    forward: float
    backward: float
    waiting: float
    pair: tuple[float, float] | None = None

    @property
    def alone(self) -> float:
        """Of forward and backward one after the other."""
        return self.forward + self.backward

    @property
    def seconds(self) -> float:
        """Of a forward and a backward, in the middle of a step."""
        return self.alone if self.pair is None else self.pair[0]


class _Cost(NamedTuple):
    """What is launched takes of a device that the host is ahead of.

    Attributes:
        device, busy: seconds, of all and of the compute engine's work.
        launched: launches, posts and events of every rank.
    """

    device: float
    busy: float
    launched: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, played: Played) -> _Cost:
        launched = (
            (
                sum(one.launches for one in of.operations),
                sum(one.posts for one in of.operations),
                sum(one.events for one in of.operations),
            )
            for of in played.launches
        )
        return cls(played.timeline.seconds, played.busy, tuple(launched))

    def host(self, machine: Machine) -> float:
        """Seconds of the busiest rank's host."""
        return max(machine.host(*counts) for counts in self.launched)

    def beyond(self, less: _Cost) -> _Cost:
        """What it takes more than that."""
        launched = (
            (a - x, b - y, c - z)
            for (a, b, c), (x, y, z) in zip(self.launched, less.launched, strict=True)
        )
        return _Cost(self.device - less.device, self.busy - less.busy, tuple(launched))


@dataclass
class Step:
    """A step on a machine; times of variants share what does not depend on them.

    Args:
        rough: let one rank stand for all: a fraction of the time, and up to 2 % too short with two
            chunks or more, 3 % with one.
        shared: what steps with layers of the same shape, on the same machine but for its host, have
            in common.

    Raises:
        ValueError: a group does not fit the machine's nodes.
    """

    machine: Machine
    training: Training
    rough: bool = False
    shared: Shared = field(default_factory=dict)

    @cached_property
    def group(self) -> Group:
        """The tensor-parallel group."""
        return Group(self.machine, self.training.tp)

    def layer(self, variant: Variant, part: Part) -> Played:
        """Play one layer of one micro-batch."""
        attended = self._attended(variant)
        build = llama.forward if part == "forward" else llama.backward
        seconds = attended[part == "backward"] if attended else None
        shape = self.training.shape
        whole = False if self.rough and not variant.attention else None
        return self.group.play(
            variant, lambda rank: build(rank, shape, seconds), whole=whole, steady=True
        )

    def parts(self, variant: Variant) -> list[tuple[str, Played]]:
        """Play a layer forward, then backward; or one of a forward beside one of a backward."""
        if variant.kind == "turns":
            return [("pair", self._pair(variant, 1))]
        return [(part, self.layer(variant, part)) for part in PARTS]

    def time(self, variant: Variant, *, free: bool = False) -> StepTime:
        """Seconds of a step.

        Args:
            free: whether transfers between stages and of buckets take no time either.
        """
        training, shape = self.training, self.training.shape
        layer = self.layer_time(variant)
        f, b = layer.forward, layer.backward
        again = f if training.recompute == "full" else 0.0

        def part(build: Callable[[Rank, LayerShape], None]) -> float:
            whole = False if self.rough else None
            return self.group.play(variant, lambda rank: build(rank, shape), whole=whole).seconds

        chunks = [count / training.vpp for count in training.layers] * training.vpp
        forwards = [count * f for count in chunks]
        backwards = [count * (b + again) for count in chunks]
        heads = llama.head_forward, llama.head_backward
        head = self._once(("head", variant), lambda: [part(build) for build in heads])
        forwards[-1] += head[0]
        backwards[-1] += head[1]
        embedding = self._embedding(variant)
        forwards[0] += embedding
        backwards[0] += embedding
        between = 0.0 if free else self._between_stages
        play = training.micro_batches, between, training.vpp
        if layer.pair is None:
            ends = one_forward_one_backward(forwards, backwards, *play)
        else:
            pairs = [count * layer.pair[0] + layer.pair[1] for count in chunks]
            pairs[-1] += sum(head)
            pairs[0] += 2 * embedding
            ends = turns.step_ends(forwards, backwards, pairs, *play)
            f, b = (part * layer.pair[0] / layer.alone for part in (f, b))
        end, exposed = max(ends), 0.0
        if not free:
            stages = range(len(training.layers))
            tails = [self._buckets(variant, stage, f, b + again) for stage in stages]
            late = max(e + tail for e, (tail, _) in zip(ends, tails, strict=True))
            exposed = late - end + tails[0][1]
            end += exposed
        return StepTime(end + self._optimizer, f, b, layer.waiting, exposed)

    def layer_time(self, variant: Variant) -> LayerTime:
        """A layer of one micro-batch, forward and backward, in the middle of a stage."""
        key = "layer", variant, self.training.recompute
        return self._once(key, lambda: self._layer(variant))

    def _layer(self, variant: Variant) -> LayerTime:
        if variant.kind == "turns":
            return self._turning(variant)
        found = self._in_a_row(
            self._once(
                ("costs", variant),
                lambda: [_Cost.of(self.layer(variant, part)) for part in PARTS],
                host=False,
            )
        )
        waiting = sum(one.waiting for one in self._attended(variant) or ())
        return found._replace(waiting=found.waiting + waiting)

    def _in_a_row(self, parts: Sequence[_Cost]) -> LayerTime:
        """Forward and backward, layer after layer: the device's time or the host's.

        The host runs on from one to the other, so that they meet at the end of both.
        """
        forward, backward = parts
        runs = 2 if self.training.recompute == "full" else 1
        hosts = [one.host(self.machine) for one in parts]
        seconds = [one.device for one in parts]
        if runs * hosts[0] + hosts[1] > runs * seconds[0] + seconds[1]:
            seconds = hosts
        return LayerTime(seconds[0], seconds[1], sum(seconds) - forward.busy - backward.busy)

    def _turning(self, variant: Variant) -> LayerTime:
        """Megatron's order alone; side by side what two more layers add to two."""
        alone = self.layer_time(Variant("megatron", "megatron"))
        two, four = self._once(
            ("costs", variant, self.training.recompute),
            lambda: [_Cost.of(self._pair(variant, layers)) for layers in (2, 4)],
            host=False,
        )
        more = four.beyond(two)
        layer = max(more.device, more.host(self.machine)) / 2
        pair = layer, max(0.0, two.device - 2 * layer)
        return LayerTime(alone.forward, alone.backward, layer - more.busy / 2, pair=pair)

    def _pair(self, variant: Variant, layers: int) -> Played:
        """So many layers of a forward beside as many of a backward."""
        shape, attended = self.training.shape, self._attended(variant)
        again = self.training.recompute == "full"

        def build(rank: Rank) -> None:
            turns.pair(rank, shape, layers, attended, again=again)

        return self.group.play(variant, build, steady=True)

    def _once(self, what: Hashable, find: Callable[[], _Found], *, host: bool = True) -> _Found:
        """Find it, or what was found on a machine that differs at most in its host, if it does not
        depend on it."""
        training, machine = self.training, self.machine
        of = machine.launch_overhead, machine.post_overhead, machine.event_overhead
        exchanges = training.cp, training.ulysses, training.fuse_ulysses, training.groups
        key = what, self.rough, training.shape, training.key_value, exchanges, of if host else None
        if key not in self.shared:
            self.shared[key] = find()
        found: _Found = self.shared[key]
        return found

    def programs(self, variant: Variant) -> list[Ran]:
        """What a rank runs of a layer and of the head, with every schedule that is tried."""
        return self._once(("programs", variant), lambda: self._programs(variant))

    def _programs(self, variant: Variant) -> list[Ran]:
        shape = self.training.shape
        found: list[Ran] = []

        def add(group: Group, one: Variant, *builds: Callable[[Rank], None]) -> None:
            for build in builds:
                found.extend(group.build(one, build, 0).ran.values())

        for one in [variant.with_way(way) for way in variant.tuned] or [variant]:
            forward, backward = self._attended(one) or (None, None)
            add(
                self.group,
                one,
                partial(llama.forward, shape=shape, attention=forward),
                partial(llama.backward, shape=shape, attention=backward),
                partial(llama.head_forward, shape=shape),
                partial(llama.head_backward, shape=shape),
            )
            if one.schedule and self._fuses_ulysses:
                group, exchanges, ulysses = self._exchanges(one.schedule)
                add(group, exchanges, ulysses.forward, ulysses.backward)
        return found

    # ------------------------------------------------------------------- parts

    def _attended(self, variant: Variant) -> tuple[Attended, Attended] | None:
        """Attention forward and backward under context parallelism."""
        training = self.training
        if training.cp == 1:
            return None
        schedule = variant.schedule if self._fuses_ulysses else None
        free = variant.kind == "compute"
        make = self._ulysses if training.ulysses else self._around_a_ring
        return self._once(("attention", free, schedule), lambda: make(free, schedule))

    @property
    def _fuses_ulysses(self) -> bool:
        return self.training.cp > 1 and self.training.ulysses and self.training.fuse_ulysses

    def _exchanges(self, schedule: Schedule | None) -> tuple[Group, Variant, Ulysses]:
        """Heads are exchanged before and after attention, fused if there is a schedule."""
        training = self.training
        group = Group(self.machine, training.cp, stride=training.tp)
        if schedule is not None:
            # The options of tensor parallelism serve here, too; with attention chunks are even.
            lanes = min(schedule.lanes_for(training.cp), training.cp - 1)
            schedule = replace(group.direct, lanes=lanes, chunks=schedule.chunks)
        repeats = max(1.0, training.tp * training.cp / training.groups)
        variant = Variant("ulysses", "fused" if schedule else "plain", schedule=schedule)
        return group, variant, Ulysses(training.shape, schedule, training.key_value, repeats)

    def _ulysses(self, free: bool, schedule: Schedule | None) -> tuple[Attended, Attended]:
        group, variant, ulysses = self._exchanges(schedule)
        found = []
        for build in (ulysses.forward, ulysses.backward):
            played = group.play(COMPUTE_ONLY if free else variant, build)
            found.append(Attended(played.seconds, played.waiting, ulysses.projects))
        return found[0], found[1]

    def _around_a_ring(self, free: bool, _: Schedule | None) -> tuple[Attended, Attended]:
        """Keys and values go around a ring while they are attended to."""
        training, machine = self.training, self.machine
        shape = training.shape
        group = Group(machine, training.cp, stride=training.tp)
        kv = shape.rows * 2 * training.key_value / training.tp * ITEM_BYTES
        times = []
        for factor, passed in ((1.0, 1), (BACKWARD_ATTENTION, 2)):
            whole = shape.attention(machine, factor)(slice(0, shape.rows))

            def build(rank: Rank, seconds: float = whole, size: float = kv * passed) -> None:
                waits: tuple[int, ...] = ()
                for left in reversed(range(rank.size)):
                    before = waits
                    if left:
                        waits = rank.pass_on("keys and values", size, after=before)
                    rank.compute("attention", seconds / rank.size, before)

            ring = Variant("ring", "plain", ring=True)
            played = None if free else group.play(ring, build)
            times.append(Attended(played.seconds, played.waiting) if played else Attended(whole))
        return times[0], times[1]

    def _embedding(self, variant: Variant) -> float:
        """Seconds of the embedding, which reduce-scatters its rows (and gathers gradients)."""
        shape = self.training.shape
        seconds = self.machine.memory(2.0 * shape.rows * shape.row_bytes)
        if variant.kind == "compute":
            return seconds
        size = float(shape.block * shape.row_bytes)
        return seconds + self._collective(self.group, size, variant.ring)

    def _collective(self, group: Group, size: float, ring: bool) -> float:
        def find() -> float:
            calm = Group(group.machine, group.size, group.stride)
            return calm.collective(size, Variant("plain", "plain", ring=ring))

        return self._once(("collective", group.size, group.stride, size, ring), find)

    def _buckets(
        self, variant: Variant, stage: int, forward: float, backward: float
    ) -> tuple[float, float]:
        """Seconds that a stage's gradients and parameters leave exposed.

        The embedding is the last to have gradients and the first to be needed.  Left out: the sum
        of tied tables over the first and the last stage.
        """
        training = self.training
        layers, last = training.layers[stage], stage == len(training.layers) - 1
        ranks = training.dp * training.cp
        if ranks == 1:
            return 0.0, 0.0
        group = Group(self.machine, ranks, stride=training.tp)
        table = [training.vocabulary * training.hidden / training.tp]
        above = table if stage == 0 else []
        below = table if last and not (training.tied and stage == 0) else []
        parameters = above + [training.layer_parameters / training.tp] * layers + below
        forwards, backwards = (
            [0.0] * len(above) + [seconds] * layers + [0.0] * len(below)
            for seconds in (forward, backward)
        )
        order = buckets(parameters, ranks)
        sizes = [math.ceil(sum(parameters[layer] for layer in one) / ranks) for one in order]
        moved = [self._bucket(group, size, variant.ring) for size in sizes]
        out, sums, back = zip(*moved, strict=True)
        if training.data_parallel == "blocking":
            return sum(out), sum(back)
        return exposed_scatter(backwards, order, out, sums), exposed_gather(forwards, order, back)

    def _bucket(self, group: Group, size: int, ring: bool) -> Exchanged:
        """A bucket of so many parameters per rank."""
        if self.training.data_parallel != "commfuse":
            return Exchanged(
                self._collective(group, size * GRADIENT_BYTES, ring),
                0.0,
                self._collective(group, size * ITEM_BYTES, ring),
            )
        key = "bucket", group.size, group.stride, size
        return self._once(key, lambda: exchanged(group, size))

    @property
    def _between_stages(self) -> float:
        """Seconds of a block of activations to the next stage."""
        training, machine = self.training, self.machine
        if len(training.layers) == 1:
            return 0.0
        level = machine.inside
        if training.npus // len(training.layers) >= machine.npus_per_node:
            assert machine.between is not None  # there are more NPUs than in a node
            level = machine.between
        share = machine.npus_per_node if level.topology == "nic_per_node" else 1
        size = training.shape.block * training.shape.row_bytes
        return level.latency + size * share / level.rate

    @property
    def _optimizer(self) -> float:
        """Seconds of Adam: per parameter of this NPU's share it reads and writes 12 bytes of state
        (weight and two moments in fp32), reads the gradient and writes the bf16 weight."""
        training = self.training
        mine = training.parameters / training.npus
        return self.machine.memory(mine * (2 * 12 + GRADIENT_BYTES + ITEM_BYTES))
