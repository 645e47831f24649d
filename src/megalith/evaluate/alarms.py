"""Results that cannot be right: what gives them away, and what is likely behind them.

An evaluation of random weights, or through the wrong tokenizer, ends as orderly as any other, with a number. So every
result is held against what guessing would give, and the model and its tokenizer against what is known of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.evaluate.masked import MaskedResult
from megalith.evaluate.text import Accuracy, TextLoss
from megalith.models.language_model import LanguageModel
from megalith.tokenizers import padded_vocab_size
from megalith.train.metrics import read_metrics

_HARDLY_LEARNT = 0.75  # of ln V: above it a model has learnt little more than which tokens are frequent
_LAST_STEPS, _LAST_SHARE = 20, 10  # whose losses are averaged: so many, and no more than the last tenth of the run


@dataclass(frozen=True)
class Alarm:
    """Something that cannot be right."""

    what: str
    cause: str

    def lines(self) -> list[str]:
        return [f"ALARM: {self.what}", f"  likely cause: {self.cause}"]


@dataclass(frozen=True)
class Evidence:
    """What is known beside the result."""

    vocab_size: int
    iteration: int  # of the checkpoint; 0 for weights that name none
    other_tokenizer: str | None = None  # how it differs from the training's; None if it does not, as far as known
    never_trained: bool = False
    training_loss: float | None = None  # at the end of the training, in nats; None where nothing says it

    @property
    def uniform(self) -> float:
        """The loss of a guess of equal probabilities, in nats."""
        return math.log(self.vocab_size)


def alarms_of(result: Accuracy | TextLoss | MaskedResult, evidence: Evidence) -> list[Alarm]:
    """Everything that is wrong with a result and its model, the result first."""
    if isinstance(result, MaskedResult):
        found = _of_masked(result, evidence)
    else:
        about = _of_accuracy(result, evidence) if isinstance(result, Accuracy) else _of_text(result, evidence)
        found = [] if about is None else [about]
    if evidence.other_tokenizer is not None:
        found.append(Alarm(f"the tokenizer is not the one of the training: {evidence.other_tokenizer}", _TOKENIZER))
    if evidence.never_trained:
        found.append(Alarm("the weights are random: norms and biases are as they are drawn, not trained", _RANDOM))
    return found


_TOKENIZER = (
    "--vocab-file and --merge-file (or --tokenizer-model) name other files than the training had; leave them out, the "
    "checkpoint has its own where Megalith wrote it"
)
_RANDOM = (
    "no training step was taken before this checkpoint was written, or it was never loaded into the run that wrote it "
    "(Megatron starts from random weights where --load holds nothing); give the folder of the trained checkpoint"
)


def _of_accuracy(result: Accuracy, evidence: Evidence) -> Alarm | None:
    if result.total == 0:
        return Alarm(
            f"all {result.skipped} samples were skipped, nothing was measured",
            "none has a context before its last word or token; is the text in the key text of each line, and whole?",
        )
    if math.isnan(result.loss):
        return _not_a_number()
    if result.correct > result.by_chance:
        return None
    what = (
        f"{result.correct} of {result.total} correct is at or below chance, where blind guessing among "
        f"{evidence.vocab_size} tokens would find {result.by_chance:.2g}"
    )
    return Alarm(what, _cause(result.loss, evidence))


def _of_text(result: TextLoss, evidence: Evidence) -> Alarm | None:
    if result.num_tokens == 0:
        return Alarm(
            f"all {result.skipped or result.num_documents} texts were skipped, nothing was measured",
            "they are empty or of a single token; is this the right file, and its text in the key text of each line?",
        )
    if math.isnan(result.mean):
        return _not_a_number()
    if result.mean <= evidence.uniform:
        return None
    what = (
        f"a perplexity of {math.exp(min(result.mean, 700.0)):.4g} is above the {evidence.vocab_size} tokens of the "
        "vocabulary: blind guessing would be better"
    )
    return Alarm(what, _cause(result.mean, evidence))


def _of_masked(result: MaskedResult, evidence: Evidence) -> list[Alarm]:
    tokens, orders = result.tokens, result.orders
    if not tokens.total:
        return [
            Alarm(
                f"{result.samples} samples have no hidden token, nothing was measured",
                "the file is empty, its documents have a single sentence, or it is not the file that is meant; of a "
                "dataset, it was made without --split-sentences",
            )
        ]
    if math.isnan(tokens.mean):
        return [_not_a_number()]
    found, by_chance = [], tokens.total / evidence.vocab_size
    if tokens.correct <= by_chance or tokens.mean > evidence.uniform:
        what = (
            f"{tokens.correct} of {tokens.total} hidden tokens found at a loss of {tokens.mean:.4g} is no better than "
            f"guessing among {evidence.vocab_size} tokens, which finds {by_chance:.2g} at {evidence.uniform:.4g}"
        )
        found.append(Alarm(what, _cause(tokens.mean, evidence)))
    # Where all answers are the same, a model that knows them is no better than one that does not.
    if orders is not None and orders.total and orders.share <= result.one_answer < 1.0:
        what = (
            f"the order of two texts is told right {orders.correct} of {orders.total} times, no better than always "
            f"giving the more frequent answer ({result.one_answer:.3g})"
        )
        cause = (
            "the weights are random, see below"
            if evidence.never_trained
            else "the head that tells them apart was trained too short or on other text, or was not in the checkpoint "
            "that the model was made of (a BertForMaskedLM has none); compare with the sop loss of the training, "
            "where guessing gives 0.69"
        )
        found.append(Alarm(what, cause))
    return found


def _not_a_number() -> Alarm:
    return Alarm(
        "the loss is not a number",
        "the training that wrote this checkpoint diverged, or the weights overflow in their precision; take an earlier "
        "iteration, or leave --fp16 out",
    )


def _cause(loss: float, evidence: Evidence) -> str:
    """The likeliest explanation of a result that is no better than guessing."""
    if evidence.never_trained:
        return "the weights are random, see below"
    if evidence.other_tokenizer is not None:
        return "the tokenizer is not the one of the training, see below"
    measured = f"the loss here is {loss:.2f}, guessing gives {evidence.uniform:.2f}"
    hardly = _HARDLY_LEARNT * evidence.uniform < loss <= evidence.uniform
    if evidence.training_loss is not None:
        measured += f", the training ended at {evidence.training_loss:.2f}"
        hardly = evidence.training_loss > _HARDLY_LEARNT * evidence.uniform
    trained = f" ({evidence.iteration} iterations)" if evidence.iteration else ""
    if hardly:
        return f"the model has hardly learnt yet{trained}: {measured}; train longer, and look at its validation loss"
    if loss > evidence.uniform:
        return (
            f"the model is surer of wrong tokens than of right ones ({measured}): the token ids mean something else to "
            "it (another tokenizer than in training), the text is of another kind or language than its training text, "
            "or the weights were converted wrongly; compare with the validation loss of the training"
        )
    return (
        f"the model has learnt{trained}, but not this ({measured}): its training text is of another kind or language, "
        "or it is too small or was trained too short for it"
    )


def training_loss(save_folder: Path, iteration: int) -> float | None:
    """The mean loss of the last steps before a checkpoint, as the run that wrote it kept it; None if it did not."""
    try:
        records = read_metrics(save_folder / "run" / "metrics.jsonl")
    except (OSError, ValueError, KeyError):
        return None
    losses = [
        float(record["loss"])
        for record in records
        if record.get("event") == "step" and record.get("loss") is not None and record["iteration"] <= iteration
    ]
    last = losses[-min(_LAST_STEPS, max(1, len(losses) // _LAST_SHARE)) :]
    return sum(last) / len(last) if last else None


def never_trained(model: LanguageModel, context: ParallelContext) -> bool:
    """Whether all norms are one and all biases zero, on all ranks: the first update changes them.

    Models without biases have too little to tell in half precision, where small updates of a one are lost: they count
    as trained unless they are in at least fp32.
    """
    biases, ones = 0, True
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            biases += 1
            ones = ones and not bool(parameter.any())
        elif "norm" in name:
            ones = ones and bool((parameter == 1).all())
    ones = ones and (biases > 0 or model.dtype in (torch.float32, torch.float64))
    return all(comm.all_gather_objects(ones, context.world))


def size_difference(args: Mapping[str, Any], tokenizer_size: int) -> str | None:
    """Whether a tokenizer has another size than the vocabulary table of Megatron's args was made for.

    For checkpoints without a card, written by Megatron: its table is the vocabulary padded by its rule.
    """
    rows, divisible = args.get("padded_vocab_size"), args.get("make_vocab_size_divisible_by")
    if not rows or not divisible:
        return None
    if tokenizer_size <= rows and rows == padded_vocab_size(
        tokenizer_size, int(divisible), int(args.get("tensor_model_parallel_size") or 1)
    ):
        return None
    return f"it has {tokenizer_size} tokens, and the {rows} rows of the vocabulary table are not their padding"
