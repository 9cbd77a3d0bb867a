"""Trains small models with verl's Megatron engine, in Megatron's order and overlapped.

Started by torchrun; prints a line of JSON for each case::

    torchrun --nproc_per_node 2 -m tests.clients.verl_training '[{"name": "TP 2", "tensor": 2}]'
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_patches.fb_overlap import Overlapping
from mindspeed_patches.state_hashes import hash_over_ranks
from tests.clients.verl_on_cpu import verl_on_cpu
from tests.megatron.models import RECOMPUTED
from tests.megatron.training import without_groups_afterwards

VOCABULARY, EXPERTS = 128, 4
HIDDEN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
SPARSE = {
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
LENGTHS = (16, 24, 12, 20, 9, 31, 17, 22)
ON_CPU = {
    "attention_backend": "unfused",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "persist_layer_norm": False,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained.

    Attributes:
        layout: verl's names of parallel sizes, without ``_parallel_size``.
        models: ``actor``, ``critic`` and ``reference``.
        replay: verl's mode of router replay.
        loss: ``sft``, ``entropy`` or ``ppo``.
        samples: per rank of data parallelism and step.
    """

    name: str
    layout: dict[str, int]
    sparse: bool = False
    models: tuple[str, ...] = ("actor",)
    packed: bool = True
    recomputed: bool = False
    dynamic: bool = False
    replay: str = "disabled"
    loss: str = "sft"
    samples: tuple[int, ...] = (4, 4, 4)


def engine(run: Run, model: str, path: str) -> Any:
    """verl's engine of an actor, a critic or a reference."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead

    of_values = model == "critic"
    named = HFModelConfig(
        path=path,
        load_tokenizer=False,
        use_remove_padding=run.packed,
        model_type="value_model" if of_values else "language_model",
    )
    named.tokenizer = SimpleNamespace(pad_token_id=0)
    tokens = {"max_token_len_per_gpu": 48, "infer_max_token_len_per_gpu": 48}
    options = McoreEngineConfig(
        forward_only=model == "reference",
        vanilla_mbridge=True,
        use_dynamic_bsz=run.dynamic,
        use_remove_padding=run.packed,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
        router_replay=EngineRouterReplayConfig(mode=run.replay),
        override_transformer_config=ON_CPU | (RECOMPUTED if run.recomputed else {}),
        **tokens,
        **{f"{name}_parallel_size": size for name, size in run.layout.items()},
    )
    rates = {"lr": 1e-3, "lr_decay_steps": 10, "lr_warmup_steps": 0, "total_training_steps": 10}
    kind = MegatronEngineWithValueHead if of_values else MegatronEngineWithLMHead
    built = kind(named, options, McoreOptimizerConfig(**rates), CheckpointConfig())
    built.initialize()
    return built


def batch(run: Run, step: int, replica: int) -> Any:
    """Samples of the lengths above; the last three quarters of each are its response."""
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    generator = torch.Generator().manual_seed(100 * step + replica)
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(run.samples[step])]
    tokens = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    prompts = [length // 4 for length in lengths]
    pairs = list(zip(tokens, prompts, strict=True))
    advantages = [torch.randn(len(ids) - prompt, generator=generator) for ids, prompt in pairs]
    columns = {
        "input_ids": tokens,
        "position_ids": [torch.arange(length) for length in lengths],
        "loss_mask": [(torch.arange(len(ids)) >= prompt).float() for ids, prompt in pairs],
        "prompts": [ids[:prompt] for ids, prompt in pairs],
        "responses": [ids[prompt:] for ids, prompt in pairs],
        "response_mask": [torch.ones(len(ids) - prompt) for ids, prompt in pairs],
        "advantages": advantages,
        "old_log_probs": [-4 + 0.1 * row for row in advantages],
    }
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    return tensordict_utils.get_tensordict(
        {name: nested(rows) for name, rows in columns.items()}
        | {"temperature": torch.ones(len(lengths))},
        non_tensor_dict={
            "calculate_entropy": run.loss != "sft",
            "use_dynamic_bsz": run.dynamic,
            "micro_batch_size_per_gpu": 1,
            "max_token_len_per_gpu": 48,
            "pad_mode": DatasetPadMode.NO_PADDING,
            "global_batch_size": len(lengths),
        },
    )


def loss_of(run: Run, model: str) -> Any:
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss, sft_loss

    def of_values(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        return model_output["values"].values().float().pow(2).mean(), {}

    def with_entropy(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        loss, metrics = sft_loss(None, model_output, data, dp_group)
        return loss - 0.05 * model_output["entropy"].values().float().mean(), metrics

    if model == "critic":
        return of_values
    if run.loss == "ppo":
        settings = {"strategy": "megatron", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
        return partial(ppo_loss, ActorConfig(**settings, entropy_coeff=0.01))
    return with_entropy if run.loss == "entropy" else partial(sft_loss, None)


def routed(built: Any, data: Any) -> Any:
    """Experts that a rollout might have chosen: other ones than those of a forward."""
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(data, enable_routing_replay=True)
    with built.eval_mode():
        output = built.infer_batch(data, None)
    for chunk in built.module:
        chunk.train()
    own = output["model_output"]["routed_experts"]
    chosen = (own.values() + 1) % EXPERTS
    return torch.nested.nested_tensor_from_jagged(chosen, offsets=own.offsets())


def train(run: Run, path: str) -> tuple[Any, str]:
    """Losses of this rank, and the bits of all weights and optimizers of all ranks."""
    from verl.utils import tensordict_utils

    engines = {model: engine(run, model, path) for model in run.models}
    trained = {model: built for model, built in engines.items() if model != "reference"}
    losses = []
    for step in range(len(run.samples)):
        for model, built in engines.items():
            data = batch(run, step, built.get_data_parallel_rank())
            if model == "reference":
                with built.eval_mode():
                    output = built.infer_batch(data, None).get("model_output", {})
                losses += [rows.values().tolist() for rows in output.values()]
                continue
            with built.train_mode():
                if run.replay != "disabled":
                    chosen = routed(built, batch(run, step, built.get_data_parallel_rank()))
                    data["routed_experts"] = chosen
                    tensordict_utils.assign_non_tensor(data, enable_routing_replay=True)
                output = built.train_batch(data, loss_of(run, model))
                built.lr_scheduler_step()
                losses.append(output.get("loss"))
    hashes = [hash_over_ranks(built.module, built.optimizer) for built in trained.values()]
    return losses, hashlib.sha256("".join(hashes).encode()).hexdigest()


def both_ways(run: Run, path: str) -> dict[str, Any]:
    """Bits of both orders, and what overlap did."""
    results = []
    overlapping = Overlapping(plain_pipelines=True)
    for start in (lambda: None, overlapping.start):
        start()
        with without_groups_afterwards():
            results.append(train(run, path))
    overlapping.stop()
    (losses, bits), (_, overlapped) = results
    overlap = overlapping.overlap
    return {
        "name": run.name,
        "loss": losses[-1],
        "in order": bits,
        "overlapped": overlapped,
        "same losses": str(results[0][0]) == str(results[1][0]),
        "pairs": overlap and overlap.runs,
        "forwards handed over": overlap and overlap.hand_overs["forward"],
        "recomputations ahead": overlapping.recomputation.ahead.count,
        "weight gradients of a micro-batch": overlapping.weight_gradients.most,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with verl_on_cpu(), tempfile.TemporaryDirectory() as folder:
        for given in json.loads(sys.argv[1]):
            run = Run(**given)
            kind = ("qwen3_moe", "Qwen3Moe") if run.sparse else ("qwen2", "Qwen2")
            names = {"model_type": kind[0], "architectures": [f"{kind[1]}ForCausalLM"]}
            with open(os.path.join(folder, "config.json"), "w") as file:
                json.dump(names | HIDDEN | (SPARSE if run.sparse else {}), file)
            result = both_ways(run, folder)
            if dist.get_rank() == 0:
                print(f"RESULT {json.dumps(result)}", flush=True)
    dist.barrier()
    os._exit(0)  # verl's background threads would keep the process


if __name__ == "__main__":
    main()
