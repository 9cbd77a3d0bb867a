"""Sixty bad inputs: wrong types, broken files, scripts that hang, numbers without sense.

Each ends with status 2, or 1 where the answer is no, and a line that says the value and the limit.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limits import LIMIT
from tests.tools.cli.refused import ROOT, answers_to

LAUNCH = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 --global-batch-size 8 "
    "--tensor-model-parallel-size 2 --sequence-parallel"
)
EXPERTS = f"{LAUNCH} --num-experts 8"
STAGES = f"{LAUNCH} --pipeline-model-parallel-size 2"

# A launch, its status, and what is said of it.
LAUNCHES = (
    (f"{LAUNCH} --noop-layers x", 2, "--noop-layers: 'x' is no layer; give numbers from 0 to 3"),
    (f"{LAUNCH} --noop-layers 1,99", 2, "--noop-layers: '99' is no layer"),
    (f"{LAUNCH} --noop-layers -1", 2, "--noop-layers: '-1' is no layer"),
    (f"{LAUNCH} --noop-layers", 2, "--noop-layers: '' is no layer"),
    (f"{STAGES} --num-layer-list 1,x", 2, "(--num-layer-list): 'x' is not a whole number from 1"),
    (f"{STAGES} --num-layer-list 9,9", 1, "give 2 numbers that add up to 4"),
    (f"{LAUNCH} --num-layer-list", 2, "--num-layer-list: expected one argument"),
    (f"{STAGES} --num-layers-per-virtual-pipeline-stage 0", 2, "is '0'; give a whole number from"),
    (f"{STAGES} --num-layers-per-virtual-pipeline-stage 3", 2, "4 layers are not divisible by it"),
    (f"{LAUNCH} --tensor-model-parallel-size two", 2, "'two' is not a whole number from 1"),
    (f"{LAUNCH} --tensor-model-parallel-size {'9' * 23}", 2, "a number of 23 digits; give at most"),
    (f"{LAUNCH} --pipeline-model-parallel-size -2", 2, "'-2' is not a whole number from 1"),
    (f"{LAUNCH} --global-batch-size 7", 1, "choose --global-batch-size 4 or 8"),
    (f"{LAUNCH} --num-attention-heads 7", 1, "hidden size 512 is not divisible by heads 7"),
    (f"{LAUNCH} --micro-batch-size 1.5", 2, "'1.5' is not a whole number from 1"),
    (f"{LAUNCH} --seq-length", 2, "--seq-length: expected one argument"),
    (f"{LAUNCH} --recompute-granularity some", 2, "is 'some'; give full or selective"),
    (
        f"{LAUNCH} --recompute-granularity full --recompute-num-layers -3",
        2,
        "is '-3'; give a",
    ),
    (f"{LAUNCH} --use-commfuse --commfuse-taper nan", 2, "taper is nan; from 1/8 to 8"),
    (f"{LAUNCH} --multi-latent-attention --q-lora-rank x", 2, "is 'x'; give a whole number from 0"),
    (f"{LAUNCH} --num-experts many", 2, "--num-experts is 'many'; give a whole number from 0"),
    (f"{EXPERTS} --expert-tensor-parallel-size 0", 2, "is '0'; give a whole number from 1"),
    (f"{EXPERTS} --moe-router-topk 99", 2, "--moe-router-topk 99 is more than --num-experts 8"),
    (f"{EXPERTS} --moe-ffn-hidden-size -1", 2, "is '-1'; give a whole number from 1"),
    (LAUNCH.replace("node 8", "node x"), 2, "--nproc-per-node is 'x'; give a whole number from 1"),
    (LAUNCH.replace("node 8", "node 0"), 2, "--nproc-per-node is '0'; give a whole number from 1"),
    (
        LAUNCH.replace("node 8", "node 3"),
        1,
        "3 NPUs (NNODES 1 x NPUS_PER_NODE 3) are not",
    ),
    (
        "echo no data here >&2; exit 3",
        2,
        "ended with code 3, started nothing, and printed last:",
    ),
    ("if then fi (", 2, "by their names; it ended with code 2"),
    ("", 2, "started nothing, and printed last: nothing"),
)
FILES = {
    "latin.yaml": b"num_layers: 4 # \xe9\xff\n",
    "broken.yaml": b"a: [1, 2\nb: }",
    "list.yaml": b"- 1\n",
    "empty.yaml": b"",
    "nul.yaml": b"a: \x00\n",
    "deep.yaml": b"a: " + b"[" * 5000,
    "half.json": b'{"machine": {',
    "latin.json": b"\xff\xfe{}",
    "deep.json": b"[" * 100_000,
    "hangs.sh": b"while :; do :; done\n",
    "log/rank_0.jsonl": b"\xff\xfe\n",
}
# A question, its status, and what is said last.
QUESTIONS = (
    ("doctor --config latin.yaml", 2, "latin.yaml is not valid yaml: 'utf-8' codec can't decode"),
    ("doctor --config broken.yaml", 2, "broken.yaml is not valid yaml: line 2: expected ',' or"),
    ("doctor --config nul.yaml", 2, "nul.yaml is not valid yaml: "),
    ("doctor --config deep.yaml", 2, "deep.yaml is not valid yaml: it is nested too deeply"),
    ("doctor --config folder.yaml", 2, "'folder.yaml' is neither a file nor one of llama2_13b"),
    (f"doctor --config {'a' * 300}", 2, "aaa' is neither a file nor one of llama2_13b"),
    ("doctor --config llama3_7b", 2, "; did you mean llama3_70b?"),
    ("plan empty.yaml", 2, "empty.yaml holds nothing, not a mapping of name: value"),
    ("plan list.yaml", 2, "list.yaml holds list, not a mapping of name: value"),
    ("plan ''", 2, "'' is no launch script, no folder and no rule"),
    ("plan gather_gem", 2, "; did you mean gather_gemm?"),
    ("plan good.sh --timeout 1e300", 2, "'1e300' is not a number above 0, up to 1e+09"),
    ("plan --model llama3_8b --micro-batch 999999999999999", 1, "take another --npus, a shorter"),
    ("simulate --hardware broken.yaml", 2, "broken.yaml is not valid yaml: line 2"),
    ("simulate --hardware ascend_910b", 2, "; did you mean ascend_910b_roce?"),
    ("simulate --variants comfuse-fb", 2, "; did you mean commfuse-fb?"),
    ("simulate --post-us 1e300", 2, "--post-us: '1e300' is not a number above 0, up to 1e+09"),
    ("bench --from half.json", 2, "half.json: not what `commfuse-npu bench --json` writes: JSON"),
    ("bench --from latin.json", 2, "latin.json: not what `commfuse-npu bench --json` writes: Uni"),
    ("bench --from deep.json", 2, "deep.json: not what `commfuse-npu bench --json` writes: Recurs"),
    ("bench --from folder.yaml", 2, "folder.yaml: Is a directory"),
    ("bench --scale 1e-9", 2, "--scale: '1e-9' is below 1: no layer is wider than the model's"),
    ("bench --works mlp,mpl", 2, "'mpl' is unknown; choose from all-gather, reduce-scatter, mlp, "),
    ("measure --device cpu --steps gems", 2, "; did you mean gemms? (see commfuse-npu measure"),
    ('measure --device cpu --launch "torchrun \'x"', 2, "No closing quotation; quote it as for a"),
    ("verify --log log", 2, "log/rank_0.jsonl"),
)
# What a shell does with a command, its status, and its last line on stderr.
IN_A_SHELL = (
    ("verify --max-ranks 2 --chunks 1 --lanes 1 >/dev/full", 2, "No space left on device"),
    (
        "plan good.sh --json /dev/full",
        2,
        "No space left on device; all else is there",
    ),
    ("doctor >&-", 0, ""),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    (made / "folder.yaml").mkdir()
    (made / "log").mkdir()
    for name, content in FILES.items():
        (made / name).write_bytes(content)
    for number, (launch, _, _) in enumerate(LAUNCHES):
        (made / f"{number}.sh").write_text(f"{launch}\n", "utf-8")
    (made / "good.sh").write_text(f"{LAUNCH}\n", "utf-8")
    return made


ASKED = (
    *((f"plan {number}.sh", *said) for number, (_, *said) in enumerate(LAUNCHES)),
    ("plan hangs.sh --timeout 1", 2, "did not end within 1 s although it starts nothing here"),
    *QUESTIONS,
)


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, dict[str, Any]]:
    return answers_to((question for question, _, _ in ASKED), folder)


@pytest.mark.parametrize(("question", "code", "said"), ASKED, ids=[one for one, _, _ in ASKED])
def test_it_is_answered_in_a_line(
    answers: dict[str, dict[str, Any]], question: str, code: int, said: str
) -> None:
    found = answers[question]
    assert found["code"] == code, found
    assert not found["torch"]
    assert not found["written"]
    if found["error"]:
        assert found["out"] == ""
        (line,) = found["error"].splitlines()
        assert line.startswith(f"commfuse-npu {question.split()[0]}: error: ")
    else:
        line, *_ = found["out"].splitlines()
        assert code == 1, "an invalid request is refused on stderr"
    assert said in line


@pytest.mark.parametrize(("words", "code", "said"), IN_A_SHELL)
def test_what_a_shell_does_with_it(folder: Path, words: str, code: int, said: str) -> None:
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m commfuse_npu.tools.cli {words}",
        shell=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines() or [""]
    assert line.endswith(said)
