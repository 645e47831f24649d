"""Parsing of lines and text into documents: what a worker does with a chunk before it is encoded."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

Document = list[str | list[str]]
"""For each key the text of a document, or its texts where the value is a list."""

_SHOWN = 60
_LONGEST_NUMBER = 4000  # digits; below the limit of `int`
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class BadDocument:
    """Reason why a document cannot be read."""

    reason: str


@dataclass(frozen=True)
class Dialogue(BadDocument):
    """Messages with role and content; no text unless a chat template makes one of it."""

    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[Any] | None = None
    prompt: int = 0
    """Number of messages at the beginning that are a prompt, from which nothing is learnt."""


MESSAGES = "messages"
"""Key that stands for the dialogue of an object or row, in whatever form it is."""
_DIALOGUES = (
    (("messages",), ("tools",)),  # OpenAI's
    (("conversations",), ("system", "tools")),  # ShareGPT's
    (("instruction", "output"), ("input", "system", "history")),  # Alpaca's, as LLaMA-Factory reads it
    (("prompt", "completion"), ("tools",)),  # TRL's; texts or messages
)
"""Keys of each form of dialogue, and keys that it may have besides."""


def dialogue_keys(names: Collection[str]) -> list[str]:
    """Return those of the names of an object's keys or a table's columns that make up a dialogue; [] if none do."""
    for needed, further in _DIALOGUES:
        if set(needed) <= set(names):
            return [*needed, *(name for name in further if name in names)]
    return []


def dialogue_hint(names: Collection[str]) -> str:
    """Return what to give in place of keys or columns that make up no dialogue."""
    *most, last = (" and ".join(needed) for needed, _ in _DIALOGUES)
    forms = f"{', '.join(most)}, or {last}"
    if {"chosen", "rejected"} <= set(names):
        return (
            f": preference optimisation (DPO) is not supported; to learn the chosen answers alone, give them as {forms}"
        )
    return f" (a dialogue has {forms}; --json-keys names another key with messages)"


def json_documents(
    lines: Sequence[bytes], keys: tuple[str, ...], encoding: str, limit: int
) -> Iterator[tuple[int, Document | BadDocument]]:
    """Yield the number and document of each JSON line in UTF-8, skipping blank lines. Messages name the `encoding`."""
    parse = _fast_parser()
    for number, line in enumerate(lines):
        if not line:
            continue
        if len(line) > limit:
            if not line.isspace():
                yield number, _too_long("line", line, limit)
            continue
        if parse is not None:
            # The lenient parser below accepts everything that orjson does, with the same result.
            try:
                parsed = parse(line)
            except ValueError:
                pass
            else:
                yield number, document_of(parsed, keys)
                continue
        if not line.isspace():
            yield number, _document_of_line(line, keys, encoding)


def json_texts(lines: Sequence[bytes], keys: tuple[str, ...]) -> list[list[str]] | None:
    """Return the texts of all lines for each key; None unless each line is an object with one text under every key."""
    parse = _fast_parser()
    if parse is None:
        return None
    try:
        if len(keys) == 1:
            (key,) = keys
            columns = [[parse(line)[key] for line in lines]]
        else:
            objects = [parse(line) for line in lines]
            columns = [[parsed[key] for parsed in objects] for key in keys]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return columns if all(set(map(type, column)) <= {str} for column in columns) else None


@cache
def _fast_parser() -> Callable[[bytes], Any] | None:
    """Return orjson's parser (extra `data`); None if it is not installed."""
    try:
        loads: Callable[[bytes], Any] = importlib.import_module("orjson").loads
    except ImportError:
        return None
    return loads


def _whole_number(digits: str) -> int | float:
    """Parse a JSON integer; one that is too long for Python's `int` becomes a float."""
    return int(digits) if len(digits) <= _LONGEST_NUMBER else float(digits)


LENIENT_DECODER = json.JSONDecoder(parse_int=_whole_number)
"""Takes all that Python's json takes, and whole numbers of any length."""


def _document_of_line(line: bytes, keys: tuple[str, ...], encoding: str) -> Document | BadDocument:
    try:
        # Files with byte order marks may have been concatenated.
        parsed = LENIENT_DECODER.decode(line.removeprefix(_BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        return BadDocument(f"byte {error.start} of the line is not valid {encoding} (--encoding sets another)")
    except RecursionError:
        return BadDocument("the JSON is nested too deeply")
    except ValueError as error:
        hint = "; it looks like a JSON array, give one object per line" if line.lstrip().startswith(b"[") else ""
        return BadDocument(f"invalid JSON: {error}{hint}")
    return document_of(parsed, keys)


def document_of(parsed: Any, keys: tuple[str, ...]) -> Document | BadDocument:
    """Return the texts of a parsed JSON value, one entry for each key."""
    if not isinstance(parsed, dict):
        kind = "an array: give one object per line" if isinstance(parsed, list) else f"a {type(parsed).__name__}"
        return BadDocument(f"expected a JSON object, found {kind}")
    texts: Document = []
    if keys == (MESSAGES,) and (names := dialogue_keys(parsed)):
        try:
            return _dialogue({name: parsed[name] for name in names})
        except (TypeError, ValueError) as error:
            return BadDocument(f"{', '.join(names)} make no dialogue: {error}")
    for key in keys:
        if key not in parsed:
            found = ", ".join(json.dumps(name) for name in parsed) or "none"
            hint = dialogue_hint(parsed) if keys == (MESSAGES,) else " (--json-keys names the text)"
            return BadDocument(f"no key {json.dumps(key)}; its keys are {found}{hint}")
        text = text_of(parsed[key], key)
        if isinstance(text, BadDocument):
            return text
        texts.append(text)
    return texts


def element_document(element: Any, keys: tuple[str, ...]) -> Document | BadDocument:
    """Return the texts of an element of a JSON array: an object, or a text."""
    if isinstance(element, str) and len(keys) == 1:
        return [element]
    if isinstance(element, dict):
        return document_of(element, keys)
    return BadDocument(f"expected a JSON object or a text, found {type(element).__name__}")


def json_value_documents(data: bytes, keys: tuple[str, ...]) -> list[Document | BadDocument] | None:
    """Return the documents of one JSON object or array in UTF-8, over any number of lines; None if it is not one."""
    try:
        value = LENIENT_DECODER.decode(data.decode())
    except (ValueError, RecursionError):
        return None
    return [element_document(element, keys) for element in (value if isinstance(value, list) else [value])]


def text_of(value: Any, key: str) -> str | list[str] | BadDocument:
    """Return a value that is a text or a list of texts; BadDocument for any other."""
    inner = set(map(type, value)) if isinstance(value, list) else None
    if isinstance(value, str) or inner is not None and inner <= {str}:
        return value
    if inner == {dict}:
        messages = [_message(message) for message in value]
        if kinds := [kind for message in messages for kind in _kinds_beside_text(message.get("content"))]:
            return BadDocument(
                f"the value of {json.dumps(key)} has content of type {kinds[0]}; only text can be trained on"
            )
        if {str}.issuperset(type(message.get("role")) for message in messages):
            reason = f"the value of {json.dumps(key)} is a dialogue; give --chat-template"
            return Dialogue(reason, messages)
    return BadDocument(f"the value of {json.dumps(key)} is not text but {json.dumps(value, default=str)[:_SHOWN]}")


def _dialogue(given: dict[str, Any]) -> Document | BadDocument:
    """Return the dialogue of an object of one of the forms, or its text where that is what `messages` holds.

    Raises:  TypeError or ValueError if a part has another type.
    """
    messages: Any
    prompt = 0
    if "instruction" in given:
        asked = "\n".join(filter(None, (given["instruction"], given.get("input"))))
        turns = [*(_parsed(given.get("history")) or ()), (asked, given["output"])]
        messages = [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=False)
        ]
    elif "prompt" in given:
        sides = (("user", given["prompt"]), ("assistant", given["completion"]))
        parts = [part if isinstance(part, list) else [{"role": role, "content": part}] for role, part in sides]
        messages, prompt = [*parts[0], *parts[1]], len(parts[0])
    else:
        messages = _parsed(given.get("messages", given.get("conversations")))
    if given.get("system"):
        messages = [{"role": "system", "content": given["system"]}, *messages]
        prompt += 1
    found = text_of(messages, MESSAGES)
    if not isinstance(found, Dialogue):
        return found if isinstance(found, BadDocument) else [found]
    tools = given.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools or "null")
    return replace(found, tools=tools or None, prompt=prompt)


def _parsed(value: Any) -> Any:
    """Return a value, or that of its JSON where it is a list: columns of tables hold dialogues as text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with role and content, without keys of no value; ShareGPT's have `from` and `value`.

    Content in parts, OpenAI's form, becomes one text if all of them are texts.
    """
    if None in message.values():
        message = {key: value for key, value in message.items() if value is not None}  # as transformers does
    content = message.get("content")
    if isinstance(content, list) and not _kinds_beside_text(content):
        message = {**message, "content": "".join(part["text"] for part in content)}  # as the server joins them
    if "role" in message or not {"from", "value"} <= message.keys():
        return message
    speaker = message["from"]
    return {
        "role": {"human": "user", "gpt": "assistant", "observation": "tool"}.get(str(speaker), speaker),
        "content": message["value"],
    }


def _kinds_beside_text(content: Any) -> list[str]:
    """Return the types of those parts of a message's content that are no text; none of content that is one text."""
    if not isinstance(content, list):
        return []
    parts = [part if isinstance(part, dict) else {"type": type(part).__name__} for part in content]
    return [
        str(part.get("type")) for part in parts if part.get("type") != "text" or not isinstance(part.get("text"), str)
    ]


def text_documents(
    data: bytes, separator: str | None, *, alone: bool, encoding: str, limit: int
) -> Iterator[tuple[int, Document | BadDocument]]:
    """Yield the number and document of each part of a text between separators.

    Line breaks next to a separator belong to neither document, and documents without a visible character are left
    out. A file that comes whole (`alone`) and without any separator is one document as it stands.
    """
    parts = data.split(separator.encode()) if separator else [data]
    whole = alone and len(parts) == 1
    for number, part in enumerate(parts):
        if len(part) > limit:
            yield number, _too_long("document", part, limit)
            continue
        try:
            text = part.decode()
        except UnicodeDecodeError as error:
            reason = f"byte 0x{part[error.start]:02x} is not valid {encoding} (--encoding sets another)"
            yield number, BadDocument(reason)
            continue
        document = text if whole else text.strip("\r\n")
        if document and not document.isspace():
            yield number, [document]


def _too_long(unit: str, content: bytes, limit: int) -> BadDocument:
    return BadDocument(f"the {unit} has {len(content)} bytes, more than {limit} (--max-document-bytes)")


def count_units(data: bytes, separator: bytes | None) -> int:
    """Count the lines, or documents of a text, in `data`."""
    if separator is None:
        return 1
    return data.count(separator) + (not data.endswith(separator) and bool(data))
