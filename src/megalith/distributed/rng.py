"""The random streams of a process as an object that is saved, loaded and passed on.

Seeds follow Megatron (spec/training-behaviour.md section 4): the base seed feeds Python, numpy and torch on the CPU
and on the device; the tracked device streams are derived from it. On a CPU dropout draws from torch's stream.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

MODEL_PARALLEL_OFFSET = 2718  # Megatron's distance of the model-parallel stream from the base seed


class RandomStreams:
    """Python's, numpy's and torch's generators, seeded together.

    Constructing one seeds the generators of the process; there is one set of them in a process, which this object
    stands for.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    @property
    def weights(self) -> torch.Generator:
        """The stream that Megatron's CPU initialisation draws from: torch's default."""
        return torch.default_generator

    def state(self) -> dict[str, Any]:
        """Return the states under the keys of Megatron's `rng_state` entry."""
        on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state() if on_cuda else torch.zeros(0, dtype=torch.uint8),
            "rng_tracker_states": {},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue the streams from a state that `state` returned; a device state is used where there is a device."""
        version, internal, gauss = state["random_rng_state"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(state["np_rng_state"])
        torch.set_rng_state(state["torch_rng_state"])
        if torch.cuda.is_available() and state["cuda_rng_state"].numel() > 0:
            torch.cuda.set_rng_state(state["cuda_rng_state"])
