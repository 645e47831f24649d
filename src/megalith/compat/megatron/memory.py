"""Memory report of a run: Megatron's theoretical footprint by its own formula, and the measured memory.

Megatron's "MB" are MiB. Its formula counts 18 bytes per parameter (16-bit weight and gradient, fp32 master weight, fp32
gradient and two moments) whatever the precision, every expert on every rank, and activations as of a 16-bit GPT; it is
printed for comparison between runs. The measured figures follow on a separate line. For T5 Megatron counts the
encoder only; here the decoder with its two attentions is counted too, and activations are left out for lack of a
formula.

Source: Korthikanti et al. 2022, arXiv:2205.05198, table 2; docs/reference/console.md#memory-report; the log_rank0.txt
of golden `pretrain` (experts, and activations without sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megalith.config import ModelConfig, RunConfig
from megalith.config.flops import attention_products, feed_forward_weights
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.train.results import Hook, WindowReport

_MB = 1024.0 * 1024.0
_REPLICATED_BYTES = 18.0
_BESIDE = 1.05  # allowance for buffers and the like, on top of the bound
_DIVIDED_BYTES, _DIVISIBLE_BYTES = 6.0, 12.0  # with the distributed optimizer


@dataclass(frozen=True)
class TheoreticalMemory:
    """Megatron's theoretical numbers of parameters and bytes."""

    transformer: float
    embedding: float
    most_loaded: float  # parameters of the most loaded (tensor, pipeline) rank
    weight_and_optimizer: float  # its bytes
    activation: float | None  # its bytes; None if Megatron has no formula
    # parameters of the multi-token prediction layers without their input projections; None if there are none
    prediction: float | None = None


def theoretical_memory(run: RunConfig, vocab_size: int) -> TheoreticalMemory:
    """Compute the theoretical footprint of a run with this padded vocabulary."""
    model, parallel = run.model, run.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    transformer = _transformer(model)
    table = float(model.hidden_size * vocab_size)
    untied = model.untie_embeddings_and_output_weights
    prediction = _layers(model, model.experts[-1:] * model.predictions)
    most_loaded = (transformer / pp + prediction + table * (2 if untied and pp == 1 else 1)) / tp
    each = _REPLICATED_BYTES
    if parallel.shards_optimizer_only:
        each = _DIVIDED_BYTES + _DIVISIBLE_BYTES / run.data_parallel_size
    return TheoreticalMemory(
        transformer,
        table * (2 if untied else 1),
        most_loaded,
        most_loaded * each,
        _activation(run, vocab_size),
        prediction if model.predictions else None,
    )


def _transformer(model: ModelConfig) -> float:
    """Count the parameters of all layers and of the final norm of each stack."""
    hidden, gate = model.hidden_size, 1.5 if model.gated else 1.0
    norm = (1 if model.normalization == "RMSNorm" else 2) * hidden
    attention = 2 * _attention(model)
    parameters = _layers(model, model.experts) + norm
    if model.family.encoder_decoder:
        layer = 2 * attention + 2 * hidden * model.ffn_size * gate + 3 * norm
        parameters += model.num_decoder_layers * layer + norm
    return parameters


def _layers(model: ModelConfig, experts: Sequence[int]) -> float:
    """Count the parameters of decoder layers, given the number of experts of each (0 for a dense layer)."""
    hidden = model.hidden_size
    norm = (1 if model.normalization == "RMSNorm" else 2) * hidden
    return sum(2 * (_attention(model) + feed_forward_weights(model, number)) + 2 * norm for number in experts)


def _attention(model: ModelConfig) -> float:
    """Count half of the parameters of attention, with the norms of latent vectors."""
    norm = 1 if model.normalization == "RMSNorm" else 2
    latent = (model.q_lora_rank or 0) + model.kv_lora_rank if model.multi_latent_attention else 0
    return attention_products(model, 0) + norm * latent / 2


def _activation(run: RunConfig, vocab_size: int) -> float | None:
    """Estimate the activations of the first stage on one rank, in bytes: by the paper's table or by a bound."""
    model, parallel = run.model, run.parallel
    if model.family.encoder_decoder:
        return None
    by_table = parallel.sequence_parallel_here and run.train.recompute_granularity == "selective"
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    tokens, hidden = run.data.seq_length * run.train.micro_batch_size, model.hidden_size
    each = 18 + 4 * model.ffn_size / hidden if by_table else 10 + 24 / tp
    total = tokens * hidden * each * model.num_layers
    total += 8 * tokens * pp + tokens * hidden * pp
    virtual = parallel.virtual_stages(model.num_layers)
    if virtual > 1:
        total *= 1 + (pp - 1) / (pp * virtual)
    elif pp > 1:
        total *= min(1.0, run.num_micro_batches / pp)
    if by_table:
        total += tokens * hidden * 4 * (1 + vocab_size / hidden) if pp == 1 else 0
        return total / tp
    total += 2 * tokens * (vocab_size / tp + hidden) if pp == 1 else 0
    return total * _BESIDE


def theory_lines(figures: TheoreticalMemory) -> str:
    """Return Megatron's lines that follow the first iteration line, with the doubled blank of the first."""
    size = f"Theoretical memory footprints: weight and optimizer={figures.weight_and_optimizer / _MB:.2f} MB"
    if figures.activation is not None:
        total = figures.weight_and_optimizer + figures.activation
        size += f", activation={figures.activation / _MB:.2f} MB, total={total / _MB:.2f} MB"
    ahead = figures.prediction
    everything = figures.transformer + figures.embedding + (ahead or 0.0)
    return "\n".join(
        [
            f"Number of parameters in transformer block in billions: {figures.transformer / 1e9: .2f}",
            *([] if ahead is None else [f"Number of parameters in mtp block in billions: {ahead / 1e9: .2f}"]),
            f"Number of parameters in embedding layers in billions: {figures.embedding / 1e9:.2f}",
            f"Total number of parameters in billions: {everything / 1e9:.2f}",
            f"Number of parameters in most loaded shard in billions: {figures.most_loaded / 1e9:.4f}",
            size,
        ]
    )


def memory_line(rank: int, iteration: int, figures: Mapping[str, int]) -> str:
    """Return the memory of a rank: Megatron's wording on a GPU, the resident size of the process elsewhere."""
    head = f"[Rank {rank}] (after {iteration} iterations) memory (MB)"
    names = {"allocated": "allocated_bytes", "max allocated": "max_allocated_bytes", "reserved": "reserved_bytes"}
    names |= {"max reserved": "max_reserved_bytes"}
    if "reserved_bytes" not in figures:
        names = {"resident": "resident_bytes", "max resident": "max_resident_bytes"}
    shown = [f"{said}: {figures[name] / _MB:.1f}" for said, name in names.items() if name in figures]
    return " | ".join([head, *shown])


@dataclass(eq=False)
class MemoryReport(Hook):
    """Hook that reports the memory of the first replica's ranks after the first line, then every `interval` iterations.

    All ranks have this hook; ranks other than the first write to their own logs.
    """

    context: ParallelContext
    figures: Callable[[], Mapping[str, int]]
    say: Callable[[str], None]
    theory_text: str  # Megatron's figures, printed once
    interval: int | None = None  # iterations; None for the first line only

    def after_window(self, report: WindowReport) -> None:
        first, self.theory_text = self.theory_text, ""
        if first:
            self.say(first)
        elif self.interval is None or report.iteration % self.interval:
            return
        everywhere = comm.all_gather_objects(dict(self.figures()), self.context.world)
        for rank, figures in enumerate(everywhere):
            place = self.context.layout.coordinates(rank)
            if place["dp"] == place["cp"] == 0:
                self.say(memory_line(rank, report.iteration, figures))
