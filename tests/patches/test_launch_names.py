"""A launch refuses options that look like ours and are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_patches import launch


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--commfuse-lane", "--commfuse-lanes"),
        ("--commfuse_chunks=2", "--commfuse-chunks"),
        ("--use-comfuse", None),
        ("--use-commfused", "--use-commfuse"),
        ("--commfuse-fb-overlaps", "--commfuse-fb-overlap"),
        ("--no-commfuse-attentions", "--no-commfuse-attention"),
    ],
)
def test_the_option_that_was_meant_is_named(tmp_path: Path, word: str, meant: str | None) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("started = True\n", "utf-8")
    words = [str(script), "--num-layers", "2", word, "2"]
    if meant is None:  # Megatron's to refuse
        launch.main(words, prepare=lambda: None)
        return
    with pytest.raises(SystemExit, match=rf"unknown: {word.split('=')[0]}; did you mean {meant}\?"):
        launch.main(words, prepare=lambda: None)


def test_all_of_ours_are_known(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("started = True\n", "utf-8")
    words = ["--use-commfuse", "--no-use-commfuse", "--commfuse-chunks=2", "--commfuse-fb-overlap"]
    launch.main([str(script), *words, "--commfuse-fb-overlap-memory"], prepare=lambda: None)
