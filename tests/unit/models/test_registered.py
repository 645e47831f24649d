"""Layers that users register: what they are given, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.assemble.trained import Trained
from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.layout import Recompute
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.models.language_model import LanguageModel, named_placements
from megalith.models.plain import build_registered
from megalith.nn.documents import Documents
from megalith.nn.placement import Replicated
from megalith.nn.region import Solo
from megalith.registry import Entry, Registered
from megalith.serve.model_runner import ModelRunner
from megalith.serve.runner import Batch, Chunk

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    max_position_embeddings=24,
    position_embedding_type="rope",
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


class Heads(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, *, region: Any, dtype: Any, device: Any) -> None:
        super().__init__()
        self.calls = True
        self.qkv = nn.Linear(16, 48, bias=False, dtype=dtype, device=device)
        self.back = nn.Linear(16, 16, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor, attend: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).unbind(-3)
        if not self.calls:
            return self.back(v.flatten(2))
        return self.back(attend(attend.rotate(q), attend.rotate(k), v).flatten(2))


class Scale(nn.Module):
    def __init__(self, size: int, epsilon: float, *, dtype: Any, device: Any, shape: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def own(kind: str, thing: Any) -> Registered:
    return Registered(Entry(kind, f"my-{kind}", thing))


def model_with(config: ModelConfig = CONFIG, **parts: Any) -> GPT:
    model = GPT(replace(config, **parts), 40)
    initialise(model, seed=3)
    return model


def test_an_own_attention_generates_as_it_reads() -> None:
    model = model_with(attention=own("attention", Heads), normalization=own("norm", Scale)).eval()
    tokens = torch.randint(0, 40, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(tokens)[0]
        runner = ModelRunner(model, 4, 4)
        first = runner.run(Batch([Chunk(tokens[0, :7].tolist(), 0, range(3))]))
        rest = runner.run(Batch([Chunk(tokens[0, 7:].tolist(), 7, range(3))]))
    torch.testing.assert_close(first[-1], wanted[6])
    torch.testing.assert_close(rest[-1], wanted[11])


def test_documents_reach_an_own_attention() -> None:
    model = model_with(attention=own("attention", Heads))
    tokens = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    together = model(tokens, documents=Documents.of(ids, torch.device("cpu")), position_ids_BS=None)
    alone = model(tokens[:, :3])
    torch.testing.assert_close(together[:, :3], alone)
    for block in model.blocks():
        block.self_attention.layer.calls = False  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"Heads.*attend"):
        model(tokens, documents=Documents.of(ids, torch.device("cpu")))
    model(tokens)


def test_the_core_of_an_own_attention_is_computed_again() -> None:
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    config, parts = replace(CONFIG, attention=own("attention", Heads), attention_dropout=0.2), frozenset({"core_attn"})
    found = []
    for recompute in (None, Recompute(parts=parts)):
        model = GPT(config, 40, recompute=recompute)
        initialise(model, seed=3)
        torch.manual_seed(1)
        loss = model(tokens, labels_BS=tokens).mean()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    for block in model.blocks():
        block.self_attention.layer.calls = False  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"Heads.*--recompute-modules core_attn"):
        model(tokens, labels_BS=tokens)
    model.eval()(tokens)


def test_initial_weights_follow_from_seed_and_name() -> None:
    one, other = model_with(attention=own("attention", Heads)), model_with(attention=own("attention", Heads))
    for (name, left), right in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right), name
    layers = [block.self_attention.layer.qkv.weight for block in one.blocks()]  # type: ignore[union-attr]
    assert not torch.equal(layers[0], layers[1]) and 0.0 < float(layers[0].detach().abs().max()) <= 0.25 + 1e-6


def test_what_has_no_placement_is_replicated_or_refused() -> None:
    model = model_with(attention=own("attention", Heads))
    table = {name: placement for name, _, placement in named_placements(model)}
    assert table["decoder.layers.1.self_attention.layer.qkv.weight"] == Replicated()
    model.region = type("Two", (Solo,), {"size": 2})()
    with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size 2.*layers\.0\.self_attention\.layer\.qkv"):
        model.placements()


def test_a_scalar_parameter_is_refused_by_name() -> None:
    kind = own("norm", lambda size, epsilon, dtype, device: Scale(size, epsilon, dtype=dtype, device=device, shape=()))
    with pytest.raises(ConfigError, match=r"layers\.0\.input_layernorm\.scale"):
        model_with(normalization=kind)


def test_keys_of_another_size_are_refused() -> None:
    class Wide(Heads):
        def forward(self, x: Tensor, attend: Any) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3)
            return self.back(attend(q, k, v).flatten(2))

    with pytest.raises(ConfigError, match=r"\[S, B, 4, 4\]"):
        model_with(attention=own("attention", Wide))(torch.zeros(1, 4, dtype=torch.int64))


def test_an_own_feed_forward_layer_learns() -> None:
    class Plain(nn.Module):
        def __init__(self, config: ModelConfig, layer: int, *, region: Any, dtype: Any, device: Any) -> None:
            super().__init__()
            self.up = nn.Linear(16, 16, dtype=dtype, device=device)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.up(x))

    model = model_with(mlp=own("mlp", Plain))
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, labels_BS=tokens).mean().backward()
    gradients = [block.mlp.up.weight.grad for block in model.blocks()]  # type: ignore[union-attr]
    assert all(gradient is not None and float(gradient.abs().sum()) > 0 for gradient in gradients)


class Narrow(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, *, region: Any, dtype: Any, device: Any) -> None:
        super().__init__()
        self.up = nn.Linear(16, 1, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def test_an_output_that_would_be_broadcast_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--mlp.*\[8, 2, 1\].*\[8, 2, 16\]"):
        model_with(mlp=own("mlp", Narrow))(torch.zeros(2, 8, dtype=torch.long))

    class One(nn.Module):
        def __init__(self, config: ModelConfig, *, dtype: Any, device: Any) -> None:
            super().__init__()

        def forward(self, positions: Tensor) -> Tensor:
            return torch.ones(*positions.shape, 1)

    with pytest.raises(ConfigError, match=r"--position-embedding-type.*One.*\[2, 8, 1\].*\[2, 8, 16\]"):
        model_with(position_embedding_type=positions(One))(torch.zeros(2, 8, dtype=torch.long))


class Sinusoids(nn.Module):
    def __init__(self, config: ModelConfig, *, dtype: Any, device: Any) -> None:
        super().__init__()
        self.amplitude = nn.Parameter(torch.ones(config.hidden_size, dtype=dtype, device=device))

    def forward(self, positions: Tensor) -> Tensor:
        channels = torch.arange(len(self.amplitude), device=positions.device)
        return self.amplitude * torch.sin(positions[..., None] / 10.0 ** (channels / 8))


def positions(thing: Any, rotary: bool = False) -> Registered:
    return Registered(Entry("position", "my-positions", thing, options={"rotary": rotary}))


def test_an_own_position_embedding_is_added_and_generates_as_it_reads() -> None:
    model = model_with(position_embedding_type=positions(Sinusoids)).eval()
    tokens = torch.randint(0, 40, (1, 12), generator=torch.Generator().manual_seed(0))
    assert model.embedding is not None
    with torch.no_grad():
        model.embedding.position_embeddings.amplitude.mul_(3.0)  # type: ignore[operator, union-attr]
        wanted = model(tokens)[0]
        words = model.embedding.word_embeddings(tokens)
        added = model.embedding(tokens, torch.arange(12)[None]).transpose(0, 1) - words
        torch.testing.assert_close(added, model.embedding.position_embeddings(torch.arange(12)[None]))  # type: ignore
        runner = ModelRunner(model, 4, 4)
        first = runner.run(Batch([Chunk(tokens[0, :7].tolist(), 0, range(3))]))
        rest = runner.run(Batch([Chunk(tokens[0, 7:].tolist(), 7, range(3))]))
    torch.testing.assert_close(first[-1], wanted[6])
    torch.testing.assert_close(rest[-1], wanted[11])
    model.region = type("Two", (Solo,), {"size": 2})()
    with pytest.raises(ConfigError, match=r"embedding\.position_embeddings\.amplitude"):
        model.placements()


def test_own_rotary_frequencies_turn_heads() -> None:
    def as_rope(config: ModelConfig, size: int) -> Tensor:
        assert size == 2  # half of heads of 4
        return 1.0 / config.rotary_base ** (torch.arange(0, size, 2) / size)

    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    config = replace(CONFIG, rotary_percent=0.5)
    wanted = model_with(config)(tokens)
    assert torch.equal(model_with(config, position_embedding_type=positions(as_rope, rotary=True))(tokens), wanted)
    faster = positions(lambda config, size: 0.5 + as_rope(config, size), rotary=True)
    assert not torch.allclose(model_with(config, position_embedding_type=faster)(tokens), wanted)
    with pytest.raises(ConfigError, match=r"--position-embedding-type my-positions.*\[3\].*\[1\]"):
        model_with(config, position_embedding_type=positions(lambda config, size: torch.ones(3), rotary=True))(tokens)


def test_a_registered_model_that_cannot_continue_text_is_refused_by_name() -> None:
    class Bag(LanguageModel):
        def _build(self, peers: Any, recompute: Any) -> None:
            self.table = nn.Embedding(self.vocab_size, 16)

        def blocks(self) -> Any:
            return iter(())

        def forward_stage(self, inputs: Any, hidden: Any) -> Any:
            raise NotImplementedError

        losses = forward_stage

    config = replace(CONFIG, model=own("model", Bag))
    trained = Trained(build_registered(config, 40), None, 1, ())  # type: ignore[arg-type]
    for ask in (lambda: trained.gpt, lambda: trained.writer):
        with pytest.raises(ConfigError, match=r"--model my-model.*megalith\.api\.GPT"):
            ask()
