"""What the launchers print, given to MindSpeed-LLM's own parser and validators.

Needs the real thing: MINDSPEED_HOME, MINDSPEED_LLM_HOME and MEGATRON_HOME name checkouts, and
COMMFUSE_NPU_PYTHON an interpreter with torch_npu; LD_LIBRARY_PATH has CANN or stand-ins for it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from commfuse_npu.tools.model_config import ModelConfig
from tests.launchers.launching import MODELS, ROOT, dry_run, started

NEEDED = ("MINDSPEED_HOME", "MINDSPEED_LLM_HOME", "MEGATRON_HOME", "COMMFUSE_NPU_PYTHON")
MISSING = [name for name in NEEDED if not os.environ.get(name)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not set")
SCRIPT = Path(__file__).with_name("parse_with_mindspeed_llm.py")


def parsed(words: list[str], world_size: int) -> dict[str, Any]:
    """The arguments as the validators leave them, on rank 0 of ``world_size``."""
    folders = [os.environ[name] for name in ("MINDSPEED_LLM_HOME", "MINDSPEED_HOME")]
    folders += [os.environ["MEGATRON_HOME"], str(ROOT)]
    run = started(
        *(os.environ["COMMFUSE_NPU_PYTHON"], str(SCRIPT), *words),
        folder=os.environ["MINDSPEED_LLM_HOME"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folders),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "1",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(world_size),
        },
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("commfuse", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_it_is_accepted_and_means_what_the_file_says(model, commfuse, tmp_path) -> None:
    config = ModelConfig.load(ROOT / "configs" / f"{model}.yaml")
    words = dry_run(
        model, USE_COMMFUSE=str(int(commfuse)), TOKENIZER_MODEL=str(tmp_path), COMMFUSE_LANES="3"
    )
    args = parsed(words[words.index("pretrain_gpt.py") + 1 :], config.world_size)
    same = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length"),
        *(
            "group_query_attention",
            "rotary_base",
            "norm_epsilon",
            "sequence_parallel",
            "lr",
            "min_lr",
        ),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("micro_batch_size", "global_batch_size", "data_parallel_size", "tokenizer_type"),
        *("untie_embeddings_and_output_weights", "make_vocab_size_divisible_by", "bf16"),
    )
    grouped = config.num_query_groups != config.num_attention_heads
    wanted = {"group_query_attention": grouped}
    wanted |= {name: getattr(config, name) for name in same if name not in wanted}
    assert {name: args[name] for name in same} == wanted
    # Without groups Megatron takes as many as there are heads, whatever this says.
    assert not grouped or args["num_query_groups"] == config.num_query_groups
    stages = config.num_layer_list
    assert args["num_layer_list"] == (",".join(map(str, stages)) if stages else None)
    assert (args["swiglu"], args["normalization"]) == (True, "RMSNorm")
    assert (args["add_bias_linear"], args["position_embedding_type"]) == (False, "rope")
    assert (args["ckpt_format"], args["transformer_impl"]) == ("torch", "local")
    assert args["params_dtype"] == "torch.bfloat16"
    assert bool(args.get("use_commfuse")) is commfuse
    assert args.get("commfuse_lanes") == (3 if commfuse else None)
