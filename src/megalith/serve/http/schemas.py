"""The requests of OpenAI's endpoints, and the fields that both share in the engine's words.

A field that is not known, or of another type, is refused by name.

A refusal is cheap whatever the body: lists end at their first fault (`fail_fast`), because pydantic collects a fault of
each item in each form that a list may have, which are seconds for a body of some MiB.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megalith.serve.http.errors import ApiError, printable, refusal
from megalith.serve.http.service import Service
from megalith.serve.request import Sampling
from megalith.tokenizers import Tokenizer

Id = Annotated[int, Field(ge=0)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
_BIASES = 1024
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]

_NO_EFFECT = "accepted; has no effect here"
_NO_CHOICE = "a call cannot be forced: the model's answer is text; give auto or none"
_OLD_NAME = "the old name of tools; give those"
_NO_GRAMMAR = "constrained decoding is not supported; ask for the form in the prompt and check the answer"
_UNSUPPORTED = {
    "tools": "they are for /v1/chat/completions, whose template describes them",
    "tool_choice": _NO_CHOICE,
    "functions": _OLD_NAME,
    "function_call": _NO_CHOICE,
    "response_format": _NO_GRAMMAR,
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), _NO_GRAMMAR
    ),
    "modalities": "answers are text",
    "audio": "answers are text",
    "prediction": "predicted outputs are not supported; leave it out",
    "web_search_options": "the server reaches no other one; leave it out",
    "suffix": "the model continues texts, it does not fill gaps",
    "use_beam_search": "beam search is served by PUT /api, as beam_width",
    "length_penalty": "it belongs to beam search, which is served by PUT /api as beam_width",
    "min_tokens": "not supported; ignore_eos continues to max_tokens",
    "prompt_logprobs": "not supported; echo with logprobs scores the prompt",
    "bad_words": "not supported; logit_bias of -100 bans a token",
    "include_stop_str_in_output": "not supported; stop_reason names the stop text",
    "truncate_prompt_tokens": "not supported; shorten the prompt",
    "add_generation_prompt": "set it in chat_template_kwargs",
    "continue_final_message": "not supported; render the dialogue yourself and use /v1/completions",
    "chat_template": "a template is set at the start, by --chat-template FILE",
}
"""Fields of OpenAI's and vLLM's requests that would change the answer, with what to do instead."""

_FORMS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of lists of token ids, none of them empty",
    "stop": "a text of 1 to 256 characters, or a list of at most 16 of them",
    "content": "a text, or a list of parts of the type text",
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """What a stream has besides the text."""

    include_usage: bool = False
    include_obfuscation: bool | None = Field(None, description=_NO_EFFECT)


class _Generation(_Strict):
    model: str | None = Field(None, max_length=512)
    temperature: float | None = Field(None, ge=0.0, le=100.0, description="0 takes the most likely token; default 1")
    top_p: float | None = Field(None, ge=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=1_000_000, description="not OpenAI's; 0 or -1 allows every token")
    min_p: float | None = Field(None, ge=0.0, le=1.0, description="not OpenAI's; relative to the likeliest token")
    repetition_penalty: float | None = Field(None, gt=0.0, le=10.0, description="not OpenAI's")
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    logit_bias: dict[str, Bias] | None = Field(None, max_length=_BIASES, description="token id -> bias")
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="not OpenAI's: tokens that end the answer, besides the model's own"
    )
    skip_special_tokens: bool = Field(True, description="not OpenAI's: false shows special tokens in the text")
    ignore_eos: bool = Field(False, description="not OpenAI's: continue after the end of a text")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description=_NO_EFFECT)
    metadata: dict[str, str] | None = Field(None, description=_NO_EFFECT)
    store: bool | None = Field(None, description=_NO_EFFECT)
    service_tier: str | None = Field(None, description=_NO_EFFECT)
    safety_identifier: str | None = Field(None, description=_NO_EFFECT)
    prompt_cache_key: str | None = Field(None, description=_NO_EFFECT)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bounded(cls, given: Any) -> Any:
        """Check the number of entries before any is validated."""
        if isinstance(given, dict) and len(given) > _BIASES:
            raise PydanticCustomError("too_long", f"has more than {_BIASES} entries")
        return given

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(_Generation):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=128, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=128, fail_fast=True)]
    )
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="default 16")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=128, description="only as many as n")
    suffix: None = Field(None, description="not supported")


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    name: Name
    arguments: Json[dict[str, Any]] = Field(description="a JSON object as text; the template receives the object")


class ToolCall(_Strict):
    """A call that an assistant has made, as the client read it from the answer."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(_Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON Schema")
    strict: Literal[False] | None = Field(None, description="the model's answer is not constrained")


class Tool(_Strict):
    """A tool that the template describes to the model."""

    type: Literal["function"]
    function: ToolFunction


class ChatMessage(_Strict):
    """One message of a dialogue. Empty fields are those that OpenAI's client sends back with an answer."""

    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None
    name: str | None = Field(None, max_length=256)
    refusal: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("no_content", "null is the content of an assistant only")
        return self

    @property
    def for_template(self) -> dict[str, Any]:
        """Return the message as templates read it: content as one text, no empty fields."""
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        calls = [call.model_dump(exclude_none=True) for call in self.tool_calls or ()]
        further = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        return {"role": self.role, "content": text, **{name: value for name, value in further.items() if value}}


class ResponseFormat(_Strict):
    """Free text is the only one."""

    type: Literal["text"]


class LoadAdapter(_Strict):
    """`POST /v1/load_lora_adapter`."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] = Field(description="in the folder of --lora-dir")
    load_inplace: bool = Field(False, description="replace adapters of the same name")


class UnloadAdapter(_Strict):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Name
    lora_int_id: int | None = Field(None, description=_NO_EFFECT)


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1, description="default: what the context leaves")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="for the chat template; a call is part of the answer's text"
    )
    tool_choice: Literal["none", "auto"] | None = Field(None, description="none: the template gets no tools")
    functions: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description=f"empty: {_OLD_NAME}")
    function_call: Literal["none", "auto"] | None = Field(None, description=_NO_EFFECT)
    parallel_tool_calls: bool | None = Field(None, description=_NO_EFFECT)
    reasoning_effort: str | None = Field(None, max_length=64, description=_NO_EFFECT)
    verbosity: str | None = Field(None, max_length=64, description=_NO_EFFECT)
    modalities: list[Literal["text"]] | None = Field(None, description="text is the only one")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="not OpenAI's: variables of the template")


Model = TypeVar("Model", bound=BaseModel)


def validated(kind: type[Model], found: Any) -> Model:
    """Validate JSON as a request; `ApiError` 400 names the field, what it is and what it may be."""
    if not isinstance(found, dict):
        raise ApiError(400, "the body is no JSON object", "body")
    others = [name for name in found if name not in kind.model_fields]
    unset = {name for name in others if found[name] is None and name in _UNSUPPORTED}  # some clients write every field
    unknown = next((name for name in others if name not in unset), None)
    if unknown is not None:
        raise _unknown(kind, unknown)
    if unset:
        found = {name: value for name, value in found.items() if name not in unset}
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _unknown(kind: type[BaseModel], name: str) -> ApiError:
    known, shown = list(kind.model_fields), printable(name)
    if name in _UNSUPPORTED:
        return refusal(shown, _UNSUPPORTED[name], "unsupported_field")
    guess = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.8)
    hint = f"; did you mean {guess[0]}?" if guess else f"; this endpoint has {', '.join(known)}"
    return refusal(shown, f"no such field here{hint}", "unknown_field")


def _refusal(kind: type[BaseModel], error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    place = list(first["loc"])
    names = [str(part) for part in place if not _is_branch(part)]
    field = printable(".".join(names)) or "body"
    if first["type"] == "extra_forbidden":
        return refusal(field, "no such field here", "unknown_field")
    form = next((_FORMS[name] for name in reversed(names) if name in _FORMS and first["type"] != "missing"), None)
    if form is not None:
        return ApiError(400, f"{_culprit(found, field)}must be {form}", field, "invalid_value")
    if place and place[0] in _UNSUPPORTED and place[0] != "tools":  # of which the wrong part is named
        return refusal(field, _UNSUPPORTED[str(place[0])], "unsupported_field")
    code = "missing_field" if first["type"] == "missing" else "invalid_value"
    said = first["msg"]
    return refusal(field, f"{said[:1].lower()}{said[1:]}{_given(first)}", code)


def _culprit(errors: Sequence[Any], field: str) -> str:
    """Return the item of a list that fits no form of a union; the form that most items before it fit decides."""

    def progress(error: Any) -> tuple[bool, list[int]]:
        return not error["type"].endswith("_type"), [part for part in error["loc"] if isinstance(part, int)]

    nearest = max((error for error in errors if error["loc"][0] == errors[0]["loc"][0]), key=progress)
    where = "".join(f"[{part}]" for part in progress(nearest)[1]) if field == str(nearest["loc"][0]) else ""
    value = nearest["input"]
    shown = (
        f"{printable(repr(value), 60)} is not valid; {field} " if where and not isinstance(value, (dict, list)) else ""
    )
    return f"{field}{where}: {shown}"


def _is_branch(part: str | int) -> bool:
    """Return whether a part of pydantic's error location is a branch of a union, not a field."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "constrained-str", "constrained-int"))


def _given(error: Any) -> str:
    value = error["input"]
    if error["type"] == "missing" or isinstance(value, (dict, list)):
        return ""
    return f", not {printable(repr(value), 60)}"


def sampling_of(body: CompletionRequest | ChatRequest, vocab_size: int) -> Sampling:
    """Return the sampling parameters of a request; `ApiError` 400 for a bias on an unknown token."""
    bias = {}
    for name, value in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            raise refusal("logit_bias", f"{name[:20]!r} is not a token id below {vocab_size}")
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
    """Return the fields of `Request` that end the text, hide tokens and name the adapters."""
    stop_ids, size = list(body.stop_token_ids or ()), service.tokenizer.vocab_size
    if bad := [number for number in stop_ids if number >= size]:
        raise refusal("stop_token_ids", f"{bad[0]} is not a token id below {size}")
    chat = service.chat_of(body.model)
    ends = chat.stop_texts if isinstance(body, ChatRequest) else ()
    if body.skip_special_tokens:  # a special token that is not shown is never found in the text
        stop_ids += [number for text in body.stops if (number := service.special_texts.get(text)) is not None]
    return {
        "stop_ids": () if body.ignore_eos else chat.stop_ids,
        "extra_stop_ids": tuple(stop_ids),
        "skip_token_ids": service.tokenizer.special_ids if body.skip_special_tokens else frozenset(),
        "stop_texts": body.stops if body.ignore_eos else (*body.stops, *ends),
        "adapter": service.number_of(body.model),
    }


def token_texts(tokenizer: Tokenizer, ids: Sequence[int], before: int | None = None) -> list[str]:
    """Return the text of each token in context, after the token `before`; a part of a character is U+FFFD."""
    found = []
    for number in ids:
        alone = tokenizer.decode([number])
        if before is not None:
            start, both = tokenizer.decode([before]), tokenizer.decode([before, number])
            alone = both[len(start) :] if both.startswith(start) and "\ufffd" not in start + alone else alone
        found.append(alone)
        before = number
    return found
