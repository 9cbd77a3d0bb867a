"""``commfuse-npu plan FOLDER``: verdicts of launches, scripts that misbehave, and the summary."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools import cli
from commfuse_npu.tools.plan import sandbox
from tests.tools.answers import answer
from tests.tools.plan.launches import EXPERTS, MODEL, TP, ULYSSES, script

Asked = Callable[..., dict[str, Any]]
OTHERS = "generation, evaluation, conversion or data"
SCRIPTS = {
    "dense/full.sh": (script(f"{TP} --global-batch-size 16"), ("full", "")),
    "dense/partial.sh": (script(f"{TP} --defer-embedding-wgrad-compute"), ("partial", "")),
    "dense/coc.sh": (script(f"{TP} --use-ascend-coc"), ("refused", "another overlap")),
    "dense/alone.sh": (script("--tensor-model-parallel-size 1"), ("refused", "TP 1")),
    "dense/ulysses.sh": (script(f"{TP} {ULYSSES}"), ("full", "")),
    "dense/lora.sh": (script(f"{TP} --lora-target-modules linear_qkv"), ("refused", "LoRA")),
    "dense/short.sh": (script(f"{TP} --seq-length 1024"), ("full", "")),
    "experts/full.sh": (script(f"{TP} {EXPERTS}"), ("full", "")),
    "more/evaluate.sh": (script(f"{TP} --skip-train"), OTHERS),
    "more/generate.sh": (script(TP, program="inference.py"), OTHERS),
    "more/convert.sh": ("python convert_ckpt.py --target-tensor-parallel-size 4\n", OTHERS),
    "more/fsdp2.sh": (
        "torchrun --nproc_per_node 8 train_fsdp2.py some.yaml\n",
        "trains without Megatron's options",
    ),
    "more/mindspore.sh": (f"msrun pretrain_gpt.py {MODEL}\n", "trains with MindSpore"),
    "more/nothing.sh": ("export SOMETHING=1\n", "starts nothing"),
}


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    """A function that writes scripts by name, runs ``plan`` on them and returns its JSON."""

    def ask(scripts: dict[str, str], *words: str, code: int = 0) -> dict[str, Any]:
        for name, text in scripts.items():
            path = tmp_path / "scripts" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        return answer(tmp_path, "plan", str(tmp_path / "scripts"), *words, code=code)

    return ask


def only(found: dict[str, Any]) -> dict[str, Any]:
    (launch,) = found["launches"]
    assert isinstance(launch, dict)
    return launch


def test_all_of_them(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    report = asked({name: text for name, (text, _) in SCRIPTS.items()}, "--all")
    verdicts = {row["script"]: (row["verdict"], row["kind"]) for row in report["launches"]}
    assert verdicts | report["others"] == {name: verdict for name, (_, verdict) in SCRIPTS.items()}
    assert not report["unread"]
    text = capsys.readouterr().out
    assert text.startswith("Of 8 launches 1 can take --commfuse-fb-overlap as they are, 5 --use-")
    assert "pass as typed: 5 x one micro-batch has no partner, 1 x --use-ascend-coc" in text
    assert "| dense | 7 | 3 | 1 | 3 | 1 | 1 | 1 | 0 | 0 | 1 |\n" in text
    assert "| experts | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |\n" in text
    assert "| all | 8 | 4 | 1 | 3 | 1 | 1 | 1 | 0 | 1 | 1 |\n" in text
    for name, count in {
        "with transfers of TP, EP or CP": 7,
        "TP above 1, neither LoRA nor another overlap": 5,
        "of these full": 4,
        "of these --commfuse-ulysses fits": 1,
        "of these with short blocks": 2,
        "of these --commfuse-attention passes": 4,
    }.items():
        assert f"\n| {name} | {count} |\n" in text
    assert "dense/coc.sh: refused with --use-ascend-coc; TP 4, PP 1, CP 1, DP 2, " in text
    without = {row["script"]: row["without"] for row in report["launches"] if row["without"]}
    assert without["dense/coc.sh"] == "full without --use-ascend-coc"
    assert "dense/partial.sh: partial; TP 4, PP 1, CP 1, DP 2, sequence parallel; left: out" in text
    assert "dense/full.sh: full; TP 4, PP 1, CP 1, DP 2, sequence parallel; also: --comm" in text
    assert f"No such training: 3 scripts: {OTHERS}\n" in text


def test_scripts_start_from_mindspeed_llms_root(asked: Asked, tmp_path: Path) -> None:
    """As its examples expect; they source other files relative to it."""
    root = tmp_path / "scripts"
    (root / "examples").mkdir(parents=True)
    (root / "pretrain_gpt.py").touch()
    (root / "sizes.sh").write_text("TP=4\n", "utf-8")
    training = "torchrun pretrain_gpt.py --sequence-parallel --tensor-model-parallel-size"
    (root / "examples" / "it.sh").write_text(
        f"source sizes.sh\ncd $(dirname $0)/..\n{training} $TP {MODEL}\n{training} 2 {MODEL}\n"
    )
    launches = answer(tmp_path, "plan", str(root / "examples"))["launches"]
    assert [row["layout"]["tensor"] for row in launches] == [4, 2], "two trainings of a script"


# ------------------------------------------------------------------ scripts that misbehave


def test_others_are_counted_when_some_cannot_be_read(asked: Asked, capsys) -> None:
    unread = {
        "hangs.sh": ("while :; do :; done\n", "it did not end within 1 s"),
        "ends.sh": (
            "echo set DATA_PATH first >&2\nexit 3\n",
            "it ended with code 3 before it started anything; it printed last: set DATA_PATH first",
        ),
        "module.sh": (f"python -m pdb pretrain_gpt.py {MODEL}\n", "by 'python -m pdb pretrain_gp"),
        "size.sh": (script("--tensor-model-parallel-size four"), "parallel-size is 'four'"),
        "typo.sh": (script(f"{TP} --commfuse-chunk 2"), "is refused: unknown: --commfuse-chunk; "),
        "large.sh": ("#" * (1 << 20) + "\n", "at most 1 MB"),
    }
    scripts = {name: text for name, (text, _) in unread.items()}
    report = asked({**scripts, "fine.sh": script(TP)}, "--timeout", "1", code=1)
    assert only(report)["script"] == "fine.sh"
    assert report["unread"].keys() == unread.keys()
    for name, (_, message) in unread.items():
        assert message in report["unread"][name]
    message = capsys.readouterr().out
    assert "Not read: ends.sh: it ended with code 3" in message
    assert "fine.sh: full" not in message, "without --all"


def test_nothing_is_written_into_the_folder(asked: Asked, tmp_path: Path) -> None:
    """A script does not see the files that another one has written either."""
    folder = tmp_path / "scripts"
    writing = "echo spoiled > b.sh; echo TP=1 > sizes.conf; /bin/mkdir -p made; > $PWD/x.log\n"
    scripts = {
        "a.sh": f"cd $(dirname $0)\n{writing}source sizes.conf\nexit 5\n",
        "b.sh": f"source sizes.conf\n[ -e made ] && exit 6\n{script('$TP')}",
        "sizes.conf": f"TP='{TP}'\n",
    }
    report = asked(scripts, code=1)
    assert list(report["unread"]) == ["a.sh"]
    assert only(report)["layout"]["tensor"] == 4
    assert {path.name: path.read_text("utf-8") for path in folder.iterdir()} == scripts


@pytest.mark.parametrize("works", [True, False])
def test_neither_the_network_nor_the_folder_by_its_path_is_reached(
    works: bool, asked: Asked, monkeypatch, capsys, tmp_path: Path
) -> None:
    """If a sandbox works; if none does, the output says so."""
    if not works:
        ways = [("absent", ["/no/such/program"]), ("refusing", ["/bin/false"])]
        monkeypatch.setattr(sandbox, "_ways", lambda *folders: ways)
    written = tmp_path / "scripts" / "written"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.5)
        reaching = f"echo x > /dev/tcp/127.0.0.1/{listener.getsockname()[1]}\n{script(TP)}"
        writing = f"echo x > {written if works else 'written'}\n"
        report = asked({"it.sh": writing + reaching})
        assert only(report)["verdict"] == "full"
        if not works:
            assert "not kept from the network" in capsys.readouterr().out
            listener.accept()[0].close()
        elif "without network" not in report["sandbox"]:
            pytest.skip("this machine allows neither bwrap nor unshare")
        else:
            with pytest.raises(TimeoutError):
                listener.accept()
    assert not written.exists()


# ------------------------------------------------------------------ real examples

HOME = os.environ.get("MINDSPEED_LLM_HOME")


@pytest.mark.timeout(1200)
@pytest.mark.skipif(not HOME, reason="MINDSPEED_LLM_HOME is not set: a checkout of MindSpeed-LLM")
def test_the_real_examples(tmp_path: Path) -> None:
    folder, page = Path(str(HOME), "examples", "mcore"), tmp_path / "found.json"
    before = {str(path) for path in folder.rglob("*")}
    code = cli.main(["plan", str(folder), "--json", str(page)])
    report = json.loads(page.read_text("utf-8"))
    # Up to 26.0.0 one script is not valid shell: MASTER_ADDR=<master_addr>.
    assert set(report["unread"]) <= {"llama2/pretrain_llama2_70b_128k_C_ptd.sh"}
    assert code == bool(report["unread"])
    counts = report["counts"]
    assert counts["launches"] == len(report["launches"]) >= 90
    assert counts["launches"] == sum(counts[name] for name in ("full", "partial", "refused"))
    assert counts["with transfers of TP, EP or CP"] >= 70
    assert counts["--commfuse-fb-overlap passes as typed"] >= 40
    # Every version from 2.3.0 on has at least one of each.
    assert all(counts[name] for name in ("full", "partial", "LoRA", "another overlap", "TP 1"))
    trained, others = (
        {Path(name).name for name in names}
        for names in ([row["script"] for row in report["launches"]], report["others"])
    )
    assert not [name for name in trained if name.startswith(("generate", "ckpt", "data"))]
    assert not [name for name in others if name.startswith(("pretrain", "tune"))]
    assert {str(path) for path in folder.rglob("*")} == before
