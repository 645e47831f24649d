"""Megatron's `PUT /api`: its fields, defaults, texts and answers, with the semantics that it had until 2024.

Two things differ. What Megatron answers with status 200 and a text where it refuses a value is 400 here, and the body
is JSON with that text under `message` (where Megatron's client looks for it) and in OpenAI's shape under `error`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive

from megalith.errors import DataError
from megalith.serve.http.errors import ApiError, printable, refusal
from megalith.serve.http.openai import submit_all
from megalith.serve.http.service import Collected, Service
from megalith.serve.http.settings import Defaults
from megalith.serve.request import Beams, Event, Finished, PromptLogprobs, Request, Sampling, Token
from megalith.serve.worker import Answer
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import end_ids

MAX_PROMPTS = 128
DEFAULT_STOP_TOKEN = 50256  # the end of a text in GPT-2's vocabulary


@dataclass(frozen=True)
class ApiRequest:
    """A request of `PUT /api`."""

    prompts: tuple[str, ...]
    tokens_to_generate: int = 64
    logprobs: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: int = -1
    no_log: bool = False
    beam_width: int | None = None
    stop_token: int = DEFAULT_STOP_TOKEN
    length_penalty: float = 1.0
    says_length: bool = True  # whether tokens_to_generate was given


_TOKENS = "tokens_to_generate must be an integer greater than or equal to 0"
_TEMPERATURE = "temperature must be a positive number less than or equal to 100.0"
_TOP_K = "top_k must be an integer equal to or greater than 0 and less than or equal to 1000"
_TOP_P = "top_p must be a positive float less than or equal to 1.0"
_DECAY = "top_p_decay must be a positive float less than or equal to 1.0"
_BOUND = "top_p_bound must be a positive float less than or equal to top_p"
_FLAGS = ("add_BOS", "stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon")


def read(found: Any, defaults: Defaults) -> ApiRequest:
    """Understand the JSON of a request, or refuse it with Megatron's text; unknown fields are passed over, as there."""
    if not isinstance(found, dict):
        raise ApiError(400, "the body is no JSON object", "body")
    prompts = _prompts(found)
    given = _Given(found)
    tokens = given.integer("tokens_to_generate", defaults.tokens_to_generate, _TOKENS, low=0)
    logprobs = given.flag("logprobs")
    given.check(tokens > 0 or logprobs, "tokens_to_generate", "tokens_to_generate=0 implies logprobs=True")
    temperature = given.number("temperature", defaults.temperature, _TEMPERATURE, (int, float))
    given.check(0.0 < temperature <= 100.0, "temperature", _TEMPERATURE)
    # A request that names one of the two turns the default of the other off.
    top_k = given.integer("top_k", 0 if "top_p" in found else defaults.top_k, _TOP_K, low=0, high=1000)
    top_p = given.number("top_p", 0.0 if "top_k" in found else defaults.top_p, _TOP_P, (float,))
    given.check(not (top_p > 0.0 and top_k > 0), "top_p", "cannot set both top-k and top-p samplings.")
    given.check(0.0 <= top_p <= 1.0, "top_p", "top_p must be less than or equal to 1.0")
    decay = given.number("top_p_decay", 0.0, _DECAY, (float,))
    given.check("top_p_decay" not in found or top_p > 0.0, "top_p_decay", "top_p_decay cannot be set without top_p")
    given.check(0.0 <= decay <= 1.0, "top_p_decay", "top_p_decay must be less than or equal to 1.0")
    bound = given.number("top_p_bound", 0.0, _BOUND, (float,))
    given.check("top_p_bound" not in found or top_p > 0.0, "top_p_bound", "top_p_bound cannot be set without top_p")
    in_bounds = "top_p_bound" not in found or 0.0 < bound <= top_p
    given.check(in_bounds, "top_p_bound", "top_p_bound must be greater than 0 and less than top_p")
    flags = {name: given.flag(name) for name in _FLAGS}
    empty = any(not prompt for prompt in prompts)
    given.check(not empty or flags["add_BOS"], "prompts", "Empty prompts require add_BOS=true")
    seed = given.integer("random_seed", -1, "random_seed must be integer")
    given.check(
        "random_seed" not in found or 0 <= seed < 2**63, "random_seed", "random_seed must be a positive integer"
    )
    no_log = given.flag("no_log")
    beams = given.integer("beam_width", 0, "beam_width must be integer") if "beam_width" in found else None
    if beams is not None:
        given.check(1 <= beams <= 128, "beam_width", "beam_width must be an integer > 0 and at most 128")
        given.check(len(prompts) == 1, "prompts", "When doing beam_search, batch size must be 1")
        given.check(tokens > 0, "tokens_to_generate", "tokens_to_generate must be above 0 with beam_width")
    return ApiRequest(
        prompts=prompts,
        tokens_to_generate=tokens,
        logprobs=logprobs,
        temperature=float(temperature),
        top_k=top_k,
        top_p=top_p,
        top_p_decay=decay,
        top_p_bound=bound,
        random_seed=seed,
        no_log=no_log,
        beam_width=beams,
        stop_token=given.integer("stop_token", DEFAULT_STOP_TOKEN, "stop_token must be an integer", low=0),
        length_penalty=given.number("length_penalty", 1.0, "length_penalty must be a float", (float,)),
        says_length="tokens_to_generate" in found,
        **flags,
    )


def _prompts(found: Mapping[str, Any]) -> tuple[str, ...]:
    prompts = found.get("prompts")
    checks = [
        ("prompts", "prompts argument required", "prompts" in found),
        ("max_len", "max_len is no longer used.  Replace with tokens_to_generate", "max_len" not in found),
        ("sentences", "sentences is no longer used.  Replace with prompts", "sentences" not in found),
        ("prompts", "prompts is not a list of strings", isinstance(prompts, list)),
        ("prompts", "prompts is empty", prompts != []),
    ]
    for name, text, holds in checks:
        if not holds:
            raise ApiError(400, text, name, "invalid_value")
    assert isinstance(prompts, list)
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"Maximum number of prompts is {MAX_PROMPTS}", "prompts", "invalid_value")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ApiError(400, "prompts is not a list of strings", "prompts", "invalid_value")
    return tuple(prompts)


@dataclass(frozen=True)
class _Given:
    """The JSON of a request, and the refusals of its values."""

    found: Mapping[str, Any]

    def check(self, holds: bool, name: str, text: str) -> None:
        if not holds:
            value = self.found.get(name)
            shown = f" (it is {printable(repr(value), 40)})" if isinstance(value, (int, float, str)) else ""
            raise ApiError(400, text + shown, name, "invalid_value")

    def flag(self, name: str) -> bool:
        value = self.found.get(name, False)
        self.check(isinstance(value, bool), name, f"{name} must be a boolean value")
        return bool(value)

    def integer(self, name: str, default: int, text: str, *, low: int | None = None, high: int | None = None) -> int:
        value = self.found.get(name, default)
        self.check(type(value) is int, name, text)
        self.check((low is None or value >= low) and (high is None or value <= high), name, text)
        return int(value)

    def number(self, name: str, default: float, text: str, kinds: tuple[type, ...]) -> Any:
        """Return a number of one of these types: Megatron accepts 1 for a temperature, but not for a top_p."""
        value = self.found.get(name, default)
        self.check(type(value) in kinds, name, text)
        self.check(abs(value) < 1e300, name, text)
        return value


async def answer(service: Service, body: ApiRequest, defaults: Defaults, receive: Receive) -> dict[str, Any]:
    """Return the JSON of the answer."""
    requests = await _requests(service, body, defaults)
    if body.beam_width is not None:
        (found,) = await service.collect([await service.submit(requests[0], _field)], receive)
        return _beam_response(service, requests[0], found.beams or Beams((), ()))
    taken = await submit_all(service, requests, _field)
    streams: list[AsyncIterator[Event]] | None = None
    if body.stop_on_double_eol and (newline := _only_id(service.tokenizer, "\n")) is not None:
        streams = [
            _until_double_eol(given, newline, service.token_before_answer(request.prompt))
            for given, request in zip(taken, requests, strict=True)
        ]
    return _text_response(service, body, requests, await service.collect(taken, receive, streams))


async def _requests(service: Service, body: ApiRequest, defaults: Defaults) -> list[Request]:
    """Return one request for each prompt. All texts end at one length, that of the longest prompt and its answer."""
    answers = service.encoder_input is not None
    if answers and body.add_BOS:
        raise refusal("add_BOS", "the model answers the prompt, which begins no document")
    beginning = end_ids(service.tokenizer) if body.add_BOS else ()
    if body.add_BOS and not beginning:
        raise refusal("add_BOS", "the tokenizer has no end-of-document token")
    prompts = [beginning + await service.encode(text, "prompts") for text in body.prompts]
    if not all(prompts):
        raise refusal("prompts", "one of them has no tokens")
    longest, tokens = max(prompts, key=len), body.tokens_to_generate
    most = service.max_output_tokens(longest)
    if defaults.length is not None and not body.says_length:
        tokens = max(1, min(defaults.length, most) if answers else defaults.length - len(longest))
    length = len(longest) + tokens
    if tokens > most:
        message = "Length of prompt + tokens_to_generate longer than allowed"
        if body.beam_width is not None:
            message = "context length + tokens_to_generate too large"
        field = "prompts" if most <= 0 else "tokens_to_generate"
        numbers = f"{len(longest)} + {tokens} > {service.context_length} tokens"
        if answers:
            numbers = f"{len(longest)} > {service.context_length} tokens"
            if field != "prompts":
                numbers = f"{tokens} > {most} tokens of an answer"
        raise ApiError(400, f"{message} ({numbers})", field, "context_length_exceeded")
    if defaults.max_tokens is not None and len(prompts) * length > defaults.max_tokens:
        message = f"Too many tokens.  {len(prompts) * length} is greater than {defaults.max_tokens}"
        raise ApiError(
            400, f"{message}; prompts x length is bounded by --max-tokens-to-oom", "prompts", "too_many_tokens"
        )
    stop_ids, sampling = _stop_ids(service.tokenizer, body), _sampling(service.tokenizer, body)
    first_seed = service.next_seed() if body.random_seed < 0 else body.random_seed
    return [
        Request(
            prompt=prompt,
            max_new_tokens=(tokens if answers else length - len(prompt)) if tokens else 0,
            sampling=sampling,
            seed=None if first_seed is None else first_seed + number,  # equal prompts are to differ
            stop_ids=stop_ids,
            logprobs=0 if body.logprobs and body.beam_width is None else None,
            prompt_logprobs=body.logprobs and body.beam_width is None and not answers,
            beam_width=body.beam_width,
            length_penalty=body.length_penalty,
        )
        for number, prompt in enumerate(prompts)
    ]


def _sampling(tokenizer: Tokenizer, body: ApiRequest) -> Sampling:
    colon, newline = _only_id(tokenizer, ":"), _only_id(tokenizer, "\n")
    bans = body.prevent_newline_after_colon and colon is not None and newline is not None
    return Sampling(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        top_p_decay=body.top_p_decay,
        top_p_bound=body.top_p_bound,
        banned_after=((colon, newline),) if bans else (),  # type: ignore[arg-type]
    )


def _stop_ids(tokenizer: Tokenizer, body: ApiRequest) -> tuple[int, ...] | None:
    """Return the ids that end a text; as in Megatron, those of a line end replace the end of a document."""
    if body.beam_width is not None:
        known = body.stop_token < tokenizer.vocab_size
        if not known and body.stop_token != DEFAULT_STOP_TOKEN:
            rule = f"stop_token {body.stop_token} is not below the vocabulary size {tokenizer.vocab_size}"
            raise ApiError(400, rule, "stop_token", "invalid_value")
        return (body.stop_token,) if known else end_ids(tokenizer)
    if body.stop_on_double_eol:
        ends = [_only_id(tokenizer, "\n\n")]
    elif body.stop_on_eol:
        ends = [_only_id(tokenizer, "\n\n"), _only_id(tokenizer, "\n")]
    else:
        return None
    return tuple(end for end in ends if end is not None)


def _only_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of a text that is a single token, else None."""
    try:
        ids = tokenizer.encode(text)
    except DataError:  # NullTokenizer takes numbers only
        return None
    return ids[0] if len(ids) == 1 else None


async def _until_double_eol(answer: Answer, token: int, before: int | None) -> AsyncIterator[Event]:
    """Yield the events of an answer up to where a token comes twice in a row (two ends of lines), `before` included."""
    async for event in answer:
        yield event
        if isinstance(event, Token):
            if event.id == before == token:
                answer.cancel()
                yield Finished("stop", stop="\n\n")
                return
            before = event.id


def _answer_prefix(service: Service, request: Request) -> tuple[int, ...]:
    """Return the tokens that the text of an answer begins with: the prompt, unless an encoder reads it."""
    return () if service.encoder_input else request.prompt


def _text_response(
    service: Service, body: ApiRequest, requests: Sequence[Request], collected: Sequence[Collected]
) -> dict[str, Any]:
    tokenizer = service.tokenizer
    texts, segments, logprobs = [], [], []
    for request, found in zip(requests, collected, strict=True):
        tokens = found.samples[0].tokens if found.samples else []
        ids = [*_answer_prefix(service, request), *(token.id for token in tokens)]
        texts.append(tokenizer.decode(ids))
        segments.append([tokenizer.decode([number]) for number in ids])
        if body.logprobs:
            scores = found.scores or PromptLogprobs((), ())
            logprobs.append([*scores.logprobs[1:], *(token.logprob for token in tokens)])
    return {"logprobs": logprobs if body.logprobs else None, "segments": segments, "text": texts}


def _beam_response(service: Service, request: Request, found: Beams) -> dict[str, Any]:
    tokenizer = service.tokenizer
    whole = [[*_answer_prefix(service, request), *hypothesis] for hypothesis in found.hypotheses]
    return {
        "scores": list(found.scores),
        "segments": [[tokenizer.decode([number]) for number in ids] for ids in whole],
        "text": [tokenizer.decode(ids) for ids in whole],
    }


_FIELDS = {"prompt": "prompts", "max_new_tokens": "tokens_to_generate"}


def _field(name: str) -> str:
    """Return Megatron's name for a field of the engine's request."""
    return _FIELDS.get(name, name)
