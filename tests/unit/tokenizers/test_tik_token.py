"""TikTokenizer: ids, special tokens, and what a broken vocabulary says."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalith.config import TokenizerConfig
from megalith.errors import DataError
from megalith.tokenizers import build_tokenizer
from megalith.tokenizers.tik_token import TikTokenizer


def entries(*more: bytes) -> list[dict[str, Any]]:
    tokens = [*(bytes([byte]) for byte in range(256)), *more]
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(tokens)
    ]


def write(folder: Path, content: Any) -> Path:
    path = folder / "tok.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_ids(tmp_path: Path) -> None:
    path = write(tmp_path, entries(b"ab", b"abc"))
    cut = TikTokenizer(path, vocab_size=260, num_special_tokens=3)
    assert cut.encode("abc") == [256 + 3, ord("c") + 3]  # of 258 ranks the last has no place
    whole = TikTokenizer(path, vocab_size=263, num_special_tokens=5)
    assert whole.encode("abc<s>")[0] == 257 + 5 and whole.decode(whole.encode("abc<s>")) == "abc<s>"
    assert whole.special == {"unk": 0, "bos": 1, "eos": 2} and (whole.eod, whole.pad) == (2, None)
    assert whole.decode([0, 3, 4]) == "<unk><SPECIAL_3><SPECIAL_4>"
    with pytest.raises(DataError, match="id 263"):
        whole.decode([263])


def test_named_special_tokens_by_the_flags(tmp_path: Path) -> None:
    path = write(tmp_path, entries())
    config = TokenizerConfig(
        "TikTokenizer",
        tokenizer_model=str(path),
        vocab_size=262,
        tiktoken_num_special_tokens=6,
        tiktoken_pattern="v1",
        tokenizer_special_tokens=("<pad>", "<unk>", "</s>", "<s>"),
    )
    tokenizer = build_tokenizer(config)
    assert tokenizer.special == {"unk": 1, "bos": 3, "eos": 2, "pad": 0} and tokenizer.pad == 0
    identity = tokenizer.identity()
    assert identity["class"] == "CustomTikTokenizer" and identity["vocab_size"] == "262"
    assert identity["special_tokens"] == "['<pad>', '<unk>', '</s>', '<s>']"
    assert tokenizer.fingerprint()["settings"] == {"pattern": "v1", "num_special_tokens": 6}
    plain = TikTokenizer(path, vocab_size=262, num_special_tokens=6)
    assert plain.identity()["special_tokens"] == "None" and set(plain.files()) == {"tiktoken.vocab.json"}


def test_patterns_differ_in_capitals(tmp_path: Path) -> None:
    path = write(tmp_path, entries(b"aB"))
    sizes = [
        len(TikTokenizer(path, pattern=name, vocab_size=260, num_special_tokens=3).encode("aB"))
        for name in ("v1", "v2")
    ]
    assert sizes == [1, 2]


def _swap(content: list[dict[str, Any]]) -> Any:
    content[3], content[4] = content[4], content[3]
    return content


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: json.dumps(content)[:-9], "is cut short or damaged"),
        (lambda content: {"a": 1}, "expected a JSON list"),
        (lambda content: _swap(content), "is damaged: entry 3"),
        (lambda content: [*content[:-1], {"rank": 256}], "is damaged: entry 256"),
        (lambda content: [*content[:-1], {**content[256], "token_bytes": "AA=="}], "duplicate tokens"),
        (lambda content: content[:200], "has 200 tokens, and --vocab-size 260 with 3 special tokens needs 257"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, damage: Callable[[Any], Any], message: str) -> None:
    path = write(tmp_path, damage(entries(b"ab")))
    with pytest.raises(DataError, match=message):
        TikTokenizer(path, vocab_size=260, num_special_tokens=3)
    with pytest.raises(DataError, match="cannot read --tokenizer-model"):
        TikTokenizer(tmp_path / "none.json")
