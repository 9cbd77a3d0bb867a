"""The comparison with what others measured of GEMMs and of a fused kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.simulate.hardware import Hardware
from scripts.evidence.kernels import Measured, main, predict, read

MACHINE = Hardware.load(find_config("ascend_910b_server", "hardware")).machine()
SHAPES = [(256 * m, 512 * k, 1024 * n) for m in (1, 2) for k in (1, 3, 8) for n in (1, 2, 5)]
HEADER = "m,k,n,TotalTime(us),MatmulTime(us),AllGatherTime(us),掩盖度\n"


def as_simulated(efficiency: float, hidden: float) -> list[Measured]:
    """What a machine that is as simulated would show, in int8."""
    int8 = replace(
        MACHINE,
        cube_flops=2 * MACHINE.cube_flops,
        hbm_bandwidth=2 * MACHINE.hbm_bandwidth,
        gemm_efficiency=efficiency,
    )
    found = []
    for m, k, n in SHAPES:
        gemm, gather = int8.gemm(8 * m, k, n), 5e-11 * m * k
        total = gemm + gather - hidden * min(gemm, gather)
        found.append(Measured(8 * m, k, n, total, gemm, gather))
    return found


def text(shapes: list[Measured]) -> str:
    lines = [
        f"{one.rows // 8},{one.inner},{one.outer},{1e6 * one.total!r},{1e6 * one.gemm!r},"
        f"{1e6 * one.gather!r},0.5\n"
        for one in shapes
    ]
    return HEADER + "".join(lines)


def test_what_the_model_makes_is_found_again() -> None:
    found = predict(MACHINE, as_simulated(0.6, 0.7))
    assert found.fitted == pytest.approx((0.6, 0.7), abs=1e-3)
    assert max(map(abs, found.gemm + found.total)) < 1e-3
    assert len(found.gemm) == len(SHAPES) // 2, "only what the fit has not seen"


def test_a_file_is_read_and_impossible_shapes_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = as_simulated(0.6, 0.7)
    impossible = shapes[0]._replace(total=0.9 * max(shapes[0].gemm, shapes[0].gather))
    small = shapes[1]._replace(inner=256)
    path = tmp_path / "lcoc.csv"
    path.write_text(text([impossible, small, *shapes[2:]]), encoding="gbk")
    assert read(path)[1:] == [pytest.approx(one, rel=1e-9) for one in shapes[2:]], (
        "short sides are no layers"
    )
    assert main([f"A2={path}"]) == 0
    cells = capsys.readouterr().out.splitlines()[-1].split("|")
    assert (cells[1].strip(), cells[2].strip(), cells[-2].strip()) == ("A2", "16", "1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("A4=x.csv", "A4=x.csv begins with none of A2, A3"),
        ("A2=/no/such/file.csv", "/no/such/file.csv: "),
    ],
)
def test_what_is_no_table_is_refused(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([given])
    assert said in capsys.readouterr().err


def test_too_few_shapes_or_words_instead_of_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "few.csv"
    for content, said in ((text(as_simulated(0.6, 0.7)[:3]), "3 shapes"), (HEADER + "a,b\n", "a")):
        path.write_text(content, encoding="gbk")
        with pytest.raises(SystemExit, match="2"):
            main([f"A3={path}"])
        assert said in capsys.readouterr().err
