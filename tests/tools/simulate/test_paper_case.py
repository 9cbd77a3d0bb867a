"""The script that puts the paper's own case beside the simulator's."""

from __future__ import annotations

from pathlib import Path

import pytest

from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.simulate.hardware import Hardware
from commfuse_npu.tools.simulate.machine import Machine
from scripts.evidence import paper_case
from scripts.evidence.paper_case import (
    ATTENTION,
    MLP,
    READING,
    READINGS,
    Reading,
    derived,
    draw,
    error,
    main,
    predicted,
    with_attention,
)

COMPUTE = MLP.paper["plain"] - MLP.paper["plain, communication"]


@pytest.fixture(scope="module")
def described() -> Machine:
    return Hardware.load(find_config("ascend_910b_server", "hardware")).machine()


@pytest.mark.parametrize("reading", READINGS, ids=str)
def test_the_derived_machine_gives_the_plain_column(reading: Reading, described: Machine) -> None:
    times = predicted(derived(reading, described), reading.build(MLP), ring=reading.ring)
    assert times["compute"] == pytest.approx(COMPUTE, rel=1e-9)
    assert times["plain"] == pytest.approx(MLP.paper["plain"], rel=1e-9)
    communication = MLP.paper["plain, communication"]
    assert times["plain, communication"] == pytest.approx(communication, rel=1e-9)
    # No order of transfers is faster than no transfers.
    assert times["slicing"] > COMPUTE
    assert times["row-parallel"] > COMPUTE


def test_attention_is_as_efficient_as_its_plain_column_says(described: Machine) -> None:
    machine = derived(READING, described)
    for case in ATTENTION:
        fitted = with_attention(READING, machine, case)
        assert (fitted.cube_flops, fitted.inside) == (machine.cube_flops, machine.inside)
        times = predicted(fitted, READING.build(case), ring=READING.ring, split=True)
        assert times["plain"] == pytest.approx(case.paper["plain"], rel=1e-9)
        assert set(case.paper) <= set(times)


def test_an_error_is_against_the_computation_where_the_paper_is_below_it() -> None:
    assert error(110.0, paper=100.0, bound=90.0) == pytest.approx(0.1)
    assert error(110.0, paper=80.0, bound=100.0) == pytest.approx(0.1)
    assert error(90.0, paper=100.0, bound=90.0) == pytest.approx(-0.1)


def test_a_time_that_no_rate_gives_is_refused(
    described: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION[0].paper, "plain", 1.0)  # less than its GEMMs
    with pytest.raises(ValueError, match=r"no rate gives 1\.0 ms"):
        with_attention(READING, derived(READING, described), ATTENTION[0])


def test_pages_and_picture_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vl_convert")
    monkeypatch.setattr(paper_case, "CORNERS", paper_case.CORNERS[:1])
    monkeypatch.setattr(paper_case, "_LENGTHS", (2048, 4096))
    monkeypatch.setattr(paper_case, "READINGS", READINGS[:2])
    page, tables, picture = (tmp_path / name for name in ("page.md", "tables.md", "a.svg"))
    words = ["--markdown", str(page), "--tables", str(tables), "--plot", str(picture)]
    assert main(words) == 0
    text = page.read_text("utf-8")
    assert "| MLP, (32, 4096, 4096) | plain | 122.3 | 122.3 | given |" in text
    assert "| MLP, (32, 4096, 4096) | compute | 78.5 | 78.5 | given |" in text
    # Below the computation: marked.
    (row,) = [line for line in text.splitlines() if "| row-parallel | 77.1 |" in line]
    assert row.endswith("%\\* |")
    assert tables.read_text("utf-8").count("| ring |") == 1
    machine = derived(
        READING, Hardware.load(find_config("ascend_910b_server", "hardware")).machine()
    )
    again = tmp_path / "b.svg"
    draw(paper_case.over_lengths(machine, READING), again)
    assert picture.read_bytes() == again.read_bytes()
    assert b"dc:date" not in again.read_bytes()
