"""Fields that OpenAI's two endpoints share, in the engine's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalith.serve.http.errors import ApiError
from megalith.serve.http.schemas import ChatRequest, CompletionRequest
from megalith.serve.http.service import Service
from megalith.serve.request import Sampling
from megalith.tokenizers import Tokenizer


def sampling_of(body: CompletionRequest | ChatRequest, vocab_size: int) -> Sampling:
    """How to choose tokens.

    Raises:
        ApiError: 400, a token of logit_bias is none.
    """
    bias = {}
    for name, value in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            rule = f"logit_bias: {name[:20]!r} is no token id below {vocab_size}"
            raise ApiError(400, rule, "logit_bias", "invalid_value")
        bias[int(name)] = value
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=min(max(body.top_k or 0, 0), vocab_size),
        min_p=body.min_p or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p or 1e-9,  # OpenAI's 0 is the likeliest alone, the engine's all
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
    )


def text_fields_of(body: CompletionRequest | ChatRequest, service: Service) -> dict[str, Any]:
    """Fields of `Request` about where the text ends and what it shows.

    Raises:
        ApiError: 400, a token of stop_token_ids is none.
    """
    stop_ids, size = list(body.stop_token_ids or ()), service.tokenizer.vocab_size
    if bad := [number for number in stop_ids if number >= size]:
        rule = f"stop_token_ids: {bad[0]} is no token id below {size}"
        raise ApiError(400, rule, "stop_token_ids", "invalid_value")
    if body.skip_special_tokens:  # a special token that is not shown is never found in the text
        stop_ids += [number for text in body.stops if (number := service.special_texts.get(text)) is not None]
    return {
        "stop_ids": () if body.ignore_eos else service.stop_ids,
        "more_stop_ids": tuple(stop_ids),
        "hidden_ids": service.tokenizer.special_ids if body.skip_special_tokens else frozenset(),
        "stop_texts": body.stops,
    }


def token_texts(tokenizer: Tokenizer, ids: Sequence[int], before: int | None = None) -> list[str]:
    """The text of each token where it stands; a part of a character is U+FFFD.

    Args:
        before: the token that they follow: some tokenizers drop a space at the beginning of a text.
    """
    found = []
    for number in ids:
        alone = tokenizer.decode([number])
        if before is not None:
            start, both = tokenizer.decode([before]), tokenizer.decode([before, number])
            alone = both[len(start) :] if both.startswith(start) and "\ufffd" not in start + alone else alone
        found.append(alone)
        before = number
    return found
