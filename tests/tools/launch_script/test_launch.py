"""torchrun's options are read without torch, as torch's own parser reads them."""

from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser

from commfuse_npu.tools.launch_script import UsageError
from commfuse_npu.tools.launch_script.launch import launch_of
from commfuse_npu.tools.launch_script.shell import Command


def test_every_option_of_torchrun_is_known() -> None:
    words = ["torchrun"]
    for action in get_args_parser()._actions:
        if not action.option_strings or action.dest == "help":
            continue
        # Where a script is expected to be a module, an address or no Python, it is no training.
        if action.dest in ("module", "no_python", "run_path", "nproc_per_node", "nnodes"):
            continue
        words.append(max(action.option_strings, key=len))
        words += [] if action.nargs == 0 else ["7"]
    launch = launch_of(
        Command([*words, "--nproc_per_node", "4", "--nnodes=1:2", "pretrain_gpt.py", "--bf16"], "/")
    )
    assert launch is not None
    assert (launch.script, launch.processes) == ("pretrain_gpt.py", 8)
    assert launch.options.words == ["--bf16"]


@pytest.mark.parametrize("words", ["--frobnicate 3 pretrain_gpt.py", "--nproc_per_node 8"])
def test_what_torchrun_would_refuse_is_said(words: str, capsys) -> None:
    with pytest.raises(UsageError, match=r"torchrun does not take .+; correct them"):
        launch_of(Command(["torchrun", *words.split()], "/"))
    assert capsys.readouterr() == ("", "")
