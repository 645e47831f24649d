"""Alarms for results that cannot be right, with their likely causes.

An evaluation of random weights, or with the wrong tokenizer, also ends with a plausible-looking number. So every result
is compared with guessing, and the model and its tokenizer with what is known of them.
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
from megalith.errors import DataError
from megalith.evaluate.benchmark import BenchmarkResult
from megalith.evaluate.masked import MaskedResult
from megalith.evaluate.text import Accuracy, TextLoss
from megalith.models.language_model import LanguageModel
from megalith.nn.norm import LayerNorm, RMSNorm
from megalith.tokenizers import padded_vocab_size
from megalith.train.metrics import read_metrics

_HARDLY_LEARNT = 0.75  # of ln V: above it a model has learnt little more than which tokens are frequent
_FEW_ANSWERS = 8  # below it equal answers are no sign
_LAST_STEPS, _LAST_SHARE = 20, 10  # the losses of this many last steps are averaged, at most the last tenth of the run


@dataclass(frozen=True)
class Alarm:
    """Finding that cannot be right, and its likely cause."""

    what: str
    cause: str

    def lines(self) -> list[str]:
        return [f"ALARM: {self.what}", f"  likely cause: {self.cause}"]


@dataclass(frozen=True)
class Evidence:
    """Facts beside the result that help to explain it."""

    vocab_size: int
    iteration: int  # of the checkpoint; 0 if unknown
    other_tokenizer: str | None = None  # how it differs from the training's; None if no difference is known
    never_trained: bool = False
    training_loss: float | None = None  # at the end of the training, in nats; None if unknown

    @property
    def uniform(self) -> float:
        """Return the loss of guessing with equal probabilities, in nats."""
        return math.log(self.vocab_size)


def alarms_of(result: Accuracy | TextLoss | MaskedResult | BenchmarkResult, evidence: Evidence) -> list[Alarm]:
    """Return all alarms of a result and its model, those of the result first."""
    if isinstance(result, MaskedResult):
        found = _masked_alarms(result, evidence)
    elif isinstance(result, BenchmarkResult):
        found = _benchmark_alarms(result, evidence)
    else:
        about = _accuracy_alarm(result, evidence) if isinstance(result, Accuracy) else _text_alarm(result, evidence)
        found = [] if about is None else [about]
    if evidence.other_tokenizer is not None:
        found.append(Alarm(f"the tokenizer is not the one of the training: {evidence.other_tokenizer}", _TOKENIZER))
    if evidence.never_trained:
        found.append(Alarm("the weights are random: norms and biases are as they are drawn, not trained", _RANDOM))
    return found


def require_measured(result: Accuracy | TextLoss | MaskedResult | BenchmarkResult, path: Path) -> None:
    """Raise DataError if a file has nothing to take a score from."""
    if isinstance(result, MaskedResult):
        total, found = result.tokens.total, f"{result.samples} samples, none with a hidden token"
        remedy = (
            "it is empty, too short, or its documents have a single sentence; give longer text with sentences, or a "
            "dataset of preprocess --split-sentences"
        )
    elif isinstance(result, TextLoss):
        total, found = result.num_tokens, "no token to predict"
        remedy = 'its texts are empty or a single token; give longer text (of a jsonl, under the key "text")'
    elif isinstance(result, Accuracy):
        total, found = result.total, f"{result.skipped} samples, all skipped"
        remedy = 'none has a context before its last word or token; give whole texts under the key "text"'
    else:
        return  # `LocalDataset` refuses files without questions
    if not total:
        raise DataError(f"{path} (--data) has {found}, so that nothing can be measured: {remedy}")


_TOKENIZER = (
    "--vocab-file and --merge-file (or --tokenizer-model) name other files than those of the training; leave them out: "
    "a checkpoint that Megalith wrote has its own"
)
_RANDOM = (
    "no training step was taken before this checkpoint was written, or it was never loaded into the run that wrote it "
    "(Megatron starts from random weights where --load holds nothing); give the folder of the trained checkpoint"
)


def _accuracy_alarm(result: Accuracy, evidence: Evidence) -> Alarm | None:
    if math.isnan(result.loss):
        return _nan_alarm()
    if result.correct > result.by_chance:
        return None
    what = (
        f"{result.correct} of {result.total} correct is at or below chance, where blind guessing among "
        f"{evidence.vocab_size} tokens would find {result.by_chance:.2g}"
    )
    return Alarm(what, _cause(result.loss, evidence))


def _text_alarm(result: TextLoss, evidence: Evidence) -> Alarm | None:
    if math.isnan(result.mean):
        return _nan_alarm()
    if result.mean <= evidence.uniform:
        return None
    what = (
        f"a perplexity of {math.exp(min(result.mean, 700.0)):.4g} is above the {evidence.vocab_size} tokens of the "
        "vocabulary: blind guessing would be better"
    )
    return Alarm(what, _cause(result.mean, evidence))


def _masked_alarms(result: MaskedResult, evidence: Evidence) -> list[Alarm]:
    tokens, orders = result.tokens, result.orders
    if math.isnan(tokens.mean):
        return [_nan_alarm()]
    found, by_chance = [], tokens.total / evidence.vocab_size
    if tokens.correct <= by_chance or tokens.mean > evidence.uniform:
        what = (
            f"{tokens.correct} of {tokens.total} hidden tokens found at a loss of {tokens.mean:.4g} is no better than "
            f"guessing among {evidence.vocab_size} tokens, which finds {by_chance:.2g} at {evidence.uniform:.4g}"
        )
        found.append(Alarm(what, _cause(tokens.mean, evidence)))
    # If all samples have the same answer, accuracy cannot tell a trained model from a constant one.
    if orders is not None and orders.total and orders.share <= result.majority_share < 1.0:
        what = (
            f"the order of two texts is predicted right {orders.correct} of {orders.total} times, no better than "
            f"always giving the more frequent answer ({result.majority_share:.3g})"
        )
        cause = (
            "the weights are random, see below"
            if evidence.never_trained
            else "the head that predicts the order was trained too briefly or on other text, or was missing from the "
            "checkpoint that the model was made from (a BertForMaskedLM has none); compare with the sop loss of the "
            "training, where guessing gives 0.69"
        )
        found.append(Alarm(what, cause))
    return found


def _benchmark_alarms(result: BenchmarkResult, evidence: Evidence) -> list[Alarm]:
    if not result.finite:
        return [_nan_alarm()]
    found = []
    if result.correct <= result.by_chance:
        guess = f"at or below chance, where guessing finds {result.by_chance:.3g}" if result.by_chance else "none"
        found.append(
            Alarm(f"{result.correct} of {result.total} answers are right: {guess}", _cause_of_answers(evidence))
        )
    most, times = max(result.answers.items(), key=lambda item: item[1], default=("", 0))
    empty = result.answers.get("", 0)
    if 2 * empty > result.total:
        cause = "it ends its answer at once: a chat model is asked without --apply-chat-template, a base model with it"
        found.append(Alarm(f"{empty} of {result.total} answers are empty", cause))
    elif times == result.total >= _FEW_ANSWERS and result.right_answers > 1:
        shown = most if isinstance(most, str) else f"number {most + 1}"
        cause = f"the answer does not depend on the question: {_cause_of_answers(evidence)}"
        found.append(Alarm(f"all {times} answers are the same: {shown[:60]!r}", cause))
    if result.shortened:
        what = (
            f"{result.shortened} of {result.asked} prompts are longer than the model's {result.context_length} tokens"
        )
        found.append(
            Alarm(f"{what} with the answer, and lost their beginning", "too many examples; give fewer by --num-fewshot")
        )
    return found


def _cause_of_answers(evidence: Evidence) -> str:
    """Return the likeliest explanation of answers that are no better than guesses."""
    if evidence.never_trained:
        return "the weights are random, see below"
    if evidence.other_tokenizer is not None:
        return "the tokenizer is not the one of the training, see below"
    loss = evidence.training_loss
    if loss is not None and loss > _HARDLY_LEARNT * evidence.uniform:
        return (
            f"the model has hardly learnt yet: its training ended at {loss:.2f}, guessing gives {evidence.uniform:.2f}"
        )
    return (
        "the model is too small or was trained too briefly for such questions, its training text is of another "
        "language, or a chat model is asked without --apply-chat-template"
    )


def _nan_alarm() -> Alarm:
    return Alarm(
        "the loss is not a number",
        "the training that wrote this checkpoint diverged, or the weights overflow in their precision; take an earlier "
        "iteration, or leave --fp16 out",
    )


def _cause(loss: float, evidence: Evidence) -> str:
    """Return the likeliest explanation of a result that is no better than guessing."""
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
        return f"the model has hardly learnt yet{trained}: {measured}; train longer and watch the validation loss"
    if loss > evidence.uniform:
        return (
            f"the model is surer of wrong tokens than of right ones ({measured}): the token ids mean something else to "
            "it (another tokenizer than in training), the text is of another kind or language than its training text, "
            "or the weights were converted wrongly; compare with the validation loss of the training"
        )
    return (
        f"the model has learnt{trained}, but not this ({measured}): its training text is of another kind or language, "
        "or it is too small or was trained too briefly for it"
    )


def training_loss(save_folder: Path, iteration: int) -> float | None:
    """Return the mean loss of the last steps before a checkpoint from its run's metrics; None if unknown."""
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
    """Return whether all norms and biases have their initial values, on all ranks; the first update changes them.

    Models without biases have too little evidence in half precision, where small updates of a one are lost: they count
    as trained unless they are in at least fp32.
    """
    biases, initial = 0, True
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("bias"):
                biases += 1
                initial = initial and not bool(parameter.any())
            elif isinstance(module, LayerNorm | RMSNorm):
                initial = initial and bool((parameter == (0 if module.around_one else 1)).all())
    initial = initial and (biases > 0 or model.dtype in (torch.float32, torch.float64))
    return all(comm.all_gather_objects(initial, context.world))


def size_difference(args: Mapping[str, Any], tokenizer_size: int) -> str | None:
    """Return how a tokenizer's size contradicts the vocabulary table of Megatron's args; None if it fits.

    For checkpoints without a fingerprint, written by Megatron: their table is the vocabulary padded by its rule.
    """
    rows, divisible = args.get("padded_vocab_size"), args.get("make_vocab_size_divisible_by")
    if not rows or not divisible:
        return None
    if tokenizer_size <= rows and rows == padded_vocab_size(
        tokenizer_size, int(divisible), int(args.get("tensor_model_parallel_size") or 1)
    ):
        return None
    return f"it has {tokenizer_size} tokens, and the {rows} rows of the vocabulary table are not their padding"
