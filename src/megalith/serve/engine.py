"""The engine: takes requests and returns events, one step at a time, in one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random, SystemRandom

import torch
from torch import Tensor

from megalith.nn.lora import Adapter
from megalith.serve.model_runner import DecoderPrompt, ModelRunner
from megalith.serve.request import (
    Beams,
    Event,
    Finished,
    PromptLogprobs,
    QueueFullError,
    Reason,
    Request,
    RequestError,
    Sampling,
    StopTexts,
    TextStream,
    Token,
    TopLogprobs,
)
from megalith.serve.runner import Batch, Chunk, Runner
from megalith.serve.sampler import BeamSearch, SampledToken, SamplingInput, apply_penalties, choose_tokens, score_tokens
from megalith.serve.scheduler import (
    BlockPool,
    BlockTable,
    ScheduledChunk,
    Scheduler,
    Sequence,
    block_hash,
    padded_to_blocks,
)
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import end_ids


@dataclass(frozen=True)
class Limits:
    """Upper bounds on the work of an engine."""

    max_num_batched_tokens: int = 512  # tokens per step; longer prompts are chunked, so that decoding continues
    max_num_seqs: int = 64  # sequences (samples, beams) that run at once
    max_waiting: int = 256  # sequences in the queue; a request beyond them is refused with `QueueFullError`
    samples: int = 128  # the largest `n` and `beam_width`
    logprobs: int = 20  # the largest `logprobs`
    stop_texts: int = 32  # 16 of a client, and those of a chat template


@dataclass(frozen=True, eq=False)
class RequestHandle:
    """A submitted request; its events carry it."""

    id: int
    request: Request
    prefix: tuple[int, ...]  # decoder tokens before the output: the prompt; empty if an encoder reads the prompt


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
    output: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _BeamSearchState:
    """A beam search in progress; the beams advance together, once the logits of all are computed."""

    handle: RequestHandle
    beams: BeamSearch
    sequences: list[Sequence]
    logits: dict[Sequence, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class _RequestState:
    """A request in progress: its unfinished samples, or its beam search."""

    handle: RequestHandle
    stop_ids: frozenset[int]
    output_start: int  # index of the first output token in each sequence
    samples: list[_Sample] = field(default_factory=list)
    search: _BeamSearchState | None = None
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: list[TopLogprobs] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        return self.search.sequences if self.search else [sample.sequence for sample in self.samples]


Events = list[tuple[RequestHandle, Event]]


class Engine:
    """Serves requests with a runner. Not thread-safe: one thread calls all methods (`serve.worker`).

    `decoder_prompt` holds the start and end tokens of the decoder; None for decoder-only models. `adapters` are the
    numbers of the LoRA adapters that requests may have. `around_step` returns a context for the computation of a
    number of tokens.
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
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_num_seqs=self.limits.max_num_seqs,
        )
        self._requests: dict[RequestHandle, _RequestState] = {}
        self._events: Events = []
        self._last_request_id = self._prompt_tokens = self._generated_tokens = 0
        self.adapters, self._unloaded = set[int](), set[int]()
        self.around_step: Callable[[int], AbstractContextManager[object]] = nullcontext

    @property
    def context_length(self) -> int:
        """Maximum prompt + output length (prompt only for encoder-decoder models), limited by model and KV cache."""
        size = self.runner.block_size
        # An encoder-decoder model also needs blocks for the decoder's start token and one output token.
        decoder = 0 if self.decoder_prompt is None else padded_to_blocks(2, size)
        return max(0, min(self.runner.context_length, size * self.runner.num_blocks - decoder))

    def max_output_tokens(self, length: int) -> int:
        """Return the maximum output length for a prompt of `length` tokens; negative if the prompt is too long."""
        if self.decoder_prompt is None or length > self.context_length:
            return self.context_length - length
        size = self.runner.block_size
        available = size * self.runner.num_blocks - padded_to_blocks(length, size)
        return min(self.runner.context_length, available - 1)  # one is the decoder's start token

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._events)

    def add_adapters(self, number: int, adapters: Mapping[str, Adapter]) -> None:
        """Add LoRA adapters (`ModelRunner.add_adapters`), all others of this engine having had other numbers."""
        assert isinstance(self.runner, ModelRunner) and number not in (0, *self.adapters)
        self.runner.add_adapters(number, adapters)
        self.adapters.add(number)

    def remove_adapters(self, number: int) -> None:
        """Refuse further requests with these adapters, and free them after the last that runs."""
        self.adapters.discard(number)
        self._unloaded.add(number)

    def _free_adapters(self) -> None:
        used = {handle.request.adapter for handle in self._requests}
        for number in self._unloaded - used:
            assert isinstance(self.runner, ModelRunner)
            self.runner.remove_adapters(number)
        self._unloaded &= used

    def submit(self, request: Request) -> RequestHandle:
        """Queue a request. `RequestError` if it can never be served, `QueueFullError` if the queue is full."""
        self._check(request)
        num_branches = request.beam_width or request.n
        waiting = sum(sequence.num_branches for sequence in self._scheduler.waiting)
        if self._scheduler.waiting and waiting + num_branches > self.limits.max_waiting:
            raise QueueFullError(f"queue full: {waiting} of at most {self.limits.max_waiting} sequences waiting")
        self._last_request_id += 1
        handle = RequestHandle(self._last_request_id, request, request.prompt if self.decoder_prompt is None else ())
        stop_ids = request.stop_ids
        if stop_ids is None:
            stop_ids = end_ids(self.tokenizer) if self.decoder_prompt is None else (self.decoder_prompt.end,)
        sequence = self._make_sequence(request, num_branches)
        all_stop_ids = frozenset((*stop_ids, *request.extra_stop_ids))
        sequence.owner = state = _RequestState(handle, all_stop_ids, len(sequence.tokens))
        if request.beam_width:
            beams = BeamSearch(request.beam_width, request.length_penalty, state.stop_ids)
            state.search = _BeamSearchState(handle, beams, [sequence])
        else:
            seed = SystemRandom().getrandbits(64) if request.seed is None else request.seed
            state.samples = [self._make_sample(handle, index, seed, sequence) for index in range(request.n)]
        if request.prompt_logprobs:
            state.prompt_logprobs, state.prompt_top = [None], [()]
            self._emit_prompt_logprobs(state)
        self._requests[handle] = state
        self._scheduler.add(sequence)
        self._prompt_tokens += len(request.prompt)
        return handle

    def _make_sequence(self, request: Request, num_branches: int) -> Sequence:
        """Return the sequence of a new request: the prompt, or the encoder input and the decoder's start token."""
        length, tokens = len(request.prompt), list(request.prompt)
        new = min(request.max_new_tokens, self.max_output_tokens(length))
        if self.decoder_prompt is None:
            # Adapters have other keys and values; no number is given twice, so blocks of others are never found.
            table = BlockTable(cache_salt=b"adapter %d" % request.adapter if request.adapter else b"")
            start = 0 if request.prompt_logprobs else length - 1
            return Sequence(tokens, length + new, start, num_branches, block_table=table)
        tokens += [0] * (padded_to_blocks(length, self.runner.block_size) - length) + [self.decoder_prompt.start]
        table = BlockTable(cache_salt=block_hash(b"text", request.prompt))
        return Sequence(
            tokens, len(tokens) + new, len(tokens) - 1, num_branches, encoder_length=length, block_table=table
        )

    def _make_sample(self, handle: RequestHandle, index: int, seed: int, sequence: Sequence) -> _Sample:
        request = handle.request
        return _Sample(
            handle,
            index,
            Random(f"{seed}/{index}"),
            TextStream(self.tokenizer.decode, handle.prefix, request.skip_token_ids),
            StopTexts(request.stop_texts),
            sequence,
        )

    def cancel(self, handle: RequestHandle) -> None:
        """Stop a request; its unfinished samples end as "cancelled" at the next step. No effect if it has ended."""
        state = self._requests.pop(handle, None)
        if state is None:
            return
        for sequence in dict.fromkeys(state.sequences):  # samples share one until the prompt is computed
            self._scheduler.remove(sequence)
        for index in [0] if state.search else [sample.index for sample in state.samples]:
            self._events.append((handle, Finished("cancelled", sample=index)))

    def step(self) -> Events:
        """Compute one batch; return its events, in order for each sample. `PeerError` if another rank is gone.

        Without work it sends the other ranks a heartbeat: call it at least once a second.
        """
        if self._unloaded:
            self._free_adapters()
        scheduled = self._scheduler.schedule()
        if scheduled.chunks:
            size = self.runner.block_size
            chunks = [_batch_chunk(chunk, size) for chunk in scheduled.chunks]
            with self.around_step(sum(len(chunk.tokens) for chunk in chunks)):
                logits_RV = self.runner.run(Batch(chunks, scheduled.copies))[:, : self.vocab_size]
            self._scheduler.complete_step(scheduled)
            self._dispatch_logits(scheduled.chunks, logits_RV)
        else:
            self.runner.ping()
        events, self._events = self._events, []
        return events

    def run(self, request: Request) -> Iterator[Event]:
        """Serve one request alone, event by event."""
        handle = self.submit(request)
        while handle in self._requests:
            yield from (event for owner, event in self.step() if owner is handle)

    def stats(self) -> Stats:
        scheduler = self._scheduler
        return Stats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            blocks_used=scheduler.blocks.num_used,
            blocks=scheduler.blocks.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            reused_tokens=scheduler.num_cached_tokens,
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
        if request.adapter not in (0, *self.adapters):
            raise RequestError("adapter", "is not loaded any more")
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
        decoder_only = self.decoder_prompt is None
        longest = self.context_length - (1 if decoder_only and request.max_new_tokens else 0)
        if length > longest:
            raise RequestError(
                "prompt",
                f"has {length} tokens, and the model reads {self.context_length}{' with the output' * decoder_only}: "
                f"shorten it by {length - longest} or more",
            )
        if request.prompt_logprobs and not decoder_only:
            raise RequestError("prompt_logprobs", "is not supported for encoder-decoder models")
        if len(request.stop_texts) > limits.stop_texts or not all(request.stop_texts):
            raise RequestError("stop_texts", f"must be at most {limits.stop_texts} non-empty strings")
        if request.beam_width and (request.n > 1 or request.logprobs is not None or request.prompt_logprobs):
            raise RequestError("beam_width", "requires n=1 and no logprobs")
        if request.beam_width and 2 * request.beam_width > self.vocab_size:
            raise RequestError("beam_width", f"{request.beam_width} is above half of the vocabulary, {self.vocab_size}")

    # --- logits to events ---

    def _dispatch_logits(self, chunks: list[ScheduledChunk], logits_RV: Tensor) -> None:
        """Pass the logits [R, V], in order of the chunks, to the samples, beam searches and prompts that need them."""
        row = 0
        samples: list[_Sample] = []
        rows: list[int] = []
        searches: list[_BeamSearchState] = []
        for chunk in chunks:
            state: _RequestState = chunk.sequence.owner
            start, row = row, row + chunk.num_logits
            if not chunk.num_logits:
                continue
            if state.prompt_logprobs and len(state.prompt_logprobs) < len(state.handle.request.prompt):
                self._score_prompt(state, chunk, logits_RV[start:row])
            if chunk.stop < len(chunk.sequence.tokens):
                continue
            if state.search is not None:
                state.search.logits[chunk.sequence] = logits_RV[row - 1]
                searches.append(state.search)
                continue
            if state.handle.request.max_new_tokens == 0:
                for sample in list(state.samples):
                    self._finish_sample(state, sample, "length")
                continue
            samples_here = [sample for sample in state.samples if sample.sequence is chunk.sequence]
            for sample in samples_here[1:]:
                sample.sequence = self._scheduler.fork(chunk.sequence, state)
            samples += samples_here
            rows += [row - 1] * len(samples_here)
        if samples:
            self._sample_tokens(samples, logits_RV if rows == list(range(logits_RV.shape[0])) else logits_RV[rows])
        for search in dict.fromkeys(searches):
            if len(search.logits) == len(search.sequences):
                self._advance(search)

    def _score_prompt(self, state: _RequestState, chunk: ScheduledChunk, logits_PV: Tensor) -> None:
        """Add the log-probability of the next prompt token for each row of the chunk's last P logits [P, V]."""
        request = state.handle.request
        targets = request.prompt[chunk.stop - chunk.num_logits + 1 : chunk.stop + 1]
        for logprob, top in score_tokens(logits_PV[: len(targets)], targets, max(1, request.logprobs or 0)):
            state.prompt_logprobs.append(logprob)
            state.prompt_top.append(top)
        self._emit_prompt_logprobs(state)

    def _emit_prompt_logprobs(self, state: _RequestState) -> None:
        """Emit the prompt's log-probabilities once they are complete: for a prompt of one token from the start."""
        if len(state.prompt_logprobs) == len(state.handle.request.prompt):
            self._events.append((state.handle, PromptLogprobs(tuple(state.prompt_logprobs), tuple(state.prompt_top))))

    def _sample_tokens(self, samples: list[_Sample], logits_BV: Tensor) -> None:
        chosen = choose_tokens(logits_BV, [_sampling_input(sample) for sample in samples])
        self._generated_tokens += len(samples)
        for sample, sampled in zip(samples, chosen, strict=True):
            self._append(self._requests[sample.handle], sample, sampled)

    def _append(self, state: _RequestState, sample: _Sample, sampled: SampledToken) -> None:
        """Append a token to a sample, and finish the sample if the token is its last."""
        if sampled.problem:
            self._finish_sample(state, sample, "error", sampled.problem)
            return
        token = sampled.token
        reason: Reason | None = None
        stop: int | str | None = None
        sample.output.append(token)
        sample.sequence.tokens.append(token)
        if token in state.stop_ids:
            new_text, reason, stop = "", "stop", token
        else:
            new_text, stop = sample.stops.push(sample.text.push(token))
            if stop is not None:
                reason = "stop"
            elif len(sample.sequence.tokens) >= sample.sequence.limit:
                reason = "length"
        if reason is not None and not isinstance(stop, str):
            tail, late_stop = sample.stops.push(sample.text.rest())
            new_text += tail
            if late_stop is None:
                new_text += sample.stops.rest()
            else:
                reason, stop = "stop", late_stop
        self._events.append((state.handle, Token(token, new_text, sampled.logprob, sampled.top, sample.index)))
        if reason is not None:
            self._finish_sample(state, sample, reason, stop=stop)

    def _finish_sample(
        self, state: _RequestState, sample: _Sample, reason: Reason, message: str = "", stop: int | str | None = None
    ) -> None:
        state.samples.remove(sample)
        if not any(other.sequence is sample.sequence for other in state.samples):
            self._scheduler.remove(sample.sequence)
        self._events.append((state.handle, Finished(reason, message, stop, sample.index)))
        if not state.samples:
            del self._requests[state.handle]

    def _advance(self, search: _BeamSearchState) -> None:
        """Take one step of a beam search: each beam ends, continues or forks."""
        request, parents = search.handle.request, search.sequences
        output_start = self._requests[search.handle].output_start
        outputs = [sequence.tokens[output_start:] for sequence in parents]
        logits_WV = torch.stack([search.logits.pop(sequence) for sequence in parents])
        bans = Sampling(banned=request.sampling.banned, banned_after=request.sampling.banned_after)
        if bans.changes_logits:
            for logits_V, output in zip(logits_WV, outputs, strict=True):
                apply_penalties(logits_V, bans, search.handle.prefix, output)
        continuations = search.beams.step(logits_WV, outputs)
        self._generated_tokens += len(continuations)
        search.sequences = []
        for parent, _ in continuations:
            sequence = parents[parent]
            taken = sequence in search.sequences
            search.sequences.append(self._scheduler.fork(sequence, sequence.owner) if taken else sequence)
        for sequence in parents:
            if sequence not in search.sequences:
                self._scheduler.remove(sequence)
        for sequence, (_, token) in zip(search.sequences, continuations, strict=True):
            sequence.tokens.append(token)
        if not continuations or len(search.sequences[0].tokens) >= search.sequences[0].limit:
            self._finish_search(search, output_start)

    def _finish_search(self, search: _BeamSearchState, output_start: int) -> None:
        hypotheses = search.beams.best([sequence.tokens[output_start:] for sequence in search.sequences])
        for sequence in search.sequences:
            self._scheduler.remove(sequence)
        token_lists, scores = zip(*hypotheses, strict=True)
        stopped = not search.sequences
        self._events.append((search.handle, Beams(tuple(map(tuple, token_lists)), scores)))
        self._events.append((search.handle, Finished("stop" if stopped else "length")))
        del self._requests[search.handle]


def _batch_chunk(chunk: ScheduledChunk, block_size: int) -> Chunk:
    sequence = chunk.sequence
    blocks = sequence.block_table.blocks[: -(-chunk.stop // block_size)]
    tokens = sequence.tokens[chunk.start : chunk.stop]
    adapter = sequence.owner.handle.request.adapter
    return Chunk(tokens, chunk.start, blocks, chunk.num_logits, sequence.encoder_length, adapter)


def _sampling_input(sample: _Sample) -> SamplingInput:
    request = sample.handle.request
    uniform = 0.0 if request.sampling.greedy else sample.rng.random()
    return SamplingInput(request.sampling, uniform, sample.handle.prefix, sample.output, request.logprobs)
