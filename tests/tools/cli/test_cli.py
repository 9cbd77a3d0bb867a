"""The command line: answers, and exit codes that say what kind of answer it is."""

from __future__ import annotations

from commfuse_npu.tools import cli, verify_command


def test_a_plan_is_drawn(capsys) -> None:
    assert cli.main(["plan", "gather", "--ranks", "3", "--rank", "1", "--chunks", "2"]) == 0
    drawing = capsys.readouterr().out
    assert drawing.startswith("gather, rank 1 of 3, shifted, 2 lanes, 2 chunks")
    assert "block 0 chunk 1 <- rank 0" in drawing


def test_a_plan_that_cannot_be_is_explained(capsys) -> None:
    assert cli.main(["plan", "gather", "--shape", "two_level", "--ranks", "6"]) == 2
    assert "two_level needs node_size" in capsys.readouterr().err


def test_all_plans_are_proved(capsys) -> None:
    assert cli.main(["verify", "--max-ranks", "4", "--chunks", "1", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("  4 ranks: ")


def test_a_broken_plan_is_reported(monkeypatch, capsys) -> None:
    monkeypatch.setattr(verify_command, "counter_examples", lambda plans: ["a reason"])
    assert cli.main(["verify", "--max-ranks", "2"]) == 1
    assert "a reason" in capsys.readouterr().out


def test_lanes_that_differ_at_the_two_ends_are_reported(monkeypatch, capsys) -> None:
    plans = verify_command._plans

    def broken(schedule, kind, size, own):
        built = plans(schedule, kind, size, own)
        # The last rank keeps the lanes of another schedule.
        if schedule.lanes == 2:
            built[-1] = plans(verify_command.replace(schedule, lanes=1), kind, size, own)[-1]
        return built

    monkeypatch.setattr(verify_command, "_plans", broken)
    assert cli.main(["verify", "--min-ranks", "3", "--max-ranks", "3"]) == 1
    assert "its other end uses lane" in capsys.readouterr().out
