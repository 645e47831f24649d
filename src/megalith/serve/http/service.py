"""The service behind all endpoints: encode prompts, submit requests, and collect or stream their events."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from megalith.errors import DataError
from megalith.serve.http.adapters import AdapterNames
from megalith.serve.http.errors import ApiError, printable, refusal
from megalith.serve.http.metrics import Metrics, RequestLog
from megalith.serve.http.settings import ServerSettings
from megalith.serve.request import Beams, Event, Finished, PromptLogprobs, QueueFullError, Request, RequestError, Token
from megalith.serve.worker import Answer, Worker
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.chat_template import ChatFormat

_LONGEST_TOKEN = 128  # bytes: GPT-2's is; a text longer than the context times this cannot fit


@dataclass
class Sample:
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finished: Finished = Finished("cancelled")


@dataclass
class Collected:
    """All events of one request, collected."""

    samples: list[Sample]
    scores: PromptLogprobs | None = None
    beams: Beams | None = None


@dataclass(frozen=True)
class EncoderInput:
    """Prompts of an encoder-decoder model: the encoder reads them, and the answer does not continue them."""

    encode: Callable[[str], list[int]]  # token ids of a text for the encoder
    max_new_tokens: Callable[[int], int]  # number of prompt tokens -> longest answer, in tokens


@dataclass
class Service:
    """The model behind the endpoints."""

    worker: Worker
    tokenizer: Tokenizer
    context_length: int  # maximum tokens of prompt and answer together; of the prompt alone for an encoder-decoder
    settings: ServerSettings
    log: RequestLog
    metrics: Metrics = field(default_factory=Metrics)
    chat: ChatFormat = ChatFormat()  # of the model alone, and of adapters that have none of their own
    first_seed: int | None = None  # of the first request without a seed, counted up from there; None: random seeds
    draining: bool = False  # whether new requests are refused
    encoder_input: EncoderInput | None = None  # None: the model continues its prompt (decoder only)
    created: int = field(default_factory=lambda: int(time.time()))
    adapters: AdapterNames = field(default_factory=AdapterNames)

    def __post_init__(self) -> None:
        self._encoders = ThreadPoolExecutor(2, "encode")
        self._seed_numbers = itertools.count()
        self._open: set[Answer] = set()

    @property
    def failure(self) -> str | None:
        """Reason why nothing can be served any more; None while the engine runs."""
        return self.worker.failure

    @cached_property
    def special_texts(self) -> dict[str, int]:
        """Special tokens: text -> id."""
        return {self.tokenizer.decode([number]): number for number in sorted(self.tokenizer.special_ids)}

    def models(self) -> dict[str, int]:
        """Return the names of models, the model alone first -> numbers of adapters, 0 for none."""
        base = self.settings.model_name
        return {base: 0, **{f"{base}:{name}": number for name, number in self.adapters.numbers.items()}}

    def number_of(self, name: str | None) -> int:
        """Return the number of the adapters that a request names, as `base:adapter` or `adapter`; 0 for none.

        Raises `ApiError` 404 for an unknown name.
        """
        known = {**self.adapters.numbers, **self.models()}
        if name is None or name in known:
            return 0 if name is None else known[name]
        said = f"model: there is no {printable(name)}; this server has {', '.join(self.models())}"
        raise ApiError(404, said, "model", "model_not_found")

    def chat_of(self, name: str | None) -> ChatFormat:
        """Return the chat format of a model or of its adapters; raises as `number_of` does."""
        return self.adapters.formats.get(self.number_of(name), self.chat)

    def next_seed(self) -> int | None:
        return None if self.first_seed is None else self.first_seed + next(self._seed_numbers)

    async def encode(self, text: str, place: str) -> tuple[int, ...]:
        """Encode a text in a thread; `ApiError` 400 if it cannot be encoded, or is longer than any context."""
        size, read = len(text), self.encoder_input.encode if self.encoder_input else self.tokenizer.encode
        if size > self.context_length * _LONGEST_TOKEN:
            raise too_long(self, place, f"{size} characters")
        try:
            ids = await asyncio.get_running_loop().run_in_executor(self._encoders, read, text)
        except DataError as error:
            raise refusal(place, str(error)) from None
        return tuple(ids)

    def max_output_tokens(self, prompt: Sequence[int]) -> int:
        """Return the most tokens of an answer to a prompt; negative if the prompt is too long."""
        return (
            self.encoder_input.max_new_tokens(len(prompt)) if self.encoder_input else self.context_length - len(prompt)
        )

    def token_before_answer(self, prompt: Sequence[int]) -> int | None:
        """Return the token that an answer continues; None if an encoder reads the prompt."""
        return None if self.encoder_input else prompt[-1]

    async def submit(self, request: Request, field_of: Callable[[str], str] = str) -> Answer:
        """Submit a request; `field_of` maps a field of `Request` or `Sampling` to the client's name of it.

        Raises `ApiError`: 400 the request cannot be served, 429 the queue is full, 503 the engine has failed.
        """
        if self.failure is not None:
            raise ApiError(503, f"the model cannot be reached any more: {self.failure}")
        if self.draining:
            raise ApiError(503, "the server is stopping; ask another one")
        try:
            answer = await self.worker.submit(request)
        except RequestError as error:
            name = field_of(error.field)
            if name == "adapter":  # unloaded since the request came
                raise ApiError(404, f"model: {error.message}", "model", "model_not_found") from None
            raise refusal(name, error.message) from None
        except QueueFullError as error:
            raise self._busy(str(error)) from None
        self._open.add(answer)
        self.metrics.active = len(self._open)
        return answer

    def check_room(self) -> None:
        """Raise `ApiError` 429 if the queue is full, before a request is processed."""
        if self.worker.full:
            raise self._busy(f"{self.worker.stats().waiting} sequences waiting")

    def _busy(self, said: str) -> ApiError:
        after = {"retry-after": str(self.settings.limits.retry_seconds)}
        return ApiError(429, f"{said}; try again in a moment", None, "queue_full", after)

    def release(self, answers: Sequence[Answer]) -> None:
        """Cancel those of these answers that still run, and stop tracking them."""
        for answer in answers:
            answer.cancel()
            self._open.discard(answer)
        self.metrics.active = len(self._open)

    def cancel_all(self) -> None:
        """Cancel all answers; each still reports its end to its client."""
        for answer in list(self._open):
            answer.cancel()

    async def collect(
        self, answers: Sequence[Answer], receive: Receive, streams: Sequence[AsyncIterable[Event]] | None = None
    ) -> list[Collected]:
        """Wait for whole answers (`streams` in place of their own events), unless the client leaves (`receive` tells).

        Raises `ApiError`: 504 it took too long, 500 the engine could not, 499 the client has left.
        """
        began = time.monotonic()
        work = asyncio.ensure_future(asyncio.gather(*(self._collect(stream, began) for stream in streams or answers)))
        left = asyncio.ensure_future(disconnected(receive))
        both: set[asyncio.Future[Any]] = {work, left}
        try:
            limit = self.settings.limits.request_seconds
            done, _ = await asyncio.wait(both, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                return work.result()
            if left in done:
                self.metrics.disconnects += 1
                raise ApiError(499, "the client has left")
            raise ApiError(504, f"the answer took longer than {limit:g} s, the limit of --request-timeout")
        finally:
            work.cancel()
            left.cancel()
            self.release(answers)
            await asyncio.gather(work, left, return_exceptions=True)  # else asyncio reports a cancelled gather

    async def _collect(self, stream: AsyncIterable[Event], began: float) -> Collected:
        found = Collected([])
        async for event in stream:
            if isinstance(event, PromptLogprobs):
                found.scores = event
            elif isinstance(event, Beams):
                found.beams = event
            else:
                while len(found.samples) <= event.sample:
                    found.samples.append(Sample())
                sample = found.samples[event.sample]
                if isinstance(event, Finished):
                    sample.finished = self.ended(event)
                    continue
                if not sample.ids:
                    self.metrics.first_token.add(time.monotonic() - began)
                sample.ids.append(event.id)
                sample.texts.append(event.text)
                sample.tokens.append(event)
        return found

    def ended(self, event: Finished) -> Finished:
        """Count the end of a sample; `ApiError` 500 where it ended with an error, 503 where the engine has failed."""
        self.metrics.finished[event.reason] += 1
        if event.reason == "error":
            status = 503 if self.failure is not None else 500
            raise ApiError(status, event.message or "the model could not answer")
        return event


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def too_long(service: Service, place: str, given: str) -> ApiError:
    """Return the error 400 for a prompt that does not fit."""
    together = "" if service.encoder_input else " with the answer"
    return refusal(
        place,
        f"has {given}, and the model reads {service.context_length} tokens{together}; shorten it",
        "context_length_exceeded",
    )


def request_violation(service: Service, prompt: Sequence[int], new_tokens: int, place: str, count: str) -> None:
    """Raise `ApiError` 400 where a prompt and its answer do not fit, naming the field that is too large."""
    room = service.max_output_tokens(prompt)
    if room < 0 or (room == 0 and new_tokens > 0):
        raise too_long(service, place, f"{len(prompt)} tokens")
    if new_tokens > room:
        bound = (
            f"the {room} tokens that an answer may have"
            if service.encoder_input
            else f"the {room} tokens that the context of {service.context_length} leaves after a prompt of "
            f"{len(prompt)}"
        )
        raise refusal(count, f"{new_tokens} is more than {bound}", "context_length_exceeded")


DONE = b"data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode  # json.dumps makes one for every call


class EventStream(Response):
    """A response of server-sent events. However it ends, the places of its requests are given back."""

    def __init__(self, service: Service, objects: AsyncIterator[Mapping[str, Any]], answers: Sequence[Answer]) -> None:
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service, self._objects, self._answers = service, objects, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._service.settings.limits.request_seconds
        timer = asyncio.get_running_loop().call_later(limit, self._cut_off)
        work = asyncio.ensure_future(self._send(send))
        left = asyncio.ensure_future(disconnected(receive))
        try:
            done, _ = await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                work.result()
            else:
                self._service.metrics.disconnects += 1
        finally:
            timer.cancel()
            left.cancel()
            work.cancel()
            self._service.release(self._answers)

    def _cut_off(self) -> None:
        for answer in self._answers:
            answer.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for item in self._objects:
                await send({"type": "http.response.body", "body": _event(item), "more_body": True})
        except ApiError as error:  # the status is sent already
            await send({"type": "http.response.body", "body": _event(error.body), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


def _event(item: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(item).encode("ascii") + b"\n\n"


async def merged(service: Service, answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of all answers as they come, each with the number of its answer."""
    began, waiting = time.monotonic(), set(range(len(answers)))
    async for number, event in _in_order(answers):
        if waiting and number in waiting and isinstance(event, Token):
            waiting.remove(number)
            service.metrics.first_token.add(time.monotonic() - began)
        yield number, event


async def _in_order(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Event]]:
    if len(answers) == 1:  # the usual case, without a task and a queue more for every token
        async for only in answers[0]:
            yield 0, only
        return
    queue: asyncio.Queue[tuple[int, Event | BaseException | None]] = asyncio.Queue()

    async def pump(number: int) -> None:
        try:
            async for event in answers[number]:
                queue.put_nowait((number, event))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.ensure_future(pump(number)) for number in range(len(answers))]
    open_ones = len(answers)
    try:
        while open_ones:
            number, event = await queue.get()
            if event is None:
                open_ones -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield number, event
    finally:
        for task in tasks:
            task.cancel()
