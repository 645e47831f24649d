"""Random streams of a process: seeded, saved and loaded together.

Seeds follow Megatron: the base seed, which depends on the pipeline stage, feeds Python, numpy and torch on the CPU and
on the device; the model-parallel stream is derived from it (docs/reference/training.md#random-streams).

| draws                                                    | stream  | equal on                      |
|----------------------------------------------------------|---------|-------------------------------|
| initial weights as Megatron draws them on a CPU          | weights | all ranks of a pipeline stage |
| dropout of activations replicated over tensor parallel   | default | the tensor-parallel ranks     |
| dropout of activations sharded over tensor parallel      | own     | no other rank                 |

Unlike in Megatron, data-parallel and context-parallel ranks have different streams, so that they do not drop the same
elements of different samples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.device import is_host
from megalith.distributed.context import ParallelContext
from megalith.kernels.dropout import BERNOULLI, BITS, Drawing

STAGE_OFFSET = 100  # Megatron's difference between the base seeds of two pipeline stages
MODEL_PARALLEL_OFFSET = 2718  # Megatron's difference between model-parallel stream and base seed
REPLICA_OFFSET = 1_000_003  # ours, between two replicas; larger than the sum of the other offsets
OWN_STREAM = "model-parallel-rng"
"""Megatron's name of the stream that differs between tensor-parallel ranks."""
DROPOUT = "megalith_dropout"
"""Key of how dropout draws, which Megatron passes over; absent where it is by torch's own way."""


class Stream:
    """Random stream beside torch's default one, on the CPU and on the device of the run."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._device = device = torch.device(device)
        self._states = {"cpu": torch.Generator().manual_seed(seed).get_state()}
        if not is_host(device):
            self._states["device"] = torch.Generator(device=device).manual_seed(seed).get_state()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Make draws from torch's default stream come from this one within the block."""
        outer = self._exchange(self._states)
        try:
            yield
        finally:
            self._states = self._exchange(outer)

    def replay(self) -> AbstractContextManager[None]:
        """Return a context in which this stream starts from its present state; on exit it continues from where it was.

        The context may be entered repeatedly, but not within `used` or itself.
        """
        return _Replay(self, self._states)

    def go_on_from(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replace the states; return the previous ones."""
        before, self._states = self._states, dict(states)
        return before

    def _exchange(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Set the states of torch's default stream; return the previous ones."""
        before = {"cpu": torch.get_rng_state()}
        torch.set_rng_state(states["cpu"])
        if "device" in states:
            module = torch.get_device_module(self._device)
            before["device"] = module.get_rng_state(self._device)
            module.set_rng_state(states["device"], self._device)
        return before

    def state(self) -> dict[str, Tensor]:
        """Return the device's state under Megatron's key, and on a GPU the CPU's under a second key."""
        if "device" in self._states:
            return {OWN_STREAM: self._states["device"], f"{OWN_STREAM}-cpu": self._states["cpu"]}
        return {OWN_STREAM: self._states["cpu"]}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load what `state` returned; ignore states of another kind of device."""
        names = {"device": OWN_STREAM, "cpu": f"{OWN_STREAM}-cpu"} if "device" in self._states else {"cpu": OWN_STREAM}
        for kind, name in names.items():
            if name in state and state[name].numel() == self._states[kind].numel():
                self._states[kind] = state[name].clone()


class _Replay(AbstractContextManager[None]):
    """Context manager that `Stream.replay` returns."""

    def __init__(self, stream: Stream, states: dict[str, Tensor]) -> None:
        self._stream, self._states = stream, dict(states)

    def __enter__(self) -> None:
        self._outer = self._stream.go_on_from(self._states)

    def __exit__(self, *error: object) -> None:
        self._stream.go_on_from(self._outer)


class RandomStreams:
    """Generators of Python, numpy and torch in this process, seeded together, and how dropout draws from them.

    Attributes:
        weights: generator for Megatron's CPU initialization: torch's default on the first replica.
        own: stream for draws that differ on every rank.
    """

    def __init__(self, seed: int, context: ParallelContext | None = None) -> None:
        context = context or ParallelContext.solo()
        replica = context.flatten_axes("cp", "dp").index
        base, apart = seed + STAGE_OFFSET * context.pp.index, REPLICA_OFFSET * replica
        self.seed, self._device = seed, context.device
        random.seed(base + apart)
        np.random.seed((base + apart) % 2**32)
        torch.manual_seed(base + apart)
        Drawing.way = BITS
        self.weights = torch.default_generator if replica == 0 else torch.Generator().manual_seed(base)
        self.own = Stream(base + MODEL_PARALLEL_OFFSET + context.tp.index + apart, context.device)

    def state(self) -> dict[str, Any]:
        """Return the states under the keys of Megatron's `rng_state` entry."""
        device, none = self._device, torch.zeros(0, dtype=torch.uint8)
        return {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": none if is_host(device) else torch.get_device_module(device).get_rng_state(device),
            "rng_tracker_states": self.own.state(),
        } | ({} if Drawing.way == BERNOULLI else {DROPOUT: Drawing.way})

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned; a device's state is ignored without a device."""
        version, internal, gauss = state["random_rng_state"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(state["np_rng_state"])
        torch.set_rng_state(state["torch_rng_state"])
        if not is_host(self._device) and state["cuda_rng_state"].numel() > 0:
            torch.get_device_module(self._device).set_rng_state(state["cuda_rng_state"], self._device)
        self.own.load_state(state["rng_tracker_states"])
        Drawing.way = state.get(DROPOUT, BERNOULLI)
