"""The report at the start, on real Megatron models: latent attention, experts, buckets."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from commfuse_npu.refusals import IncompatibleOptionsError
from mindspeed_patches import PatchManager
from mindspeed_patches.start_report import StartReport
from mindspeed_patches.training_options import register_wrappers
from mindspeed_patches.wrappers import LinearWrappers
from tests.distributed.ranks import on_ranks
from tests.megatron.in_ranks import WITHOUT_KERNELS, gpt, language_loss, megatron
from tests.patches.launches import real_arguments

LENGTH, BATCH, VOCABULARY = 16, 2, 64
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 16,
    "rope_type": "rope",
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}
RULES = "expert layers are left to the token dispatcher"


class Core(torch.nn.Module):
    """Causal attention with two head sizes, which Megatron's local one does not support."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any):
        rows = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*rows, is_causal=True, scale=self.scale).permute(2, 0, 1, 3).flatten(2)


def build(**config: Any) -> torch.nn.Module:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    latent = "multi_latent_attention" in config
    settings = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        **WITHOUT_KERNELS,
    }
    torch.manual_seed(1)
    return gpt(
        (MLATransformerConfig if latent else TransformerConfig)(**settings | config),
        core=Core if latent else None,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="none" if latent else "rope",
    )


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The loss and all gradients of one step."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    loss = language_loss(model, tokens, tokens.roll(-1, 1)).mean()
    loss.backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **named}


@contextlib.contextmanager
def wrapped(*options: str, **arguments: Any) -> Iterator[tuple[LinearWrappers, StartReport]]:
    """Applies the wrappers that the options request, with open lanes."""
    args = real_arguments(*options, transformer_impl="local", **arguments)
    manager = PatchManager()
    linears, lanes, report = register_wrappers(manager, args)
    for owner in lanes:
        owner.open(1)
    manager.apply_patches()
    try:
        yield linears, report
    finally:
        manager.remove_patches()
        for owner in lanes:
            owner.close()


def told(report: StartReport, model: Any) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        report.tell([model])
    return out.getvalue().splitlines()


def fused(*names: str, layers: int = 2) -> list[str]:
    return [f"CommFuse: {name}: {layers} of {layers} fused" for name in names]


OUTPUT = fused("output", layers=1)
DENSE = fused("qkv", "proj", "fc1", "fc2") + OUTPUT


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ({}, DENSE),
        (
            LATENT,
            fused("q_down", "q_up", "kv_down", "kv_up", "proj", "fc1", "fc2") + OUTPUT,
        ),
        (
            EXPERTS,
            [
                *fused("qkv", "proj", "shared_fc1", "shared_fc2"),
                *OUTPUT,
                f"CommFuse: experts: 0 of 2 fused; 2 not: {RULES}",
            ],
        ),
    ],
    ids=["dense", "latent", "shared_experts"],
)
@on_ranks(2)
def test_lines_are_what_is_fused_and_its_bits_megatrons(
    rank: int, config: dict[str, Any], lines: list[str]
) -> None:
    """Rank 0 prints the lines, gradients have Megatron's bits, and no layer is left unreported."""
    with megatron(2):
        reference = gradients(build(**config))
        with wrapped() as (linears, report):
            model = build(**config)
            assert told(report, model) == (lines if rank == 0 else [])
            with mock.patch("mindspeed_patches.wrappers._logger") as logger:
                ours = gradients(model)
            assert not logger.warning.called
        # All but the experts, which are reported as not fused.
        names = {line.split(": ")[1] for line in lines if "0 of" not in line}
        assert {name for name, path in linears.calls if path == "fused"} == names
        assert ours.keys() == reference.keys()
        for name, value in reference.items():
            assert torch.equal(ours[name], value), name


class Alien(torch.nn.Module):
    """A tensor-parallel layer that is not Megatron's but has an attribute of its layers."""

    output_size_per_partition = 4


SIZES = {"seq_length": LENGTH, "micro_batch_size": BATCH}
NO_TRANSFER = (
    "without sequence parallelism the forward has no transfer (Megatron hides that of the backward "
    "behind wgrad; --sequence-parallel has both)"
)
OF_DATA = (
    "its mask is that of the data (--attention-mask-type general, or samples padded on the left); "
    "only causal and full attention and packed documents are fused"
)
REASONS: list[tuple[str, dict[str, Any], list[str]]] = [
    # options, configuration, layers and why they are not fused
    (
        "",
        {"sequence_parallel": False},
        [
            f"qkv: {NO_TRANSFER}",
            f"fc1: {NO_TRANSFER}",
            f"output: {NO_TRANSFER}",
        ],
    ),
    (
        "--commfuse-layers qkv,fc1,fc2,output",
        {},
        ["proj: proj is not in the list of layers to fuse (add proj to --commfuse-layers)"],
    ),
    ("", {"alien": True}, ["linear_fc1: Alien is not Megatron's linear layer"]),
    ("--commfuse-attention", {}, []),
    (
        "--commfuse-attention",
        {"recompute_granularity": "selective"},
        ["attention: selective recomputation runs core attention separately"],
    ),
    ("--commfuse-attention", {"general": True}, [f"attention: {OF_DATA}"]),
]


@on_ranks(2)
def test_each_reason_comes_with_the_way_out(rank: int) -> None:
    with megatron(2), mock.patch.object(torch.cuda, "Stream"):
        for options, config, expected in REASONS:
            of_config = {k: v for k, v in config.items() if k not in ("alien", "general")}
            with wrapped(*options.split(), **SIZES) as (_, report):
                model: Any = build(**of_config)
                if "alien" in config:
                    model.decoder.layers[1].mlp.linear_fc1 = Alien()
                for layer in model.decoder.layers if "general" in config else ():
                    layer.self_attention.config.attention_mask_type = "general"
                lines = [line for line in told(report, model) if " not: " in line]
            reasons = [re.sub(r": 0 of \d fused; \d not:", ":", line) for line in lines]
            assert reasons == [f"CommFuse: {reason}" for reason in expected if rank == 0], options
        with wrapped("--commfuse-attention", **SIZES) as (_, report):
            last = told(report, build(sequence_parallel=False))[-1:]
            assert all(line.endswith("parallelism nothing is split") for line in last)


@on_ranks(2)
def test_where_nothing_is_fused_all_ranks_end(rank: int) -> None:
    with megatron(2), wrapped(**SIZES) as (linears, report):
        model, linears.min_rows = build(), 17
        with pytest.raises(IncompatibleOptionsError) as caught:
            told(report, model)
        assert told(report, model) == []  # once
    first, *lines, last = str(caught.value).splitlines()
    reason = "0 of 2 fused; 2 not: a block has fewer than 17 rows"
    assert (first, last[:16]) == ("--use-commfuse would fuse nothing:", "change that, or ")
    for line, name in zip(lines, ("qkv", "proj", "fc1", "fc2"), strict=False):
        assert line.startswith(f"  {name}: {reason}, for which Megatron's own order is faster")


@on_ranks(2)
def test_stages_are_counted_together(rank: int) -> None:
    """The second of two stages fuses no layer: it must not exit alone."""
    linears: Any = SimpleNamespace(reported=set())
    report = StartReport(linears)
    layers = [[("qkv", ""), ("fc1", "why")], [("fc1", "why")]][rank]
    lines = ["CommFuse: qkv: 1 of 1 fused", "CommFuse: fc1: 0 of 2 fused; 2 not: why"]
    with (
        megatron(1, pipeline_model_parallel_size=2),
        mock.patch.object(report, "_count", return_value=layers),
    ):
        assert told(report, torch.nn.Module()) == ([] if rank else lines)
    assert ("fc1", "why") in linears.reported


@on_ranks(2)
def test_buckets_of_experts_are_told_apart(rank: int) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    with megatron(1), wrapped("--commfuse-dp", tensor_model_parallel_size=1) as (_, report):
        model = build(tensor_model_parallel_size=1, sequence_parallel=False, **EXPERTS)
        for name, parameter in model.named_parameters():
            parameter.allreduce = ".experts." not in name
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        lines = told(report, DistributedDataParallel(model.config, config, model))
    other = "these parameters are sharded over another group than the dense ones"
    assert lines == [
        f"CommFuse: {name}: 1 of 2 fused; 1 not: {other}"
        for name in ("gradients", "parameters")
        if rank == 0
    ]


def test_layers_that_exchange_heads_are_told_apart() -> None:
    from megatron.core.transformer.attention import SelfAttention

    class Layer(SelfAttention):
        def __init__(self, core: torch.nn.Module, **config: Any) -> None:
            torch.nn.Module.__init__(self)
            self.core_attention = core
            self.config = SimpleNamespace(attention_dropout=0.0, **config)
            self.attn_mask_type = SimpleNamespace(name="causal")

    # MindSpeed-LLM nests one core attention in another.
    exchange: Any = torch.nn.Module()
    exchange.local_attn = torch.nn.Module()
    exchange.local_attn.core_attention = torch.nn.Identity()
    general = {"attention_mask_type": "general"}
    layers = (
        *(Layer(exchange), Layer(exchange, **general)),
        *(Layer(exchange, **general, reset_attention_mask=True), Layer(torch.nn.Identity())),
    )
    report: Any = StartReport(SimpleNamespace(transport=None), ulysses=True)  # type: ignore[arg-type]
    reasons = ["", OF_DATA, "", "Identity exchanges no heads"]
    assert list(report._count(torch.nn.ModuleList(layers))) == [("ulysses", r) for r in reasons]


def test_only_models_to_train_are_looked_at() -> None:
    report: Any = StartReport(SimpleNamespace())  # type: ignore[arg-type]
    report.tell = mock.Mock()
    get_model = report.get_model_wrapper(lambda *_, **__: ["chunk"])
    for arguments, calls in ((("type",), 1), (("type", False), 1)):
        assert get_model("provider", *arguments) == ["chunk"]
        assert report.tell.call_count == calls
    get_model("provider", wrap_with_ddp=False)
    get_model("provider", wrap_with_ddp=True)
    assert report.tell.call_args_list == [mock.call(["chunk"])] * 2
