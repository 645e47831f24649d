"""muP: each of its factors is where it should be, and hidden states do not grow with the width as a model learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalith.config import RunConfig, load
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.optim import Optimizer, build_optimizer

BASE = (
    "--num-layers 2 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 30 --hidden-dropout 0 "
    "--attention-dropout 0 --init-method-std 0.1 --clip-grad 0 --weight-decay 0"
)
MUP = "--use-mup --mup-base-hidden-size 32"


def _run(flags: str, width: int = 64) -> RunConfig:
    return load([*BASE.split(), "--hidden-size", str(width), *flags.split()], {}, files=False)


def _model(flags: str, width: int = 64) -> GPT:
    model = GPT(_run(flags, width).model, 40, dtype=torch.float64)
    initialise(model, seed=5)
    return model


def _tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, 40, (rows, 16), generator=torch.Generator().manual_seed(1))


def _optimizer(model: GPT, flags: str, width: int = 64) -> Optimizer:
    run = _run(flags, width)
    return build_optimizer(model, run.optimizer, run.precision)


def test_initial_weights_are_divided_by_the_root_of_the_width() -> None:
    plain, scaled = (dict(_model(flags).named_parameters()) for flags in ("", MUP))
    for name, weight in plain.items():
        divided = weight.dim() == 2 and not name.startswith("embedding.")
        torch.testing.assert_close(scaled[name] * (math.sqrt(2.0) if divided else 1.0), weight, msg=name)


def test_a_weight_of_the_output_is_divided_as_the_hidden_ones() -> None:
    plain, scaled = (_model(f"--untie-embeddings-and-output-weights {flags}").output_weight for flags in ("", MUP))
    torch.testing.assert_close(scaled * math.sqrt(2.0), plain)


def test_attention_divides_by_the_head_size() -> None:
    model = _model("").eval()
    for flags, scale in (
        ("--use-mup", 1 / 16),
        ("--use-mup --mup-base-head-dim 8", math.sqrt(8) / 16),
        ("--use-mup --mup-attn-scale-power 0.5", 1 / 4),
        ("--use-mup --softmax-scale 0.7", 0.7),
    ):
        other, plain = (_model(f) for f in (flags, f"--softmax-scale {scale}"))
        torch.testing.assert_close(other.eval()(_tokens()), plain.eval()(_tokens()))
        assert (scale == 1 / 4) == bool(torch.allclose(other(_tokens()), model(_tokens())))


@pytest.mark.parametrize(("flags", "factor"), [(MUP, 0.5), (f"{MUP} --mup-output-mult 3", 3.0), ("--use-mup", 1.0)])
def test_logits_have_their_factor(flags: str, factor: float) -> None:
    """Of `forward`, of the loss, and of whoever takes hidden states and the output weight."""
    model, tokens = _model(flags).eval(), _tokens()
    states = model.decoder(model.embedding(tokens, torch.arange(16).expand_as(tokens)), None)  # type: ignore[misc]
    logits = factor * (states @ model.output_weight.t()).transpose(0, 1)
    torch.testing.assert_close(model(tokens), logits)
    labels = tokens.roll(-1, 1)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(model(tokens, labels_BS=labels).flatten(), expected)
    torch.testing.assert_close((model(tokens, apply_head=False) @ model.output_weight.t()).transpose(0, 1), logits)


def test_embeddings_have_their_factor() -> None:
    plain, scaled = (_model(f"--use-mup {flags}").embedding for flags in ("", "--mup-embedding-mult 3"))
    assert plain is not None and scaled is not None
    positions = torch.arange(16).expand(2, 16)
    torch.testing.assert_close(scaled(_tokens(), positions), 3.0 * plain(_tokens(), positions))


# Optimizer -> what the rates of a matrix, the output layer, an embedding and a norm are multiplied by at m = 2.
RATES = {
    "--optimizer adam": (0.5, 0.5, 1.0, 1.0),
    "--optimizer lion": (0.5, 0.5, 1.0, 1.0),
    "--optimizer sgd": (1.0, 1.0, 2.0, 2.0),
    "--optimizer muon": (1.0, 0.5, 1.0, 1.0),
    "--optimizer adam --decoupled-lr 0.1": (0.5, 1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("flags", RATES)
def test_rates_by_kind_of_parameter(flags: str) -> None:
    flags = f"{flags} --untie-embeddings-and-output-weights"
    model = _model(f"{MUP} {flags}")
    optimizer = _optimizer(model, f"{MUP} {flags}")
    rates = {name: group.lr_mult for group in optimizer.groups for name in group.names}
    names = (
        "decoder.layers.0.mlp.linear_fc1.weight",
        "output_layer.weight",
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
    )
    assert tuple(rates[name] for name in names) == RATES[flags.removesuffix(" --untie-embeddings-and-output-weights")]
    assert [group["lr_mult"] for group in optimizer.scalars()["param_groups"]] == [g.lr_mult for g in optimizer.groups]
    plain = _optimizer(_model(flags), flags)
    assert {group.lr_mult for group in plain.groups} == {1.0}


def test_a_step_moves_matrices_by_a_rate_over_the_width_and_has_epsilon_so() -> None:
    """The same weights and gradients with and without muP: the first update of AdamW is lr g / (|g| + eps)."""
    flags, lr, eps = "--adam-eps 0.5", 0.1, 0.5
    model = _model(f"{MUP} {flags}")
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = _optimizer(model, f"{MUP} {flags}")
    optimizer.zero_grad()
    model(_tokens(), labels_BS=_tokens().roll(-1, 1)).sum().backward()
    optimizer.gradients.finish()
    grads = {name: piece.clone() for name, piece in optimizer.gradients.grad_shards.items()}
    optimizer.step(lr, 0.0)
    for name, weight in model.named_parameters():
        m = 2.0 if weight.dim() == 2 and not name.startswith("embedding.") else 1.0
        update = lr / m * grads[name] / (grads[name].abs() + eps / m)
        torch.testing.assert_close(before[name] - weight, update, msg=name)


def _sizes_after_steps(flags: str, width: int) -> list[float]:
    """The root mean square of the hidden states behind the layers, and of the logits, after four steps of AdamW."""
    model = _model(flags, width)
    optimizer = _optimizer(model, flags, width)
    tokens = _tokens(8)
    for _ in range(4):
        optimizer.zero_grad()
        model(tokens, labels_BS=tokens.roll(-1, 1)).mean().backward()
        optimizer.step(0.02, 0.0)
    model.eval()
    states: list[Tensor] = []
    for block in model.blocks():
        block.register_forward_hook(lambda _, __, output: states.append(output.detach()))
    with torch.no_grad():
        logits = model(tokens)
    return [float(x.square().mean().sqrt()) for x in (*states, logits)]


def test_coordinates_do_not_grow_with_the_width() -> None:
    """The coordinate check of the paper's appendix D.1: eight times the width, the same sizes, where else they grow."""
    heads = "--num-attention-heads 4 --untie-embeddings-and-output-weights"
    plain = [_sizes_after_steps(heads, width) for width in (32, 256)]
    scaled = [_sizes_after_steps(f"{heads} {MUP}", width) for width in (32, 256)]
    growth, kept = ([wide / narrow for narrow, wide in zip(*sizes, strict=True)] for sizes in (plain, scaled))
    assert min(growth) > 2.0
    assert max(kept) < 1.25
