"""The engine: requests in, events out, one step at a time, in one thread."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from random import Random, SystemRandom

import torch
from torch import Tensor

from megalith.serve.model_runner import DecoderPrompt
from megalith.serve.request import (
    Beams,
    Busy,
    Event,
    Finished,
    Reason,
    Request,
    RequestError,
    Sampling,
    Scores,
    StopTexts,
    TextStream,
    Token,
    Top,
)
from megalith.serve.runner import Batch, Piece, Runner
from megalith.serve.sampler import BeamSearch, Choice, Row, change, choose, scores
from megalith.serve.scheduler import Blocks, Part, Scheduler, Sequence, Table, chained, filled_blocks
from megalith.tokenizers import Tokenizer


@dataclass(frozen=True)
class Limits:
    """What bounds the work of an engine."""

    step_tokens: int = 512  # read in one step at most: long prompts are chunked, so that other answers keep flowing
    running: int = 64  # how many sequences (samples, beams) are worked on at once
    waiting: int = 256  # how many more may wait; a request beyond them is refused with `Busy`
    samples: int = 128  # the largest `n` and `beam_width`
    logprobs: int = 20  # the largest `logprobs`
    stop_texts: int = 16


@dataclass(frozen=True, eq=False)
class Ticket:
    """A request that was taken."""

    number: int
    request: Request
    continued: tuple[int, ...]  # what the answer continues: the prompt, or nothing where an encoder reads that


@dataclass(frozen=True)
class Stats:
    """What an engine has done and has to do."""

    waiting: int = 0  # sequences, now
    running: int = 0  # sequences, now
    blocks_used: int = 0  # of the cache, now; used ones are those that a sequence needs
    blocks: int = 0  # of the cache, now; used ones are those that a sequence needs
    prompt_tokens: int = 0  # since the start
    generated_tokens: int = 0  # since the start
    reused_tokens: int = 0  # of prompts, whose keys and values were there already
    preemptions: int = 0  # sequences that had to give their blocks to others and were read again


@dataclass(eq=False)
class _Sample:
    """One answer that grows."""

    ticket: Ticket
    index: int
    chance: Random
    text: TextStream
    stops: StopTexts
    sequence: Sequence
    answer: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Search:
    """A beam search: its beams go on together, when the logits of all are there."""

    ticket: Ticket
    beams: BeamSearch
    sequences: list[Sequence]
    logits: dict[Sequence, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Job:
    """What is open of a request."""

    ticket: Ticket
    stop_ids: frozenset[int]
    begin: int  # how many tokens of each sequence stand before the answer
    samples: list[_Sample] = field(default_factory=list)
    search: _Search | None = None
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: list[Top] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return self.search.sequences if self.search else [sample.sequence for sample in self.samples]


Events = list[tuple[Ticket, Event]]


class Engine:
    """Serves requests with a runner. Not thread-safe: one thread calls all methods (see `serve.worker`).

    `decoder_prompt` is that of an encoder-decoder model; None for a model that continues its prompt.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        limits: Limits | None = None,
        *,
        decoder_prompt: DecoderPrompt | None = None,
    ) -> None:
        self.runner, self.tokenizer, self.limits, self.decoder_prompt = (
            runner,
            tokenizer,
            limits or Limits(),
            decoder_prompt,
        )
        self.vocab_size = min(tokenizer.vocab_size, runner.vocab_size)
        self._scheduler = Scheduler(
            Blocks(runner.num_blocks, runner.block_size),
            step_tokens=self.limits.step_tokens,
            max_running=self.limits.running,
        )
        self._jobs: dict[Ticket, _Job] = {}
        self._events: Events = []
        self._numbers = self._prompt_tokens = self._generated_tokens = 0

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer may have together, or with an encoder a prompt alone.

        The cache may hold less than the model reads.
        """
        size = self.runner.block_size
        answer = 0 if self.decoder_prompt is None else filled_blocks(2, size)
        return max(0, min(self.runner.context_length, size * self.runner.num_blocks - answer))

    def room(self, length: int) -> int:
        """How many tokens the answer to a prompt of so many may have; negative, by how many the prompt is too long."""
        if self.decoder_prompt is None or length > self.context_length:
            return self.context_length - length
        size = self.runner.block_size
        held = size * self.runner.num_blocks - filled_blocks(length, size) - 1
        return min(self.runner.context_length, held)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._events)

    def submit(self, request: Request) -> Ticket:
        """Take a request; `RequestError` if it can never be served, `Busy` if too many wait."""
        self._check(request)
        width = request.beam_width or request.n
        waiting = sum(sequence.width for sequence in self._scheduler.waiting)
        if self._scheduler.waiting and waiting + width > self.limits.waiting:
            raise Busy(f"{waiting} sequences wait already and {self.limits.waiting} may; try again later")
        self._numbers += 1
        ticket = Ticket(self._numbers, request, request.prompt if self.decoder_prompt is None else ())
        end = self.tokenizer.eod if self.decoder_prompt is None else self.decoder_prompt.end
        stop_ids = (end,) if request.stop_ids is None else request.stop_ids
        first = self._sequence(request, width)
        first.owner = job = _Job(ticket, frozenset((*stop_ids, *request.more_stop_ids)), len(first.tokens))
        if request.beam_width:
            beams = BeamSearch(request.beam_width, request.length_penalty, job.stop_ids)
            job.search = _Search(ticket, beams, [first])
        else:
            seed = SystemRandom().getrandbits(64) if request.seed is None else request.seed
            job.samples = [self._sample(ticket, index, seed, first) for index in range(request.n)]
        if request.prompt_logprobs:
            job.prompt_logprobs, job.prompt_top = [None], [()]
            self._tell_scores(job)
        self._jobs[ticket] = job
        self._scheduler.add(first)
        self._prompt_tokens += len(request.prompt)
        return ticket

    def _sequence(self, request: Request, width: int) -> Sequence:
        """What is read before there is an answer: the prompt, or a text for the encoder and the decoder's start."""
        length, tokens = len(request.prompt), list(request.prompt)
        new = min(request.max_new_tokens, self.room(length))
        if self.decoder_prompt is None:
            return Sequence(tokens, length + new, 0 if request.prompt_logprobs else length - 1, width)
        tokens += [0] * (filled_blocks(length, self.runner.block_size) - length) + [self.decoder_prompt.start]
        table = Table(root=chained(b"text", request.prompt))
        return Sequence(tokens, len(tokens) + new, len(tokens) - 1, width, source=length, table=table)

    def _sample(self, ticket: Ticket, index: int, seed: int, sequence: Sequence) -> _Sample:
        request = ticket.request
        return _Sample(
            ticket,
            index,
            Random(f"{seed}/{index}"),
            TextStream(self.tokenizer.decode, ticket.continued, request.hidden_ids),
            StopTexts(request.stop_texts),
            sequence,
        )

    def cancel(self, ticket: Ticket) -> None:
        """Stop working on it; its open samples finish with "cancelled" at the next step. Finished ones stay so."""
        job = self._jobs.pop(ticket, None)
        if job is None:
            return
        for sequence in dict.fromkeys(job.sequences):  # samples share one until the prompt is read
            self._scheduler.remove(sequence)
        for index in [0] if job.search else [sample.index for sample in job.samples]:
            self._events.append((ticket, Finished("cancelled", sample=index)))

    def step(self) -> Events:
        """Compute one batch; return its events, in order for each sample. `PeerError` if another rank is gone.

        Without work it tells the other ranks that this one lives: call it at least once a second.
        """
        plan = self._scheduler.plan()
        if plan.parts:
            size = self.runner.block_size
            pieces = [_piece(part, size) for part in plan.parts]
            logits_RV = self.runner.run(Batch(pieces, plan.copies))[:, : self.vocab_size]
            self._scheduler.done(plan)
            self._take(plan.parts, logits_RV)
        else:
            self.runner.ping()
        events, self._events = self._events, []
        return events

    def run(self, request: Request) -> Iterator[Event]:
        """Serve one request alone, event by event."""
        ticket = self.submit(request)
        while ticket in self._jobs:
            yield from (event for owner, event in self.step() if owner is ticket)

    def stats(self) -> Stats:
        scheduler = self._scheduler
        return Stats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            blocks_used=scheduler.blocks.used,
            blocks=scheduler.blocks.count,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            reused_tokens=scheduler.reused,
            preemptions=scheduler.preemptions,
        )

    def close(self) -> None:
        """Let the other ranks go; afterwards there are no more steps."""
        self.runner.close()

    # --- what a request may ask ---

    def _check(self, request: Request) -> None:
        limits, length = self.limits, len(request.prompt)
        for name, message in request.sampling.problems():
            raise RequestError(name, message)
        if not request.prompt:
            raise RequestError("prompt", "is empty: generation continues a text of at least one token")
        if bad := [token for token in request.prompt if not 0 <= token < self.vocab_size]:
            raise RequestError("prompt", f"has the token {bad[0]}; the vocabulary has 0 to {self.vocab_size - 1}")
        for name, value, least, most in (
            ("max_new_tokens", request.max_new_tokens, 0 if request.prompt_logprobs else 1, None),
            ("n", request.n, 1, limits.samples),
            ("beam_width", 1 if request.beam_width is None else request.beam_width, 1, limits.samples),
            ("logprobs", request.logprobs or 0, 0, limits.logprobs),
        ):
            if value < least or (most is not None and value > most):
                raise RequestError(
                    name, f"{value} is not {f'{least} or more' if most is None else f'{least} to {most}'}"
                )
        together = self.decoder_prompt is None
        longest = self.context_length - (1 if together and request.max_new_tokens else 0)
        if length > longest:
            raise RequestError(
                "prompt",
                f"has {length} tokens, and the model reads {self.context_length}{' with the answer' * together}: "
                f"shorten it by {length - longest} or more",
            )
        if request.prompt_logprobs and not together:
            raise RequestError("prompt_logprobs", "are of models that continue the prompt; this one answers it")
        if len(request.stop_texts) > limits.stop_texts or not all(request.stop_texts):
            raise RequestError("stop_texts", f"are 1 to {limits.stop_texts} texts, none of them empty")
        if request.beam_width and (request.n > 1 or request.logprobs is not None or request.prompt_logprobs):
            raise RequestError("beam_width", "goes with n 1 and without log-probabilities")
        if request.beam_width and 2 * request.beam_width > self.vocab_size:
            raise RequestError("beam_width", f"{request.beam_width} is above half of the vocabulary, {self.vocab_size}")

    # --- what comes of logits ---

    def _take(self, parts: Seq[Part], logits_RV: Tensor) -> None:
        """Give the rows of logits to those whose tokens were read."""
        row = 0
        samples: list[_Sample] = []
        rows: list[int] = []
        searches: list[_Search] = []
        for part in parts:
            job: _Job = part.sequence.owner
            first, row = row, row + part.wanted
            if not part.wanted:
                continue
            if job.prompt_logprobs and len(job.prompt_logprobs) < len(job.ticket.request.prompt):
                self._score_prompt(job, part, logits_RV[first:row])
            if part.stop < len(part.sequence.tokens):
                continue
            if job.search is not None:
                job.search.logits[part.sequence] = logits_RV[row - 1]
                searches.append(job.search)
                continue
            if job.ticket.request.max_new_tokens == 0:
                for sample in list(job.samples):
                    self._finish(job, sample, "length")
                continue
            mine = [sample for sample in job.samples if sample.sequence is part.sequence]
            for sample in mine[1:]:
                sample.sequence = self._scheduler.fork(part.sequence, job)
            samples += mine
            rows += [row - 1] * len(mine)
        if samples:
            self._choose(samples, logits_RV if rows == list(range(logits_RV.shape[0])) else logits_RV[rows])
        for search in dict.fromkeys(searches):
            if len(search.logits) == len(search.sequences):
                self._advance(search)

    def _score_prompt(self, job: _Job, part: Part, logits_PV: Tensor) -> None:
        """Rows of logits are the last ones of the part; each scores the token behind it."""
        request = job.ticket.request
        following = request.prompt[part.stop - part.wanted + 1 : part.stop + 1]
        for logprob, top in scores(logits_PV[: len(following)], following, max(1, request.logprobs or 0)):
            job.prompt_logprobs.append(logprob)
            job.prompt_top.append(top)
        self._tell_scores(job)

    def _tell_scores(self, job: _Job) -> None:
        """Once all are there; of a prompt of one token they are from the start."""
        if len(job.prompt_logprobs) == len(job.ticket.request.prompt):
            self._events.append((job.ticket, Scores(tuple(job.prompt_logprobs), tuple(job.prompt_top))))

    def _choose(self, samples: list[_Sample], logits_BV: Tensor) -> None:
        chosen = choose(logits_BV, [_row(sample) for sample in samples])
        self._generated_tokens += len(samples)
        for sample, choice in zip(samples, chosen, strict=True):
            self._append(self._jobs[sample.ticket], sample, choice)

    def _append(self, job: _Job, sample: _Sample, choice: Choice) -> None:
        """One more token, and the end of the sample if it is the last."""
        if choice.problem:
            self._finish(job, sample, "error", choice.problem)
            return
        token = choice.token
        reason: Reason | None = None
        stop: int | str | None = None
        sample.answer.append(token)
        sample.sequence.tokens.append(token)
        if token in job.stop_ids:
            shown, reason, stop = "", "stop", token
        else:
            shown, stop = sample.stops.push(sample.text.push(token))
            if stop is not None:
                reason = "stop"
            elif len(sample.sequence.tokens) >= sample.sequence.limit:
                reason = "length"
        if reason is not None and not isinstance(stop, str):
            rest, late = sample.stops.push(sample.text.rest())
            shown += rest
            if late is None:
                shown += sample.stops.rest()
            else:
                reason, stop = "stop", late
        self._events.append((job.ticket, Token(token, shown, choice.logprob, choice.top, sample.index)))
        if reason is not None:
            self._finish(job, sample, reason, stop=stop)

    def _finish(
        self, job: _Job, sample: _Sample, reason: Reason, message: str = "", stop: int | str | None = None
    ) -> None:
        job.samples.remove(sample)
        if not any(other.sequence is sample.sequence for other in job.samples):
            self._scheduler.remove(sample.sequence)
        self._events.append((job.ticket, Finished(reason, message, stop, sample.index)))
        if not job.samples:
            del self._jobs[job.ticket]

    def _advance(self, search: _Search) -> None:
        """One step of a beam search: its beams end, go on and split."""
        request, parents = search.ticket.request, search.sequences
        begin = self._jobs[search.ticket].begin
        answers = [sequence.tokens[begin:] for sequence in parents]
        logits_WV = torch.stack([search.logits.pop(sequence) for sequence in parents])
        bans = Sampling(banned=request.sampling.banned, banned_after=request.sampling.banned_after)
        if bans.changes_logits:
            for logits_V, answer in zip(logits_WV, answers, strict=True):
                change(logits_V, bans, search.ticket.continued, answer)
        following = search.beams.step(logits_WV, answers)
        self._generated_tokens += len(following)
        search.sequences = []
        for parent, _ in following:
            sequence = parents[parent]
            taken = sequence in search.sequences
            search.sequences.append(self._scheduler.fork(sequence, sequence.owner) if taken else sequence)
        for sequence in parents:
            if sequence not in search.sequences:
                self._scheduler.remove(sequence)
        for sequence, (_, token) in zip(search.sequences, following, strict=True):
            sequence.tokens.append(token)
        if not following or len(search.sequences[0].tokens) >= search.sequences[0].limit:
            self._end(search, begin)

    def _end(self, search: _Search, begin: int) -> None:
        hypotheses = search.beams.best([sequence.tokens[begin:] for sequence in search.sequences])
        for sequence in search.sequences:
            self._scheduler.remove(sequence)
        texts, found = zip(*hypotheses, strict=True)
        stopped = not search.sequences
        self._events.append((search.ticket, Beams(tuple(map(tuple, texts)), found)))
        self._events.append((search.ticket, Finished("stop" if stopped else "length")))
        del self._jobs[search.ticket]


def _piece(part: Part, block_size: int) -> Piece:
    sequence = part.sequence
    blocks = sequence.table.blocks[: -(-part.stop // block_size)]
    return Piece(sequence.tokens[part.start : part.stop], part.start, blocks, part.wanted, sequence.source)


def _row(sample: _Sample) -> Row:
    request = sample.ticket.request
    uniform = 0.0 if request.sampling.greedy else sample.chance.random()
    return Row(request.sampling, uniform, sample.ticket.continued, sample.answer, request.logprobs)
