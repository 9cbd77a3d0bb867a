"""``commfuse-npu plan PROFILE``: folders in torch_npu's format, with known figures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools import cli
from tests.tools.answers import answer

NUMBERS = {
    "tp": ("group_name_15", 3985310388293886940),
    "dp_cp": ("group_name_5", 5862276114690318097),
    "pp": ("group_name_19", 3985310405473756128),
}
"""Names of groups, and their numbers as msprof writes them, from a profile of MindSpeed-LLM."""
Kernel = tuple[str, str, float, float]
"""Name, accelerator core, start and end in ms."""


def sent(group: str, number: int, start: float, end: float) -> Kernel:
    return f"hcom_x__{NUMBERS[group][1] % 1000:03}_{number}_1", "COMMUNICATION", start, end


HEAD = "Step Id,Name,Accelerator Core,Start Time(us),Duration(us)"
STEP = [
    ("aclnnMatmul", "MIX_AIC", 0.0, 10.0),
    sent("tp", 0, 10.0, 14.0),
    ("aclnnRmsNorm", "AI_VECTOR_CORE", 13.0, 15.0),
    sent("dp_cp", 0, 4.0, 6.0),
    sent("dp_cp", 1, 15.0, 18.0),
    sent("pp", 0, 17.0, 19.0),
]
"""Two transfers overlap from 17 to 18; this time is exposed once."""


def written(folder: Path, rank: int, kernels: Sequence[Kernel], named: bool = True) -> Path:
    """Write the folder of a rank; returns where its files are."""
    output = folder / f"host_{rank}_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    (output.parent / f"profiler_info_{rank}.json").write_text("{}")
    groups = {key: {"group_name": name} for name, (key, _) in NUMBERS.items() if named}
    metadata = json.dumps({"parallel_group_info": groups})
    (output.parent / "profiler_metadata.json").write_text(metadata)
    rows = [HEAD]
    for name, core, start, end in kernels:
        begin, took = 1764246877000000 + start * 1000, end - start
        rows.append(f"13,{name},{core},{begin:.3f}\t,{took * 1000:.3f}")
    (output / "kernel_details.csv").write_text("\n".join(rows))
    return output


@pytest.mark.parametrize(
    ("kernels", "named", "expected"),
    [
        (STEP, True, {
            "rank": "0", "step": "13", "length": 19.0, "computing": 12.0, "communication": 10.0,
            "exposed": 7.0, "parts": {"tensor": 3.0, "data": 3.0, "pipeline": 2.0},
            "bounds": {"--commfuse-overlap": 3.0, "--use-commfuse": 3.0},
        }),
        # A group without a name may be of any kind.
        (STEP, False, {"parts": {"not named": 7.0},
                       "bounds": {"--commfuse-overlap": 7.0, "--use-commfuse": 7.0}}),
        # No more is hidden than can be computed meanwhile: 1 ms of the GEMM runs beside the first
        # gather already, 1 ms of it and the norm do not.
        ([("aclnnMatmul", "MIX_AIC", 1.0, 3.0), ("aclnnRmsNorm", "AI_CPU", 5.0, 6.0),
          *(sent("tp", n, at, at + 3.0) for n, at in enumerate((2.0, 6.0, 12.0)))], True,
         {"exposed": 8.0, "bounds": {"--commfuse-overlap": 2.0, "--use-commfuse": 1.0}}),
    ],
)  # fmt: skip
def test_what_is_exposed_and_whose_it_is(
    tmp_path: Path, kernels: list[Kernel], named: bool, expected: dict[str, Any]
) -> None:
    written(tmp_path / "profile", 0, kernels, named)
    (step,) = answer(tmp_path, "plan", str(tmp_path / "profile"))
    assert expected.items() <= step.items()


STEP_TRACE = """\
Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble
13,5000.0,2500.0,3500.0,6000.0,250.0,7250.0,500.0
"""


def test_the_step_trace_counts_if_no_kernel_is_a_transfer(tmp_path: Path, capsys) -> None:
    """Of 5 ms of computing, 3.5 ms run beside a transfer already."""
    output = written(tmp_path, 0, STEP[:1])
    (output / "step_trace_time.csv").write_text(STEP_TRACE)
    (step,) = answer(tmp_path, "plan", str(output))
    assert step == {
        "rank": "0", "step": "13", "length": 7.75, "computing": 5.0, "communication": 6.0,
        "exposed": 2.5, "parts": {"not named": 2.5}, "source": "step_trace_time.csv",
        "bounds": {"--commfuse-overlap": 1.5, "--use-commfuse": 1.5},
    }  # fmt: skip
    assert "rank 0: kernel_details.csv has no transfers" in capsys.readouterr().out


def test_several_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, 2, [sent("tp", 0, 0.0, 4.0)])
    written(tmp_path, 10, STEP)
    assert cli.main(["plan", str(tmp_path)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "--commfuse-overlap can hide at most 3.0 ms of 19.0 ms, rank 10, step 13."
    assert [line for line in lines if ", 13 |" in line] == [
        "| 2, 13 | 4.0 | 0.0 | 4.0 | 4.0 | 4.0 | - | - | 0.0 | 0.0 |",
        "| 10, 13 | 19.0 | 12.0 | 10.0 | 7.0 | 3.0 | 3.0 | 2.0 | 3.0 | 3.0 |",
    ]


KERNELS = "kernel_details.csv"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"../profiler_metadata.json": "{"}, "_ascend_pt cannot be evaluated: JSONDecodeError: "),
        ({KERNELS: HEAD}, "kernel_details.csv holds no kernel"),
        ({KERNELS: "Step Id,Name\n13,a\n"},
         "_ascend_pt cannot be evaluated: KeyError: 'Accelerator Core'; record it with"),
        ({KERNELS: f"{HEAD}\n13,a,AI_CORE,0,1\n"},
         "kernel_details.csv has no transfers, and there is no step_trace_time.csv; record it"),
        ({KERNELS: None}, "has no kernel_details.csv; record it with"),
        ({KERNELS: None, "a.db": ""},
         "no kernel_details.csv, but a.db: exported as db, which is not read; call torch_npu.prof"),
        ({".": None}, "has no *_ascend_pt with ASCEND_PROFILER_OUTPUT in it; record it with"),
        ({"../PROF_1": "", ".": None},
         "_ascend_pt is not analyzed yet; call torch_npu.profiler.profiler.analyse('"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    tmp_path: Path, files: dict[str, str | None], said: str, capsys
) -> None:
    output = written(tmp_path, 0, STEP)
    for file, content in files.items():
        if content is None:
            (output / file).rename(tmp_path / "elsewhere")
        else:
            (output / file).write_text(content)
    assert cli.main(["plan", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
