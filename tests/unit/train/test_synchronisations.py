"""The host waits for the device once a step: it reads one tensor, and copies nothing from pageable memory.

On a CPU nobody waits, but the calls are the same. Those are counted that return a tensor's values to Python, that make
a tensor on a device from values of Python, and operators that read a value or whose result's shape depends on values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.config import PrecisionConfig
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.step import train_step
from megalith.train.step_hooks import StepHook

from ...fake_device import READS
from .conftest import batches, make_state

READ = {"tolist", "cpu", "numpy", "__array__", "new_tensor"}
MADE = {"tensor", "as_tensor", "asarray"}  # if they name a device: on the host they copy nothing


class _Calls(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = getattr(func, "__name__", ""), kwargs or {}
        if name in READ or (name in MADE and options.get("device") is not None):
            self._counts[name] += 1
        return func(*args, **options)


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in READS or by_mask:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    counts = Counter[str]()
    with _Calls(counts), _Operators(counts):
        yield counts


class Hook(StepHook):
    """Code in the middle of a step."""

    def __init__(self, act: Callable[[Tensor], object]) -> None:
        self._act = act

    def on_losses(self, micro_batch: int, sums: Tensor) -> Tensor:
        self._act(sums)
        return sums


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (PrecisionConfig(), torch.float32),
        (PrecisionConfig(bf16=True), torch.bfloat16),
        (PrecisionConfig(fp16=True, initial_loss_scale=2.0**7), torch.float16),
        (PrecisionConfig(fp16=True, initial_loss_scale=2.0**126, hysteresis=1), torch.float16),
    ],
    ids=["fp32", "bf16", "fp16", "overflow"],
)
def test_a_step_reads_one_tensor(precision: PrecisionConfig, dtype: torch.dtype) -> None:
    state, loaded = make_state(precision, dtype, dropout=0.0), list(islice(batches(masked=True), 4))
    for number in range(2):
        with counted() as counts:
            result = train_step(state, iter(loaded[2 * number :]), 2)
        assert counts == {"tolist": 1}
    assert result.applied is (precision.initial_loss_scale < 2.0**126)


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("_local_scalar_dense", lambda sums: sums.detach().sum().item()),
        ("_local_scalar_dense", lambda sums: float(sums.detach().sum())),
        ("_local_scalar_dense", lambda sums: bool(sums.isfinite().all())),
        ("tolist", lambda sums: sums.tolist()),
        ("cpu", lambda sums: sums.cpu()),
        ("numpy", lambda sums: sums.detach().numpy()),
        ("new_tensor", lambda sums: sums.new_tensor([1.0])),
        ("tensor", lambda sums: torch.tensor([1.0], device=sums.device)),
        ("nonzero", lambda sums: sums.nonzero()),
        ("index", lambda sums: sums[sums > 0]),
    ],
)
def test_another_one_would_be_counted(name: str, act: Callable[[Tensor], object]) -> None:
    with counted() as counts:
        train_step(make_state(dropout=0.0), batches(), 1, hooks=[Hook(act)])
    assert counts == Counter({"tolist": 1}) + Counter({name: 1})


def test_what_ranks_agree_on_is_read_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "all_reduce", lambda x, axis: 2 * x)
    context = cast("ParallelContext", SimpleNamespace(world=SimpleNamespace(size=2)))
    consensus = RankConsensus(NeverStop(), context, is_out_of_time=lambda: True)
    with counted() as counts:
        sums = consensus.sum_over_ranks(torch.ones(3))
    assert counts == {} and sums.tolist() == [2.0, 2.0, 2.0]
    with counted() as counts:
        assert consensus.out_of_time and not consensus.save_in_progress and not consensus.save_failed
        assert consensus.requested is None
    assert counts == {"tolist": 1}
