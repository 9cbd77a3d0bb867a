"""Ctrl-C while a forward and a backward take turns ends both."""

import inspect
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commfuse_npu.overlap import ForwardBackwardOverlap, transfers, turns
from commfuse_npu.overlap.transfers import active_turns
from tests.distributed.ranks import on_ranks
from tests.overlap.test_forward_backward import world


@on_ranks(2)
def test_ctrl_c_in_a_wait_for_the_turn_ends_both_sides(rank: int) -> None:
    # Background jobs of a shell ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    overlap, reached = ForwardBackwardOverlap([world()]), list[str]()

    def transfer(side: str) -> None:
        try:
            dist.all_reduce(torch.ones(2))
            reached.append(f"{side} went on")
        finally:
            reached.append(f"{side} cleans up")

    def backward() -> None:
        # A signal right before the main thread waits for a lock is handled once it has the lock.
        while Path(f"/proc/self/task/{os.getpid()}/stat").read_text().split()[2] != "S":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        while not active_turns().interrupted:
            time.sleep(0.01)
        transfer("backward")

    with pytest.raises(KeyboardInterrupt):
        overlap.run(lambda: transfer("forward"), backward)
    assert reached == ["backward cleans up", "forward cleans up"], "one after the other"


@on_ranks(2)
def test_ctrl_c_at_any_instruction_ends_all_passes(rank: int) -> None:
    """SIGINT before any bytecode instruction of a run in the main thread, with three passes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    overlap, left = ForwardBackwardOverlap([world()]), 0
    running, begun = list[str](), list[str]()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_filename not in (turns.__file__, transfers.__file__):
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if event == "opcode" and left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return trace

    def side(me: str, count: int) -> None:
        begun.append(me)
        try:
            for _ in range(count):
                running.append(me)
                assert running == [me], "two passes run"
                running.remove(me)
                active_turns().hand_over()
        finally:
            begun.remove(me)

    def backward() -> None:
        fork = active_turns().fork(lambda: side("fork", 2))
        side("backward", 2)
        active_turns().join(fork)

    for at in itertools.count(1):
        left = at
        # From Python 3.12 on settrace reports instructions only if a frame on the stack asks.
        inspect.currentframe().f_trace_opcodes = True
        sys.settrace(trace)
        try:
            overlap.run(lambda: side("forward", 1), backward)
        except KeyboardInterrupt:
            assert left <= 0
        finally:
            sys.settrace(None)
        assert begun == [], "a pass is still running"
        assert overlap.run(lambda: active_turns().hand_over(), lambda: 2) == (None, 2)
        running.clear()
        if left > 0:
            break
    assert at > 200
