"""How large a model this machine trains in the given minutes: a choice made from measured speed, without torch.

Two measurements: the rate of a matrix product says which models are out of reach, and the time of a real training step
of the others says which of them still learns enough in the time, and in how many iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PADDING = 128  # Megatron's --make-vocab-size-divisible-by
TOKENS_PER_PARAMETER = 1.5
"""The largest model is taken that still sees this many tokens for each of its parameters. Measured on source code with
three minutes on two cores, in bits per character of validation text: 4 x 192 at 0.8 tokens per parameter 1.58, 4 x 128
at 1.9 1.52, 2 x 64 at 9 to 27 1.61 to 1.52. Far from the 20 of a compute-optimal run (Hoffmann et al. 2022,
arXiv:2203.15556): no such run is this short."""

TRAINING_SHARE = 0.85
"""Of the time, for training steps; the rest is for evaluation, saving, and the steps lost by the kill."""

MOST_EPOCHS = 10.0
"""Passes over the text after which repeating it gains little (Muennighoff et al. 2023, arXiv:2305.16264)."""

FEWEST_ITERATIONS = 24
BF16_GAIN = 1.3
"""bf16 is taken where its matrix product is at least this much faster than that of fp32."""

FP16_GAIN = 2.0
"""fp16, which needs a loss scale, is taken where it is this much faster than the better of the other two."""


@dataclass(frozen=True)
class ModelSize:
    """A GPT in Llama style and the batch it is trained with.

    Attributes:
        batch_size: samples of one step.
        learning_rate: peak.
        vocab_size: of the tokenizer trained for it.
    """

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
        """Forward and backward, matrix products only; looking up the embedding costs none."""
        looked_up = self.padded_vocab_size * self.hidden_size
        return 6.0 * (self.num_parameters - looked_up) + 12.0 * self.num_layers * self.hidden_size * self.seq_length

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_length


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
"""Small to large."""


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        name: for the screen.
        precision: "fp32", "bf16" or "fp16", the one to train in.
        flops: FLOP/s of a matrix product in that precision.
    """

    name: str
    precision: str
    flops: float


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
    """Pick the largest model that sees enough tokens in the time, or the smallest of all.

    Args:
        seconds: of training.
        num_tokens: in the text, roughly.
        step_time: measures a training step of a model, in seconds; asked only where it can matter.

    Returns:
        The model and the seconds of its step.
    """
    for size in reversed(MODEL_SIZES[1:]):
        ideal = size.flops_per_token * size.tokens_per_step / machine.flops
        if not sees_enough(size, seconds, ideal, num_tokens):
            continue
        measured = step_time(size)
        if sees_enough(size, seconds, measured, num_tokens):
            return size, measured
    return MODEL_SIZES[0], step_time(MODEL_SIZES[0])


def sees_enough(size: ModelSize, seconds: float, step_seconds: float, num_tokens: float) -> bool:
    """Tell whether a model learns from enough tokens for its size."""
    tokens = min(seconds / step_seconds * size.tokens_per_step, MOST_EPOCHS * num_tokens)
    return tokens >= TOKENS_PER_PARAMETER * size.num_parameters


def choose_iterations(size: ModelSize, seconds: float, step_seconds: float, num_tokens: float) -> int:
    """Count the steps that fit into the time, without learning the text by heart.

    Args:
        step_seconds: measured.
        num_tokens: of training text.
    """
    by_time = TRAINING_SHARE * seconds / step_seconds
    by_text = MOST_EPOCHS * num_tokens / size.tokens_per_step
    return max(FEWEST_ITERATIONS, round(min(by_time, by_text)))
