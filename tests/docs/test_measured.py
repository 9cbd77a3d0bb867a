"""Tables of the pages are what their commands write."""

import re
from pathlib import Path

from commfuse_npu.proof.cases import cases
from commfuse_npu.tools.config_file import find_config
from commfuse_npu.tools.hardware.description import Hardware
from commfuse_npu.tools.hardware.machine import min_outputs_to_hide
from commfuse_npu.tools.model_config import ModelConfig
from commfuse_npu.tools.simulate.timed import ratio
from commfuse_npu.tools.simulate.training import Layout, training
from scripts.evidence import layers

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "measured.md").read_text("utf-8")
PAGES = [ROOT / "README.md", DOCS / "simulate.md", DOCS / "readme_zh.md"]
"""They have the short table."""


def test_the_ratio_of_communication_to_computation() -> None:
    hardware = Hardware.find("ascend_910b_server")
    setup = training(ModelConfig.load(find_config("llama3_8b")), Layout(8, 1, 1, 1), 8192)
    assert ratio(setup, hardware).text("{:.2f}".format) == "0.55 (0.29 to 0.99)"
    assert "0.55, 0.29 to 0.99" in PAGE


def test_the_short_table_is_what_is_simulated(tmp_path: Path) -> None:
    copies = [tmp_path / page.name for page in PAGES]
    for page, copy in zip(PAGES, copies, strict=True):
        text = page.read_text("utf-8")
        begin, end = (f"<!-- {word}: results -->" for word in ("begin", "end"))
        copy.write_text(f"{text[: text.index(begin)]}{begin}{end}{text.partition(end)[2]}", "utf-8")
    assert layers.main(["--results", *map(str, copies)]) == 0
    assert [copy.read_text("utf-8") for copy in copies] == [p.read_text("utf-8") for p in PAGES]


def test_what_is_counted_is_as_many() -> None:
    sets = sum(len(list(cases(size))) for size in range(2, 17))
    assert f"| {sets:,} sets |" in PAGE
    for path in sorted((ROOT / "configs" / "hardware").glob("ascend*.yaml")):
        assumed, total = map(int, re.findall(r"\d+", Hardware.load(path).assumed))
        row = rf"{total - assumed} of {total}.* \| beside each in `configs/hardware/{path.name}`"
        assert re.search(row, PAGE), path.name
    server = Hardware.find("ascend_910b_server")
    outputs = f"from {min_outputs_to_hide(server.machine(), 8):,} outputs on"
    assert outputs in (DOCS / "options.md").read_text("utf-8")
