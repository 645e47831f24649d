"""How many tokens experts get in a plan, which in a run follows from values.

The experts of the rank get `ROWS` times their share of all tokens, others what a balanced router sends. Numbers of
tokens are tensors on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megalith.config import RunConfig
from megalith.device import has_memory
from megalith.distributed import comm
from megalith.distributed.context import Axis
from megalith.nn.moe import grouped, permutation, routing
from megalith.parallel import experts

ROWS = 2
"""Times the tokens that a balanced router would send to the experts of one rank, where other ranks hold others."""


@contextmanager
def replaced(module: Any, **functions: Any) -> Iterator[None]:
    """Replace functions of a module within the block."""
    before = {name: getattr(module, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(module, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


@contextmanager
def routed(run: RunConfig, start: Callable[[str, Axis, Any], Any] = lambda *_: None) -> Iterator[None]:
    """Let routers send tokens as above within the block.

    Args:
        start: receives exchanges of uneven parts.
    """
    chosen, ranks = run.model.moe_router_topk, run.layout.ep
    places, by_all_to_all = min(chosen, ranks), run.model.moe_token_dispatcher_type != "allgather"

    def balanced(choices: Tensor, number: int) -> Tensor:
        """Count the choices of each of `number` - 1 experts or ranks, and those that are left out: none."""
        return torch.tensor([*_divided(choices.numel(), number - 1), 0])

    def sent(choices: Tensor, number: int) -> Tensor:
        return balanced(choices[: choices.numel() * places // chosen], number)  # each token once to a rank

    def local(experts_TK: Tensor, here: range) -> permutation.Order:
        received = experts_TK.numel()  # choices, of other ranks' experts too
        own = received // places if by_all_to_all else min(received, ROWS * received // ranks)
        return permutation.order_by_expert(experts_TK, len(here), _divided(own, len(here)))

    def exchanged(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        return x * ROWS if has_memory(x.device) else all_to_all(x, axis, split_dim, concat_dim)

    def rows(x: Tensor, axis: Axis, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        start("all_to_all", axis, x)
        return x.new_empty(sum(receive_counts), *x.shape[1:])

    all_to_all = comm.all_to_all
    with ExitStack() as stack:
        for context in (
            replaced(permutation, count_choices=balanced),
            replaced(routing, sinkhorn_plan=torch.exp),  # which asks for values to see whether it is done
            replaced(experts, count_choices=sent, _order_local=local),
            replaced(comm, all_to_all=exchanged, all_to_all_rows=rows),
            replaced(grouped, to_device=lambda x, device: x.to(device)),
        ):
            stack.enter_context(context)
        yield


def _divided(total: int, number: int) -> list[int]:
    return [total // number + (place < total % number) for place in range(number)]
