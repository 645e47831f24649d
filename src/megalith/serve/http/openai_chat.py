"""OpenAI's `/v1/chat/completions`: a dialogue, by the template of the tokenizer, as one text to continue."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from megalith.serve.http.chat_template import BadDialogue
from megalith.serve.http.errors import ApiError
from megalith.serve.http.openai_completions import usage
from megalith.serve.http.schemas import ChatRequest
from megalith.serve.http.service import Sample, Service, request_violation, too_long
from megalith.serve.http.shared_fields import sampling_of, text_fields_of, token_texts
from megalith.serve.http.strict_json import printable
from megalith.serve.request import Finished, Request, Token
from megalith.tokenizers import Tokenizer

_RESERVED = frozenset({"messages", "tools", "documents"})


@dataclass(frozen=True)
class _Plan:
    """A dialogue, understood."""

    body: ChatRequest
    request: Request
    head: dict[str, Any]


async def plan(service: Service, body: ChatRequest) -> _Plan:
    """Understand a request.

    Raises:
        ApiError: 400, names the field, or says that the model has no chat template.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs: true", "top_logprobs", "invalid_value")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        rule = "max_tokens: is the old name of max_completion_tokens; give one of them"
        raise ApiError(400, rule, "max_tokens", "invalid_value")
    ids = await service.encode(_render(service, body), "messages")
    ids = _as_rendered(service.tokenizer, ids)
    room = service.room(ids)
    if room < 1:
        raise too_long(service, "messages", f"{len(ids)} tokens")
    field = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    new_tokens = next((count for count in (body.max_tokens, body.max_completion_tokens) if count is not None), room)
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
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.settings.model_name}
    return _Plan(body, request, head)


def _render(service: Service, body: ChatRequest) -> str:
    if service.template is None:
        raise ApiError(
            400,
            "messages: this model's tokenizer has no chat template; use /v1/completions, or start the server with "
            "--chat-template FILE",
            "messages",
            "no_chat_template",
        )
    messages = [{"role": m.role, "content": m.text, **({"name": m.name} if m.name else {})} for m in body.messages]
    variables = body.chat_template_kwargs or {}
    if taken := _RESERVED & set(variables):
        rule = f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set"
        raise ApiError(400, rule, "chat_template_kwargs", "invalid_value")
    try:
        return service.template.render(messages, **variables)
    except BadDialogue as error:
        rule = f"messages: the chat template does not take them: {printable(str(error), 300)}"
        raise ApiError(400, rule, "messages", "invalid_value") from None


def _as_rendered(tokenizer: Tokenizer, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Without what a tokenizer puts around every text: a template writes all special tokens that it wants."""
    around = tuple(tokenizer.encode(""))
    if not around:
        return ids
    letter = tuple(tokenizer.encode("a"))
    for before in range(len(around), -1, -1):
        behind = len(around) - before
        if letter[:before] + letter[len(letter) - behind :] == around:
            return ids[before : len(ids) - behind]
    return ids


async def whole(service: Service, made: _Plan, receive: Receive) -> dict[str, Any]:
    """The answer in one piece."""
    (found,) = await service.collect([await service.submit(made.request)], receive)
    choices = [_choice(service, made, number, sample) for number, sample in enumerate(found.samples)]
    completion = sum(len(sample.ids) for sample in found.samples)
    counts = usage(len(made.request.prompt), completion)
    return {**made.head, "object": "chat.completion", "choices": choices, "usage": counts}


def _choice(service: Service, made: _Plan, number: int, sample: Sample) -> dict[str, Any]:
    return {
        "index": number,
        "message": {"role": "assistant", "content": "".join(sample.texts), "refusal": None},
        "logprobs": _logprobs(service, made, sample.tokens, service.before(made.request.prompt)),
        "finish_reason": sample.finished.reason,
        "stop_reason": sample.finished.stop,
    }


def _logprobs(service: Service, made: _Plan, tokens: Sequence[Token], before: int | None) -> dict[str, Any] | None:
    if not made.body.logprobs:
        return None
    rows = []
    texts = token_texts(service.tokenizer, [token.id for token in tokens], before)
    for text, token in zip(texts, tokens, strict=True):
        top = [
            {"token": (shown := token_texts(service.tokenizer, [number], before)[0]), "logprob": value}
            | {"bytes": _bytes(shown)}
            for number, value in token.top[: made.body.top_logprobs or 0]
        ]
        rows.append({"token": text, "logprob": token.logprob, "bytes": _bytes(text), "top_logprobs": top})
        before = token.id
    return {"content": rows, "refusal": None}


def _bytes(text: str) -> list[int] | None:
    """Those of a whole text; a part of a character has none that we know."""
    return None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass"))


async def pieces(
    service: Service, made: _Plan, events: AsyncIterator[tuple[int, Any]]
) -> AsyncIterator[dict[str, Any]]:
    """The answer as it grows: the objects of the stream."""
    shows_usage = bool(made.body.stream_options and made.body.stream_options.include_usage)
    last: dict[int, int] = {}
    completion = 0

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, end: Finished | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs}
        choice["finish_reason"] = end.reason if end else None
        if end is not None and end.stop is not None:
            choice["stop_reason"] = end.stop
        usage_field = {"usage": None} if shows_usage else {}
        return {**made.head, "object": "chat.completion.chunk", "choices": [choice], **usage_field}

    for index in range(made.request.n):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for _, event in events:
        if isinstance(event, Finished):
            yield chunk(event.sample, {}, None, service.ended(event))
        elif isinstance(event, Token):
            completion += 1
            logprobs = _logprobs(service, made, [event], last.get(event.sample, service.before(made.request.prompt)))
            last[event.sample] = event.id
            if event.text or logprobs is not None:
                yield chunk(event.sample, {"content": event.text}, logprobs)
    if shows_usage:
        counts = usage(len(made.request.prompt), completion)
        yield {**made.head, "object": "chat.completion.chunk", "choices": [], "usage": counts}
