"""The engine: takes requests and returns events, one step at a time, in one thread."""

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
from megalith.serve.runner import Batch, Chunk, Runner
from megalith.serve.sampler import BeamSearch, Choice, Row, apply_penalties, choose_tokens, score_tokens
from megalith.serve.scheduler import (
    BlockPool,
    BlockTable,
    ScheduledChunk,
    Scheduler,
    Sequence,
    chain_digest,
    padded_to_blocks,
)
from megalith.tokenizers import Tokenizer


@dataclass(frozen=True)
class Limits:
    """Upper bounds on the work of an engine."""

    step_tokens: int = 512  # most tokens of a step: long prompts are chunked, so that other answers keep flowing
    running: int = 64  # most sequences (samples, beams) that run at once
    waiting: int = 256  # most sequences that wait; a request beyond them is refused with `Busy`
    samples: int = 128  # the largest `n` and `beam_width`
    logprobs: int = 20  # the largest `logprobs`
    stop_texts: int = 16


@dataclass(frozen=True, eq=False)
class RequestHandle:
    """A submitted request; its events carry it."""

    id: int
    request: Request
    prefix: tuple[int, ...]  # tokens that the answer continues: the prompt, or none where an encoder reads it


@dataclass(frozen=True)
class Stats:
    """Counters of an engine."""

    waiting: int = 0  # sequences, now
    running: int = 0  # sequences, now
    blocks_used: int = 0  # blocks of the KV cache that a sequence holds, now
    blocks: int = 0  # blocks of the KV cache
    prompt_tokens: int = 0  # since the start
    generated_tokens: int = 0  # since the start
    reused_tokens: int = 0  # tokens of prompts found in the prefix cache, since the start
    preemptions: int = 0  # sequences whose blocks were freed and that were recomputed, since the start


@dataclass(eq=False)
class _Sample:
    """One sample of a request in progress."""

    handle: RequestHandle
    index: int
    rng: Random
    text: TextStream
    stops: StopTexts
    sequence: Sequence
    answer: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Search:
    """A beam search in progress; its beams advance together, once the logits of all are computed."""

    handle: RequestHandle
    beams: BeamSearch
    sequences: list[Sequence]
    logits: dict[Sequence, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _Job:
    """A request in progress: its open samples, or its beam search."""

    handle: RequestHandle
    stop_ids: frozenset[int]
    answer_start: int  # tokens of each sequence before the answer
    samples: list[_Sample] = field(default_factory=list)
    search: _Search | None = None
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: list[Top] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return self.search.sequences if self.search else [sample.sequence for sample in self.samples]


Events = list[tuple[RequestHandle, Event]]


class Engine:
    """Serves requests with a runner. Not thread-safe: one thread calls all methods (`serve.worker`).

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
        self.runner, self.tokenizer, self.limits = runner, tokenizer, limits or Limits()
        self.decoder_prompt = decoder_prompt
        self.vocab_size = min(tokenizer.vocab_size, runner.vocab_size)
        self._scheduler = Scheduler(
            BlockPool(runner.num_blocks, runner.block_size),
            step_tokens=self.limits.step_tokens,
            max_running=self.limits.running,
        )
        self._jobs: dict[RequestHandle, _Job] = {}
        self._events: Events = []
        self._numbers = self._prompt_tokens = self._generated_tokens = 0

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt with its answer, with an encoder of a prompt alone, by the model and the cache."""
        size = self.runner.block_size
        answer = 0 if self.decoder_prompt is None else padded_to_blocks(2, size)
        return max(0, min(self.runner.context_length, size * self.runner.num_blocks - answer))

    def max_answer_tokens(self, length: int) -> int:
        """Return the most tokens of an answer to a prompt of `length` tokens; negative if the prompt is too long."""
        if self.decoder_prompt is None or length > self.context_length:
            return self.context_length - length
        size = self.runner.block_size
        held = size * self.runner.num_blocks - padded_to_blocks(length, size) - 1
        return min(self.runner.context_length, held)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs or self._events)

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request; `RequestError` if it can never be served, `Busy` if too many wait."""
        self._check(request)
        width = request.beam_width or request.n
        waiting = sum(sequence.width for sequence in self._scheduler.waiting)
        if self._scheduler.waiting and waiting + width > self.limits.waiting:
            raise Busy(f"{waiting} sequences wait already and {self.limits.waiting} may; try again later")
        self._numbers += 1
        handle = RequestHandle(self._numbers, request, request.prompt if self.decoder_prompt is None else ())
        end = self.tokenizer.eod if self.decoder_prompt is None else self.decoder_prompt.end
        stop_ids = (end,) if request.stop_ids is None else request.stop_ids
        first = self._sequence(request, width)
        first.owner = job = _Job(handle, frozenset((*stop_ids, *request.more_stop_ids)), len(first.tokens))
        if request.beam_width:
            beams = BeamSearch(request.beam_width, request.length_penalty, job.stop_ids)
            job.search = _Search(handle, beams, [first])
        else:
            seed = SystemRandom().getrandbits(64) if request.seed is None else request.seed
            job.samples = [self._sample(handle, index, seed, first) for index in range(request.n)]
        if request.prompt_logprobs:
            job.prompt_logprobs, job.prompt_top = [None], [()]
            self._emit_scores(job)
        self._jobs[handle] = job
        self._scheduler.add(first)
        self._prompt_tokens += len(request.prompt)
        return handle

    def _sequence(self, request: Request, width: int) -> Sequence:
        """Return the sequence before the answer: the prompt, or the encoder input and the decoder's first token."""
        length, tokens = len(request.prompt), list(request.prompt)
        new = min(request.max_new_tokens, self.max_answer_tokens(length))
        if self.decoder_prompt is None:
            return Sequence(tokens, length + new, 0 if request.prompt_logprobs else length - 1, width)
        tokens += [0] * (padded_to_blocks(length, self.runner.block_size) - length) + [self.decoder_prompt.start]
        table = BlockTable(root=chain_digest(b"text", request.prompt))
        return Sequence(tokens, len(tokens) + new, len(tokens) - 1, width, encoder_length=length, block_table=table)

    def _sample(self, handle: RequestHandle, index: int, seed: int, sequence: Sequence) -> _Sample:
        request = handle.request
        return _Sample(
            handle,
            index,
            Random(f"{seed}/{index}"),
            TextStream(self.tokenizer.decode, handle.prefix, request.hidden_ids),
            StopTexts(request.stop_texts),
            sequence,
        )

    def cancel(self, handle: RequestHandle) -> None:
        """Stop a request; its open samples finish as "cancelled" at the next step. No effect on a finished one."""
        job = self._jobs.pop(handle, None)
        if job is None:
            return
        for sequence in dict.fromkeys(job.sequences):  # samples share one until the prompt is computed
            self._scheduler.remove(sequence)
        for index in [0] if job.search else [sample.index for sample in job.samples]:
            self._events.append((handle, Finished("cancelled", sample=index)))

    def step(self) -> Events:
        """Compute one batch; return its events, in order for each sample. `PeerError` if another rank is gone.

        Without work it sends the other ranks a heartbeat: call it at least once a second.
        """
        plan = self._scheduler.plan()
        if plan.chunks:
            size = self.runner.block_size
            chunks = [_batch_chunk(chunk, size) for chunk in plan.chunks]
            logits_RV = self.runner.run(Batch(chunks, plan.copies))[:, : self.vocab_size]
            self._scheduler.done(plan)
            self._dispatch_logits(plan.chunks, logits_RV)
        else:
            self.runner.ping()
        events, self._events = self._events, []
        return events

    def run(self, request: Request) -> Iterator[Event]:
        """Serve one request alone, event by event."""
        handle = self.submit(request)
        while handle in self._jobs:
            yield from (event for owner, event in self.step() if owner is handle)

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
        """End the loops of the other ranks; no step can follow."""
        self.runner.close()

    # --- validation ---

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

    # --- logits to events ---

    def _dispatch_logits(self, chunks: Seq[ScheduledChunk], logits_RV: Tensor) -> None:
        """Pass the rows of logits, in order of the chunks, to the samples, searches and prompts that wait for them."""
        row = 0
        samples: list[_Sample] = []
        rows: list[int] = []
        searches: list[_Search] = []
        for chunk in chunks:
            job: _Job = chunk.sequence.owner
            first, row = row, row + chunk.num_logits
            if not chunk.num_logits:
                continue
            if job.prompt_logprobs and len(job.prompt_logprobs) < len(job.handle.request.prompt):
                self._score_prompt(job, chunk, logits_RV[first:row])
            if chunk.stop < len(chunk.sequence.tokens):
                continue
            if job.search is not None:
                job.search.logits[chunk.sequence] = logits_RV[row - 1]
                searches.append(job.search)
                continue
            if job.handle.request.max_new_tokens == 0:
                for sample in list(job.samples):
                    self._finish(job, sample, "length")
                continue
            samples_here = [sample for sample in job.samples if sample.sequence is chunk.sequence]
            for sample in samples_here[1:]:
                sample.sequence = self._scheduler.fork(chunk.sequence, job)
            samples += samples_here
            rows += [row - 1] * len(samples_here)
        if samples:
            self._choose(samples, logits_RV if rows == list(range(logits_RV.shape[0])) else logits_RV[rows])
        for search in dict.fromkeys(searches):
            if len(search.logits) == len(search.sequences):
                self._advance(search)

    def _score_prompt(self, job: _Job, chunk: ScheduledChunk, logits_PV: Tensor) -> None:
        """Score prompt tokens by the logits [P, V] of the last P tokens of a chunk; each scores the token after it."""
        request = job.handle.request
        following = request.prompt[chunk.stop - chunk.num_logits + 1 : chunk.stop + 1]
        for logprob, top in score_tokens(logits_PV[: len(following)], following, max(1, request.logprobs or 0)):
            job.prompt_logprobs.append(logprob)
            job.prompt_top.append(top)
        self._emit_scores(job)

    def _emit_scores(self, job: _Job) -> None:
        """Emit the prompt's scores once they are complete; for a prompt of one token they are from the start."""
        if len(job.prompt_logprobs) == len(job.handle.request.prompt):
            self._events.append((job.handle, Scores(tuple(job.prompt_logprobs), tuple(job.prompt_top))))

    def _choose(self, samples: list[_Sample], logits_BV: Tensor) -> None:
        chosen = choose_tokens(logits_BV, [_row(sample) for sample in samples])
        self._generated_tokens += len(samples)
        for sample, choice in zip(samples, chosen, strict=True):
            self._append(self._jobs[sample.handle], sample, choice)

    def _append(self, job: _Job, sample: _Sample, choice: Choice) -> None:
        """Append a token to a sample, and finish the sample if the token is its last."""
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
        self._events.append((job.handle, Token(token, shown, choice.logprob, choice.top, sample.index)))
        if reason is not None:
            self._finish(job, sample, reason, stop=stop)

    def _finish(
        self, job: _Job, sample: _Sample, reason: Reason, message: str = "", stop: int | str | None = None
    ) -> None:
        job.samples.remove(sample)
        if not any(other.sequence is sample.sequence for other in job.samples):
            self._scheduler.remove(sample.sequence)
        self._events.append((job.handle, Finished(reason, message, stop, sample.index)))
        if not job.samples:
            del self._jobs[job.handle]

    def _advance(self, search: _Search) -> None:
        """Take one step of a beam search: its beams end, continue or fork."""
        request, parents = search.handle.request, search.sequences
        answer_start = self._jobs[search.handle].answer_start
        answers = [sequence.tokens[answer_start:] for sequence in parents]
        logits_WV = torch.stack([search.logits.pop(sequence) for sequence in parents])
        bans = Sampling(banned=request.sampling.banned, banned_after=request.sampling.banned_after)
        if bans.changes_logits:
            for logits_V, answer in zip(logits_WV, answers, strict=True):
                apply_penalties(logits_V, bans, search.handle.prefix, answer)
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
            self._end(search, answer_start)

    def _end(self, search: _Search, answer_start: int) -> None:
        hypotheses = search.beams.best([sequence.tokens[answer_start:] for sequence in search.sequences])
        for sequence in search.sequences:
            self._scheduler.remove(sequence)
        texts, found = zip(*hypotheses, strict=True)
        stopped = not search.sequences
        self._events.append((search.handle, Beams(tuple(map(tuple, texts)), found)))
        self._events.append((search.handle, Finished("stop" if stopped else "length")))
        del self._jobs[search.handle]


def _batch_chunk(chunk: ScheduledChunk, block_size: int) -> Chunk:
    sequence = chunk.sequence
    blocks = sequence.block_table.blocks[: -(-chunk.stop // block_size)]
    tokens = sequence.tokens[chunk.start : chunk.stop]
    return Chunk(tokens, chunk.start, blocks, chunk.num_logits, sequence.encoder_length)


def _row(sample: _Sample) -> Row:
    request = sample.handle.request
    uniform = 0.0 if request.sampling.greedy else sample.rng.random()
    return Row(request.sampling, uniform, sample.handle.prefix, sample.answer, request.logprobs)
