"""Bad input: exit code 2, one line with value, limit and way out, and nothing done before."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.tools.cli.refused import ROOT, answers_to

# (question, what its last line says)
QUESTIONS = (
    (
        "frobnicate",
        "invalid choice: 'frobnicate' (choose from 'doctor', 'plan', 'simulate'",
    ),
    ("''", "invalid choice: '' (choose from"),
    ("--frobnicate", "commfuse-npu: error: "),
    ("doctor --frobnicate", "unknown: --frobnicate (see commfuse-npu doctor --help)"),
    ("doctor surplus", "unknown: surplus (see commfuse-npu doctor --help)"),
    ("doctor --config nowhere", "'nowhere' is neither a file nor one of llama2_13b, llama2_70b"),
    ("doctor --config ''", "'' is neither a file nor one of llama2_13b, llama2_70b"),
    ("doctor --config bad.yaml", "bad.yaml: unknown option 'a'; did you mean"),
    ("doctor -- pretrain_gpt.py --num-layers x", "--num-layers: 'x' is not a whole number from 1"),
    ("doctor -- ls", "--num-layers, --hidden-size, --num-attention-heads, --seq-length"),
    ("plan nowhere", "nowhere is no launch script, no folder and no rule; rules are bucket_gather"),
    ("plan -- ls", "--num-layers, --hidden-size, --num-attention-heads, --seq-length"),
    ("plan file --tp 2", "--tp: no effect on what a script starts; leave it out"),
    (
        "plan there",
        "'there' has no launch scripts, *.sh, in it or below it; give a folder that",
    ),
    ("plan there --timeout 0", "--timeout: '0' is not a number above 0"),
    ("plan there --json no/such/x.json", "no/such, which is not there; make it, or choose"),
    ("plan there --jsn x.json", "unknown: --jsn x.json; did you mean --json?"),
    ("plan", "give a launch script, a folder of them, --model NAME, or a rule"),
    ("plan reduce_scatter", "reduce_scatter is no launch script, no folder and no rule"),
    ("plan gemm_scatter --ranks 4 --lanes 9", "--lanes 9: 4 ranks have 3 peers; choose 1 to 3"),
    (
        "plan gather_gemm --lane 3",
        "unknown: --lane 3; did you mean --lanes? (see commfuse-npu plan",
    ),
    ("plan gather_gemm --ranks 1", "--ranks: '1' is not a whole number from 2 to 1024"),
    ("plan gather_gemm --ranks 1000000", "'1000000' is not a whole number from 2 to 1024"),
    ("plan gather_gemm --ranks 4 --rank 4", "--rank 4 is not one of --ranks 4; choose 0 to 3"),
    ("plan gather_gemm --rank -1", "--rank: '-1' is not a whole number from 0"),
    ("plan gather_gemm --rows 0", "--rows: '0' is not a whole number from 1 to 16777216"),
    ("plan gather_gemm --taper nan", "--taper: 'nan' is not a number above 0"),
    ("plan gather_gemm --taper 9", "taper is 9.0; from 1/8 to 8"),
    ("plan gather_gemm --shape warp", "shape 'warp' is unknown; choose one of shifted, two_level"),
    ("plan gather_gemm --shape two_level --ranks 6", "two_level needs node_size"),
    ("plan gather_gemm --shape two_level --node-size 3", "group size 4 is not a multiple of node"),
    ("simulate --model machine.yaml", "machine.yaml describes a machine; give it as --hardware"),
    (
        "simulate --model quoted.yaml",
        "hidden_size: a number as text; leave the quotes out",
    ),
    ("simulate --model llama3_8b --tp 3 --sequence-lengths 8190", "choose TP from 1, 2, 4, 8"),
    ("plan gather_gemm --chunks 1000", "256"),
    ("measure --device cpu --ranks 2 --resume --folder nothere", "nothere holds no run to resume"),
    (
        "bench --from wrong.json",
        "writes: there is no 'machine' in it",
    ),
    ("plan gather_gemm --tp 4", "--tp: no effect on a program; leave it out"),
    ("plan --model llama3_8b --ranks 4", "--ranks: no effect on a recommendation"),
    ("plan --model llama_x", "'llama_x' is neither a file nor one of llama2_13b"),
    ("plan --model llama3_8b --npus 0", "--npus: '0' is not a whole number from 1"),
    ("plan --model llama3_8b --npus 9", "--npus 9: "),
    ("plan --model llama3_8b --tp 3", "--npus 8 is not divisible by --tp 3 = 3; choose others"),
    ("plan --model llama3_8b --json /no/such/x.json", "needs the folder /no/such, which is not"),
    ("plan --model llama3_8b --html x", "'x' is no name of a page; let it end in .html or .htm"),
    ("simulate --npus 8 64 512", "64 NPUs are more than the 8 of 1 nodes of 8; choose smaller"),
    ("simulate --npus 12", "--npus 12 is not divisible by TP*CP*PP = 8*1*1 = 8; choose 8 or 16"),
    ("simulate --tp 3", "of 14336 are not divisible by TP 3; choose TP from 1, 2, 4, 8"),
    (
        "simulate --tp 4 --sequence-lengths 8190",
        "divisible by TP*CP = 4*1 = 4; choose --sequence-lengths 8188 or 8192",
    ),
    ("simulate --npus 8 --dp 1", "--npus and --dp say the same twice"),
    ("simulate --hardware nowhere", "'nowhere' is neither a file nor one of"),
    ("simulate --lanes 9", "--lanes 9: a group of 8 ranks has 7; choose 7 or less"),
    ("simulate --variants ''", "--variants: '' is an empty list; give one word at least"),
    ("simulate --variants warp", "no variant is called 'warp'; choose from plain-mesh"),
    ("simulate --sequence-lengths 99999999999", "is not a whole number from 1 to 16777216"),
    ("simulate --micro-batches 99999999", "'99999999' is not a whole number from 1 to 65536"),
    ("simulate --model llama_x", "'llama_x' is neither a file nor one of llama2_13b"),
    ("simulate --hardware bad.yaml", "bad.yaml: "),
    ("simulate --html no/such/x.html", "no/such, which is not there; make it, or choose another"),
    ("simulate --html x.png", "'x.png' is no name of a page; let it end in .html or .htm"),
    ("simulate --html no/such/x.html", "no/such, which is not there; make it, or choose another"),
    ("simulate --json there", "'there' is no name of a file; give one"),
    (
        "bench --works none",
        "--works: 'none' is unknown; choose from all-gather, reduce-scatter, mlp",
    ),
    ("bench --variants best", "no variant for 2 ranks is called 'best'"),
    ("bench --dtypes fp64", "'fp64' is unknown; choose from fp32, bf16"),
    ("bench --device npu --sleep-gemm 9", "leave it out"),
    ("bench --sleep-gemm 0", "'0' is not a number above 0"),
    ("bench --ratios -1", "'-1': ratios are numbers from 0 to 100"),
    ("bench --ratios nan", "--ratios: 'nan': ratios are numbers from 0 to 100"),
    ("bench --ranks 65", "--ranks: '65' is not a whole number from 2 to 64"),
    ("bench --rounds 0", "--rounds: '0' is not a whole number from 1"),
    ("bench --timeout inf", "--timeout: 'inf' is not a number above 0"),
    ("bench --html x.png", "'x.png' is no name of a page; let it end in .html or .htm"),
    ("bench --from nowhere", "nowhere: No such file or directory"),
    ("measure --device tpu", "--device: invalid choice: 'tpu' (choose from 'cpu', 'cuda', 'npu'"),
    ("measure --ranks 1", "--ranks: '1' is not a whole number from 2 to 1024"),
    ("measure --steps none", "--steps: 'none' is unknown; choose from links, collectives, gemms"),
    ("measure --minutes 0", "--minutes: '0' is not a number above 0"),
    ("measure --config nowhere", "'nowhere' is neither a file nor one of llama2_13b, llama2_70b"),
    ("measure --base nowhere", "'nowhere' is neither a file nor one of ascend_910b_roce"),
    ("measure --device cpu --folder bad.yaml", "bad.yaml is no folder; choose another with"),
    ("measure --device cpu --folder .", ". is not empty; choose a new folder with --folder"),
    ("measure --steps launch", "--steps launch needs a launch; give it by --launch"),
    ("measure --steps host --launch x.sh", "--launch: no effect without launch among --steps; add"),
    ("measure --one-device --launch train.sh", "--launch trains on all ranks"),
    ("measure --launch absent.sh", "there is no launch script absent.sh here or in"),
    ("measure --launch pretrain_gpt.py", "names no number, and here are 8 (--ranks)"),
    ("measure --device cpu --launch absent", "--launch 'absent' starts no program; give a launch"),
    ("bench --config llama_x", "'llama_x' is neither a file nor one of llama2_13b"),
    ("verify --max-ranks 0", "--max-ranks: '0' is not a whole number from 2 to 1024"),
    ("verify --max-ranks -3", "--max-ranks: '-3' is not a whole number from 2 to 1024"),
    ("verify --min-ranks 9 --max-ranks 4", "is more than --max-ranks 4: there is nothing to prove"),
    ("verify --chunks 99999999", "--chunks: '99999999' is not a whole number from 1 to 256"),
    ("verify --log nowhere", "nowhere: No such file or directory"),
    ("verify --log there", "there holds no rank_*.jsonl; give the folder of --commfuse-order-log"),
    ("verify --log there --max-ranks 4", "--max-ranks: no effect on a recorded run; leave it out"),
    ("pretrain --data-path ''", "'' is no file and no folder; give one with text"),
    ("pretrain --data-path nowhere", "'nowhere' is no file and no folder; give one with text"),
    ("pretrain --config bad.yaml", "unknown: --config bad.yaml"),
    ("pretrain --hidden 3", "unknown: --hidden 3; did you mean --hidden-size?"),
    ("pretrain --tensor-model-parallel-size 3", "--num-attention-heads 8 is not divisible by the"),
    ("pretrain --seq-length 1001", "by the tensor-parallel size 2; choose 1000 or 1002"),
    ("pretrain --seq-length 1", "--seq-length: '1' is not a whole number from 2"),
    ("pretrain --num-query-groups 1", "by the tensor-parallel size 2; choose 2"),
    ("pretrain --num-query-groups 6", "by --num-query-groups 6; choose 6 or 12"),
    ("pretrain --ffn-hidden-size 701", "by the tensor-parallel size 2; choose 700 or 702"),
    ("pretrain --hidden-size 24", "by 2 (rotary) times --num-attention-heads 16; choose 16 or 32"),
    (
        "pretrain --context-parallel-size 8",
        "by the tensor-parallel size times the context-parallel",
    ),
    (
        "pretrain --context-parallel-size 2 --seq-length 34",
        "context-parallel size 4; choose 32 or 36",
    ),
    ("pretrain --context-parallel-size 2 --commfuse-attention", "exclude each other"),
    ("pretrain --commfuse-ulysses", "needs --context-parallel-size of at least 2: "),
    ("pretrain --commfuse-dp", "--commfuse-dp needs --use-distributed-optimizer: "),
    ("pretrain --commfuse-dp --no-use-commfuse", "--commfuse-dp needs --use-commfuse, "),
    ("pretrain --overlap-param-gather", "give all three, or leave it out"),
    ("pretrain --global-batch-size 7", "by micro-batch size times data-parallel size 4; choose 4"),
    ("pretrain --train-iters 0", "--train-iters: '0' is not a whole number from 1"),
    ("pretrain --lr nan", "--lr: 'nan' is not a number above 0"),
    ("pretrain --link-rate 0", "--link-rate: '0' is not a number above 0"),
    ("pretrain --link-rate 9 --tensor-model-parallel-size 1", "needs links, but"),
    ("pretrain --link-rate 9 --compare --train-iters 3", "3 warm-up iterations, but --train-iters"),
    ("pretrain --compare --tensor-model-parallel-size 1", "--compare has nothing to compare at"),
    ("pretrain --resume", "leave --resume out to start anew"),
    ("pretrain --name ../x", "'../x' is not a folder name; use letters, digits"),
    ("pretrain --runs-dir file/x", "file/x/llama_tiny: Not a directory; choose another --runs-dir"),
    ("pretrain --compare --no-use-commfuse", "--compare has nothing to compare with Megatron's"),
    ("pretrain --plain --compare", "choose --use-commfuse, and leave --compare out"),
    ("pretrain --plain --no-use-commfuse", "--plain is the plain form of what would be fused"),
    ("pretrain --compare --resume", "--compare trains from the beginning; leave --resume out"),
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("asked")
    (folder / "there").mkdir()
    configs = ROOT / "configs"
    machine = (configs / "hardware" / "ascend_910b_server.yaml").read_text("utf-8")
    model = (configs / "llama3_8b.yaml").read_text("utf-8")
    quoted = re.sub(r"^(hidden_size: )(\d+)", r'\1"\2"', model, flags=re.M)
    assert quoted != model
    for name, text in (
        ("file", "x"),
        ("bad.yaml", "a: 1"),
        ("bad.json", "{}"),
        ("wrong.json", '{"results": []}'),
        ("machine.yaml", machine),
        ("quoted.yaml", quoted),
    ):
        (folder / name).write_text(text, "utf-8")
    return answers_to((question for question, _ in QUESTIONS), folder)


@pytest.mark.parametrize(("question", "said"), QUESTIONS)
def test_it_is_refused_in_a_line(
    answers: dict[str, dict[str, Any]], question: str, said: str
) -> None:
    found = answers[question]
    assert found["code"] == 2, found
    assert (found["out"], found["written"]) == ("", [])
    *_, last = found["error"].splitlines()
    assert " error: " in last
    assert said in last
    assert "Traceback" not in found["error"]
    if not question.startswith("pretrain"):
        command = question.split()[0]
        assert last.startswith(("commfuse-npu: error: ", f"commfuse-npu {command}: error: "))
        assert not found["torch"]
        assert not found["drawing"]
