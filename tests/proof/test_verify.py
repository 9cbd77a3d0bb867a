"""The verifier proves what is compiled and refutes what is broken, in words."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_npu.plan import PlanError, Schedule
from commfuse_npu.plan.program import (
    Add,
    Collective,
    Compute,
    Copy,
    Hold,
    Instruction,
    Mark,
    Post,
    Program,
    Record,
    Scratch,
    Span,
    Wait,
    accesses,
)
from commfuse_npu.plan.rules import RULES
from commfuse_npu.plan.rules.pieces import (
    gather_pieces,
    made_pieces,
    parts_of,
    scatter_pieces,
    used_pieces,
)
from commfuse_npu.plan.schedule import Place
from commfuse_npu.proof.cases import CHUNKS, Case, arguments, cases
from commfuse_npu.proof.verify import counter_examples, rendezvous, verify

Group = list[Program]


def long(*sizes: int) -> list[Any]:
    return [pytest.param(size, CHUNKS, marks=pytest.mark.long) for size in sizes]


def group(
    rule: str, *given: object, size: int = 3, lanes: int = 2, chunks: int = 1, batched: bool = True
) -> Group:
    return Case(rule, given, Schedule(lanes=lanes, chunks=chunks), size, batched).programs()


def gather(**options: Any) -> Group:
    return group("gather_gemm", 2, 2, 3, False, None, 2, **options)


def together(rule: str, *given: object, size: int = 3) -> Group:
    return Case(rule, given, Schedule("collective", chunks=2), size, True).programs()


def scatter(**options: Any) -> Group:
    return group("gemm_scatter", 2, 2, 4, **options)


# ---------------------------------------------------------------------- what is compiled holds


@pytest.mark.parametrize(
    ("size", "chunks"),
    [
        *((1, CHUNKS), (2, CHUNKS), (3, (1, 3)), (4, (2,)), (5, CHUNKS)),
        *long(3, 4, *range(6, 17)),
    ],
)
def test_every_rule_holds(size: int, chunks: Sequence[int]) -> None:
    for case in cases(size, chunks):
        assert counter_examples(case.programs()) == [], str(case)
        RULES[case.rule].cache_clear()


def test_nothing_is_left_out() -> None:
    assert all(rule.lines and arguments(name, 3, 4) for name, rule in RULES.items())


def test_cases_meet_every_option() -> None:
    for size in (3, 12):
        found = list(cases(size))
        assert {case.rule for case in found} == RULES.keys()
        for option in ("chunks", "lanes", "taper"):
            assert len({getattr(case.schedule, option) for case in found}) > 2, (size, option)
        assert {case.schedule.node_size for case in found} == {
            None, *(node for node in range(1, size + 1) if size % node == 0)
        }  # fmt: skip
    assert len(list(cases(3, every=True))) > 10 * len(list(cases(3)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_several_may_be_under_way_on_the_same_lanes(size: int) -> None:
    """Begun ahead one after the other, as buckets and prefetched weights are, or one by one."""
    for lanes, chunks, batched in product((1, 2, 3), (1, 2), (False, True)):

        def of(rule: str, *given: object, options=(size, lanes, chunks, batched)) -> Group:
            return group(rule, *given, **dict(zip(_OPTIONS, options, strict=True)))

        buckets = [of("bucket_scatter", 4, 1, 1), of("bucket_scatter", 6, 2, 2)]
        buckets += [of("bucket_gather", 4, False), of("bucket_gather", 6, True)]
        layers = [of("sharded_forward", 4, 2), of("sharded_backward", 4, 2, True, True)]
        linear = [of("gather_gemm", 4, 2, 3, False, None, 2), of("gemm_scatter", 4, 2, 4)]
        for operations in (buckets, layers, linear, [*layers, *buckets]):
            for cold in (False, True):
                assert rendezvous(operations, cold=cold) is None


_OPTIONS = ("size", "lanes", "chunks", "batched")


def test_a_rank_that_begins_in_another_order_gets_other_data() -> None:
    one, other = group("bucket_gather", 4, False), group("bucket_scatter", 4, 1, 1)
    crossed = [[one[0], other[1], other[2]], [other[0], one[1], one[2]]]
    assert "wrong data: rank 0 sends block 0 from rank 0 to rank 1 (step 0, lane 0)" in str(
        rendezvous(crossed)
    )


# ---------------------------------------------------------------------- how much is computed


def counts(program: Program) -> tuple[int, int, int]:
    """GEMMs, sums and copies."""
    return program.count(Compute, "gemm"), program.count(Add), program.count(Copy)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_pieces_that_are_there_together_are_one_gemm(size: int, chunks: int) -> None:
    schedule, inner = Schedule(chunks=chunks), size // 2
    place = Place(schedule, inner, size, True)
    sides = 1 if size == 2 else 2

    def of(rule: str, *given: object) -> Program:
        return RULES[rule](place, *given)

    gathered = of("gather_gemm", 8, 2, 3, False, None, 2)
    pieces = gather_pieces(place, 8)
    assert counts(gathered)[0] == len(pieces) == (1 + sides if chunks == 1 else 1 + chunks)
    assert counts(gathered)[2] == (0 if chunks == 1 or size == 2 else sides * chunks)
    assert pieces[0] == (slice(8 * inner, 8 * inner + 8),)
    scattered = of("gemm_scatter", 8, 2, 8)
    assert counts(scattered) == (chunks + sides, chunks, 0)
    assert counts(scattered)[0] == len(scatter_pieces(place, 8, 8))
    backward = of("column_backward", 8, 8, 3, True, True, True)
    assert counts(backward) == (chunks, chunks, 1)
    assert backward.count(Compute, "wgrad") == 1
    reduced = of("gemm_all_reduce", 8 * size, 2, 3)
    assert counts(reduced) == (chunks + sides, chunks, 0)
    assert len(parts_of(place, 8 * size)) == chunks
    # What is made or used block by block is made or used as often as it is sent.
    made = of("produce_scatter", 8, 2)
    assert made.count(Compute, "make") == (size - 1) * chunks + 1
    # Beyond two chunks, there is a sum on the way.
    assert counts(made)[1] == (chunks if chunks <= 2 else chunks + 1)


@pytest.mark.parametrize("rank", [0, 2, 3])
def test_the_own_block_is_used_first_and_made_last(rank: int) -> None:
    place, own = Place(Schedule(chunks=3, taper=2), rank, 4, True), slice(7 * rank, 7 * rank + 7)
    assert used_pieces(place, 7)[0] == made_pieces(place, 7)[-1] == own
    for pieces in (
        used_pieces(place, 7), made_pieces(place, 7), used_pieces(place, 7, "last"),
    ):  # fmt: skip
        assert len(pieces) == 1 + 3 * 3
        assert sorted(row for run in pieces for row in range(28)[run]) == list(range(28))


# ---------------------------------------------------------------------- planted faults


def at(program: Program, kind: type[Instruction], number: int = 0) -> int:
    """Where the instruction of this number among those of its kind is."""
    places = [place for place, one in enumerate(program.code) if isinstance(one, kind)]
    return places[number]


def with_code(programs: Group, rank: int, code: Sequence[Instruction]) -> Group:
    changed = replace(programs[rank], code=tuple(code))
    return [*programs[:rank], changed, *programs[rank + 1 :]]


def put(programs: Group, rank: int, place: int, *instructions: Instruction) -> Group:
    """With these in place of one instruction of a rank."""
    code = programs[rank].code
    return with_code(programs, rank, [*code[:place], *instructions, *code[place + 1 :]])


def move(programs: Group, rank: int, place: int, to: int) -> Group:
    code = list(programs[rank].code)
    code.insert(to, code.pop(place))
    return with_code(programs, rank, code)


def drop(kind: type[Instruction], number: int = 0) -> Callable[[Group], Group]:
    return lambda programs: put(programs, 0, at(programs[0], kind, number))


def no_first_step(programs: Group) -> Group:
    """Neither posted nor waited for."""
    code = [
        one._replace(
            receives=tuple(step for step in one.receives if step),
            sends=tuple(step for step in one.sends if step),
        )
        if isinstance(one, Wait)
        else one
        for one in programs[0].code
    ]
    return with_code(programs, 0, code[1:])


def swap_posts(programs: Group) -> Group:
    first, second = at(programs[0], Post, 0), at(programs[0], Post, 1)
    return move(programs, 0, second, first)


def change_post(programs: Group, number: int = 0, rank: int = 0, **ends: Any) -> Group:
    """Change fields of the transfer or of the span of a post's ends."""
    place = at(programs[rank], Post, number)
    post = programs[rank].code[place]
    for way, changes in ends.items():
        end = getattr(post, way)
        part = "span" if changes.keys() <= set(end.span._fields) else "transfer"
        end = end._replace(**{part: getattr(end, part)._replace(**changes)})
        post = post._replace(**{way: end})
    return put(programs, rank, place, post)


def posts(number: int = 0, **ends: Any) -> Callable[[Group], Group]:
    return lambda programs: change_post(programs, number, **ends)


def change(kind: type[Instruction], number: int = 0, **fields: Any) -> Callable[[Group], Group]:
    def changed(programs: Group) -> Group:
        place = at(programs[0], kind, number)
        one = programs[0].code[place]
        made = {name: new(getattr(one, name)) for name, new in fields.items()}
        return put(programs, 0, place, one._replace(**made))

    return changed


def shifted(spans: Any, rows: int = 1) -> Any:
    first, *rest = spans
    return (first._replace(start=first.start + rows, stop=first.stop + rows), *rest)


def one_memory(programs: Group) -> Group:
    """What arrives in the second chunk has the memory of what arrives in the first."""
    scratch = tuple(
        Scratch(one.name, one.slot.replace("slab 1", "slab 0"), *one[2:])
        for one in programs[0].scratch
    )
    return [replace(programs[0], scratch=scratch), *programs[1:]]


def own_block_first(programs: Group) -> Group:
    """The own block's GEMM changes places with the other one of the last columns."""
    last, other = at(programs[0], Compute, -1), at(programs[0], Compute, -2)
    return move(programs, 0, last, other)


def another_order_at_all_ranks(programs: Group) -> Group:
    for rank, program in enumerate(programs):
        place = at(program, Add)
        add = program.code[place]
        (partials, parts), own = add.terms
        middle = partials.stop // parts
        split = [
            (partials._replace(start=middle), 1), (partials._replace(stop=middle), 1), own
        ]  # fmt: skip
        programs = put(programs, rank, place, Add(add.out, tuple(split)))
    return programs


def waits_first(programs: Group) -> Group:
    return move(programs, 0, at(programs[0], Wait), at(programs[0], Compute))


def late_wait(programs: Group) -> Group:
    place = at(programs[0], Wait)
    return move(programs, 0, place, place + 1)


def on_two_lanes(programs: Group) -> Group:
    """Both ends agree, but a rank's batch would have to be on two lanes at once."""
    lanes = {0: 0, 1: 1, 2: 0}
    for rank in range(3):
        post = programs[rank].code[at(programs[rank], Post)]
        programs = change_post(
            programs,
            rank=rank,
            send={"lane": lanes[rank]},
            receive={"lane": lanes[post.receive.transfer.source]},
        )
    return programs


def a_send_with_a_receive(programs: Group) -> Group:
    """In one post, though the transport posts one by one."""
    receive, send = (programs[0].code[at(programs[0], Post, k)] for k in (0, 2))
    return put(programs, 0, at(programs[0], Post, 2), Post(send.send, receive.receive))


def awaits_before_it_sends(programs: Group) -> Group:
    """Every rank waits for what the others send after they have waited."""
    for rank, program in enumerate(programs):
        wait = program.code[at(program, Wait)]
        programs = put(programs, rank, at(program, Wait))
        code = programs[rank].code
        place = at(programs[rank], Post, 2)
        programs = with_code(programs, rank, [*code[:place], wait, *code[place:]])
    return programs


def whole_in_two_calls(programs: Group) -> Group:
    place = at(programs[0], Compute, -1)
    work = programs[0].code[place]
    halves = [
        work._replace(ins=tuple(span._replace(start=a, stop=b) for span in work.ins))
        for a, b in ((0, 2), (2, 6))
    ]
    return put(programs, 0, place, *halves)


BACKWARD = ("column_backward", 2, 2, 4, True, True, True)
USED = ("gather_use", 2, 2, False)

FAULTS: dict[str, tuple[Group, Callable[[Group], Group], str]] = {
    # Pairing and order.
    "swapped posts": (
        gather(lanes=1), swap_posts,
        r"deadlock \(warm\): rank 0 waits on lane 0 .*after that of step 1; there is no common",
    ),
    "swapped posts of two lanes, which only hangs while links are closed": (
        gather(), swap_posts, r"deadlock \(cold\): .* to open lane . between them",
    ),
    "a missing step": (
        gather(), no_first_step, "rank 1 expects block 0 from rank 0 .* which rank 0 does not send",
    ),
    "a missing receive": (
        gather(), change(Post, receive=lambda end: None), "a batch is a send and a receive",
    ),
    "a lane at one end": (
        gather(lanes=3), posts(send={"lane": 1}, receive={"lane": 1}),
        r"rank 0 sends block 0 from rank 0 to rank 1 \(step 0, lane 1\), rank 1 expects",
    ),
    "a lane that does not exist": (
        gather(), posts(send={"lane": 2}, receive={"lane": 2}), "there is no lane 2 of 2",
    ),
    "two lanes in a batch": (gather(), on_two_lanes, "ends of a batch are of one step and lane"),
    "to itself": (gather(), posts(send={"target": 0}), "block 0 from rank 0 to rank 0 .* itself"),
    "to a rank that is not there": (gather(), posts(send={"target": 3}), "there is no rank 3 of 3"),
    "another's transfer": (gather(), posts(send={"source": 1}), "this rank has no part in block 0"),
    "another piece": (
        gather(), posts(send={"piece": "block 9"}), "rank 0 sends block 9 .* expects block 0",
    ),
    "fewer rows": (gather(), posts(send={"stop": 1}), "sends 1 x 2 of block 0 .* expects 2 x 2"),
    "a send in a receive's post": (
        gather(batched=False), a_send_with_a_receive, "sends and receives are posted one by one",
    ),
    "a wait before the send, on gloo": (
        gather(batched=False), awaits_before_it_sends,
        r"deadlock .*waits for step 1 before it posts the send of step 0",
    ),
    # Memory.
    "a missing wait": (
        gather(), drop(Wait),
        r"out\[2:6\] = gemm.*it reads whole where block 2 from rank 2 .*has not waited for it",
    ),
    "a missing wait at the end": (gather(), drop(Wait, -1), "never waits for what leaves: block 0"),
    "a wait too late": (
        gather(), late_wait,
        "it reads whole where block 2 .*has not waited",
    ),
    "a wait for nothing": (
        gather(), change(Wait, receives=lambda steps: (*steps, 7)), "no receive of step 7",
    ),
    "memory that is sent from": (
        group("gemm_scatter", 2, 2, 4, chunks=3), drop(Wait, 1),
        "writes product 2 where partial for 1 chunk 0 .* leaves, and has not waited",
    ),
    "one slot for two": (
        scatter(chunks=2), one_memory,
        "it writes partials 1 where partial for 0 chunk 0 .* arrives, and has not waited",
    ),
    "rows that are not there": (
        gather(), posts(receive={"start": 5, "stop": 7}), "whole has 6 rows",
    ),
    "some columns of rows": (
        gather(), posts(send={"columns": (0, 1)}), "is not rows one below the other",
    ),
    "sums in a message": (
        group("bucket_scatter", 2, 1, 1), posts(send={"buffer": "total", "start": 0, "stop": 2}),
        "has the dtype of sums",
    ),
    "an unknown buffer": (gather(), posts(send={"buffer": "y"}), "y is neither the operation's"),
    "a sum over one of its parts": (
        group("bucket_scatter", 4, 1, 1),
        change(Add, 1, out=lambda span: span._replace(stop=3)),
        "it writes over what it reads",
    ),
    # Two streams.
    "no hold for what is aside": (
        scatter(chunks=3), drop(Hold), r"it races with .*\(aside: out",
    ),
    "no hold before what is aside": (
        group("gather_gemm", 2, 2, 3, False, None, 2, chunks=2), drop(Hold),
        "it does not hold for what came before",
    ),
    "no hold for what was computed": (
        group("gather_gemm", 4, 2, 3, False, None, 2, chunks=3), drop(Hold, 1),
        r"out\[.* = result 1.*it races with .*result 1\[.* = gemm",
    ),
    "no event": (scatter(chunks=2), drop(Record), "nobody has recorded this event"),
    "an event too early": (
        group("gather_gemm", 2, 2, 3, False, None, 2, chunks=2),
        lambda programs: move(programs, 0, at(programs[0], Record), 4),
        r"it races with .*result 0\[.* = gemm",
    ),
    "a wait on the other stream": (
        scatter(chunks=2), change(Wait, aside=lambda aside: not aside),
        "it does not hold for what came before|only the other stream has waited",
    ),
    "a sum on the other stream": (
        scatter(chunks=2), change(Add, aside=lambda aside: not aside),
        "only the other stream has waited for the receive of step 0",
    ),
    # Data.
    "rows that nobody wrote": (
        group("gather_gemm", 2, 2, 0, False, "whole", 2), drop(Copy),
        "it reads rows of whole that hold nothing",
    ),
    "another row": (
        group("gather_gemm", 2, 2, 3, False, None, 2, chunks=2),
        posts(send={"start": 1, "stop": 2}),
        r"rank 1: out\[0, 0:3\] is gemm\(shard\[1, 0:2\] of rank 0, weight\[0:2, 0:3\] of rank 1\) "
        r"of rank 1, it has to be gemm\(shard\[0, 0:2\] of rank 0",
    ),
    "another place": (
        gather(), change(Compute, 1, outs=lambda spans: shifted(spans, -2)),
        r"rank 0: out\[0, 0:3\] is gemm\(shard\[0, 0:2\] of rank 1",
    ),
    "another weight": (
        scatter(chunks=2),
        change(Compute, ins=lambda ins: (ins[0], ins[1]._replace(columns=(2, 4)))),
        r"out\[0, 0:2\] is a sum that lacks gemm\(.* weight\[0:2, 0:2\] of rank 0",
    ),
    "added twice": (
        scatter(), change(Add, terms=lambda terms: (*terms, terms[-1])),
        r"rank 0: out\[0, 0:4\] is a sum with gemm\(a\[0, 0:2\] of rank 0, weight\[0:2, 0:4\] of "
        r"rank 0\) of rank 0 2 times, not 1",
    ),
    "never added": (
        scatter(), change(Add, terms=lambda terms: terms[:1]),
        r"out\[0, 0:4\] is a sum that lacks gemm\(a\[0, 0:2\] of rank 0",
    ),
    "another order of additions": (
        scatter(), another_order_at_all_ranks,
        r"other order: its part 0 is gemm\(a\[0, 0:2\] of rank 1.* be gemm\(a\[0, 0:2\] of rank 2",
    ),
    "parts that do not fit": (
        scatter(), change(Add, terms=lambda terms: ((terms[0][0], 1), terms[1])),
        "partials 0 is not 1 parts of the shape of the sum",
    ),
    "an input that is changed": (
        scatter(), change(Add, out=lambda span: span._replace(buffer="weight")),
        "it changes weight",
    ),
    "an input that is added into": (
        scatter(), change(Add, terms=lambda terms: ((Span("weight", 0, 2), 1), *terms)),
        "it changes weight",
    ),
    "columns that do not fit": (
        scatter(chunks=2), change(Compute, ins=lambda ins: (ins[0], ins[1]._replace(columns=None))),
        "the columns of its matrices do not fit",
    ),
    "rows copied elsewhere": (
        group("gather_gemm", 2, 2, 3, True, "whole", 2, chunks=2),
        change(Copy, out=lambda span: span._replace(start=1, stop=3)),
        r"whole\[.* hold nothing|reads rows of whole|whole\[0",
    ),
    "a row left out": (
        group(*USED), change(Compute, 2, ins=lambda ins: shifted(ins, 2)),
        r"call 2 of use takes .*, it has to take shard\[0, 0:2\] of rank 1",
    ),
    "a run of other rows": (
        group(*USED), change(Compute, 1, run=lambda run: slice(2, 4)),
        "call 1 of use is for rows 2:4, it has to be for 4:6",
    ),
    "a piece that is never used": (
        group(*USED), drop(Compute, 2), "use is called 2 times, it has to be 3 times",
    ),
    "a factor of other rows": (
        group("gather_gemm", 2, 2, 3, False, "blocks", 2),
        change(Compute, 1, ins=lambda ins: (ins[0], *shifted(ins[1:]))),
        r"wgrad takes .*, it has to take shard\[0, 0:2\] of rank 0 with other\[0, 0:2\] of rank 0",
    ),
    "the whole in parts": (
        group(*BACKWARD), whole_in_two_calls,
        "wgrad is called 2 times.*call 0 of wgrad takes 2 and 2 rows, it has to take 6 and 6",
    ),
    "rows used twice": (
        group("gather_gemm", 2, 2, 3, False, "blocks", 2),
        lambda programs: put(programs, 0, 3, programs[0].code[3], programs[0].code[3]),
        "wgrad is called 3 times, it has to be 2 times",
    ),
    # What a collective would do otherwise.
    "a collective in another order": (
        together("gather_gemm", 2, 2, 3, False, None, 2),
        change(Collective, sends=lambda all_of: all_of[::-1]),
        r"of all ranks in their order, not to \[2, 1, 0\] and from \[0, 1, 2\]",
    ),
    "an all-gather without the own block": (
        together("gather_gemm", 2, 2, 3, False, None, 2),
        change(Collective, sends=lambda s: s[1:], receives=lambda r: r[1:]),
        r"of all ranks in their order, not to \[1, 2\]",
    ),
    "a collective on two lanes": (
        together("gemm_scatter", 2, 2, 4),
        change(Collective, sends=lambda s: (s[0]._replace(lane=1), *s[1:])),
        "no lane 1 of 1.*a collective is on one lane",
    ),
    "blocks of different lengths": (
        together("gemm_scatter", 2, 2, 4),
        change(Collective, source=lambda span: span._replace(stop=span.stop - 1)),
        "its rows are not 3 equal blocks",
    ),
    "blocks that come before they are made": (
        together("gemm_scatter", 2, 2, 4),
        lambda programs: move(programs, 0, at(programs[0], Collective), 0),
        "it writes product 0 where partial for 1 chunk 0 .* leaves, and has not waited for it",
    ),
    # Where the own block is.
    "the own block not last": (scatter(chunks=2), own_block_first, "its last gemm is not that of"),
    "a wait before the own block": (gather(), waits_first, "it waits before the gemm of its own"),
    "the own block not first": (
        gather(), lambda programs: move(programs, 0, at(programs[0], Compute), 4),
        "its first gemm is not that of its own block",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str) -> None:
    programs, fault, words = FAULTS[name]
    verify(programs)
    with pytest.raises(PlanError, match=rf"(?s){words}"):
        verify(fault(programs))


def test_what_does_not_come_from_one_rule_is_no_set() -> None:
    programs = gather()
    assert "2 programs were given for a group of 3" in counter_examples(programs[:2])[0]
    turned = [programs[1], programs[0], programs[2]]
    assert counter_examples(turned)[0] == "the program in place 0 is that of rank 1"
    mixed = [*programs[:2], gather(chunks=2)[2]]
    assert "rank 2 runs gather_gemm(2, 2, 3, False, None, 2) by" in counter_examples(mixed)[0]
    mixed = [*programs[:2], gather(batched=False)[2]]
    assert "one by one, rank 0 gather_gemm" in counter_examples(mixed)[0]
    assert counter_examples([]) == ["there are no programs; give one per rank"]
    unknown = [replace(one, rule=("mine", *one.rule[1:])) for one in programs]
    with pytest.raises(PlanError, match=r"what has to come out of mine; known are .*gather_gemm"):
        verify(unknown)


def test_no_more_is_told_than_asked_for() -> None:
    broken = [with_code([one], 0, one.code[2:])[0] for one in gather(size=4)]
    assert len(counter_examples(broken, limit=99)) > 3
    assert len(counter_examples(broken, limit=3)) == 3


_RANDOM = [case for size in (2, 3, 4) for case in random.Random(size).sample(list(cases(size)), 40)]


def _touched(program: Program) -> list[tuple[int, int, int]]:
    """Every span of every instruction: its place, whether it is written, and its number."""
    return [
        (place, written, number)
        for place, one in enumerate(program.code)
        for written, spans in enumerate(accesses(one))
        for number, span in enumerate(spans)
        if span.rows
    ]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=st.sampled_from(_RANDOM), data=st.data())
def test_any_instruction_that_is_left_out_is_missed(case: Case, data: st.DataObject) -> None:
    programs = case.programs()
    rank = data.draw(st.integers(0, case.size - 1))
    code = programs[rank].code
    needed = [
        place
        for place, one in enumerate(code)
        if not isinstance(one, Mark) and any(span.rows for part in accesses(one) for span in part)
    ]
    needed += [place for place, one in enumerate(code) if isinstance(one, Wait | Record | Hold)]
    place = data.draw(st.sampled_from(needed))
    assert counter_examples(put(programs, rank, place)), (str(case), str(programs[rank]), place)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=st.sampled_from(_RANDOM), data=st.data())
def test_any_rows_that_are_shifted_are_noticed(case: Case, data: st.DataObject) -> None:
    programs = case.programs()
    rank = data.draw(st.integers(0, case.size - 1))
    place, written, number = data.draw(st.sampled_from(_touched(programs[rank])))
    one = programs[rank].code[place]
    span = accesses(one)[written][number]
    moved = span._replace(start=span.start + 1, stop=span.stop + 1)
    assert counter_examples(put(programs, rank, place, _instead(one, written, number, moved))), (
        str(case), str(programs[rank]), place
    )  # fmt: skip


def _instead(one: Instruction, written: int, number: int, span: Any) -> Instruction:
    """An instruction with another span."""
    if isinstance(one, Post):
        way = "receive" if written else "send"
        return one._replace(**{way: getattr(one, way)._replace(span=span)})
    if isinstance(one, Compute):
        spans = list(one.outs if written else one.ins)
        spans[number] = span
        return one._replace(**{"outs" if written else "ins": tuple(spans)})
    if isinstance(one, Add) and (number or not written):
        number = 0 if written else number  # the first term is read and written
        terms = list(one.terms)
        terms[number] = (span, terms[number][1])
        return one._replace(terms=tuple(terms))
    return one._replace(**{"out" if written else "source": span})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=st.sampled_from([case for case in _RANDOM if case.size > 1]), data=st.data())
def test_any_change_of_a_transfer_is_noticed(case: Case, data: st.DataObject) -> None:
    """Whatever field of whatever end of one rank is changed, the programs do not hold."""
    programs = case.programs()
    rank = data.draw(st.integers(0, case.size - 1))
    posts = [
        place for place, one in enumerate(programs[rank].code) if isinstance(one, Post | Collective)
    ]
    if not posts:
        return
    place = data.draw(st.sampled_from(posts))
    post = programs[rank].code[place]
    way, end = data.draw(st.sampled_from(post.ends))
    field = data.draw(st.sampled_from(["step", "lane", "source", "target", "piece"]))
    value = getattr(end.transfer, field)
    changed = f"{value}, perhaps" if field == "piece" else value + 1
    other = end.transfer._replace(**{field: changed})
    if isinstance(post, Post):
        instead = post._replace(**{way: end._replace(transfer=other)})
    else:
        all_of = getattr(post, f"{way}s")
        found = (other if one == end.transfer else one for one in all_of)
        instead = post._replace(**{f"{way}s": tuple(found)})
    assert counter_examples(put(programs, rank, place, instead))
