"""A training step names no device: it runs on one that torch has never heard of, without memory and without numbers.

Nothing here needs a GPU. Every tensor is a fake one that knows its device only, so that a tensor which some code makes
on the CPU meets the others in an error, as it would on CUDA. Where a number is asked for it is 1. Experts, documents
and BERT choose tokens by their values, so that their shapes cannot be known in this way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import megalith

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
CASES = {
    "gpt2": ("gpt2", f"--bf16 {DROPOUT}", "parts-core_attn+mlp+layernorm"),
    "llama": ("llama", "--fp16 --log-num-zeros-in-grad", "uniform-2"),
    "sinks": ("sinks", "--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16", ""),
    "gates": ("gates", "--bf16 --use-precision-aware-optimizer --main-params-dtype fp16", "block-2"),
    "latent": ("latent", "--bf16", ""),
    "prediction": ("prediction", "", ""),
    "t5-relative": ("t5-relative", DROPOUT, ""),
    "muon": ("muon", "--bf16", ""),
    "soap": ("soap", "", ""),
    "per-token": ("per-token", "--bf16", ""),
}
"""A model of the parity matrix, more flags, and what is recomputed."""


def test_a_step_runs_on_any_device(repository: Path) -> None:
    """In a process of its own, whose torch gets a device more."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("a tensor on the CPU") == "FakeTensorDeviceMismatchError", "this would see nothing"
    assert found == dict.fromkeys(CASES, "")


def _ones(tensor: Tensor) -> Any:
    """The numbers of a tensor that has none."""
    if tensor.dim():
        return [_ones(part) for part in tensor.unbind()]
    return 1.0 if tensor.dtype.is_floating_point else 1


def _step(model: str, flags: str, recompute: str, device: torch.device) -> None:
    from tests.distributed.test_parity import MODELS, Case, batches_of
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megalith.assemble.model import build_chunks, build_run_optimizer
    from megalith.assemble.schedule import build_schedule
    from megalith.distributed.context import ParallelContext
    from megalith.distributed.rng import RandomStreams
    from megalith.layout import Layout
    from megalith.train.state import TrainState
    from megalith.train.step import train_step

    case = Case(Layout(), model, recompute=recompute, data="spans" if model.startswith("t5") else "")
    config, alone = case.config(flags), ParallelContext.solo()
    read = list(islice(batches_of(case, 0, 1), 2))
    context, streams = dataclasses.replace(alone, device=device), RandomStreams(1, alone)
    with FakeTensorMode() as mode:
        chunks = build_chunks(config, MODELS[model].vocab_size, context, streams.own)
        optimizer = build_run_optimizer(config, chunks, context)
        state = TrainState(chunks, optimizer, streams, build_schedule(config), context=context)
        batches = [{name: mode.from_tensor(value) for name, value in batch.items()} for batch in read]
        train_step(state, iter(batches), len(batches))
        state.optimizer.params_norm()
        assert all(weight.device == device for weight in state.model.parameters())


def _on_both(device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        torch.ones(2, 2, device=device) @ torch.ones(2, 2)


def _error_of(act: Callable[[], None]) -> str:
    try:
        act()
    except Exception as error:
        package = str(Path(megalith.__file__).parent)  # the clone may be called megalith too
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(package)]
        place = f" at {own[-1].filename}:{own[-1].lineno}: {error}" if own else ""
        return f"{type(error).__name__}{place}"
    return ""


def _main() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("elsewhere")
    module = torch.get_device_module("elsewhere")
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]  # what autocast asks for
    module.get_rng_state, module.set_rng_state = lambda device: torch.get_rng_state(), lambda state, device: None
    torch.autograd.set_multithreading_enabled(False)  # a thread of the backward pass would not know the fake mode
    device = torch.device("elsewhere", 0)
    values: dict[str, Any] = {name: lambda tensor: 1.0 for name in ("item", "__float__")}
    values |= {"__bool__": lambda tensor: True, "__int__": lambda tensor: 1}
    values |= {"tolist": _ones, "new_tensor": lambda tensor, data, **more: tensor.new_zeros(len(data), **more)}
    with mock.patch.multiple(Tensor, **values):
        found = {name: _error_of(partial(_step, *case, device)) for name, case in CASES.items()}
        found["a tensor on the CPU"] = _error_of(partial(_on_both, device))
    print(json.dumps(found), flush=True)
    os._exit(0)  # a thread of torch may end in an abort here


if __name__ == "__main__":
    _main()
