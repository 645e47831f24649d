"""The three tokenizers over a SentencePiece model: what they add to it, and what broken files say."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece

from megalith.config import TokenizerConfig
from megalith.errors import DataError
from megalith.tokenizers import build_tokenizer
from megalith.tokenizers.fingerprint import fingerprint_differences
from megalith.tokenizers.sentence_piece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"]


def train(folder: Path, **options: object) -> Path:
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=content, model_type="bpe", vocab_size=60, minloglevel=2, **options
    )
    path = folder / "tokenizer.model"
    path.write_bytes(content.getvalue())
    return path


def test_special_ids_follow_the_model(tmp_path: Path) -> None:
    model = train(tmp_path, pad_id=3)
    tokenizer = SentencePieceTokenizer(model, vocab_extra_ids=2)
    assert tokenizer.special == {"cls": 60, "sep": 61, "eod": 62, "mask": 63, "pad": 3, "bos": 1, "eos": 2}
    assert (tokenizer.extra_ids, tokenizer.vocab_size, tokenizer.pad, tokenizer.eod) == ((64, 65), 66, 3, 62)
    assert GPTSentencePieceTokenizer(model).pad == 3 and Llama2Tokenizer(model).pad is None


def test_what_the_model_has_keeps_its_id(tmp_path: Path) -> None:
    model = train(tmp_path, user_defined_symbols=["<SEP>", "<extra_id_1>"])
    tokenizer = SentencePieceTokenizer(model, vocab_extra_ids=3)
    assert (tokenizer.special["cls"], tokenizer.special["sep"], tokenizer.special["eod"]) == (60, 3, 61)
    assert tokenizer.extra_ids == (64, 4, 65) and tokenizer.vocab_size == 66
    assert tokenizer.encode("<SEP><extra_id_1><CLS>") == [3, 4, 60]


def test_a_model_without_bos_or_eos(tmp_path: Path) -> None:
    model = train(tmp_path, bos_id=-1, eos_id=-1)
    tokenizer = SentencePieceTokenizer(model)
    assert (tokenizer.special["bos"], tokenizer.special["eos"], tokenizer.vocab_size) == (65, 66, 67)
    for kind in (Llama2Tokenizer, GPTSentencePieceTokenizer):
        with pytest.raises(DataError, match=rf"tokenizer\.model.*{kind.__name__}"):
            kind(model)
    with pytest.raises(DataError, match=r"tokenizer\.model"):
        Llama2Tokenizer(train(tmp_path, bos_id=-1))


def test_text_there_and_back(tmp_path: Path) -> None:
    model = train(tmp_path)
    llama, plain, t5 = Llama2Tokenizer(model), GPTSentencePieceTokenizer(model), SentencePieceTokenizer(model, 1)
    assert llama.encode("") == [1] and plain.encode("") == t5.encode("") == []
    assert llama.encode("the fox") == [1, *plain.encode("the fox")]
    assert llama.decode(llama.encode("the fox")) == plain.decode(plain.encode("the fox")) == "the fox"
    assert t5.encode("the<extra_id_0> fox</s>") == [*plain.encode("the"), 65, *plain.encode(" fox"), 2]
    assert t5.decode([*plain.encode("the"), 65, *plain.encode("fox")]) == "the <extra_id_0> fox"
    assert 2 not in plain.encode("the</s>")
    with pytest.raises(DataError, match="id 60"):
        plain.decode([60])


def test_cards_and_identities(tmp_path: Path) -> None:
    model = train(tmp_path)
    config = TokenizerConfig("SentencePieceTokenizer", tokenizer_model=str(model), vocab_extra_ids=4)
    t5, llama = build_tokenizer(config), Llama2Tokenizer(model)
    assert t5.identity() == {
        "class": "_SentencePieceTokenizer",
        "tokenizer_path": [str(model)],
        "vocab_extra_ids": "4",
    }
    assert llama.identity()["class"] == "_Llama2Tokenizer" and set(llama.files()) == {"tokenizer.model"}
    differing = fingerprint_differences(t5.fingerprint(), SentencePieceTokenizer(model, 5).fingerprint())
    assert set(differing) == {"vocab_size", "setting vocab_extra_ids"}
    assert not fingerprint_differences(llama.fingerprint(), GPTSentencePieceTokenizer(model).fingerprint()), (
        "ids mean the same pieces"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read --tokenizer-model .*No such file"),
        (b"", "is truncated or not a SentencePiece model"),
        (b"not a model, though it is long enough for one", "is truncated or not a SentencePiece model"),
        (b"<!DOCTYPE html><html><body>404: Not Found</body></html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        Llama2Tokenizer(path)
    with pytest.raises(DataError, match="Llama2Tokenizer"):
        Llama2Tokenizer(tmp_path)


def test_half_a_model(tmp_path: Path) -> None:
    path = train(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=str(path)):
        GPTSentencePieceTokenizer(path)
