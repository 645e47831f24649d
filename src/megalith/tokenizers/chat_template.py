"""From the messages of a dialogue to one text, by the template that came with the tokenizer.

A template is a program in Jinja: it runs in the sandbox of Jinja, without files, network or attributes of Python.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalith.errors import DataError
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.huggingface import CHAT_TEMPLATE_FILE
from megalith.tokenizers.protocol import end_ids

_CONFIG, _GENERATION = "tokenizer_config.json", "generation_config.json"
_SPECIAL = "special_tokens_map.json"
TOKENIZERS = "tokenizer"
"""Name of the template in the folder of the tokenizer, where a file could be named."""
_FOLDER = Path(__file__).parent / "chat_templates"
BUILT_IN = tuple(sorted(path.stem for path in _FOLDER.glob("*.jinja")))
"""Names of our templates, where a file could be named; all mark what an assistant says, up to the end of its turn."""
_MARK = "ANSWER"
_BEGIN, _END = (
    f"{secrets.token_hex()} {edge} of what an assistant says" for edge in ("begin", "end")
)  # no text has it


class BadDialogue(ValueError):
    """The template refuses these messages."""


class ChatTemplate:
    """A template in Jinja, with variables such as bos_token.

    Args:
        with_tools: source of another template for dialogues with tools.

    Attributes:
        takes_tools: it reads the variable `tools`.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, with_tools: str | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self.source = source
        try:
            self._template = environment.from_string(source)
            self._with_tools = self._template if with_tools is None else environment.from_string(with_tools)
            parsed = environment.parse(source if with_tools is None else with_tools)
            self.takes_tools = "tools" in find_undeclared_variables(parsed)
        except TemplateError as error:
            raise DataError(f"the chat template is damaged: {error}") from error
        self._variables = dict(variables or {})

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Return the text that the model continues; `BadDialogue` if the template does not take these messages."""
        return self.render_marked(messages, **variables)[0]

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], /, **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the ranges of its characters within `{% generation %}`; raises as `render` does."""
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self._variables, **variables}
        pieces: list[str] = []
        marked: list[tuple[int, int]] = []
        begin = length = 0
        try:
            template = self._with_tools if given["tools"] else self._template
            for piece in template.generate({**given, "messages": messages}):
                if piece == _BEGIN:
                    begin = length
                elif piece == _END:
                    marked.append((begin, length))
                else:
                    pieces.append(piece)
                    length += len(piece)
        except BadDialogue:
            raise
        except Exception as error:  # a program of others: whatever it meets, the messages are not for it
            raise BadDialogue(f"{type(error).__name__}: {error}") from error
        text = "".join(pieces)
        if _BEGIN in text:
            raise BadDialogue("the template has {% generation %} inside a macro or a block that is set")
        return text, marked

    @cached_property
    def after_answer(self) -> str:
        """Return what the template writes after an assistant's message; empty if it requires other messages."""
        dialogue = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARK}]
        try:
            _, marked, after = self.render(dialogue, add_generation_prompt=False).rpartition(_MARK)
        except BadDialogue:
            return ""
        return after if marked else ""


class _Answers(Extension):
    """`{% generation %}`, by which templates mark what an assistant says, for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (_BEGIN, _END))
        return [begin, nodes.Scope(body).set_lineno(line), end]


_EXTENSIONS = ("jinja2.ext.loopcontrols", _Answers)


@dataclass(frozen=True)
class ChatFormat:
    """How a dialogue is written for a model, and what ends an answer.

    Attributes:
        template: None if there is none.
        stop_ids: Tokens that end an answer; None for the tokenizer's end-of-document token.
        stop_texts: Texts that end an answer of a dialogue.
    """

    template: ChatTemplate | None = None
    stop_ids: tuple[int, ...] | None = None
    stop_texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate | None) -> ChatFormat:
        """Return the format of a template with a tokenizer."""
        return cls(template, stop_ids_beside(tokenizer, template), stop_texts_beside(tokenizer, template))


def template_beside(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template in the folder of a tokenizer, or None."""
    folder = _folder(tokenizer)
    return None if folder is None else template_in(folder, tokenizer)


def template_in(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template in a folder, or None; special tokens that it does not name are those of a tokenizer."""
    config = _object(folder / _CONFIG)
    source, with_tools = config.get("chat_template"), None
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        source = (folder / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(source, str):
        return None
    tokens = _special_tokens(_folder(tokenizer) or folder) | _special_tokens(folder)
    return ChatTemplate(source, tokens, with_tools)


def stop_ids_beside(tokenizer: Tokenizer, template: ChatTemplate | None = None) -> tuple[int, ...] | None:
    """Return the ids that end an answer where there are others than the end of a document; None otherwise.

    They are those of generation_config.json, and the special tokens that the template writes after an answer.
    """
    folder = _folder(tokenizer)
    ends = _object(folder / _GENERATION).get("eos_token_id") if folder else None
    ends = [ends] if isinstance(ends, int) else ends
    if not isinstance(ends, list) or not all(isinstance(end, int) and 0 <= end < tokenizer.vocab_size for end in ends):
        ends = []
    found = tuple(dict.fromkeys([*end_ids(tokenizer), *ends, *ends_of_turn(tokenizer, template)]))
    return None if found == end_ids(tokenizer) else found


def stop_texts_beside(tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[str, ...]:
    """Return the text that a template writes after an answer if none of its tokens is special, as with a template that
    was given to a tokenizer without such tokens."""
    text = "" if template is None else template.after_answer.strip()
    return (text,) if text and not ends_of_turn(tokenizer, template) else ()


def ends_of_turn(tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    """Return the special tokens that a template writes after an assistant's message."""
    if template is None:
        return []
    try:
        ids = tokenizer.encode(template.after_answer) if template.after_answer else []
    except DataError:  # its output cannot be tokenized
        return []
    begins = tokenizer.special.get("bos")  # some tokenizers put it before every text
    return [number for number in ids if number in tokenizer.special_ids and number != begins]


def read_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of a file, with the special tokens of the tokenizer."""
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--chat-template {path} cannot be read: {error}") from error
    folder = _folder(tokenizer)
    return ChatTemplate(source, _special_tokens(folder) if folder else None)


def has_template(named: str) -> bool:
    """Return whether this is a file, one of `BUILT_IN`, or TOKENIZERS, whether or not the tokenizer has a template."""
    return named in (TOKENIZERS, *BUILT_IN) or Path(named).is_file()


def find_template(named: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of a file, one of `BUILT_IN`, or the tokenizer's. Raises DataError if there is none."""
    if named != TOKENIZERS:
        return read_template(_FOLDER / f"{named}.jinja" if named in BUILT_IN else Path(named), tokenizer)
    template = template_beside(tokenizer)
    if template is None:
        raise DataError(
            f"--chat-template {named}: the tokenizer has no chat template; give {', '.join(BUILT_IN)} or a Jinja file"
        )
    return template


def added_around(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return how many tokens a tokenizer adds before and behind every text; a chat template writes its own."""
    try:
        around = tuple(tokenizer.encode(""))
    except DataError:  # NullTokenizer, which adds none
        return 0, 0
    letter = tuple(tokenizer.encode("a")) if around else ()
    for before in range(len(around), -1, -1):
        behind = len(around) - before
        if letter[:before] + letter[len(letter) - behind :] == around:
            return before, behind
    return 0, 0


def _folder(tokenizer: Tokenizer) -> Path | None:
    return next((path.parent for path in tokenizer.files().values()), None)


def _special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of `bos_token` and its like by name; where the two files differ, tokenizer_config.json wins."""
    found = {}
    for name, token in (_object(folder / _SPECIAL) | _object(folder / _CONFIG)).items():
        token = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    return found


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    return found if isinstance(found, dict) else {}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise a value as transformers' filter of this name does: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise BadDialogue(message)
