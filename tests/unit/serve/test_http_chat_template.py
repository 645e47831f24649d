"""Chat templates as they lie beside tokenizers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megalith.config.groups import TokenizerConfig
from megalith.errors import DataError
from megalith.tokenizers import build_tokenizer
from megalith.tokenizers.chat_template import (
    BadDialogue,
    ChatFormat,
    ChatTemplate,
    read_template,
    stop_ids_beside,
    stop_texts_beside,
    template_beside,
)

from .http_client import LetterTokenizer, served

SAID = [{"role": "user", "content": "a"}]


class _WithFiles(LetterTokenizer):
    def __init__(self, folder: Path, files: Mapping[str, Any]) -> None:
        self._folder = folder
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text, encoding="utf-8")

    def files(self) -> dict[str, Path]:
        return {"tokenizer.json": self._folder / "tokenizer.json"}


def test_the_template_of_the_configuration_with_its_special_tokens(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "bos_token": {"content": "<s>"},
    }
    template = template_beside(_WithFiles(tmp_path, {"tokenizer_config.json": {**config, "eos_token": "</s>"}}))
    assert template is not None and template.render(SAID) == "<s>a</s>"


def test_of_several_the_default_and_a_file_before_all(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    tokenizer = _WithFiles(tmp_path, {"tokenizer_config.json": {"chat_template": named}})
    template = template_beside(tokenizer)
    assert template is not None and template.render(SAID) == "plain"
    assert template.render(SAID, tools=[{}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = template_beside(tokenizer)
    assert template is not None and template.render(SAID) == "file"


def test_what_templates_of_the_hub_use() -> None:
    source = (
        "{%- for m in messages %}{%- if m.role == 'stop' %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{% if strftime_now('%Y')|int > 2000 and not tools and add_generation_prompt %}<{{ mood }}>{% endif %}"
    )
    said = [*SAID, {"role": "stop", "content": ""}]
    assert ChatTemplate(source).render(said, mood="kind") == '{"role": "user", "content": "a"}<kind>'


def test_none_where_there_is_none_and_an_error_where_it_is_damaged(tmp_path: Path) -> None:
    assert template_beside(LetterTokenizer()) is None
    assert template_beside(_WithFiles(tmp_path, {"tokenizer_config.json": {"eos_token": "x"}})) is None
    with pytest.raises(DataError, match="damaged"):
        template_beside(_WithFiles(tmp_path, {"chat_template.jinja": "{% for %}"}))
    with pytest.raises(DataError, match="--chat-template"):
        read_template(tmp_path / "nowhere.jinja", LetterTokenizer())


@pytest.mark.parametrize("source", ["{{ x.y.z }}", "{{ messages.append(1) }}", "{{ 'a' * 10**12 }}", "{{ 1 / 0 }}"])
def test_whatever_goes_wrong_in_a_template_is_about_the_messages(source: str) -> None:
    with pytest.raises(BadDialogue):
        ChatTemplate(source).render(SAID)


def test_a_model_that_chats_may_end_its_answers_in_several_ways(tmp_path: Path) -> None:
    tokenizer = _WithFiles(tmp_path, {"generation_config.json": {"eos_token_id": [3, LetterTokenizer.eod, 5]}})
    assert stop_ids_beside(tokenizer) == (LetterTokenizer.eod, 3, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert stop_ids_beside(tokenizer) == (LetterTokenizer.eod, 3), "one that is not the tokenizer's"
    assert stop_ids_beside(LetterTokenizer()) is None


TURNS = {
    "chatml": ("<|endoftext|>", "<|im_end|>", "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"),
    "llama": ("<|begin_of_text|>", "<|eot_id|>", "<|start|>{{ m.role }}<|end|>\n\n{{ m.content }}<|eot_id|>"),
    "plain": ("<|endoftext|>", None, "[{{ m.role }}]\n{{ m.content }} [end]\n"),
}
"""First special token, the one that ends a turn, and a message by the template; `plain` ends turns by a text."""


@pytest.mark.parametrize("given", [True, False], ids=["template", "generation_config.json"])
@pytest.mark.parametrize("kind", TURNS)
def test_an_answer_ends_with_its_turn_which_is_not_shown(tmp_path: Path, kind: str, given: bool) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the hf extra is not installed")
    begin, end, message = TURNS[kind]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    special = [begin, *([end] if end else []), "<|im_start|>", "<|start|>", "<|end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([], tokenizers.trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    bpe.save(str(tmp_path / "tokenizer.json"))
    source = f"{{% for m in messages %}}{message}{{% endfor %}}"
    config = {"eos_token": begin, "chat_template": source}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = build_tokenizer(TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    template = template_beside(tokenizer)
    assert template is not None
    stop_ids, stop_texts = stop_ids_beside(tokenizer, template), stop_texts_beside(tokenizer, template)
    if not given and end is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [bpe.token_to_id(end)]}))
        stop_ids, stop_texts = stop_ids_beside(tokenizer), ()
    written = tokenizer.encode(f"Yes, I am.{end or ' [end]'}\nno part of it")
    asked = tokenizer.encode(template.render(SAID))
    body = {"messages": SAID, "max_tokens": 40, "temperature": 0}

    async def ask() -> tuple[Any, str]:
        follow = {"follow": lambda tokens: written[len(tokens) - len(asked)], "context_length": 128}
        async with served(template=template, tokenizer=tokenizer, **follow) as server:
            server.service.chat = ChatFormat(template, stop_ids, stop_texts)
            whole = await server.client.post("/v1/chat/completions", json=body)
            stream = await server.client.post("/v1/chat/completions", json={**body, "stream": True})
            return whole.json()["choices"][0], stream.text

    choice, stream = asyncio.run(ask())
    assert choice["message"]["content"] == ("Yes, I am." if end else "Yes, I am. ")
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (bpe.token_to_id(end) if end else "[end]")
    pieces = [json.loads(line)["choices"][0]["delta"].get("content", "")
              for line in re.findall(r"^data: (\{.*)$", stream, re.MULTILINE)]  # fmt: skip
    assert "".join(pieces) == choice["message"]["content"]


class _Brackets(LetterTokenizer):
    """With <s>, which begins every text, and <t>, which ends a turn."""

    special = {"eod": LetterTokenizer.eod, "bos": LetterTokenizer.vocab_size}
    special_ids = frozenset(range(LetterTokenizer.eod, LetterTokenizer.eod + 3))

    def encode(self, text: str) -> list[int]:
        begin, turn = self.special["bos"], self.special["bos"] + 1
        parts = re.split("(<t>|<s>)", text)
        ids = [[turn] if part == "<t>" else [begin] if part == "<s>" else super(_Brackets, self).encode(part)
               for part in parts]  # fmt: skip
        return [begin, *(number for some in ids for number in some)]


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("{% for m in messages %}{{ m.content }}<t>\n{% endfor %}", [LetterTokenizer.vocab_size + 1]),
        ("{% for m in messages %}{{ m.role }}<t>{{ m.content }}\n{% endfor %}", []),
        ("{% for m in messages %}<s>{{ m.content }}<t>{% if loop.last %}<s>{% endif %}{% endfor %}",
         [LetterTokenizer.vocab_size + 1]),
        ("{{ raise_exception('system first') }}", []),
        ("no content", []),
        ("{% for m in messages %}{{ m.content }} END {% endfor %}", []),
    ],
)  # fmt: skip
def test_what_the_template_writes_behind_an_answer_ends_it(source: str, more: list[int]) -> None:
    found = stop_ids_beside(_Brackets(), ChatTemplate(source))
    assert found == ((LetterTokenizer.eod, *more) if more else None)
