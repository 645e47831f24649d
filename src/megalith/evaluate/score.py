"""Log-probabilities of given tokens in padded batches, on one process or on ranks that share the model.

The ranks of a replica run their batches through the pipeline interpreter; replicas take batches in turn. Batches are
padded on the right, which a causal model does not see. The whole vocabulary table, padding included, takes part in the
softmax, as it does in the training loss (and in Megatron's evaluation). If the caller gives the number of tokens,
padded rows have no probability, as in an exported model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.device import is_host
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.errors import DataError
from megalith.models.language_model import GenerativeModel, LanguageModel
from megalith.models.plain import PlainModel
from megalith.nn.linear import linear
from megalith.nn.precision import at_least_fp32
from megalith.nn.region import Region
from megalith.parallel import pipeline
from megalith.progress import advance, is_counted, task
from megalith.schedules.pipeline import Op, make_schedule

Ids = Sequence[int] | NDArray[np.int64]

_BATCHES_AT_ONCE = 256  # per pipeline program, whose results stay on the device until it ends
_LOGITS_AT_ONCE = 1 << 24  # on a CPU twice as fast as 1 << 26, which allocates new pages each time
_SECONDS_BETWEEN_SCORES = 0.5


@dataclass(frozen=True)
class Sample:
    """Token ids of which the last ones are targets, each scored given all ids before it."""

    ids: Ids
    num_targets: int  # number of targets at the end of `ids`; at least one id precedes them


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a sample's targets, and whether each target is the likeliest token."""

    logprobs: NDArray[np.float64]  # natural logarithms of their probabilities
    greedy: NDArray[np.bool_]  # for each, whether it is the most likely token

    @property
    def total(self) -> float:
        """Return the log-probability of all targets together."""
        return float(self.logprobs.sum())


M = TypeVar("M", bound=LanguageModel)
W = TypeVar("W", bound="BatchWork")
T = TypeVar("T")


class BatchScorer(Generic[M]):
    """Runner of batches: the ranks of a replica share each batch, replicas take batches in turn.

    Args:
        context: the ranks that share the model and the samples; this process alone if None. Calls are collective, with
            equal samples on all ranks, and return the results of all samples.
    """

    def __init__(self, model: M, context: ParallelContext | None = None, *, batch_size: int = 8) -> None:
        assert batch_size >= 1, batch_size
        self.model, self.batch_size = model, batch_size
        self.context = context or ParallelContext.solo(model.device)

    def run(self, count: int, make_work: Callable[[Sequence[range], int], W]) -> Iterator[tuple[Sequence[range], W]]:
        """Yield the batches of each pipeline program of this replica with their work, which `make_work` creates."""
        context, size = self.context, self.batch_size
        batches = [range(start, min(start + size, count)) for start in range(0, count, size)]
        own = batches[context.dp.index :: context.dp.size]
        with task("evaluating", sum(map(len, own)), " samples", counts="samples"):
            for first in range(0, len(own), _BATCHES_AT_ONCE):
                part = own[first : first + _BATCHES_AT_ONCE]
                work = make_work(part, first)
                schedule = make_schedule("forward", context.pp.size, 1, len(part))
                pipeline.run(schedule.program(context.pp.index), work, context.p2p_channels)
                yield part, work

    def gather(self, found: T, nothing: T) -> list[T]:
        """Gather the results of each replica on every rank; ranks without predictions contribute `nothing`."""
        context = self.context
        if context.world.size == 1:
            return [found]
        speaks = context.tp.is_first and context.pp.is_last
        return comm.all_gather_objects(found if speaks else nothing, context.world)

    def require_equal(self, digest: str) -> None:
        """Raise `DataError` if the ranks have different samples, by a digest of them."""
        if len(set(comm.all_gather_objects(digest, self.context.world))) > 1:
            raise DataError("the ranks read different texts: the data and the tokenizer must be the same on all hosts")


class BatchWork:
    """Batches of one program (`pipeline.StageRunner`); `on_batch` receives the number of each before it runs."""

    def __init__(self, on_batch: Callable[[int], None], first: int) -> None:
        self._on_batch, self._first = on_batch, first

    def prepare(self, op: Op) -> None:
        self._on_batch(self._first + op.micro_batch)

    def activation_shape(self, micro_batch: int) -> tuple[tuple[int, int, int], torch.dtype]:
        raise NotImplementedError

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        raise NotImplementedError

    def release(self, micro_batch: int) -> None:
        pass


class RunningScore:
    """Score of the samples so far, beside the progress of an evaluation. Nothing is computed where none is shown."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._next = 0.0

    def add(self, num_samples: int, sums: Callable[[], Tensor] | None) -> None:
        """Count a batch; `sums` returns its `prediction_sums`, None but on the last pipeline stage."""
        if not is_counted("samples"):
            return
        note, now = "", time.monotonic()
        if sums is not None:
            self._sums = sums() if self._sums is None else self._sums + sums()
            if now >= self._next:  # not at every batch: the device is waited for
                number, right, loss = self._sums.tolist()
                note, self._next = f"loss {loss / number:.4g} {right / number:.1%} right", now + _SECONDS_BETWEEN_SCORES
        advance("samples", num_samples, note)


def prediction_sums(logprobs_T: Tensor, right_T: Tensor) -> Tensor:
    """Return the number of predictions, of correct ones, and the summed loss: [3] in fp64."""
    total = torch.full((), len(logprobs_T), dtype=torch.float64, device=logprobs_T.device)
    return torch.stack((total, right_T.sum().double(), -logprobs_T.double().sum()))


class Scorer(BatchScorer[GenerativeModel | PlainModel]):
    """Scorer of token sequences; only the first `num_tokens` rows of the vocabulary (None: all) have a probability."""

    def __init__(
        self,
        model: GenerativeModel | PlainModel,
        context: ParallelContext | None = None,
        *,
        batch_size: int = 8,
        num_tokens: int | None = None,
    ) -> None:
        super().__init__(model, context, batch_size=batch_size)
        self.num_tokens = num_tokens

    @property
    def context_length(self) -> int:
        """Return the tokens that the model reads at once; one more can be scored."""
        return self.model.config.max_position_embeddings

    def __call__(self, samples: Sequence[Sample], on_batch: Callable[[int], None] = lambda number: None) -> list[Score]:
        """Score samples of at most `context_length` + 1 ids, in order; `on_batch` receives each batch's number."""
        self._check(samples)

        running = RunningScore()

        def make_work(part: Sequence[range], first: int) -> _Work:
            batches = [[samples[index] for index in batch] for batch in part]
            return _Work(self.model, batches, self.num_tokens, on_batch, first, running)

        found: dict[int, Score] = {}
        for part, work in self.run(len(samples), make_work):
            found.update(zip(chain.from_iterable(part), work.scores(), strict=False))
        found = {number: score for scores in self.gather(found, {}) for number, score in scores.items()}
        return [found[number] for number in range(len(samples))]

    def _check(self, samples: Sequence[Sample]) -> None:
        rows = min(self.num_tokens or self.model.vocab_size, self.model.vocab_size)
        digest = hashlib.blake2b(digest_size=16)
        for sample in samples:
            assert 0 < sample.num_targets < len(sample.ids) <= self.context_length + 1, "the caller cuts samples"
            ids = np.asarray(sample.ids, dtype=np.int64)
            if ids.max() >= rows:
                raise DataError(
                    f"the tokenizer returns the id {ids.max()}, and the model has {rows} rows in its vocabulary table: "
                    "it is not the tokenizer that the model was trained with"
                )
            digest.update(ids.tobytes() + bytes([sample.num_targets % 256]))
        self.require_equal(digest.hexdigest())


class _Work(BatchWork):
    def __init__(
        self,
        model: GenerativeModel | PlainModel,
        batches: Sequence[Sequence[Sample]],
        num_tokens: int | None,
        on_batch: Callable[[int], None],
        first: int,
        running: RunningScore,
    ) -> None:
        super().__init__(on_batch, first)
        self._model, self._batches, self._num_tokens, self._running = model, batches, num_tokens, running
        self._results: list[tuple[Tensor, Tensor]] = []

    def activation_shape(self, micro_batch: int) -> tuple[tuple[int, int, int], torch.dtype]:
        batch = self._batches[micro_batch]
        shape = (_length(batch), len(batch), self._model.config.hidden_size)
        return shape, self._model.dtype

    def forward(self, chunk: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        batch, model = self._batches[micro_batch], self._model
        tokens_BS = torch.from_numpy(_padded(batch)).to(model.device)
        size, tokens = model.vocab_size, self._num_tokens
        places, wanted = (torch.from_numpy(found).to(model.device) for found in _targets(batch))
        if isinstance(model, PlainModel):
            logits_TV = model(tokens_BS).flatten(0, 1)[places].detach()
            self._append(batch, _score_logits(logits_TV, wanted, model.region, size, tokens or size))
            return logits_TV.new_zeros(())
        states_SBD = model.forward(tokens_BS, hidden_SBD=hidden, apply_head=False)
        if not model.stage.is_last:
            self._running.add(len(batch), None)
            return states_SBD
        states_TD = states_SBD.transpose(0, 1).flatten(0, 1)[places]
        found = score_targets(states_TD, model.output_weight, wanted, model.region, size, num_tokens=tokens)
        self._append(batch, found)
        return states_TD.new_zeros(())

    def _append(self, batch: Sequence[Sample], found: tuple[Tensor, Tensor]) -> None:
        self._results.append(found)
        self._running.add(len(batch), partial(prediction_sums, *found))

    def scores(self) -> Iterator[Score]:
        """Yield the scores of all samples, in order; none on a stage without predictions."""
        for batch, (logprobs, greedy) in zip(self._batches, self._results, strict=False):
            ends = np.cumsum([sample.num_targets for sample in batch])[:-1]
            parts = np.split(logprobs.double().cpu().numpy(), ends), np.split(greedy.cpu().numpy(), ends)
            yield from map(Score, *parts)


def _length(batch: Sequence[Sample]) -> int:
    """Return the padded input length of a batch; the last id of a sample is only a target."""
    return max(len(sample.ids) for sample in batch) - 1


def _padded(batch: Sequence[Sample]) -> NDArray[np.int64]:
    tokens_BS = np.zeros((len(batch), _length(batch)), dtype=np.int64)
    for row, sample in enumerate(batch):
        tokens_BS[row, : len(sample.ids) - 1] = sample.ids[:-1]
    return tokens_BS


def _targets(batch: Sequence[Sample]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions in [B * S] that predict the targets, and the targets, sample by sample."""
    length, places, targets = _length(batch), [], []
    for row, sample in enumerate(batch):
        last, count = row * length + len(sample.ids) - 1, sample.num_targets
        places.append(np.arange(last - count, last))
        targets.append(np.asarray(sample.ids[-count:], dtype=np.int64))
    return np.concatenate(places), np.concatenate(targets)


def score_targets(
    states_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    region: Region,
    vocab_size: int,
    bias_V: Tensor | None = None,
    *,
    num_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and whether no token is likelier (the first of equals counts).

    Shapes: states [T, D], equal on all ranks of the region; weight [V, D] and bias [V] of the logits, this rank's rows;
        targets [T] -> 2 x [T], equal on all ranks. Logarithms are taken in at least fp32. The first
        `num_tokens` rows of the table count, all if None.
    """
    rows = max(1, _LOGITS_AT_ONCE // weight_VD.shape[0])
    parts = []
    for states, targets in zip(states_TD.split(rows), targets_T.split(rows), strict=True):
        logits_TV = linear(states, weight_VD, bias_V, None).detach()
        parts.append(_score_logits(logits_TV, targets, region, vocab_size, num_tokens or vocab_size))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _score_logits(
    logits_TV: Tensor, targets_T: Tensor, region: Region, vocab_size: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Score targets as `score_targets` does, from the local columns of logits [T, V], which may be overwritten."""
    part = region.shard(vocab_size, even=False)
    logits_TV = logits_TV.to(at_least_fp32(logits_TV.dtype))
    if num_tokens < part.stop:
        logits_TV[:, max(0, num_tokens - part.start) :] = -torch.inf
    likeliest_T = _argmax(logits_TV)
    own_peak_T = logits_TV.gather(1, likeliest_T[:, None]).squeeze(1)
    here_T = (targets_T >= part.start) & (targets_T < part.stop)
    rows_T = torch.where(here_T, targets_T - part.start, 0)
    chosen_T = torch.where(here_T, logits_TV.gather(1, rows_T[:, None]).squeeze(1), 0.0)
    peak_T = region.all_reduce_max(own_peak_T)
    sums_T = logits_TV.sub_(peak_T[:, None]).exp_().sum(dim=-1)
    total_T, target_T = region.all_reduce_sum(torch.stack((sums_T, chosen_T)))
    first_T = torch.where(own_peak_T == peak_T, likeliest_T + part.start, vocab_size)
    best_T = -region.all_reduce_max(-first_T)
    return target_T - peak_T - total_T.log(), best_T == targets_T


def _argmax(logits_TV: Tensor) -> Tensor:
    """Return the first largest logit of each row; on a CPU by numpy, which is several times faster than torch."""
    if not is_host(logits_TV.device):
        return logits_TV.argmax(dim=-1)
    return torch.from_numpy(logits_TV.numpy().argmax(-1))
