"""OpenAI's `/v1/completions` and `/v1/chat/completions`: from their requests to the engine's, and back to answers.

A dialogue becomes one text to continue, by the template of the tokenizer. Both endpoints understand a request as a
plan, which answers in one piece (`whole`) or as the objects of a stream (`chunks`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.types import Receive

from megalith.serve.http.errors import printable, refusal
from megalith.serve.http.schemas import ChatRequest, CompletionRequest, sampling_of, text_fields_of, token_texts
from megalith.serve.http.service import Collected, Sample, Service, request_violation, too_long
from megalith.serve.request import Finished, PromptLogprobs, Request, TextStream, Token, TopLogprobs
from megalith.serve.worker import Answer
from megalith.tokenizers.chat_template import BadDialogue, added_around

_DEFAULT_TOKENS = 16
_RESERVED = frozenset({"messages", "tools", "documents"})


async def submit_all(
    service: Service, requests: Sequence[Request], field_of: Callable[[str], str] = str
) -> list[Answer]:
    """Submit several requests to the engine, or none if one is refused or the queue has no room for all."""
    sequences, most = sum(request.n for request in requests), service.settings.limits.waiting
    if len(requests) > 1 and sequences > most:
        prompts, n = field_of("prompt"), requests[0].n
        each = f" with {field_of('n')} {n}" if n > 1 else ""
        rule = f"{len(requests)} prompts{each} are {sequences} sequences, and at most {most} may wait (--max-queue)"
        raise refusal(prompts, f"{rule}; divide the request")
    answers: list[Answer] = []
    try:
        for request in requests:
            answers.append(await service.submit(request, field_of))
    except BaseException:
        service.release(answers)
        raise
    return answers


@dataclass(frozen=True)
class Plan:
    """Requests to the engine made from a request of the API, and how their events become the response."""

    service: Service
    body: CompletionRequest | ChatRequest
    requests: list[Request]  # to the engine, one for each prompt
    head: dict[str, Any]  # what each object of the answer begins with
    chunk_head: dict[str, Any]  # what those of a stream have beside it

    @property
    def n(self) -> int:
        return self.body.n or 1

    async def whole(self, receive: Receive) -> dict[str, Any]:
        found = await self.service.collect(await submit_all(self.service, self.requests), receive)
        choices = [
            {
                "index": number * self.n + position,
                **self._choice(number, sample, collected),
                "finish_reason": sample.finished.reason,
                "stop_reason": sample.finished.stop,
            }
            for number, collected in enumerate(found)
            for position, sample in enumerate(_samples(collected, self.n))
        ]
        completion = sum(len(sample.ids) for collected in found for sample in collected.samples)
        return {**self.head, "choices": choices, "usage": self._usage(completion)}

    def _choice(self, number: int, sample: Sample, collected: Collected) -> dict[str, Any]:
        """Return the text of a sample of prompt `number`, and its log-probabilities."""
        raise NotImplementedError

    def chunks(self, events: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of the stream as the answer grows."""
        raise NotImplementedError

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, end: Finished | None = None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, **delta, "logprobs": logprobs}
        choice["finish_reason"] = end.reason if end else None
        if end is not None and end.stop is not None:
            choice["stop_reason"] = end.stop
        usage = {"usage": None} if self._shows_usage else {}
        return {**self.head, **self.chunk_head, "choices": [choice], **usage}

    def _last_chunks(self, completion: int) -> list[dict[str, Any]]:
        """Return the last object of a stream, with the token counts, if the request asks for them."""
        last = {**self.head, **self.chunk_head, "choices": [], "usage": self._usage(completion)}
        return [last] if self._shows_usage else []

    @cached_property
    def _shows_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = sum(len(request.prompt) for request in self.requests)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def plan(service: Service, body: CompletionRequest | ChatRequest) -> Plan:
    """Return the plan for a request of either endpoint."""
    return await (_plan_chat(service, body) if isinstance(body, ChatRequest) else _plan_completion(service, body))


def _samples(collected: Collected, n: int) -> list[Sample]:
    return collected.samples + [Sample(finished=Finished("length")) for _ in range(n - len(collected.samples))]


def _head(service: Service, body: CompletionRequest | ChatRequest, prefix: str, kind: str) -> dict[str, Any]:
    created, model = int(time.time()), body.model or service.settings.model_name
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": created, "model": model}


# --- /v1/completions --------------------------------------------------------------------------------------------------


async def _plan_completion(service: Service, body: CompletionRequest) -> Plan:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refusal("best_of", f"{body.best_of} is not n, and only then supported")
    if body.echo and service.encoder_input:
        raise refusal("echo", "the model answers the prompt, it does not continue it")
    new_tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if new_tokens == 0 and not body.echo:
        rule = "is too small; give 1 or more" if service.encoder_input else "needs echo: true, which scores the prompt"
        raise refusal("max_tokens", f"0 {rule}")
    prompts = [await _prompt(service, given) for given in _prompts(body)]
    for ids, _ in prompts:
        max_output_tokens = max(1, service.max_output_tokens(ids)) if body.max_tokens is None else new_tokens
        request_violation(service, ids, min(new_tokens, max_output_tokens), "prompt", "max_tokens")
    sampling, about_text = sampling_of(body, service.tokenizer.vocab_size), text_fields_of(body, service)
    requests = [
        Request(
            prompt=ids,
            max_new_tokens=min(new_tokens, service.max_output_tokens(ids)),
            sampling=sampling,
            seed=service.next_seed() if body.seed is None else body.seed,
            n=body.n or 1,
            logprobs=body.logprobs,
            prompt_logprobs=bool(body.echo and body.logprobs is not None) or new_tokens == 0,
            **about_text,
        )
        for ids, _ in prompts
    ]
    head = _head(service, body, "cmpl", "text_completion")
    return _Completion(service, body, requests, head, {}, [text for _, text in prompts])


def _prompts(body: CompletionRequest) -> list[Any]:
    prompt: Any = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


async def _prompt(service: Service, given: Any) -> tuple[tuple[int, ...], str]:
    """Return the token ids of a prompt and its text."""
    if isinstance(given, str):
        ids = await service.encode(given, "prompt")
        if not ids:
            raise refusal("prompt", "has no tokens")
        return ids, given
    outside = next((number for number in given if number >= service.tokenizer.vocab_size), None)
    if outside is not None:
        raise refusal("prompt", f"id {outside} is not below the vocabulary size {service.tokenizer.vocab_size}")
    return tuple(given), service.tokenizer.decode(given)


@dataclass
class _Stream:
    """What has been sent of one sample."""

    offset: int
    last: int | None
    text: TextStream
    echoed: bool = False


@dataclass(frozen=True)
class _Completion(Plan):
    """A request of `/v1/completions`."""

    body: CompletionRequest
    texts: list[str]  # of the prompts, as they are echoed

    def _choice(self, number: int, sample: Sample, collected: Collected) -> dict[str, Any]:
        text, logprobs, request = "".join(sample.texts), None, self.requests[number]
        if self.body.logprobs is not None:
            table = _LogprobsTable(self.service, self.body.logprobs)
            if self.body.echo:
                table.add_prompt(request.prompt, collected.scores)
                table.offset = len(self.texts[number])
            table.add(sample.tokens, self.service.token_before_answer(request.prompt), self._text_stream(request))
            logprobs = table.json
        return {"text": self.texts[number] + text if self.body.echo else text, "logprobs": logprobs}

    def _text_stream(self, request: Request) -> TextStream:
        """Return the text of an answer that is still empty."""
        before = () if self.service.encoder_input else request.prompt
        return TextStream(self.service.tokenizer.decode, before, request.skip_token_ids)

    async def chunks(self, events: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[dict[str, Any]]:
        streams: dict[int, _Stream] = {}
        scores: dict[int, PromptLogprobs] = {}
        top, completion = self.body.logprobs, 0
        async for number, event in events:
            if isinstance(event, PromptLogprobs):
                scores[number] = event
                continue
            index, request = number * self.n + event.sample, self.requests[number]
            if (stream := streams.get(index)) is None:
                before = self.service.token_before_answer(request.prompt)
                stream = streams[index] = _Stream(0, before, self._text_stream(request))
            if self.body.echo and not stream.echoed:
                stream.echoed, stream.offset = True, len(self.texts[number])
                table = _LogprobsTable(self.service, top or 0)
                if top is not None:
                    table.add_prompt(request.prompt, scores.get(number))
                yield self._chunk(index, {"text": self.texts[number]}, None if top is None else table.json)
            if isinstance(event, Finished):
                yield self._chunk(index, {"text": ""}, None, self.service.ended(event))
                continue
            completion += 1
            logprobs = None
            if top is not None:
                table = _LogprobsTable(self.service, top, stream.offset)
                table.add([event], stream.last, stream.text)
                stream.offset, stream.last, logprobs = table.offset, event.id, table.json
            if event.text or logprobs is not None:
                yield self._chunk(index, {"text": event.text}, logprobs)
        for chunk in self._last_chunks(completion):
            yield chunk


class _LogprobsTable:
    """OpenAI's four parallel lists of log-probabilities."""

    def __init__(self, service: Service, top: int, offset: int = 0) -> None:
        self._service, self._top, self.offset = service, top, offset
        self.json: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_prompt(self, ids: Sequence[int], scores: PromptLogprobs | None) -> None:
        """Add the tokens of a prompt; a request that was cancelled before its prefill has no scores."""
        scores = scores or PromptLogprobs((None,) * len(ids), ((),) * len(ids))
        texts = token_texts(self._service.tokenizer, ids)
        before, stream = None, TextStream(self._service.tokenizer.decode)
        for number, text, logprob, top in zip(ids, texts, scores.logprobs, scores.top, strict=True):
            self._row(text, before, logprob, top)
            self.offset += len(stream.push(number))
            before = number

    def add(self, tokens: Sequence[Token], before: int | None, stream: TextStream) -> None:
        """Add the tokens of an answer, whose text so far is `stream`; the parts of a character have one offset."""
        ids = [token.id for token in tokens]
        for text, token in zip(token_texts(self._service.tokenizer, ids, before), tokens, strict=True):
            self._row(text, before, token.logprob, token.top)
            self.offset += len(stream.push(token.id))
            before = token.id

    def _row(self, text: str, before: int | None, logprob: float | None, top: TopLogprobs) -> None:
        json = self.json
        json["tokens"].append(text)
        json["token_logprobs"].append(logprob)
        json["top_logprobs"].append(
            None if logprob is None else {**self._top_logprobs_by_text(top, before), text: logprob}
        )
        json["text_offset"].append(self.offset)

    def _top_logprobs_by_text(self, top: TopLogprobs, before: int | None) -> dict[str, float]:
        """Return text -> log-probability; of two tokens with one text (parts of characters) the likelier counts."""
        found: dict[str, float] = {}
        for number, logprob in top[: max(1, self._top)]:
            (text,) = token_texts(self._service.tokenizer, [number], before)
            found.setdefault(text, logprob)
        return found


# --- /v1/chat/completions ---------------------------------------------------------------------------------------------


async def _plan_chat(service: Service, body: ChatRequest) -> Plan:
    if body.top_logprobs and not body.logprobs:
        raise refusal("top_logprobs", "needs logprobs: true")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise refusal("max_tokens", "is the old name of max_completion_tokens; give one of them")
    ids = await service.encode(_render(service, body), "messages")
    before, behind = added_around(service.tokenizer)
    ids = ids[before : len(ids) - behind]
    most = service.max_output_tokens(ids)
    if most < 1:
        raise too_long(service, "messages", f"{len(ids)} tokens")
    field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    new_tokens = next((count for count in (body.max_tokens, body.max_completion_tokens) if count is not None), most)
    request_violation(service, ids, new_tokens, "messages", field)
    request = Request(
        prompt=ids,
        max_new_tokens=new_tokens,
        sampling=sampling_of(body, service.tokenizer.vocab_size),
        seed=service.next_seed() if body.seed is None else body.seed,
        n=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **text_fields_of(body, service),
    )
    head, chunk_head = _head(service, body, "chatcmpl", "chat.completion"), {"object": "chat.completion.chunk"}
    return _Chat(service, body, [request], head, chunk_head)


def _render(service: Service, body: ChatRequest) -> str:
    template = service.chat_of(body.model).template
    if template is None:
        instead = "use /v1/completions, or start the server with --chat-template FILE"
        raise refusal("messages", f"this model's tokenizer has no chat template; {instead}", "no_chat_template")
    called = any(message.tool_calls for message in body.messages)
    if (body.tools or called) and not template.takes_tools:
        instead = "describe them in a system message, and read the call from the answer"
        raise refusal("tools" if body.tools else "messages", f"the chat template takes no tools; {instead}", "no_tools")
    tools = None if body.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    variables = body.chat_template_kwargs or {}
    if taken := _RESERVED & set(variables):
        raise refusal("chat_template_kwargs", f"{', '.join(sorted(taken))} cannot be set")
    try:
        return template.render([m.for_template for m in body.messages], tools=tools or None, **variables)
    except BadDialogue as error:
        raise refusal("messages", f"the chat template does not take them: {printable(str(error), 300)}") from None


@dataclass(frozen=True)
class _Chat(Plan):
    """A request of `/v1/chat/completions`."""

    body: ChatRequest

    def _choice(self, number: int, sample: Sample, collected: Collected) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(sample.texts), "refusal": None}
        return {"message": message, "logprobs": self._logprobs(sample.tokens, self._token_before_answer)}

    async def chunks(self, events: AsyncIterator[tuple[int, Any]]) -> AsyncIterator[dict[str, Any]]:
        last, completion = dict[int, int](), 0
        for index in range(self.n):
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
        async for _, event in events:
            if isinstance(event, Finished):
                yield self._chunk(event.sample, {"delta": {}}, None, self.service.ended(event))
            elif isinstance(event, Token):
                completion += 1
                logprobs = self._logprobs([event], last.get(event.sample, self._token_before_answer))
                last[event.sample] = event.id
                if event.text or logprobs is not None:
                    yield self._chunk(event.sample, {"delta": {"content": event.text}}, logprobs)
        for chunk in self._last_chunks(completion):
            yield chunk

    @property
    def _token_before_answer(self) -> int | None:
        return self.service.token_before_answer(self.requests[0].prompt)

    def _logprobs(self, tokens: Sequence[Token], before: int | None) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        rows, tokenizer = [], self.service.tokenizer
        for text, token in zip(token_texts(tokenizer, [token.id for token in tokens], before), tokens, strict=True):
            top = [
                {"token": (shown := token_texts(tokenizer, [number], before)[0]), "logprob": value}
                | {"bytes": _utf8_bytes(shown)}
                for number, value in token.top[: self.body.top_logprobs or 0]
            ]
            rows.append({"token": text, "logprob": token.logprob, "bytes": _utf8_bytes(text), "top_logprobs": top})
            before = token.id
        return {"content": rows, "refusal": None}


def _utf8_bytes(text: str) -> list[int] | None:
    """Return the UTF-8 bytes of a text; None for part of a character, whose bytes are unknown."""
    return None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass"))
