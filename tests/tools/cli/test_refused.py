"""Bad input: status 2, or 1 if the answer is no; one line with value, limit and remedy.

The tables have a row per kind of error, not per option that can have it.
"""

import os
import shlex
import sys
from pathlib import Path

import pytest

from commfuse_npu.tools import cli
from scripts.cpu_pretraining import __main__ as pretraining
from tests.launchers.launching import ROOT, started

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
LAUNCH = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 --global-batch-size 8 "
    "--tensor-model-parallel-size 2 --sequence-parallel"
)
STAGES = f"{LAUNCH} --pipeline-model-parallel-size 2"
# A script with a launch, the status of `plan SCRIPT`, and its message.
LAUNCHES = (
    (f"{LAUNCH} --noop-layers 1,x", 2, "--noop-layers is 'x'; give a whole number from 0"),
    (f"{STAGES} --num-layer-list 9,9", 1, "does not fit PP 2 and 4 layers; give a number for"),
    (f"{LAUNCH} --expert-model-parallel-size 0", 2, "is '0'; give a whole number from 1"),
    (f"{STAGES} --num-layers-per-virtual-pipeline-stage 3", 2, "4 layers are not divisible by it"),
    (f"{LAUNCH} --context-parallel-size 9999", 1, "choose another layout, or NNODES * NPUS_PER"),
    (f"{STAGES} --global-batch-size {10**9}", 2, "is not a whole number from 1 to 65536"),
    (f"{LAUNCH} --global-batch-size 7", 1, "choose --global-batch-size 4 or 8"),
    (f"{LAUNCH} --use-commfuse --commfuse-chunks 999", 2, "chunks is 999; at most 256, each"),
    (f"{LAUNCH} --num-experts 8 --moe-router-topk 99", 2, "is more than --num-experts 8"),
    (LAUNCH.replace("node 8", "node 0"), 2, "processes per node is empty or 0 here; give it (pl"),
    ("echo no data >&2; exit 3", 2, "printed last: no data; set the variables"),
    ("if then fi (", 2, "starts no pretraining: it ended with code 2, started nothing"),
    (f"{LAUNCH} --commfuse-wgrad=blocks", 2, "is refused: --commfuse-wgrad was removed: a weight"),
    (f"{LAUNCH} --commfuse-chunk 2", 2, "is refused: unknown: --commfuse-chunk; did you mean"),
)
FILES = {
    "file": b"x",
    "broken.yaml": b"a: [1, 2\nb: }",
    "empty.yaml": b"",
    "bad.yaml": b"a: 1",
    "log/rank_0.jsonl": b"\xff\xfe\n",
    "run/measured.json": b"{}",
    "good.sh": LAUNCH.encode(),
    "page.md": b"touch harmed",
    "train.py": b"touch harmed",
}
# The words of a command, and its last message.
QUESTIONS = (
    ("frobnicate", "'frobnicate' is none of doctor, plan, simulate, measure, verify"),
    ("pln", "did you mean plan?"),
    ("good.sh", "did you mean commfuse-npu plan good.sh?"),
    ("plan page.md", "page.md is no launch script by its name; give a .sh file"),
    ("plan train.py", "commfuse-npu plan -- torchrun ... train.py ARGS"),
    ("doctor surplus", "unrecognized arguments: surplus (see commfuse-npu doctor --help)"),
    ("plan --model ''", "'' is neither a file nor one of llama2_13b, llama2_70b"),
    (f"plan --model {'a' * 300}", "aaa' is neither a file nor one of llama2_13b"),
    ("plan --model llama3_7b", "; did you mean llama3_70b?"),
    ("plan --model bad.yaml", "bad.yaml: num_layers, hidden_size, ffn_hidden_size, num_"),
    ("plan --model broken.yaml", "broken.yaml is not valid yaml: line 2: expected ',' or"),
    ("plan -- ls", "the launch 'ls' is none that can be read; give pretrain_gpt.py ARGS, torchr"),
    ("plan -- --bf16", "--num-layers, --hidden-size, --num-attention-heads, --seq-length"),
    ("plan", "give a launch script, a folder of scripts or profiles, or --model NAME"),
    ("plan llama3_8b", "'llama3_8b' is no file and no folder; give a launch script, a"),
    ("plan empty.yaml", "empty.yaml holds nothing, not a mapping of name: value"),
    ("plan file --tp 2", "--tp: no effect without --model; leave it out"),
    ("plan there", "'there' has no *_ascend_pt with ASCEND_PROFILER_OUTPUT in it; record it with"),
    ("plan good.sh --nproc-per-node 4", "the launch starts 8 processes per node; change it there"),
    ("plan --model llama3_8b --nproc-per-node 4", "no effect with --model; use --npus"),
    ("plan there --hardware x", "--hardware: no effect without --model; leave it"),
    ("plan there --json no/such/x.json", "'no/such/x.json' cannot be written; give a file in"),
    ("plan there -- --commfuse-chunks 4", "-- --commfuse-chunks: no effect on there"),
    ("plan there --jsn x.json", "unrecognized arguments: --jsn x.json (see commfuse-npu plan"),
    ("simulate --dp 2048", "16384 NPUs are more than the 8192 of 1024 nodes of 8 in "),
    ("simulate --micro-batches 99999", "'99999' is not a whole number from 1 to 65536"),
    ("simulate --cp 3", "is not divisible by TP*CP = 8*3 = 24; choose seq_length 8184 or 8208"),
    ("simulate --tp 3", "their common divisor 8 is not divisible by TP 3; choose TP 2 or 4"),
    (
        "bench --ranks 2",
        "commfuse-npu bench was removed: in a checkout, python -m scripts.",
    ),
    ("measure --forms=auto", "commfuse-npu measure --forms was removed: in a checkout, python -m "),
    ("measure --steps host --launch x", "--launch: no effect without launch among --steps; add it"),
    ("measure --device cpu --base bad.yaml", "bad.yaml: between: None is not a mapping of figur"),
    ("measure --device cpu --folder file", "file/measured.json cannot be written: File exists; "),
    (
        "measure --device cpu --folder run",
        "run/measured.json cannot be read: KeyError('facts'); ",
    ),
    ("measure --steps launch", "--steps launch needs a launch; give it by --launch"),
    ("measure --minutes 1e300", "'1e300' is not a number above 0, up to 1e+09"),
    ("measure --launch pretrain_gpt.py", "names no number, and here are 8 (--ranks)"),
    (
        "measure --device cpu --launch x.sh",
        "--launch: trains on NPUs; on a CPU scripts/pretrain_ll",
    ),
    ('measure --launch "torchrun \'x"', "No closing quotation; quote it as for a"),
    ("verify --max-ranks 1", "'1' is not a whole number from 2 to 1024"),
    ("verify --log log --max-ranks 4", "--max-ranks: no effect on a recorded run; leave it"),
    ("verify --log log", "log/rank_0.jsonl"),
    ("pretrain --tensor-model-parallel-size 3", "is not divisible by TP 3; choose TP 2 or 4"),
    ("pretrain --hidden-size 24", "by 2 (rotary) times --num-attention-heads 16; choose 16 or 32"),
    ("pretrain --context-parallel-size 8", "heads per TP rank 4 is not divisible by CP 8; choose"),
    ("pretrain --context-parallel-size 2 --seq-length 34", "choose --seq-length 32 or 36"),
    ("pretrain --commfuse-dp --no-use-commfuse", "--commfuse-dp needs --use-commfuse, "),
    ("pretrain --commfuse-taper 0.5", "--commfuse-taper was removed: all chunks of a block have"),
    ("pretrain --global-batch-size 7", "size = 4*1 = 4; choose --global-batch-size 4 or 8"),
    ("pretrain --lr nan", "--lr: 'nan' is not a number above 0"),
    ("pretrain --link-rate 9 --tensor-model-parallel-size 1", "needs links, but there is 1"),
    ("pretrain --compare --tensor-model-parallel-size 1", "--compare has nothing to compare at"),
    ("pretrain --plain --compare", "choose --use-commfuse, and leave --compare out"),
    ("pretrain --output file/x", "Not a directory: 'file/x'; choose another folder"),
)
ASKED = [
    *((question, 2, said) for question, said in QUESTIONS),
    *((f"plan {number}.sh", *said) for number, (_, *said) in enumerate(LAUNCHES)),
    ("plan --model llama3_8b --micro-batch 999999999999999", 1, "take another --npus, a shorter"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    created = tmp_path_factory.mktemp("bad")
    for name in ("there", "log", "run"):
        (created / name).mkdir()
    for name, content in FILES.items():
        (created / name).write_bytes(content)
    for number, (launch, _, _) in enumerate(LAUNCHES):
        (created / f"{number}.sh").write_text(f"{launch}\n", "utf-8")
    return created


def content(folder: Path) -> list[tuple[Path, int]]:
    return sorted((path, path.stat().st_size) for path in folder.rglob("*"))


@pytest.mark.parametrize(("question", "code", "said"), ASKED, ids=[q for q, *_ in ASKED])
def test_it_is_answered_in_a_line(
    question: str, code: int, said: str, folder: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delattr(pretraining, "Ranks")
    before, (command, *words) = content(folder), shlex.split(question)
    try:
        ended = pretraining.main(words) if command == "pretrain" else cli.main([command, *words])
    except SystemExit as end:
        ended = int(end.code or 0)
    out, error = capsys.readouterr()
    assert (ended, content(folder)) == (code, before), error
    line = (error or out).splitlines()[-1 if error else 0]
    assert said in line
    assert "Traceback" not in error
    if error:
        assert out == ""
        assert " error: " in line
        assert command == "pretrain" or line.startswith("commfuse-npu")
    else:
        assert code == 1, "an invalid request is refused on stderr"


def test_requests_are_refused_before_torch_is_imported(folder: Path) -> None:
    calls = [shlex.split(line) for line, _ in QUESTIONS if not line.startswith("pretrain")]
    answered = [["doctor"], ["plan", str(ROOT / "configs" / "llama3_8b.yaml")]]
    code = (
        "import sys; from contextlib import suppress; from commfuse_npu.tools import cli\n"
        "for words in eval(sys.argv[1]):\n"
        "    with suppress(SystemExit):\n"
        "        assert cli.main(words) == 2, words\n"
        "print({'torch', 'matplotlib', 'numpy', 'vl_convert'} & set(sys.modules))\n"
        "sys.modules['torch'] = None\n"
        "codes = [cli.main(words) for words in eval(sys.argv[2])]\n"
        "print({'mindspeed', 'mindspeed_llm', 'megatron.core', 'torch_npu', "
        "'mindspeed_patches'} & set(sys.modules), codes[1])"
    )
    words = sys.executable, "-c", code, repr(calls), repr(answered)
    done = started(*words, env=ENVIRONMENT, folder=folder)
    first, *_, last = done.stdout.splitlines()
    assert (first, last) == ("set()", "set() 0"), done.stderr


# A command with redirections of a shell, its status, and its last line on stderr.
IN_A_SHELL = (
    ("doctor >/dev/full", 2, "No space left on device"),
    ("plan good.sh --json /dev/full", 2, "plan: error: /dev/full: No space left on device"),
    ("doctor >&-", 0, ""),
)


@pytest.mark.parametrize(("words", "code", "said"), IN_A_SHELL)
def test_what_a_shell_does_with_it(folder: Path, words: str, code: int, said: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m commfuse_npu.tools.cli {words}"
    done = started("bash", "-c", command, env=ENVIRONMENT, folder=folder)
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines() or [""]
    assert line.endswith(said)
