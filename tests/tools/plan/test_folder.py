"""``commfuse-npu plan FOLDER``: what is said of launches, of scripts that misbehave, and in sum."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.plan import sandbox
from tests.tools.plan.launches import MODEL, SCRIPTS, TP, script

Asked = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    """Asks about scripts, by their names, and returns the exit code and the JSON."""

    def ask(scripts: dict[str, str], *words: str) -> tuple[int, dict[str, Any]]:
        for name, text in scripts.items():
            path = tmp_path / "scripts" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        page = tmp_path / "found.json"
        code = cli.main(["plan", str(tmp_path / "scripts"), "--json", str(page), *words])
        return code, json.loads(page.read_text("utf-8"))

    return ask


def only(found: dict[str, Any]) -> dict[str, Any]:
    (launch,) = found["launches"]
    assert isinstance(launch, dict)
    return launch


def test_all_of_them(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = asked(SCRIPTS, "--all")
    assert code == 0
    verdicts = {one["script"]: (one["verdict"], one["kind"]) for one in found["launches"]}
    assert verdicts == {
        "dense/full.sh": ("full", ""),
        "dense/partial.sh": ("partial", ""),
        "dense/coc.sh": ("refused", "another overlap"),
        "dense/coc_partial.sh": ("refused", "another overlap"),
        "dense/alone.sh": ("refused", "TP 1"),
        "dense/ulysses.sh": ("full", ""),
        "dense/lora.sh": ("refused", "LoRA"),
        "dense/short.sh": ("full", ""),
        "dense/own.sh": ("full", ""),
        "experts/full.sh": ("full", ""),
        "experts/mla.sh": ("full", ""),
        "experts/without_dispatch.sh": ("partial", ""),
    }
    assert found["others"] == {
        "more/convert.sh": "generation, evaluation, conversion or data",
        "more/evaluate.sh": "generation, evaluation, conversion or data",
        "more/generate.sh": "generation, evaluation, conversion or data",
        "more/fsdp2.sh": "trains without Megatron's options",
        "more/mindspore.sh": "trains with MindSpore",
        "more/nothing.sh": "starts nothing",
    }
    assert not found["unread"]
    said = capsys.readouterr().out
    assert "| dense | 9 | 4 | 1 | 4 | 1 | 1 | 2 | 0 | 0 | 1 |\n" in said
    assert "| experts | 3 | 2 | 1 | 0 | 0 | 0 | 0 | 0 | 3 | 0 |\n" in said
    assert "| all | 12 | 6 | 2 | 4 | 1 | 1 | 2 | 0 | 3 | 1 |\n" in said
    assert found["counts"]["TP above 1, neither LoRA nor another overlap"] == 8
    assert found["counts"]["of these full"] == 6
    assert found["counts"]["of these --commfuse-ulysses fits"] == 1
    assert found["counts"]["of these --commfuse-attention passes"] == 6
    assert "\n| of these with short blocks | 2 |\n" in said
    assert "dense/coc.sh: refused with --use-ascend-coc; TP 4, PP 1, CP 1, DP 2, " in said
    without = {one["script"]: one["without"] for one in found["launches"] if one["without"]}
    assert without["dense/coc.sh"] == "full without --use-ascend-coc"
    assert without["dense/coc_partial.sh"] == "partial without --use-ascend-coc"
    assert (
        "dense/partial.sh: partial; TP 4, PP 1, CP 1, DP 2, sequence parallel; left: output" in said
    )
    assert "No such training: 3 scripts: generation, evaluation, conversion or data\n" in said


def test_the_counts_come_first_and_a_line_on_each_if_asked(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two trainings of a script are two launches."""
    texts = {"it.sh": "".join(script(f"{TP} --global-batch-size {2 * n}") for n in (1, 8))}
    asked(texts)
    said = capsys.readouterr().out
    assert said.startswith("Of 2 launches 1 can take --commfuse-fb-overlap as they are, 2 --use-")
    assert "| with transfers of TP, EP or CP | 2 |\n" in said
    assert "does not pass as typed: 1 x one micro-batch has no partner\n" in said
    assert "it.sh: full" not in said
    asked(texts, "--all")
    said = capsys.readouterr().out
    line, other = said.splitlines()[2:4]
    assert line.startswith("it.sh: full; TP 4, ")
    assert "--commfuse-fb-overlap" not in line
    assert other.endswith(", --commfuse-fb-overlap")


def test_scripts_start_from_mindspeed_llms_root(asked: Asked, tmp_path: Path) -> None:
    """As its examples want it; and from there they source others."""
    root = tmp_path / "scripts"
    (root / "examples").mkdir(parents=True)
    (root / "pretrain_gpt.py").touch()
    (root / "sizes.sh").write_text("TP=4\n", "utf-8")
    (root / "examples" / "it.sh").write_text(
        f"source sizes.sh\ncd $(dirname $0)/..\ntorchrun pretrain_gpt.py {MODEL} "
        "--sequence-parallel --tensor-model-parallel-size $TP\n",
        "utf-8",
    )
    page = tmp_path / "page.json"
    assert cli.main(["plan", str(root / "examples"), "--json", str(page)]) == 0
    assert only(json.loads(page.read_text("utf-8")))["layout"]["tensor"] == 4


# ------------------------------------------------------------------ scripts that misbehave


def test_others_are_counted_when_some_cannot_be_read(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = asked(
        {
            "hangs.sh": "while :; do :; done\n",
            "ends.sh": "echo set DATA_PATH first >&2\nexit 3\n",
            "module.sh": f"python -m pdb pretrain_gpt.py {MODEL}\n",
            "size.sh": script("--tensor-model-parallel-size four"),
            "option.sh": script(f"{TP} --commfuse-lanes 0"),
            "typo.sh": script(f"{TP} --commfuse-chunk 2"),
            "large.sh": "#" * (1 << 20) + "\n",
            "fine.sh": script(TP),
        },
        *("--timeout", "3"),
    )
    assert code == 1
    assert only(found)["script"] == "fine.sh"
    assert found["unread"]["hangs.sh"].startswith("it did not end within 3 s")
    assert found["unread"]["ends.sh"] == (
        "it ended with code 3 before it started anything; it printed last: set DATA_PATH first"
    )
    assert "by 'python -m pdb pretrain_gpt.py' ..., which is not" in found["unread"]["module.sh"]
    assert found["unread"]["size.sh"].startswith("--tensor-model-parallel-size is 'four'")
    assert found["unread"]["option.sh"].endswith("--commfuse-lanes: 0 is less than 1")
    assert "the launch is refused: unknown: --commfuse-chunk; " in found["unread"]["typo.sh"]
    assert "at most 1 MB" in found["unread"]["large.sh"]
    assert "Not read: ends.sh: it ended with code 3" in capsys.readouterr().out


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_written_into_the_folder(asked: Asked, tmp_path: Path) -> None:
    """Nor does a script see what another one has written."""
    folder = tmp_path / "scripts"
    writing = "echo spoiled > b.sh; echo TP=1 > sizes.conf; /bin/mkdir -p made; > $PWD/x.log\n"
    scripts = {
        "a.sh": f"cd $(dirname $0)\n{writing}source sizes.conf\nexit 5\n",
        "b.sh": f"source sizes.conf\n[ -e made ] && exit 6\n{script('$TP')}",
        "sizes.conf": f"TP='{TP}'\n",
    }
    code, found = asked(scripts)
    assert code == 1
    assert list(found["unread"]) == ["a.sh"]
    assert only(found)["layout"]["tensor"] == 4
    assert sorted(content(folder)) == sorted(str(folder / name) for name in scripts)
    assert (folder / "b.sh").read_text("utf-8") == scripts["b.sh"]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.5)
        yield listening


def reaching(listener: socket.socket) -> str:
    return f"echo x > /dev/tcp/127.0.0.1/{listener.getsockname()[1]}\n{script(TP)}"


def test_neither_the_network_nor_the_folder_by_its_path_is_reached(
    asked: Asked, tmp_path: Path, listener: socket.socket
) -> None:
    written = tmp_path / "scripts" / "written"
    code, found = asked({"it.sh": f"echo x > {written}\n{reaching(listener)}"})
    assert code == 0
    assert only(found)["verdict"] == "full"
    if "without network" not in found["sandbox"]:
        pytest.skip("this machine allows neither bwrap nor unshare")
    assert not written.exists()
    with pytest.raises(TimeoutError):
        listener.accept()


def test_where_no_sandbox_works_it_is_said(
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    listener: socket.socket,
) -> None:
    ways = [("absent", ["/no/such/program"]), ("refusing", ["/bin/false"])]
    monkeypatch.setattr(sandbox, "_ways", lambda *folders: ways)
    code, found = asked({"it.sh": f"echo x > written\n{reaching(listener)}"})
    assert code == 0
    assert only(found)["verdict"] == "full"
    assert "not kept from the network" in capsys.readouterr().out
    assert not (tmp_path / "scripts" / "written").exists()
    listener.accept()[0].close()


# ------------------------------------------------------------------ real examples

HOME = os.environ.get("MINDSPEED_LLM_HOME")


@pytest.mark.timeout(1200)
@pytest.mark.skipif(not HOME, reason="MINDSPEED_LLM_HOME is not set: a checkout of MindSpeed-LLM")
def test_the_real_examples(tmp_path: Path) -> None:
    folder = Path(str(HOME), "examples", "mcore")
    before = {str(path) for path in folder.rglob("*")}
    page = tmp_path / "found.json"
    code = cli.main(["plan", str(folder), "--json", str(page)])
    found = json.loads(page.read_text("utf-8"))
    # Up to 26.0.0 one is no shell: MASTER_ADDR=<master_addr>.
    assert set(found["unread"]) <= {"llama2/pretrain_llama2_70b_128k_C_ptd.sh"}
    assert code == bool(found["unread"])
    counts = found["counts"]
    assert counts["launches"] == len(found["launches"]) >= 90
    assert counts["launches"] == sum(counts[name] for name in ("full", "partial", "refused"))
    kinds = ("LoRA", "another overlap", "else", "TP 1")
    assert counts["with transfers of TP, EP or CP"] >= 70
    assert counts["--commfuse-fb-overlap passes as typed"] >= 40
    assert counts["and without the flags of another overlap"] >= 55
    assert counts["refused"] == sum(counts[name] for name in kinds)
    # One of each is there in every version from 2.3.0 on.
    assert all(counts[name] for name in ("full", "partial", "LoRA", "another overlap", "TP 1"))
    trained = {one["script"] for one in found["launches"]}
    assert not [
        name for name in trained if Path(name).name.startswith(("generate", "ckpt", "data"))
    ]
    missed = [name for name in found["others"] if Path(name).name.startswith(("pretrain", "tune"))]
    assert not missed
    assert {str(path) for path in folder.rglob("*")} == before
