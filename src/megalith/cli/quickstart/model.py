"""How large a model this machine trains in the given minutes, chosen by measured speed.

Two measurements: the rate of a matrix product rules models out, and the time of a real training step of the others
tells which of them still learns enough in the time, and in how many iterations.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass

PADDING = 128  # Megatron's --make-vocab-size-divisible-by
TOKENS_PER_PARAMETER = 1.5
"""The largest model is taken that still sees this many tokens for each of its parameters. Measured on source code with
three minutes on two cores, in bits per character of validation text: 4 x 192 at 0.8 tokens per parameter 1.58, 4 x 128
at 1.9 1.52, 2 x 64 at 9 to 27 1.61 to 1.52. Far from the 20 of a compute-optimal run (Hoffmann et al. 2022,
arXiv:2203.15556): no such run is this short."""

TRAINING_SHARE = 0.85  # of the time; the rest is for evaluation, saving, and the steps lost by the kill
MOST_EPOCHS = 10.0  # after which repeating a text gains little (Muennighoff et al. 2023, arXiv:2305.16264)
FEWEST_ITERATIONS = 24
# So much faster must its matrix product be to take it instead of those before; fp16 needs a loss scale.
GAINS = {"bf16": 1.3, "fp16": 2.0}
PEAK_SECONDS = 2.0  # for each precision: one noisy moment must not decide how large the model is
PEAK_SHARE = 0.02  # of the time of a training that is shorter than usual


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
    iterations: int
    step_seconds: float = 0.0  # of one training step, as measured

    @property
    def kill_step(self) -> int:
        """The step that the kill interrupts, some steps behind the checkpoint half-way."""
        return self.iterations // 2 + max(3, self.iterations // 40) + 1


def measure_machine(wanted: str, seconds: float) -> Machine:
    """Multiply matrices in each precision and pick the one in which to train for these seconds."""
    import torch

    from megalith.assemble.model import choose_device
    from megalith.train.throughput import measure_peak

    device = choose_device(wanted)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if device.type == "cuda":
        name, dtypes["fp16"] = str(torch.cuda.get_device_name(device)), torch.float16
    else:
        cores = torch.get_num_threads()
        name = f"{cores} CPU core{'s' if cores > 1 else ''} ({platform.machine()})"
    budget = min(PEAK_SECONDS, PEAK_SHARE * seconds)
    flops = {precision: measure_peak(device, dtype, budget) for precision, dtype in dtypes.items()}
    precision = choose_precision(flops)
    return Machine(name, precision, flops[precision])


def choose_precision(flops: dict[str, float]) -> str:
    """Pick the precision from the measured FLOP/s of those that the device can multiply in ("fp32" always)."""
    best = "fp32"
    for precision, gain in GAINS.items():
        if flops.get(precision, 0.0) >= gain * flops[best]:
            best = precision
    return best


def choose_plan(machine: Machine, seconds: float, num_tokens: float, step_time: Callable[[ModelSize], float]) -> Plan:
    """Pick the largest model that sees enough tokens for its size in the time, or the smallest of all.

    It is trained for the time, or until the text is known by heart. `step_time` measures the seconds of a step, and
    only where they can matter.
    """
    for size in reversed(MODEL_SIZES):
        most = MOST_EPOCHS * num_tokens / size.tokens_per_step
        needed = TOKENS_PER_PARAMETER * size.num_parameters / size.tokens_per_step
        ideal = size.flops_per_token * size.tokens_per_step / machine.flops
        if size is not MODEL_SIZES[0] and min(seconds / ideal, most) < needed:
            continue
        measured = step_time(size)
        if min(seconds / measured, most) >= needed:
            break
    iterations = round(min(TRAINING_SHARE * seconds / measured, most))
    return Plan(machine, size, max(FEWEST_ITERATIONS, iterations), measured)
