"""Dispatchers: what experts get and what comes home is that of one process, whatever the loads; rows are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.distributed import comm
from megalith.distributed.context import Axis, ParallelContext
from megalith.layout import Layout
from megalith.nn.moe.dispatch import LOCAL_DISPATCHER, Dispatcher
from megalith.parallel.experts import DISPATCHERS

from .test_parity import Case, _run

TOKENS, CHOICES, SIZE, EXPERTS, RANKS = 5, 2, 3, 8, 4

CHOSEN = {
    "uneven": lambda rank: [[rank, 7], [0, 1], [7, 6], [3, 2], [5, rank]],
    "all to one": lambda rank: [[6, 7]] * TOKENS,
    "own": lambda rank: [[2 * rank, 2 * rank + 1]] * TOKENS,
    "dropped": lambda rank: [[8, 8]] * TOKENS if rank == 1 else [[8, 3], [4, 8], [1, 2], [2, 1], [8, 8]],
}


def _tensors(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(TOKENS, SIZE, dtype=torch.float64, generator=generator).requires_grad_()
    return x_TD, torch.rand(TOKENS, CHOICES, dtype=torch.float64, generator=generator).requires_grad_()


def _computed(dispatcher: Dispatcher, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, list[int]]:
    """Expert e multiplies by e + 1 and by the weight."""
    dispatched = dispatcher.dispatch(x_TD, experts_TK, weights_TK, EXPERTS)
    numbers = torch.arange(1.0, EXPERTS + 1, dtype=torch.float64)[dispatcher.local_experts(EXPERTS)]
    factors = numbers.repeat_interleave(torch.tensor(dispatched.counts)) * dispatched.weights_N
    return dispatched.combine(dispatched.rows_ND * factors.unsqueeze(1)), dispatched.counts


class _Rows:
    """Counts what a rank receives from others."""

    def __init__(self) -> None:
        self.received = 0

    def all_to_all_rows(self, x: Tensor, axis: Axis, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        if x.shape[1:] == (SIZE,):
            self.received += sum(receive_counts) - receive_counts[axis.index]
        return _ALL_TO_ALL_ROWS(x, axis, send_counts, receive_counts)


_ALL_TO_ALL_ROWS = comm.all_to_all_rows


def _dispatch(kind: str, chosen: str, context: ParallelContext) -> tuple[list[Tensor], list[int], int]:
    """The result with the gradients of its arguments, rows of each expert, rows received."""
    rows = _Rows()
    comm.all_to_all_rows = rows.all_to_all_rows
    try:
        x_TD, weights_TK = _tensors(context.rank)
        experts_TK = torch.tensor(CHOSEN[chosen](context.rank))
        y_TD, counts = _computed(DISPATCHERS[kind](context.ep), x_TD, experts_TK, weights_TK)
        y_TD.sin().sum().backward()
    finally:
        comm.all_to_all_rows = _ALL_TO_ALL_ROWS
    assert x_TD.grad is not None and weights_TK.grad is not None
    return [y_TD.detach(), x_TD.grad, weights_TK.grad], counts, rows.received


def _dispatch_all() -> dict[tuple[str, str], tuple[list[Tensor], list[int], int]]:
    context = ParallelContext.create(Layout(dp=RANKS, ep=RANKS), torch.device("cpu"))
    return {(kind, chosen): _dispatch(kind, chosen, context) for kind in DISPATCHERS for chosen in CHOSEN}


@pytest.fixture(scope="module")
def dispatched(ranks: Any) -> list[dict[tuple[str, str], tuple[list[Tensor], list[int], int]]]:
    """By rank what each dispatcher does with each kind of choices."""
    found: list[dict[tuple[str, str], tuple[list[Tensor], list[int], int]]] = ranks.run(RANKS, _dispatch_all)
    return found


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("kind", DISPATCHERS)
def test_tokens_meet_their_experts_and_come_home(kind: str, chosen: str, dispatched: Any) -> None:
    results = [found[kind, chosen] for found in dispatched]
    loads = torch.zeros(EXPERTS + 1, dtype=torch.int64)
    for rank, (found, _, _) in enumerate(results):
        x_TD, weights_TK = _tensors(rank)
        experts_TK = torch.tensor(CHOSEN[chosen](rank))
        loads += torch.bincount(experts_TK.flatten(), minlength=EXPERTS + 1)
        y_TD, _ = _computed(LOCAL_DISPATCHER, x_TD, experts_TK, weights_TK)
        y_TD.sin().sum().backward()
        for mine, wanted in zip(found, (y_TD.detach(), x_TD.grad, weights_TK.grad), strict=True):
            assert torch.allclose(mine, wanted, rtol=1e-13, atol=1e-13)
    assert [count for _, counts, _ in results for count in counts] == loads[:EXPERTS].tolist()


@pytest.mark.parametrize("chosen", CHOSEN)
def test_a_token_travels_once_to_each_rank_that_has_experts_of_it(chosen: str, dispatched: Any) -> None:
    least = 0
    for rank in range(RANKS):
        for choices in CHOSEN[chosen](rank):
            least += len({expert // (EXPERTS // RANKS) for expert in choices if expert < EXPERTS} - {rank})
    received = sum(found["alltoall", chosen][2] for found in dispatched)
    assert received == 4 * least  # there and back, and their gradients


def _each(cases: list[Case]) -> list[str]:
    """The bits of losses, norms and gradients of each run."""
    found = []
    for case in cases:
        result = _run(case)
        gradients = [rows for _, pieces in sorted(result["gradients"].items()) for *_, rows in pieces]
        found.append(repr(result["steps"]) + str([rows.view(torch.int64).sum().item() for rows in gradients]))
    return found


def test_a_repetition_gives_the_same_bits_and_other_names_are_all_to_all(ranks: Any) -> None:
    names = ("alltoall", "flex", "alltoall_seq")
    cases = [Case(Layout(dp=2, ep=2), "mixture", dispatcher=name, zero1=True) for name in names]
    for first, second, third in ranks.run(2, _each, cases):
        assert first == second == third
