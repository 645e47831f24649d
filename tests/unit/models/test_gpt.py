"""GPT as a library object: names, counts, initial weights, cache, sink."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise, initialise_as_megatron_cpu
from megalith.models.language_model import named_placements
from megalith.nn.documents import Documents
from megalith.nn.placement import Fused, Replicated, Split
from megalith.optim import build_optimizer
from megalith.serve.model_runner import ModelRunner
from megalith.serve.runner import Batch, Chunk

from ...front_end import front_end, graphs
from ...styles import as_llama, with_latent_attention

GPT2 = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=4, max_position_embeddings=24)
LLAMA = as_llama(GPT2)
LATENT = with_latent_attention(GPT2)
STYLES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, qk_layernorm=True, use_rope_scaling=True),
    "sinks": dataclasses.replace(
        LLAMA, softmax_type="learnable", window_size="3,0", window_attn_skip_freq="2", softmax_scale=0.6
    ),
    "gates": dataclasses.replace(
        LLAMA, attention_output_gate=True, apply_layernorm_1p=True, qk_l2_norm=True, no_rope_freq="2"
    ),
}


def _model(config: ModelConfig, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> GPT:
    model = GPT(
        dataclasses.replace(config, hidden_dropout=dropout, attention_dropout=dropout, init_method_std=0.3),
        40,
        dtype=dtype,
    )
    initialise(model, seed=5)
    return model


def _tokens(length: int = 9) -> torch.Tensor:
    return torch.randint(0, 40, (3, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "length", "count"),
    [(12, 768, 12, 512, 124_082_688), (24, 1024, 16, 1024, 354_871_296)],
)
def test_parameter_counts_of_the_first_users(layers: int, hidden: int, heads: int, length: int, count: int) -> None:
    config = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, max_position_embeddings=length
    )
    assert sum(p.numel() for p in GPT(config, 50304, device="meta").parameters()) == count


@pytest.mark.parametrize("style", STYLES)
def test_every_parameter_has_a_placement(style: str) -> None:
    model = _model(STYLES[style])
    table = {name: placement for name, _, placement in named_placements(model)}
    assert set(table) == {name for name, _ in model.named_parameters()} == set(model.placements())
    assert table["decoder.layers.1.self_attention.linear_proj.weight"] == Split(1)
    assert table["decoder.layers.0.mlp.linear_fc1.weight"] == (Split(0) if style == "gpt2" else Fused(0, 2))
    assert table["decoder.final_layernorm.weight"] == Replicated()


@pytest.mark.parametrize("style", STYLES)
def test_loss_is_the_cross_entropy_of_the_logits(style: str) -> None:
    model, tokens = _model(STYLES[style]), _tokens()
    logits = model(tokens[:, :-1])
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:])
    torch.testing.assert_close(loss.flatten(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("steps", [(9,), (1,) * 9, (4, 1, 4)])
def test_reading_through_the_cache_gives_the_same_logits(style: str, steps: tuple[int, ...]) -> None:
    model, tokens = _model(STYLES[style]).eval(), _tokens()
    runner, start = ModelRunner(model, num_blocks=9, block_size=3), 0
    blocks = ([0, 1, 2], [8, 3, 5], [4, 6, 7])  # the second sequence is scattered
    with torch.no_grad():
        whole = model(tokens)
        for size in steps:
            stop = start + size
            pieces = [
                Chunk(row[start:stop], start, where, num_logits=size)
                for row, where in zip(tokens.tolist(), blocks, strict=True)
            ]
            logits = runner.run(Batch(pieces)).unflatten(0, (3, size))
            torch.testing.assert_close(logits, whole[:, start:stop], rtol=1e-11, atol=1e-12)
            start = stop


@pytest.mark.parametrize("style", STYLES)
def test_gradients_with_a_sink_are_those_of_autograd(style: str) -> None:
    plain, sunk, tokens = _model(STYLES[style]), _model(STYLES[style]), _tokens()
    plain(tokens, labels_BS=tokens.flip(1)).mean().backward()
    optimizer = build_optimizer(sunk, OptimizerConfig(), PrecisionConfig())
    for _ in range(2):  # the second pass adds
        sunk(tokens, labels_BS=tokens.flip(1)).mean().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(optimizer.gradients.grads[name], 2 * parameter.grad, rtol=1e-9, atol=1e-12)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    small, large = _model(GPT2), _model(dataclasses.replace(GPT2, num_layers=3))
    weights = dict(large.named_parameters())
    same = "decoder.layers.1.mlp.linear_fc1.weight"
    assert torch.equal(dict(small.named_parameters())[same], weights[same])
    assert not torch.equal(weights[same], weights["decoder.layers.2.mlp.linear_fc1.weight"])
    residual = weights["decoder.layers.0.mlp.linear_fc2.weight"].std().item()
    assert residual == pytest.approx(0.3 / 6**0.5, rel=0.15)
    assert weights["decoder.layers.0.input_layernorm.weight"].unique().tolist() == [1.0]


def test_megatron_draws_continue_the_stream_that_is_given() -> None:
    generator = torch.Generator().manual_seed(3)
    first, second = (GPT(GPT2, 40) for _ in range(2))
    initialise_as_megatron_cpu(first, generator)
    initialise_as_megatron_cpu(second, generator)
    assert not torch.equal(first.output_weight, second.output_weight)
    initialise_as_megatron_cpu(second, torch.Generator().manual_seed(3))
    assert torch.equal(first.output_weight, second.output_weight)


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU, and g++ is absent"
)
def test_compiled_blocks_give_the_same_steps() -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    exact = version >= (2, 13)  # older versions compile no attention in fp64 on a CPU
    losses = []
    for compiled in (False, True):
        model, tokens = _model(GPT2, torch.float64 if exact else torch.float32), _tokens()
        optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig())
        if compiled:
            model.compile_blocks()
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(tokens, labels_BS=tokens.flip(1)).mean()
            loss.backward()
            optimizer.step(0.01, 0.1)
            losses.append(loss.item())
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-9 if exact else 1e-5)
    assert losses[2] < losses[0]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a processor with AVX-512")
def test_processors_that_share_a_compile_cache_do_not_share_graphs(repository: Path, tmp_path: Path) -> None:
    test = f"{Path(__file__).relative_to(repository)}::test_compiled_blocks_give_the_same_steps"
    for capability in ("avx512", "avx2", "avx512"):
        places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
        done = subprocess.run(command, cwd=repository, env={**os.environ, **places}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("latent", [False, pytest.param(True, marks=pytest.mark.full)])
def test_documents_are_never_compiled_anew(latent: bool) -> None:
    """As many graphs whatever the documents are."""
    config = LATENT if latent else LLAMA
    plain, compiled = (_model(config, torch.float64) for _ in range(2))
    with front_end():
        compiled.compile_blocks(documents=True)
        tokens, found = _tokens(), []
        for ends in ((3,), (1, 2, 6), (4, 5)):
            ids = torch.tensor([sum(place >= end for end in ends) for place in range(tokens.shape[1])])
            documents = Documents.of(ids.expand_as(tokens).contiguous())
            losses = [
                model(tokens, labels_BS=tokens.flip(1), documents=documents).mean() for model in (plain, compiled)
            ]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(
                *losses, rtol=1e-12, atol=0
            )  # the front end splits operations: other sums with AVX2
            found.append(graphs())
    assert found[0] > 0 and len(set(found)) == 1
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_dropout_acts_in_training_only() -> None:
    model, tokens = _model(GPT2, dropout=0.5), _tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_the_three_lines_of_the_core_library() -> None:
    """TransformerConfig(2, 12, 4), GPTModel(100, 64) and torch Adam, as Megatron's simple loop has them."""
    config = ModelConfig(num_layers=2, hidden_size=12, num_attention_heads=4, max_position_embeddings=64)
    model = GPT(config, 100)
    initialise(model, seed=123)
    optimizer = torch.optim.Adam(model.parameters())
    tokens = torch.randint(0, 100, (8, 65), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
