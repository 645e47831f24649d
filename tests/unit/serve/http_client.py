"""A server without sockets: its ASGI application over an engine with a model that has no weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from megalith.errors import DataError
from megalith.serve.engine import Engine
from megalith.serve.engine import Limits as EngineLimits
from megalith.serve.http.app import build_app
from megalith.serve.http.metrics import RequestLog
from megalith.serve.http.service import EncoderInput, Service
from megalith.serve.http.settings import Defaults, ServerSettings
from megalith.serve.model_runner import DecoderPrompt
from megalith.serve.worker import Worker
from megalith.tokenizers.chat_template import ChatFormat, ChatTemplate

from ...fake_runner import FakeRunner

ALPHABET = "\n !:abcdefghijklmnopqrstuvwxyz\u00e9"
EOD = len(ALPHABET)


class LetterTokenizer:
    """One id for each letter, and one that ends a text."""

    vocab_size = len(ALPHABET) + 1
    eod = EOD
    pad = None
    special = {"eod": EOD}
    special_ids = frozenset({EOD})

    def encode(self, text: str) -> list[int]:
        unknown = next((letter for letter in text if letter not in ALPHABET), None)
        if unknown is not None:
            raise DataError(f"{unknown!a} has no id")
        return [ALPHABET.index(letter) for letter in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("<end>" if number == EOD else ALPHABET[number] for number in ids)

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def identity(self) -> dict[str, Any]:
        return {}

    def files(self) -> dict[str, Path]:
        return {}


def next_letter(tokens: Sequence[int]) -> int:
    """The alphabet in its order, from the last letter on; behind its last one the text ends."""
    last = tokens[-1]
    return ALPHABET.index("a") if last == EOD else EOD if ALPHABET[last] == "z" else last + 1


def same_text(tokens: Sequence[int]) -> int:
    """The text before the end that stands where the answer begins, once more; then the end."""
    start = tokens.index(EOD)
    text = "".join(ALPHABET[number] for number in tokens[:start]).rstrip(ALPHABET[0])
    said = len(tokens) - start - 1
    return ALPHABET.index(text[said]) if said < len(text) else EOD


@dataclass
class Served:
    """A server and a client of it."""

    client: httpx.AsyncClient
    service: Service
    app: Any
    runner: FakeRunner
    lines: list[str]


@asynccontextmanager
async def served(
    *,
    settings: ServerSettings | None = None,
    defaults: Defaults | None = None,
    template: ChatTemplate | None = None,
    follow: Callable[[Sequence[int]], int] = next_letter,
    context_length: int = 64,
    limits: EngineLimits | None = None,
    num_blocks: int = 256,
    runner: FakeRunner | None = None,
    tokenizer: Any = None,
    answers: bool = False,
    blame: Callable[[], str | None] | None = None,
) -> AsyncIterator[Served]:
    """Make a server, and take it down again; `answers`: of a model that reads prompts with an encoder."""
    tokenizer, lines = tokenizer or LetterTokenizer(), list[str]()
    runner = runner or FakeRunner(tokenizer.vocab_size, context_length, follow=follow, num_blocks=num_blocks)
    engine = Engine(runner, tokenizer, limits, decoder_prompt=DecoderPrompt(EOD, EOD) if answers else None)
    worker = Worker(engine, blame).start()
    settings = settings or ServerSettings(model_name="letters")
    service = Service(
        worker,
        tokenizer,
        context_length,
        settings,
        RequestLog(lines.append, prompts=True),
        chat=ChatFormat(template),
        encoder_input=EncoderInput(tokenizer.encode, engine.max_output_tokens) if answers else None,
    )
    app = build_app(service, defaults)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("127.0.0.1", 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:5000") as client:
        try:
            yield Served(client, service, app, runner, lines)
        finally:
            worker.close()
