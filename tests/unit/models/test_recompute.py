"""A GPT that recomputes its layers: the same numbers to the last bit, with dropout, in less memory."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.layout import Recompute
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.models.layer_options import rotations
from megalith.models.transformer import Block
from megalith.optim import build_optimizer
from megalith.serve.model_runner import ModelRunner
from megalith.serve.runner import Batch, Chunk

from ...styles import as_llama

GPT2 = ModelConfig(
    num_layers=5,
    hidden_size=16,
    num_attention_heads=4,
    max_position_embeddings=24,
    hidden_dropout=0.2,
    attention_dropout=0.2,
    init_method_std=0.3,
)
LLAMA = as_llama(GPT2)
UNFUSED = dataclasses.replace(GPT2, attention_backend="unfused")
MIXTURE = dataclasses.replace(
    LLAMA, num_experts=4, moe_ffn_hidden_size=12, moe_layer_freq="2", moe_aux_loss_coeff=(0.05,), hidden_dropout=0.2
)
SHARED = dataclasses.replace(MIXTURE, add_bias_linear=True, moe_shared_expert_intermediate_size=8, moe_layer_freq="1")
LATENT = dataclasses.replace(
    LLAMA,
    group_query_attention=False,
    multi_latent_attention=True,
    q_lora_rank=6,
    kv_lora_rank=8,
    qk_head_dim=4,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
    rope_type="rope",
)
DIRECT = dataclasses.replace(LATENT, q_lora_rank=None, qk_layernorm=True, attention_backend="unfused")
STYLES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "unfused": UNFUSED,
    "mixture": MIXTURE,
    "shared": SHARED,
    "latent": LATENT,
    "direct": DIRECT,
}
PRECISIONS = {
    "fp32": PrecisionConfig(),
    "bf16": PrecisionConfig(bf16=True),
    "fp16": PrecisionConfig(fp16=True, initial_loss_scale=1024.0),
}
METHODS = [Recompute("uniform", 1), Recompute("uniform", 2), Recompute("block", 3)]
PARTS = [["core_attn"], ["mlp"], ["moe"], ["layernorm"], ["mlp", "layernorm"], ["moe", "layernorm"]]
PARTS += [["moe_act"], ["shared_experts"], ["moe_act", "shared_experts", "layernorm"], ["moe", "moe_act"]]
PARTS += [["mla_up_proj"], ["mla_up_proj", "core_attn"], ["mla_up_proj", "layernorm", "mlp"]]
METHODS += [Recompute(parts=frozenset(parts)) for parts in PARTS]


def _of(config: ModelConfig) -> list[Recompute]:
    """The methods whose parts the layers of a model have, in some layer at least."""
    absent = set()
    if config.num_experts is None:
        absent |= {"moe", "moe_act", "shared_experts"}
    if config.moe_shared_expert_intermediate_size is None:
        absent |= {"shared_experts"}
    if not config.multi_latent_attention:
        absent |= {"mla_up_proj"}
    return [method for method in METHODS if not method.parts & absent]


def _model(config: ModelConfig, recompute: Recompute | None, dtype: torch.dtype = torch.float32) -> GPT:
    model = GPT(config, 40, recompute=recompute, dtype=dtype)
    initialise(model, seed=5)
    return model


def _tokens() -> Tensor:
    return torch.randint(0, 40, (3, 25), generator=torch.Generator().manual_seed(1))


def _steps(config: ModelConfig, precision: PrecisionConfig, recompute: Recompute | None) -> list[Tensor]:
    """Losses and all gradients of two steps of two micro-batches, and what the stream gives afterwards."""
    model = _model(config, recompute, getattr(torch, precision.params_dtype))
    optimizer, tokens = build_optimizer(model, OptimizerConfig(), precision), _tokens()
    torch.manual_seed(7)
    seen = []
    for _ in range(2):
        optimizer.zero_grad(2)
        losses = [model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean() for _ in range(2)]
        for loss in losses:  # the second has drawn before the layers of the first are recomputed
            (loss * optimizer.loss_scale).backward()
        optimizer.gradients.finish()
        seen += [loss.detach() for loss in losses]
        seen += [gradient.clone() for gradient in optimizer.gradients.grads.values()]
        assert optimizer.step(1e-2, 0.1).applied
    return [*seen, torch.rand(3)]


IN_HALF_PRECISION = ("gpt2", "mixture")


@pytest.mark.parametrize(
    ("style", "precision"),
    [
        pytest.param(
            style, precision, marks=() if precision == "fp32" or style in IN_HALF_PRECISION else pytest.mark.full
        )
        for style, precision in itertools.product(STYLES, PRECISIONS)
    ],
)
def test_losses_and_gradients_are_the_same_bits(style: str, precision: str) -> None:
    config = STYLES[style]
    wanted = _steps(config, PRECISIONS[precision], None)
    assert not torch.equal(wanted[0], wanted[1]), "the micro-batches must drop differently"
    methods = _of(config)
    assert len(methods) >= 7
    for recompute in methods:
        found = _steps(config, PRECISIONS[precision], recompute)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), recompute


def test_without_a_sink_too() -> None:
    gradients = []
    for recompute in (None, *METHODS):
        model, tokens = _model(LLAMA, recompute), _tokens()
        torch.manual_seed(7)
        model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for found in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert gradient is not None and found[name] is not None and torch.equal(gradient, found[name]), name


def _kept_by_the_decoder(recompute: Recompute | None, config: ModelConfig = GPT2) -> int:
    """Bytes of activations between the passes of the layers; weights are not counted."""
    model = _model(config, recompute)
    model.decoder.final_layernorm = None  # before its weights are noted: what is kept may get the address they had
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    memory: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            memory[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rope = None if config.rotary_size == 0 else rotations(config, torch.float32)(torch.arange(24), 24)
        y = model.decoder(torch.randn(24, 3, 16, requires_grad=True), rope)
    assert y.requires_grad
    return sum(memory.values())


def test_what_is_kept_between_the_passes() -> None:
    """A group keeps its input [24, 3, 16] in fp32; a layer that is not recomputed keeps many times that."""
    hidden, plain = 24 * 3 * 16 * 4, _kept_by_the_decoder(None)
    layer = plain / 5
    assert layer > 8 * hidden
    assert _kept_by_the_decoder(Recompute("uniform", 1)) == 5 * hidden
    assert _kept_by_the_decoder(Recompute("uniform", 2)) == 3 * hidden
    assert _kept_by_the_decoder(Recompute("uniform", 5)) == hidden
    assert _kept_by_the_decoder(Recompute("block", 5)) == 5 * hidden
    for first in (1, 3):
        kept = _kept_by_the_decoder(Recompute("block", first))
        assert kept == pytest.approx(first * hidden + (5 - first) * layer, abs=2 * hidden)


def test_parts_of_a_mixture_keep_less() -> None:
    """Experts alone, in the layers that have them; all feed-forward layers; and nothing of either in a dense model."""
    kept = {part: _kept_by_the_decoder(Recompute(parts=frozenset({part})), MIXTURE) for part in ("moe", "mlp")}
    assert _kept_by_the_decoder(None, MIXTURE) > kept["moe"] > kept["mlp"]
    assert _kept_by_the_decoder(Recompute(parts=frozenset({"moe"})), LLAMA) == _kept_by_the_decoder(None, LLAMA)


def test_further_parts_keep_less() -> None:
    """Of each of 5 layers and 72 tokens the numbers that the table of nn.recompute names, and no others."""
    numbers = {
        "moe_act": (SHARED, 2 * 3 * 12),  # of 2 choices: silu of the gate, its product with the rest, that weighed
        "shared_experts": (SHARED, 4 * 8),  # the gate and the rest, silu of the gate, its product with the rest
        "mla_up_proj": (LATENT, 3 * 4 * 8),  # 4 heads of 8 channels of queries, keys and values
    }
    for part, (config, saved) in numbers.items():
        again = Recompute(parts=frozenset({part}))
        less = _kept_by_the_decoder(None, config) - _kept_by_the_decoder(again, config)
        assert less == pytest.approx(5 * 72 * 4 * saved, rel=0.05 if part == "mla_up_proj" else 0), part
        assert _kept_by_the_decoder(again) == _kept_by_the_decoder(None), f"{part} in a model without such a part"


def _calls(model: GPT) -> list[int]:
    """The places of the layers that are computed from now on, in order."""
    calls: list[int] = []
    for place, block in enumerate(model.decoder.layers.values()):
        assert isinstance(block, Block)
        block.register_forward_pre_hook(lambda block, args, place=place: calls.append(place))
    return calls


@pytest.mark.parametrize(
    ("recompute", "backward"),
    [
        (None, []),
        (Recompute("uniform", 1), [4, 3, 2, 1, 0]),
        (Recompute("uniform", 2), [4, 2, 3, 0, 1]),
        (Recompute("block", 3), [2, 1, 0]),
    ],
    ids=str,
)
def test_what_is_computed_again(recompute: Recompute | None, backward: list[int]) -> None:
    model, tokens = _model(GPT2, recompute), _tokens()
    calls = _calls(model)
    loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
    assert calls == [0, 1, 2, 3, 4]
    loss.backward()
    assert calls == [0, 1, 2, 3, 4, *backward]


def test_evaluation_and_generation_compute_once_and_keep_a_cache() -> None:
    model, tokens = _model(GPT2, Recompute("uniform", 1)).eval(), _tokens()
    calls = _calls(model)
    model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean().backward()
    runner = ModelRunner(model, 8, 4)
    runner._layers = None  # as where ranks share layers, so that the layers themselves are called
    runner.run(Batch([Chunk(tokens[0, :-1].tolist(), 0, range(8))]))
    assert calls == [0, 1, 2, 3, 4] * 2
