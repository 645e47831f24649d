"""What to train within a number of hours: the size whose loss a scaling law puts lowest, by the speed of its plan.

Loss of N parameters after D tokens: E + A / N^a + B / D^b, with the constants to which Besiroglu et al. 2024,
arXiv:2404.10102, fitted Chinchilla's runs again. Tokens that are seen again count less: Muennighoff et al. 2023,
arXiv:2305.16264. The law is of other data and other tokenizers: it orders sizes, its losses are not yours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp

from megalith.errors import ConfigError
from megalith.plan.devices import Device
from megalith.plan.plan import Plan
from megalith.plan.presets import half, llama, run_flags

_E, _A, _B, _ALPHA, _BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
_REPEATS = 15.39  # R* of tokens
_VOCABULARY, _LENGTH = 32_000, 2048
# Layers, width and heads; the width is about 128 times the layers at the upper end, as of GPT-3 and Llama.
SIZES = (
    *((6, 384, 6), (8, 512, 8), (12, 768, 12), (16, 1024, 16), (20, 1280, 20), (24, 1536, 24), (24, 2048, 16)),
    *((28, 2560, 20), (32, 3072, 24), (32, 4096, 32), (40, 5120, 40), (48, 6144, 48), (64, 8192, 64)),
)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Purchase:
    """A model that hours on devices pay for.

    Attributes:
        parameters: of the layers and both tables of the vocabulary.
        tokens: seen in these hours, some of them several times where `epochs` is more than 1.
        loss: by the law.
    """

    parameters: int
    tokens: float
    epochs: float
    loss: float
    iterations: int
    plan: Plan


def read_number(flag: str, text: str) -> float:
    """Read a number such as 2B; ConfigError if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper(), re.ASCII)
    if not found or not float(found[1]):
        raise ConfigError(f"{flag} {text} is no number of tokens, such as 500M or 2B")
    return float(found[1]) * _UNITS[found[2]]


def loss(parameters: float, tokens: float, unique: float) -> float:
    """Return the loss that the law gives a model after so many tokens of a text of `unique` ones."""
    repeats = max(0.0, tokens / unique - 1)
    worth = min(tokens, unique) + unique * _REPEATS * (1 - exp(-repeats / _REPEATS))
    return _E + _A / parameters**_ALPHA + _B / worth**_BETA


def flags_of(layers: int, hidden: int, heads: int, device: Device, batch: int) -> list[str]:
    """Return the flags of a size."""
    width = -(-8 * hidden // 3 // 256) * 256
    rate = 6e-4 * (768 / hidden) ** 0.5
    text = llama(layers, hidden, heads, width, 0, run_flags(_VOCABULARY, _LENGTH, batch, rate))
    return [*text.split(), *half(device)]


def parameters_of(layers: int, hidden: int) -> int:
    """Return the parameters of a size."""
    width = -(-8 * hidden // 3 // 256) * 256
    return layers * (4 * hidden**2 + 3 * width * hidden) + 2 * _VOCABULARY * hidden


def afford(
    device: Device, seconds: float, unique: float, world_size: int, plan_of: Callable[[list[str]], Plan]
) -> list[Purchase]:
    """Return the sizes that `seconds` pay for, the lowest loss first, with neighbours on both sides that are worse.

    Args:
        unique: tokens of the text.
        plan_of: plans the fastest layout of flags; ConfigError if none fits.
    """
    found: list[Purchase] = []
    for one in _ascending(device, seconds, unique, world_size, plan_of):
        found.append(one)
        if len(found) > 2 and found[-1].loss > found[-2].loss > found[-3].loss:
            break  # larger ones see too few tokens
    if not found:
        raise ConfigError(f"no size fits {world_size} x {device.name}; plan for more or larger devices")
    return sorted(found, key=lambda one: one.loss)


def _ascending(
    device: Device, seconds: float, unique: float, world_size: int, plan_of: Callable[[list[str]], Plan]
) -> Iterator[Purchase]:
    rate = device.rates.best * world_size
    sizes = [(parameters_of(layers, hidden), layers, hidden, heads) for layers, hidden, heads in SIZES]

    def hoped(size: tuple[int, int, int, int]) -> float:
        return loss(size[0], 0.5 * rate * seconds / 6 / size[0], unique)

    best = min(range(len(sizes)), key=lambda place: hoped(sizes[place]))
    for count, layers, hidden, heads in sizes[max(0, best - 3) :]:
        batch = max(world_size, 64 if count < 3e8 else 256)
        batch = -(-batch // world_size) * world_size
        try:
            plan = plan_of(flags_of(layers, hidden, heads, device, batch))
        except ConfigError:
            return  # larger ones fit no more
        iterations = int(seconds / plan.time.step_seconds)
        tokens = iterations * batch * _LENGTH
        if iterations:
            yield Purchase(count, tokens, tokens / unique, loss(count, tokens, unique), iterations, plan)
