"""Choosing tokens, generating with a cache, and text that ends at whole characters."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from megalith.config import ModelConfig
from megalith.errors import ConfigError, MegalithError
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.serve.generation import generate, printable_pieces
from megalith.serve.request import Sampling
from megalith.serve.sampler import choose

GREEDY = Sampling(temperature=0.0)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _model() -> GPT:
    config = ModelConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, max_position_embeddings=12, init_method_std=0.5
    )
    model = GPT(config, 32, dtype=torch.float64)
    initialise(model, 7)
    return model


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=2), Sampling(top_p=0.5)])
def test_a_diverged_model_is_named(bad: float, sampling: Sampling) -> None:
    with pytest.raises(MegalithError, match="logits are not finite .* earlier iteration"):
        choose(torch.tensor([0.0, bad, 1.0]), sampling, _generator())
    with pytest.raises(MegalithError, match="not finite"):
        choose(torch.full((3,), -math.inf), sampling, _generator())
    assert choose(torch.tensor([0.0, -math.inf]), sampling, _generator()) == 0


def test_greedy_generation_is_the_argmax_of_full_forward_passes() -> None:
    model, prompt = _model().eval(), [3, 1, 4]
    wanted = list(prompt)
    for _ in range(6):
        logits = model(torch.tensor([wanted]))[0, -1, :30]
        wanted.append(int(logits.argmax()))
    assert list(generate(model, prompt, 6, GREEDY, _generator(), vocab_size=30)) == wanted[3:]


def test_generation_ends_at_eod_and_at_the_end_of_the_context() -> None:
    model = _model()
    hot = Sampling(temperature=20.0)
    tokens = list(generate(model, [3, 1, 4], 100, hot, _generator(), vocab_size=32))
    assert len(tokens) == 12 - 3
    eod = tokens[4]
    first = tokens.index(eod)
    assert first > 0, "the seed must not choose it at once"
    assert list(generate(model, [3, 1, 4], 100, hot, _generator(), vocab_size=32, eod=eod)) == tokens[:first]


def test_the_padding_of_the_vocabulary_is_never_chosen() -> None:
    model = _model()
    with torch.no_grad():
        model.output_weight[5:] += 100.0 * model.output_weight[:5].mean(0)
    hot = Sampling(temperature=50.0)
    assert all(
        token < 5 for seed in range(20) for token in generate(model, [0], 10, hot, _generator(seed), vocab_size=5)
    )


@pytest.mark.parametrize("prompt", [[], [0] * 12])
def test_a_prompt_that_does_not_fit_is_refused(prompt: list[int]) -> None:
    with pytest.raises(ConfigError, match="--prompt"):
        generate(_model(), prompt, 5, GREEDY, _generator(), vocab_size=32)


def test_sampling_follows_the_probabilities_among_the_candidates() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64))

    def shares(sampling: Sampling) -> list[float]:
        generator = _generator()
        counts = Counter(choose(logits, sampling, generator) for _ in range(4000))
        return [counts[token] / 4000 for token in range(4)]

    assert shares(Sampling()) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(Sampling(top_k=2)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(Sampling(top_p=0.6)) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(Sampling(temperature=0.5)) == pytest.approx([25 / 36.5, 9 / 36.5, 2.25 / 36.5, 0.25 / 36.5], abs=0.03)
    assert shares(Sampling(top_p=0.01)) == [1, 0, 0, 0]


def test_the_same_seed_chooses_the_same_tokens() -> None:
    runs = [list(generate(_model(), [1], 9, Sampling(), _generator(seed), vocab_size=32)) for seed in (5, 5, 6)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("sampling", "flag"),
    [
        (Sampling(temperature=-1.0), "--temperature"),
        (Sampling(temperature=math.nan), "--temperature"),
        (Sampling(top_k=-1), "--top-k"),
        (Sampling(top_p=1.5), "--top-p"),
    ],
)
def test_impossible_sampling_is_named(sampling: Sampling, flag: str) -> None:
    assert len(sampling.violations()) == 1
    assert sampling.violations()[0].startswith(flag)


def test_characters_are_shown_when_they_are_whole() -> None:
    data = "a\u00e9\u20acz".encode()

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    assert list(printable_pieces(iter(data), decode)) == ["a", "\u00e9", "\u20ac", "z"]
    assert "".join(printable_pieces(iter(data[:-2]), decode)) == "a\u00e9\ufffd"
