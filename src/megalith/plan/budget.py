"""What to train within a number of hours: the size whose loss a scaling law puts lowest, by the speed of its plan.

Loss of N parameters after D tokens: E + A / N^a + B / D^b, with the constants to which Besiroglu et al. 2024,
arXiv:2404.10102, fitted Chinchilla's runs again. Tokens that are seen again count less: Muennighoff et al. 2023,
arXiv:2305.16264. The law is of other data and other tokenizers: it orders sizes, its losses are not yours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from pathlib import Path
from typing import Any

from megalith.config import all_settings
from megalith.config.command_line import read_command_line, without_settings
from megalith.config.reading import read_recipe
from megalith.errors import ConfigError
from megalith.plan.devices import Device
from megalith.plan.plan import NothingFitsError, Plan, without_layout
from megalith.plan.presets import half, llama, run_flags

_E, _A, _B, _ALPHA, _BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
_REPEATS = 15.39  # R* of tokens
_VOCABULARY, _LENGTH = 32_000, 2048
# Layers, width and heads; the width is about 128 times the layers at the upper end, as of GPT-3 and Llama.
SIZES = (
    *((6, 384, 6), (8, 512, 8), (12, 768, 12), (16, 1024, 16), (20, 1280, 20), (24, 1536, 24), (24, 2048, 16)),
    *((28, 2560, 20), (32, 3072, 24), (32, 4096, 32), (40, 5120, 40), (48, 6144, 48), (64, 8192, 64)),
)
MOST_HOURS = 1_000_000
_CHOSEN = (
    *("num_layers", "decoder_num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
    *("group_query_attention", "num_query_groups", "multi_latent_attention", "mtp_num_layers"),
    *("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
    *("train_iters", "train_samples", "rampup_batch_size", "step_batch_size_schedule"),
)
"""Settings of the size of the model, the length of the run and a batch that grows."""
_INSTEAD = {
    "bf16": "fp16",
    "fp16": "bf16",
    "data_path": "mock_data",
    "train_data_path": "mock_data",
    "tokenizer_type": "vocab_size",
    "seq_length": "max_position_embeddings",
}
"""Setting -> another that is left out of the flags of a size where this one is given."""
_MOST_TOKENS = 1e18
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
    number = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < number <= _MOST_TOKENS:
        raise ConfigError(f"{flag} {text or chr(39) * 2} is no number of tokens; give one, such as 500M or 2B")
    return number


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


def parameters_of(layers: int, hidden: int, vocabulary: int = _VOCABULARY) -> int:
    """Return the parameters of a size."""
    width = -(-8 * hidden // 3 // 256) * 256
    return layers * (4 * hidden**2 + 3 * width * hidden) + 2 * vocabulary * hidden


def _given(words: Sequence[str]) -> tuple[Mapping[str, Any], str]:
    """Return the values of flags and of their recipe, and the recipe's path."""
    flags = read_command_line(words)
    recipe = read_recipe(Path(flags.recipe)).values if flags.recipe else {}
    return {**recipe, **flags.values}, flags.recipe


def completed(flags: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return `words` behind those of the flags of a size that they do not set themselves."""
    given, _ = _given(words)
    kept = without_settings(flags, {*given, *(_INSTEAD[name] for name in given if name in _INSTEAD)})
    if "seq_length" in given and "max_position_embeddings" not in given:
        kept += ["--max-position-embeddings", str(given["seq_length"])]
    return [*kept, *words]


def problems_of(hours: float, data: str | None, words: Sequence[str], device: Device, world_size: int) -> list[str]:
    """Return what is wrong with hours, tokens of the text and further flags of a run whose size is to be chosen."""
    found = list[str]()
    if not 0 < hours <= MOST_HOURS:
        found.append(f"--hours {hours:g} is not above 0 and at most {MOST_HOURS}; give the hours of the run")
    try:
        if data is None:
            found.append("--hours needs --data TOKENS, the tokens of the text, such as 2B")
        else:
            read_number("--data", data)
    except ConfigError as error:
        found += error.violations
    given, recipe = _given(words)
    written = {word.partition("=")[0] for word in words}
    for name in _CHOSEN:
        flag = all_settings()[name].flag
        if name not in given and written.isdisjoint(all_settings()[name].spellings):
            continue
        where = f" ({name} of {recipe})" if recipe and name not in read_command_line(words).values else ""
        value = "" if given.get(name) in (None, True) else f" {given[name]}"
        found.append(f"{flag}{value}{where}: --hours chooses the size of the model and the steps; leave it out")
    size = flags_of(*SIZES[0], device, _batch(0, world_size))
    try:
        without_layout(completed(size, without_settings(words, _CHOSEN)))
    except ConfigError as error:
        found += error.violations
    return found


def _batch(parameters: int, world_size: int) -> int:
    """Return the samples of a batch of a size, unless flags say it."""
    return -(-max(world_size, 64 if parameters < 3e8 else 256) // world_size) * world_size


class _Shop:
    """The sizes at what they cost on some devices.

    Attributes:
        least_seconds: of a step of those that fit.
        lacking: why the last one that does not fit does not.
    """

    def __init__(
        self, device: Device, seconds: float, unique: float, world_size: int, plan_of: Callable[[list[str]], Plan]
    ) -> None:
        self.device, self.seconds, self.unique, self.world_size = device, seconds, unique, world_size
        self.plan_of, self.least_seconds, self.lacking = plan_of, inf, ""

    def start(self) -> int:
        """Return the place in `SIZES` of one below that with the lowest loss at half of the best rate."""
        rate = self.device.rates.best * self.world_size

        def hoped(place: int) -> float:
            count = parameters_of(*SIZES[place][:2])
            return loss(count, 0.5 * rate * self.seconds / 6 / count, self.unique)

        return max(0, min(range(len(SIZES)), key=hoped) - 3)

    def buy(self, place: int) -> Purchase | None:
        """Return what is paid for of a size; None if it does not fit, or not one step is."""
        layers, hidden, heads = SIZES[place]
        batch = _batch(parameters_of(layers, hidden), self.world_size)
        try:
            plan = self.plan_of(flags_of(layers, hidden, heads, self.device, batch))
        except NothingFitsError as error:
            self.lacking = str(error)
            return None
        self.least_seconds = min(self.least_seconds, plan.time.step_seconds)
        iterations = int(self.seconds / plan.time.step_seconds)
        if not iterations:
            return None
        assert plan.found is not None
        count = parameters_of(layers, hidden, plan.found.best[0].vocab_size)
        tokens = iterations * plan.run.global_batch_size * plan.run.data.seq_length
        return Purchase(count, tokens, tokens / self.unique, loss(count, tokens, self.unique), iterations, plan)

    def refusal(self) -> ConfigError:
        """Return why no size was bought."""
        here = f"{self.world_size} x {self.device.name}"
        if self.least_seconds == inf:
            return ConfigError(f"no size fits {here}; of the smallest: {self.lacking}")
        return ConfigError(
            f"--hours {self.seconds / 3600:g} is too few: a step of the smallest size takes {self.least_seconds:.3g} s "
            f"on {here}; give at least {1.01 * self.least_seconds / 3600:.3g} hours"
        )


def afford(
    device: Device, seconds: float, unique: float, world_size: int, plan_of: Callable[[list[str]], Plan]
) -> list[Purchase]:
    """Return the sizes that `seconds` pay for, the lowest loss first, with neighbours on both sides that are worse.

    Args:
        unique: tokens of the text.
        plan_of: plans the fastest layout of flags; NothingFitsError if none fits.

    Raises:
        ConfigError: no size fits, or the seconds are less than a step.
    """
    shop = _Shop(device, seconds, unique, world_size, plan_of)
    place = start = shop.start()
    while (one := shop.buy(place)) is None:
        if not place:
            raise shop.refusal()
        place -= 1
    found = [one]
    for larger in range(place + 1, len(SIZES) if place == start else 0):
        if _worse_and_worse(found) or (one := shop.buy(larger)) is None:
            break
        found.append(one)
    for smaller in range(place - 1, -1, -1):
        if _worse_and_worse(found[::-1]) or (one := shop.buy(smaller)) is None:
            break
        found.insert(0, one)
    return sorted(found, key=lambda one: one.loss)


def _worse_and_worse(found: Sequence[Purchase]) -> bool:
    return len(found) > 2 and found[-1].loss > found[-2].loss > found[-3].loss
