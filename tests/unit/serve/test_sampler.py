"""Choosing tokens: who may be chosen, how often, and that neighbours in a batch have no part in it."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalith.serve.request import Sampling
from megalith.serve.sampler import SamplingInput, choose_tokens, score_tokens

GREEDY = Sampling(temperature=0.0)
LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64))


def _row(
    sampling: Sampling, uniform: float = 0.5, output: tuple[int, ...] = (), prompt: tuple[int, ...] = (0,)
) -> SamplingInput:
    return SamplingInput(sampling, uniform, prompt, output)


def _chosen(logits: Tensor, *rows: SamplingInput) -> list[int]:
    return [choice.token for choice in choose_tokens(logits.expand(len(rows), -1), rows)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=2), Sampling(top_p=0.5)])
def test_a_diverged_model_is_named_for_those_whom_it_concerns(bad: float, sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, -math.inf, 9.0], [-math.inf] * 3])
    first, second, third = choose_tokens(logits, [_row(sampling)] * 3)
    assert "not finite" in first.problem
    assert (second.token, second.problem) == (2, "")
    assert third.problem


@pytest.mark.parametrize(
    ("sampling", "shares"),
    [
        (Sampling(), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(top_k=2), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.6), [0.625, 0.375, 0, 0]),
        (Sampling(temperature=0.5), [25 / 36.5, 9 / 36.5, 2.25 / 36.5, 0.25 / 36.5]),
        (Sampling(top_p=0.01), [1, 0, 0, 0]),
        (Sampling(top_k=3, top_p=0.6), [0.625, 0.375, 0, 0]),
        (Sampling(min_p=0.4), [0.625, 0.375, 0, 0]),
        (Sampling(min_p=0.59), [0.625, 0.375, 0, 0]),
        (Sampling(min_p=0.61), [1, 0, 0, 0]),
        (Sampling(min_p=1.0), [1, 0, 0, 0]),
        (Sampling(temperature=0.5, min_p=0.31), [25 / 34, 9 / 34, 0, 0]),
        (Sampling(top_k=3, min_p=0.2), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        (Sampling(top_k=2, min_p=0.1), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.9, min_p=0.4), [0.625, 0.375, 0, 0]),
        (Sampling(top_p=0.6, min_p=0.2), [0.625, 0.375, 0, 0]),
        (Sampling(banned=(0,), min_p=0.6), [0, 1, 0, 0]),
        (Sampling(banned=(0,)), [0, 0.6, 0.3, 0.1]),
        (Sampling(banned_after=((7, 0),)), [0, 0.6, 0.3, 0.1]),
        (Sampling(banned_after=((8, 0),)), [0.5, 0.3, 0.15, 0.05]),
        (Sampling(logit_bias={0: -100.0}), [0, 0.6, 0.3, 0.1]),
        (
            Sampling(presence_penalty=math.log(2)),
            [0.5 / 0.85, 0.15 / 0.85, 0.15 / 0.85, 0.05 / 0.85],
        ),  # half of token 1
    ],
)
def test_the_shares_of_equally_spaced_chances(sampling: Sampling, shares: list[float]) -> None:
    rows = [_row(sampling, (index + 0.5) / 2000, output=(1, 1, 7)) for index in range(2000)]
    counts = Counter(_chosen(LOGITS, *rows))
    assert [counts[token] / 2000 for token in range(4)] == pytest.approx(shares, abs=1e-3)


def test_penalties_are_those_of_their_definitions() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 1.1])
    assert _chosen(logits, _row(Sampling(0.0, repetition_penalty=2.0), prompt=(0,))) == [3]
    assert _chosen(logits, _row(Sampling(0.0, repetition_penalty=1.5), prompt=(0,))) == [0]
    assert _chosen(logits, _row(Sampling(0.0, presence_penalty=0.8), prompt=(0,))) == [0]
    assert _chosen(logits, _row(Sampling(0.0, presence_penalty=0.8), output=(0, 0))) == [0]
    assert _chosen(logits, _row(Sampling(0.0, frequency_penalty=0.8), output=(0, 0))) == [3]
    assert _chosen(logits, _row(Sampling(0.0, banned=(0, 1, 2, 3)))) == [0], "where all are banned none is"


def test_top_p_decays_down_to_its_bound() -> None:
    sampling = Sampling(top_p=0.9, top_p_decay=0.5, top_p_bound=0.3)
    assert [sampling.top_p_at(number) for number in range(4)] == pytest.approx([0.9, 0.45, 0.3, 0.3])
    late = _row(sampling, 0.99, output=(1, 1))
    assert _chosen(LOGITS, _row(sampling, 0.99), late) == [2, 0]


def test_hardly_any_top_p_or_heat_is_greedy() -> None:
    assert Sampling(top_p=0.9, top_p_decay=1e-200).top_p_at(9) > 0, "0 would allow every token"
    assert Sampling(temperature=1e-50).greedy and not Sampling(temperature=1e-5).greedy


def test_a_flat_distribution_is_cut_where_top_p_says() -> None:
    logits = torch.zeros(1000, dtype=torch.float64) - torch.arange(1000) * 1e-9
    rows = [_row(Sampling(top_p=0.5), (index + 0.5) / 400) for index in range(400)]
    tokens = _chosen(logits, *rows)
    assert max(tokens) in range(495, 501) and min(tokens) <= 2


def test_min_p_keeps_more_candidates_than_are_looked_at_first() -> None:
    logits = torch.zeros(1000, dtype=torch.float64)
    logits[600:] = math.log(0.05)
    rows = [_row(Sampling(min_p=0.1), (index + 0.5) / 600) for index in range(600)]
    assert sorted(_chosen(logits, *rows)) == list(range(600))


def test_the_last_share_is_never_a_token_without_probability() -> None:
    logits = torch.tensor([1.0, 2.0, 1.5, -math.inf])
    almost_one = math.nextafter(1.0, 0.0)
    kinds = [Sampling(), Sampling(top_k=4), Sampling(top_p=0.999999999), Sampling(banned=(2,))]
    assert all(token in (0, 1, 2) for token in _chosen(logits, *[_row(kind, almost_one) for kind in kinds]))


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 300]),
    top_p=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    banned=st.sampled_from([(), (3, 5)]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(SAMPLINGS, min_size=1, max_size=6), st.integers(0, 1000))
def test_a_row_is_chosen_as_it_is_alone(samplings: list[Sampling], seed: int) -> None:
    logits = torch.randn(len(samplings), 500, generator=torch.Generator().manual_seed(seed)).double()
    chance = Random(seed)
    rows = [
        SamplingInput(
            sampling, chance.random(), (1, 2), tuple(chance.choices(range(500), k=index)), logprobs=index or None
        )
        for index, sampling in enumerate(samplings)
    ]
    together = choose_tokens(logits, rows)
    for index, row in enumerate(rows):
        (alone,) = choose_tokens(logits[index : index + 1], [row])
        assert alone == together[index]


def test_log_probabilities_are_those_of_the_model() -> None:
    ((own, top),) = score_tokens(LOGITS[None] + 3.0, [2], 2)
    assert own == pytest.approx(math.log(0.15))
    assert [token for token, _ in top] == [0, 1]
    assert [value for _, value in top] == pytest.approx([math.log(0.5), math.log(0.3)])
    (choice,) = choose_tokens(
        LOGITS[None], [SamplingInput(Sampling(temperature=9.0, banned=(0,)), 0.0, (0,), (), logprobs=1)]
    )
    assert choice.logprob == pytest.approx(math.log(0.3)), "before temperature and bans"


@pytest.mark.parametrize(
    ("sampling", "flag"),
    [
        (Sampling(temperature=-1.0), "--temperature"),
        (Sampling(temperature=math.nan), "--temperature"),
        (Sampling(top_k=-1), "--top-k"),
        (Sampling(top_p=1.5), "--top-p"),
        (Sampling(min_p=1.5), "--min-p"),
        (Sampling(min_p=math.nan), "--min-p"),
        (Sampling(repetition_penalty=0.0), "--repetition-penalty"),
        (Sampling(top_p=0.5, top_p_bound=0.6), "--top-p-bound"),
    ],
)
def test_impossible_sampling_is_named(sampling: Sampling, flag: str) -> None:
    assert len(sampling.violations()) == 1
    assert sampling.violations()[0].startswith(flag)
