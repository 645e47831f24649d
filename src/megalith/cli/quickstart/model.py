"""Choose the size of the model and the number of iterations that this machine can train in the given minutes.

Two measurements decide: the throughput of a matrix product rules out models that are too large, and the time of a real
training step tells which of the others sees enough tokens in the time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TOKENS_PER_PARAMETER = 1.5
"""Fewest training tokens per parameter. Measured on source code, three minutes on two cores, in bits per character of
the validation split: 4 x 192 with 0.8 tokens per parameter 1.58, 4 x 128 with 1.9 1.52, 2 x 64 with 9 to 27 1.61 to
1.52. A compute-optimal run takes 20 (Hoffmann et al. 2022, arXiv:2203.15556), but is never this short."""

TRAINING_SHARE = 0.85  # of the time; the rest is for evaluation, saving and the steps repeated after the kill
MAX_EPOCHS = 10.0  # more epochs gain little (Muennighoff et al. 2023, arXiv:2305.16264)
MIN_ITERATIONS = 24
PEAK_SECONDS = 2.0  # long enough that one noisy moment does not decide the size of the model
PEAK_SHARE = 0.02  # of the time of a run that is shorter than usual


@dataclass(frozen=True)
class ModelSize:
    """A Llama-style GPT and how to train it; `vocab_size` is a multiple of 128, to which Megatron pads it."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    seq_length: int
    batch_size: int
    learning_rate: float
    vocab_size: int

    @property
    def num_parameters(self) -> int:
        """Parameters of attention, gated MLP, norms, word embedding and output layer."""
        layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.ffn_hidden_size + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size + 2 * self.vocab_size * self.hidden_size

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
    """A device, the precision to train in and its measured throughput."""

    name: str
    precision: str  # "bf16", "fp16" or "fp32"
    flops: float  # FLOP/s of a matrix product in that precision


@dataclass(frozen=True)
class Plan:
    """The model and the length of the run for one machine and one corpus."""

    machine: Machine
    size: ModelSize
    iterations: int
    step_seconds: float = 0.0  # of one training step, as measured

    @property
    def kill_step(self) -> int:
        """Iteration in which the training is killed, some steps after the checkpoint at half of the run."""
        return self.iterations // 2 + max(3, self.iterations // 40) + 1


def measure_machine(wanted: str, seconds: float) -> Machine:
    """Choose the precision to train in by what the device computes natively, and measure a matrix product in it.

    Args:
        wanted: "auto", "cpu" or "cuda".
        seconds: length of the run; the measurement takes a small share of it.
    """
    import torch

    from megalith.assemble.model import choose_device
    from megalith.device import capability_of, is_host
    from megalith.train.throughput import measure_peak

    device = choose_device(wanted)
    able = capability_of(device)
    name = f"CPU ({platform.machine()}), threads: {torch.get_num_threads()}" if is_host(device) else able.name
    dtype = able.fastest
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return Machine(name, precision, measure_peak(device, dtype, min(PEAK_SECONDS, PEAK_SHARE * seconds)))


def choose_plan(
    machine: Machine,
    seconds: float,
    num_tokens: float,
    step_time: Callable[[ModelSize], float],
    sizes: Sequence[ModelSize] = MODEL_SIZES,
) -> Plan:
    """Choose the largest model that sees enough tokens per parameter in the time, or the smallest of all.

    Args:
        seconds: time to train for; the run is shorter where the corpus would be repeated MAX_EPOCHS times.
        num_tokens: estimated size of the corpus.
        step_time: measures the seconds of one training step; called for the few sizes that can be chosen.
        sizes: to choose from, small to large.
    """
    for size in reversed(sizes):
        max_iterations = MAX_EPOCHS * num_tokens / size.tokens_per_step
        min_iterations = TOKENS_PER_PARAMETER * size.num_parameters / size.tokens_per_step
        ideal_seconds = 6 * size.num_parameters * size.tokens_per_step / machine.flops
        if size is not sizes[0] and min(seconds / ideal_seconds, max_iterations) < min_iterations:
            continue
        step_seconds = step_time(size)
        if min(seconds / step_seconds, max_iterations) >= min_iterations:
            break
    iterations = round(min(TRAINING_SHARE * seconds / step_seconds, max_iterations))
    return Plan(machine, size, max(MIN_ITERATIONS, iterations), step_seconds)
