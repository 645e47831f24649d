"""How large a model this machine trains in the given minutes, chosen by measured speed.

Two measurements: the rate of a matrix product rules models out, and the time of a real training step of the others
tells which of them still learns enough in the time, and in how many iterations.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.assemble.model import build_chunks, build_run_optimizer, choose_device, draw_weights
from megalith.config import load
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.models.language_model import LanguageModel
from megalith.optim.optimizer import Optimizer
from megalith.train.throughput import measure_peak

PADDING = 128  # Megatron's --make-vocab-size-divisible-by
TOKENS_PER_PARAMETER = 1.5
"""The largest model is taken that still sees this many tokens for each of its parameters. Measured on source code with
three minutes on two cores, in bits per character of validation text: 4 x 192 at 0.8 tokens per parameter 1.58, 4 x 128
at 1.9 1.52, 2 x 64 at 9 to 27 1.61 to 1.52. Far from the 20 of a compute-optimal run (Hoffmann et al. 2022,
arXiv:2203.15556): no such run is this short."""

TRAINING_SHARE = 0.85  # of the time; the rest is for evaluation, saving, and the steps lost by the kill
MOST_EPOCHS = 10.0  # after which repeating a text gains little (Muennighoff et al. 2023, arXiv:2305.16264)
FEWEST_ITERATIONS, SAVES = 24, 4
BF16_GAIN = 1.3  # bf16 is used where its matrix product is at least this much faster than that of fp32
FP16_GAIN = 2.0  # fp16 needs a loss scale: it must be this much faster than the better of the other two
PEAK_SECONDS = 2.0  # for each precision: one noisy moment must not decide how large the model is
PROBE_SECONDS, FEWEST_PROBES = 3.0, 5  # so that a pause of the machine does not pass for a slow step


@dataclass(frozen=True)
class ModelSize:
    """A GPT in Llama style and the batch it is trained with."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    seq_length: int
    batch_size: int
    learning_rate: float
    vocab_size: int

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // PADDING) * PADDING

    @property
    def num_parameters(self) -> int:
        """Weights of attention, gated feed-forward, norms and the two vocabulary matrices."""
        layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.ffn_hidden_size + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size + 2 * self.padded_vocab_size * self.hidden_size

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the matrix products, forward and backward; looking up the embedding costs none."""
        looked_up = self.padded_vocab_size * self.hidden_size
        return 6.0 * (self.num_parameters - looked_up) + 12.0 * self.num_layers * self.hidden_size * self.seq_length

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_length


# Small to large.
MODEL_SIZES = (
    ModelSize(2, 64, 2, 192, 128, 8, 3.0e-3, 2048),
    ModelSize(3, 96, 3, 256, 256, 4, 2.5e-3, 4096),
    ModelSize(4, 128, 4, 352, 256, 4, 2.0e-3, 4096),
    ModelSize(4, 192, 6, 512, 256, 4, 1.5e-3, 4096),
    ModelSize(6, 256, 4, 704, 256, 8, 1.5e-3, 4096),
    ModelSize(6, 384, 6, 1024, 256, 16, 1.2e-3, 4096),
    ModelSize(8, 512, 8, 1408, 512, 16, 1.0e-3, 8192),
    ModelSize(12, 768, 12, 2048, 512, 32, 6.0e-4, 8192),
)


@dataclass(frozen=True)
class Machine:
    """A device and its measured speed."""

    name: str
    precision: str  # "fp32", "bf16" or "fp16", the one to train in
    flops: float  # FLOP/s of a matrix product in that precision


@dataclass(frozen=True)
class Plan:
    """The run that fits a machine and a text."""

    machine: Machine
    size: ModelSize
    iterations: int = FEWEST_ITERATIONS

    @property
    def save_interval(self) -> int:
        return max(1, self.iterations // SAVES)

    @property
    def kill_iteration(self) -> int:
        """Half-way, and far enough behind a checkpoint that some steps are lost."""
        return self.save_interval * (SAVES // 2) + max(3, self.iterations // 40)


def measure_machine(wanted: str = "auto") -> Machine:
    """Multiply matrices in each precision and pick the one to train in."""
    device = choose_device(wanted)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":
        name, dtypes["fp16"] = str(torch.cuda.get_device_name(device)), torch.float16
    else:
        cores = torch.get_num_threads()
        name = f"{cores} CPU core{'s' if cores > 1 else ''} ({platform.machine()})"
    flops = {precision: measure_peak(device, dtype, PEAK_SECONDS) for precision, dtype in dtypes.items()}
    precision = choose_precision(flops)
    return Machine(name, precision, flops[precision])


def choose_precision(flops: dict[str, float]) -> str:
    """Pick the precision from the measured FLOP/s of those that the device can multiply in ("fp32" always)."""
    best = "fp32"
    if flops.get("bf16", 0.0) >= BF16_GAIN * flops["fp32"]:
        best = "bf16"
    if flops.get("fp16", 0.0) >= FP16_GAIN * flops[best]:
        best = "fp16"
    return best


def choose_model(
    machine: Machine, seconds: float, num_tokens: float, step_time: Callable[[ModelSize], float]
) -> tuple[ModelSize, float]:
    """Pick the largest model that sees enough tokens for its size in the time, or the smallest of all.

    Returns it with the seconds of its step, which `step_time` measures only where it can matter.
    """

    def sees_enough(size: ModelSize, step_seconds: float) -> bool:
        tokens = min(seconds / step_seconds * size.tokens_per_step, MOST_EPOCHS * num_tokens)
        return tokens >= TOKENS_PER_PARAMETER * size.num_parameters

    for size in reversed(MODEL_SIZES[1:]):
        ideal = size.flops_per_token * size.tokens_per_step / machine.flops
        if sees_enough(size, ideal) and sees_enough(size, measured := step_time(size)):
            return size, measured
    return MODEL_SIZES[0], step_time(MODEL_SIZES[0])


def choose_iterations(size: ModelSize, seconds: float, step_seconds: float, num_tokens: float) -> int:
    """Count the steps that fit into the time, without learning the text by heart."""
    by_time = TRAINING_SHARE * seconds / step_seconds
    by_text = MOST_EPOCHS * num_tokens / size.tokens_per_step
    return max(FEWEST_ITERATIONS, round(min(by_time, by_text)))


def measure_step(size: ModelSize, train_flags: Sequence[str]) -> float:
    """Return the median seconds of a few training steps of a run, whose data files need not exist yet."""
    run = load(train_flags, os.environ, files=False)
    device = choose_device(run.train.device, run.launch)
    context = ParallelContext.solo(device)
    (model,) = chunks = build_chunks(run, size.padded_vocab_size, context)
    draw_weights(run, chunks, RandomStreams(run.train.seed), context)
    optimizer = build_run_optimizer(run, chunks, context)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(size.vocab_size, (size.batch_size, size.seq_length + 1), generator=generator).to(device)
    seconds: list[float] = []
    while len(seconds) < FEWEST_PROBES or sum(seconds) < PROBE_SECONDS:
        seconds.append(time_step(model, optimizer, tokens))
    return statistics.median(seconds)


def time_step(model: LanguageModel, optimizer: Optimizer, tokens: Tensor) -> float:
    """Time one step on the tokens [B, S + 1]; reading the loss at the end waits for the device."""
    started = time.perf_counter()
    optimizer.zero_grad()
    loss = model(tokens[:, :-1].contiguous(), labels_BS=tokens[:, 1:].contiguous()).mean()
    (loss * optimizer.loss_scale).backward()
    optimizer.step(1e-4, 0.1)
    loss.item()
    return time.perf_counter() - started
