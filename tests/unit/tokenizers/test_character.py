"""A tokenizer of single characters: its vocabulary, and what its errors name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalith.config import TokenizerConfig
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer, build_tokenizer
from megalith.tokenizers.build import with_files_in
from megalith.tokenizers.character import character_vocabulary
from megalith.tokenizers.protocol import end_ids, require_eod

TEXT = "Änderung\n中文 naïve 🙂\te\u0301"


def write(folder: Path, content: str) -> TokenizerConfig:
    file = folder / "chars.json"
    file.write_text(content, encoding="utf-8")
    return TokenizerConfig(tokenizer_type="CharacterTokenizer", vocab_file=str(file))


def tokenizer_of(folder: Path, text: str = TEXT, *, with_eod: bool = False) -> Tokenizer:
    return build_tokenizer(write(folder, character_vocabulary(text, with_eod=with_eod)))


def test_ids_are_the_code_points_in_order(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    alphabet = sorted(set(TEXT))
    assert tokenizer.vocab_size == len(alphabet)
    assert tokenizer.encode("".join(alphabet)) == list(range(len(alphabet)))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("") == []
    with pytest.raises(DataError, match=f"id {len(alphabet)} "):
        tokenizer.decode([len(alphabet)])


def test_a_document_ends_only_where_the_vocabulary_has_an_end(tmp_path: Path) -> None:
    without, ending = tokenizer_of(tmp_path), tokenizer_of(tmp_path, with_eod=True)
    assert (without.eod, without.special_ids, end_ids(without)) == (None, frozenset(), ())
    assert ending.eod == ending.vocab_size - 1 == without.vocab_size and end_ids(ending) == (ending.eod,)
    assert ending.decode(end_ids(ending)) == "<|endoftext|>"
    with pytest.raises(DataError, match="--append-eod"):
        require_eod(without, "--append-eod")
    assert require_eod(ending, "--append-eod") == ending.eod


def test_the_end_of_a_document_is_plain_text_in_a_text(tmp_path: Path) -> None:
    ending = tokenizer_of(tmp_path, "<|endoftext|>", with_eod=True)
    assert ending.eod not in ending.encode("<|endoftext|>")


def test_an_unknown_character_is_named_with_its_line_and_code_point(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 3 .*'é' \(U\+00E9\).*chars\.json"):
        tokenizer_of(tmp_path, "ab\n").encode("a\nb\naé")
    with pytest.raises(DataError, match=r"U\+D800"):
        tokenizer_of(tmp_path, "ab\ud800").encode("\ud800")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{}", "empty"),
        ("[1]", "JSON"),
        ('{"a"', "damaged"),
        ('{"a": 0, "th": 1}', "'th'"),
        ('{"": 0}', "''"),
        (r'{"\ud800": 0}', "ud800"),
        ('{"a": 0, "b": 2}', "0 to 1"),
        ('{"a": 0, "b": 0}', "0 to 1"),
        ('{"a": 0, "b": true}', "0 to 1"),
        ('{"a": [0]}', "0 to 0"),
    ],
)
def test_a_file_that_is_no_vocabulary(tmp_path: Path, content: str, named: str) -> None:
    with pytest.raises(DataError, match=r"chars\.json.*" + named):
        build_tokenizer(write(tmp_path, content))


def test_a_missing_file_is_named_with_the_command_that_makes_one(tmp_path: Path) -> None:
    config = TokenizerConfig(tokenizer_type="CharacterTokenizer", vocab_file=str(tmp_path / "no.json"))
    with pytest.raises(DataError, match=r"--vocab-file .*no\.json.*megalith preprocess"):
        build_tokenizer(config)


def test_the_file_beside_a_checkpoint_is_used(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    for name, path in tokenizer.files().items():
        (folder / name).write_bytes(path.read_bytes())
    config = TokenizerConfig(tokenizer_type="CharacterTokenizer", vocab_file="gone.json")
    moved = build_tokenizer(with_files_in(folder, config))
    assert moved.fingerprint() == tokenizer.fingerprint()
    assert json.loads((folder / "vocab.json").read_text(encoding="utf-8"))["\n"] == tokenizer.encode("\n")[0]
