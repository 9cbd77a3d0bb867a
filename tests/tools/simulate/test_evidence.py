"""The tables of the pages: steps that others measured, and points at which a form is ahead."""

import json
from pathlib import Path

import pytest

from commfuse_npu.tools.hardware.description import Hardware
from scripts.evidence import layers, steps
from tests.tools.plan.launches import MODEL, TP

LAUNCH = f"torchrun --nproc_per_node 4 pretrain_gpt.py {MODEL} {TP} --bf16"


def checkout(folder: Path, **launches: tuple[str, str]) -> Path:
    """System tests as MindSpeed-LLM keeps them: by name, a script and its figures."""
    figures = folder / "tests" / "st" / "baseline_results"
    figures.mkdir(parents=True)
    for name, (script, measured) in launches.items():
        (folder / "tests" / "st" / f"{name}.sh").write_text(script, "utf-8")
        (figures / f"{name}.json").write_text(measured, "utf-8")
    return folder


def test_measured_steps_stand_beside_simulated_ones(tmp_path: Path, capsys) -> None:
    def measured(milliseconds: float) -> str:
        memory = [{"max allocated memory": 900.0}, {"max allocated memory": 1000.0}]
        # The first third of the steps does not count.
        return json.dumps({"time info": [9e9, *[milliseconds] * 2], "memo info": memory})

    (step,) = steps.measured([checkout(tmp_path / "one", alpha_small=(LAUNCH, measured(1.0)))])
    assert isinstance(step, steps.Measured)
    hardware = Hardware.find("ascend_910b_server")
    machine, host = hardware.machine(), hardware.launching(5e-5).machine()
    unpadded = "--stage sft --no-pad-to-seq-lengths --data-path /data/alpaca/train"
    folder = checkout(
        tmp_path / "two",
        alpha_small=(LAUNCH, measured(steps.simulated(step, host))),
        beta_small=(LAUNCH, measured(steps.simulated(step, machine) / 1.25)),
        beta_swap=(f"{LAUNCH} --swap-attention", measured(1.0)),
        # Samples of 92 tokens and a template of 12; the longest of 4 has 25 / 12 times as many.
        beta_alpaca=(
            f"{LAUNCH} {unpadded} --micro-batch-size 4 --global-batch-size 4",
            measured(9),
        ),
        broken=(LAUNCH, "{"),
    )
    (tuned,) = (s for s in steps.measured([folder]) if getattr(s, "name", "") == "beta_alpaca")
    assert isinstance(tuned, steps.Measured)
    assert tuned.training.tokens == 4 * 208
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin: steps -->\nold\n<!-- end: steps -->\nafter\n", "utf-8")
    assert steps.main([str(folder), "--fit", "--markdown", str(page)]) == 0
    assert capsys.readouterr().out.startswith("50 us a launch, ")
    before, text = page.read_text("utf-8").split("<!-- begin: steps -->")
    assert (before, text.split("<!-- end: steps -->")[1]) == ("before\n", "\nafter\n")
    assert "| beta_small | 4 1 1 1 | Megatron's order | device |" in text
    assert "| +25% | 1,000 |" in text
    assert "| predicted | device | 1 | 25.0% | 25.0% |" in text
    assert "| beta_alpaca | 4 1 1 1 | Megatron's order | host | 9 |" in text
    assert "| length assumed | host | 1 |" in text
    assert "simulated as if no activation was swapped to the host | beta_swap |" in text
    assert "| its figures are not JSON | broken |" in text


def test_a_row_of_the_page_is_what_the_command_writes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(layers, "_MACHINES", ("ascend_910b_server",))
    few = {"_MODELS": ("llama2_7b",), "_SIZES": (2,), "_SEQUENCES": (4096,), "_HOSTS": (118,)}
    for name, values in few.items():
        monkeypatch.setattr(layers, name, values)
    page = tmp_path / "page.md"
    page.write_text("<!-- end: layers -->", "utf-8")
    with pytest.raises(ValueError, match="has to have '<!-- begin: layers -->' and"):
        layers.publish("table", "layers", page)
    assert page.read_text("utf-8") == "<!-- end: layers -->"
    page.write_text("<!-- begin: layers --><!-- end: layers -->", "utf-8")
    assert layers.main(["--markdown", str(page)]) == 0
    kept = (Path(__file__).resolve().parents[3] / "docs" / "layers_tables.md").read_text("utf-8")
    lines = page.read_text("utf-8").splitlines()
    (row,) = [line for line in lines if "| llama2_7b | 2 | 4096 |" in line]
    assert row in kept
    # A lone forward hides nothing, but its recomputation does.
    assert "| 118 us, 1 micro-batch | 0; 0 | 0; 0 | 0; 0 | 0; 0 | 1; 1 |" in lines
    assert "| 118 us, 1 micro-batch, recomputed | 1; 1 | 1; 1 | 0; 0 | 1; 1 | 1; 1 |" in lines
    # Programs add in a fixed order anyway: with it they are ahead of MC2 as well.
    assert "| *fused layers, tuned* | 1; 1; 1 | 0; 0; 0 | 0; 0; 1 | 1; 1; 1 | 0; 0; 1 |" in lines
