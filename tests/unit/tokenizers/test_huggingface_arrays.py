"""Texts to arrays by a tokenizer.json: gigatoken gives the ids of the library `tokenizers`, or is left alone."""

from __future__ import annotations

import itertools
import json
import logging
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from megalith.config import TokenizerConfig
from megalith.data.preprocess import PreprocessOptions, preprocess
from megalith.data.sources import SourceOptions
from megalith.errors import DataError
from megalith.tokenizers.fast_bpe import BytePairArrays, array_encoder
from megalith.tokenizers.huggingface import HuggingFaceTokenizer

pytest.importorskip("gigatoken", reason="the extra data is not installed")

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + ENDS
QWEN3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + ENDS
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + ENDS
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HOSTILE = (
    *SPECIAL,
    *("<|im_end|", "|>", "<|endoftext|><|im_end|>", "<|im_end|>\u0338", "<think>", "</think>"),
    *(
        "\U0001f600",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f1e9\U0001f1ea",
        "\u4e2d\u6587",
        "\u3053\uff0c",
    ),
    *(
        "cafe\u0301",
        "caf\u00e9",
        "\u212b",
        "\u0958",
        "\u1100\u1161\u11a8",
        "\u0301",
        "a\u0327\u0301",
        "\ufb01",
        "\u01c5",
    ),
    *("\x00", "\x1c", "\x85", "\u2028", "\ufeff", "\ufffd", "\u00a0", "\u3000", "\u200b", "\r\n", "\n\n", "\t", "\x0b"),
    *(
        "'s",
        "'S",
        "'\u017f",
        "'LL",
        "''ve",
        "1234567",
        "\u00bd\u2167",
        "\u0663",
        "     ",
        " \n ",
        "the",
        " The",
        "in",
        "ing",
    ),
    *("\ua7f1", "\u0c3c", "\U000105c9", "\U000105d2\u0307", "\U0002ebf0", "\U000323b0", "\U0001e5d0", "\u1c89"),
    *("x" * 70, "ab" * 40, "\u0939" * 30, "-" * 50),
)
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=6), max_size=12).map("".join)


LETTERS = pre_tokenizers.ByteLevel.alphabet()


def split_by(pattern: str) -> Any:
    isolated = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([isolated, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def make(pre_tokenizer: Any, *, nfc: bool = False, begins: bool = False) -> Any:
    """A BPE of few hundred tokens of sources and hostile texts, with special tokens behind and some in front."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizer, decoders.ByteLevel()
    if nfc:
        bpe.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=list(SPECIAL[:1]),
        initial_alphabet=LETTERS,
        show_progress=False,
    )
    bpe.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), *HOSTILE * 3], trainer)
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL[1:]])
    bpe.add_tokens([AddedToken("<think>", normalized=False)])
    if begins:
        around = [(token, bpe.token_to_id(token)) for token in SPECIAL[1:]]
        template = processors.TemplateProcessing(single=f"{SPECIAL[1]} $A {SPECIAL[2]}", special_tokens=around)
        bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return bpe


KINDS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: make(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": lambda: make(split_by(LLAMA3), begins=True),
    "qwen3": lambda: make(split_by(QWEN3), nfc=True),
    "qwen35": lambda: make(split_by(QWEN35), nfc=True),
}


def save(folder: Path, content: Any) -> HuggingFaceTokenizer:
    folder.mkdir(exist_ok=True)
    text = json.dumps(content) if isinstance(content, dict) else content.to_str()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0]}))
    return HuggingFaceTokenizer(folder)


def encoder_of(tokenizer: HuggingFaceTokenizer, *, plain: bool = False) -> BytePairArrays:
    encode = array_encoder(tokenizer, 1 << 40, plain=plain)
    assert isinstance(encode, BytePairArrays)
    return encode


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tokenizer, the library's own, and the encoder of text and of dialogues."""
    bpe = KINDS[request.param]()
    tokenizer = save(tmp_path_factory.mktemp("tokenizer"), bpe)
    return SimpleNamespace(bpe=bpe, text=encoder_of(tokenizer), plain=encoder_of(tokenizer, plain=True))


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_the_ids_are_those_of_the_library(kind: SimpleNamespace, texts: list[str]) -> None:
    assert kind.text._gigatoken is not None and kind.plain._gigatoken is not None
    assert [ids.tolist() for ids in kind.text(texts)] == [kind.bpe.encode(text).ids for text in texts]
    without = [kind.bpe.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in kind.plain(texts)] == without


def test_a_lone_surrogate_is_an_error(kind: SimpleNamespace) -> None:
    for text in ("ab\ud800", "e\u0301\ud800", "\U000323b0\udc00"):
        with pytest.raises(DataError, match=f"character {len(text) - 1} "):
            kind.text(["four", text])


@pytest.mark.full
@pytest.mark.parametrize("block", [*range(0, 0x40000, 0x8000), 0xE0000, 0x100000])  # no plane between has characters
def test_every_character(kind: SimpleNamespace, block: int) -> None:
    letters = [chr(code) for code in range(block, block + 0x8000) if not 0xD800 <= code < 0xE000]
    texts = [f" {a}{b}x{a} {b} {a}{a}1'{b}\u0301{a}\n{b}" for a, b in zip(letters[::2], letters[1::2], strict=True)]
    expected = [one.ids for one in kind.bpe.encode_batch(texts)]
    for text, ids, wanted in zip(texts, kind.text(texts), expected, strict=True):
        assert ids.tolist() == wanted, repr(text)


def changed(content: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {**content, **parts}


def others() -> dict[str, dict[str, Any]]:
    """Tokenizers for which gigatoken gives other ids, or is not known to give the same."""
    plain: dict[str, Any] = json.loads(KINDS["gpt2"]().to_str())
    byte_level, model = plain["pre_tokenizer"], plain["model"]
    qwen: dict[str, Any] = json.loads(KINDS["qwen3"]().to_str())
    split, last = qwen["pre_tokenizer"]["pretokenizers"]

    def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
        return {"type": "Sequence", "pretokenizers": list(steps)}

    (first, *more), ids = plain["added_tokens"], model["vocab"]
    whole = max(max(ids.values()), *(token["id"] for token in more)) + 1
    return {
        "adds a space": changed(plain, pre_tokenizer=changed(byte_level, add_prefix_space=True)),
        "no pattern": changed(plain, pre_tokenizer=changed(byte_level, use_regex=False)),
        "two patterns": changed(qwen, pre_tokenizer=sequence(split, changed(last, use_regex=True))),
        "digits": changed(plain, pre_tokenizer=sequence({"type": "Digits", "individual_digits": True}, byte_level)),
        "another pattern": changed(
            qwen, pre_tokenizer=sequence(changed(split, pattern={"Regex": r"\p{L}+|\P{L}+"}), last)
        ),
        "merged with the next": changed(qwen, pre_tokenizer=sequence(changed(split, behavior="MergedWithNext"), last)),
        "NFKC": changed(plain, normalizer={"type": "NFKC"}),
        "a word alone": changed(plain, added_tokens=[first, *(changed(one, single_word=True) for one in more)]),
        "two kinds of tokens": changed(plain, added_tokens=[first, *(changed(one, normalized=True) for one in more)]),
        "a pair around": changed(
            plain,
            post_processor={
                "type": "RobertaProcessing",
                "sep": [SPECIAL[1], more[0]["id"]],
                "cls": [SPECIAL[2], more[1]["id"]],
                "trim_offsets": True,
                "add_prefix_space": False,
            },
        ),
        "a letter of no byte": changed(plain, model=changed(model, vocab={**ids, "\u4e2d": whole})),
        "no letter for a byte": changed(
            plain, model=changed(model, vocab={"ab\u00ff" if token == "\u00ff" else token: ids[token] for token in ids})
        ),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("adds a space", "no pattern", "two patterns", "digits", "another pattern", "merged with the next", "NFKC"),
        *("a word alone", "two kinds of tokens", "a pair around", "a letter of no byte", "no letter for a byte"),
    ],
)
def test_what_is_not_known_to_be_the_same_stays_with_the_library(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = save(tmp_path, others()[name])
    with caplog.at_level(logging.WARNING):
        encode = array_encoder(tokenizer, 1 << 40)
    assert getattr(encode, "_gigatoken", None) is None and not caplog.records
    texts = [*HOSTILE, "theing <think> 12"]
    assert [ids.tolist() for ids in encode(texts)] == [tokenizer.encode(text) for text in texts]


def test_the_list_of_merges_decides_whatever_the_ids(tmp_path: Path) -> None:
    """Lists in any order, with several pairs for a token, late or missing pairs, and ids in any order."""
    source, differ = random.Random(5), 0
    words = ["".join(letters) for length in range(1, 7) for letters in itertools.product("ab", repeat=length)]
    plain: dict[str, Any] = json.loads(make(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str())
    for number in range(60):
        made = ["a", "b"]
        while len(made) < 7:
            joined = source.choice(made) + source.choice(made)
            made += [joined] * (joined not in made and len(joined) <= 9)
        merges = [[one[:at], one[at:]] for one in made for at in range(1, len(one)) if {one[:at], one[at:]} <= {*made}]
        merges = source.sample(merges, len(merges) - number % 3)
        tokens = source.sample([*sorted(LETTERS), *made[2:]], len(LETTERS) + len(made) - 2)
        vocabulary = {token: at for at, token in enumerate([*tokens, SPECIAL[0]])}
        model = changed(plain["model"], vocab=vocabulary, merges=merges, ignore_merges=bool(number % 2))
        added = [changed(plain["added_tokens"][0], id=len(tokens))]
        tokenizer = save(tmp_path, changed(plain, model=model, added_tokens=added))
        encode = encoder_of(tokenizer)
        assert encode._gigatoken is not None
        assert [ids.tolist() for ids in encode(words)] == [tokenizer.encode(word) for word in words]
        differ += any(len(ids) > 1 for word, ids in zip(words, encode(words), strict=True) if word in vocabulary)
    assert differ > 10  # tokens that merging does not make of their own letters


def test_all_pairs_of_each_token_as_llama3_lists_them(tmp_path: Path) -> None:
    content = json.loads(KINDS["llama3"]().to_str())
    ids = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    merges = [
        [token[:at], token[at:]]
        for token in sorted(ids, key=ids.__getitem__)
        if token not in special
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    assert len(merges) > len(content["model"]["merges"])
    content["model"] |= {"merges": merges, "ignore_merges": True}
    tokenizer = save(tmp_path, content)
    encode = encoder_of(tokenizer)
    assert encode._gigatoken is not None
    assert [ids.tolist() for ids in encode(HOSTILE)] == [tokenizer.encode(text) for text in HOSTILE]


def test_datasets_have_the_same_bytes_with_and_without_gigatoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "tok", KINDS["llama3"]())
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (*HOSTILE, "")))
    config = TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tok"))
    content = []
    monkeypatch.setattr("megalith.tokenizers.huggingface._WORTH_LOADING", 1)
    for name in ("with", "without"):
        options = PreprocessOptions(
            (str(tmp_path / "in.jsonl"),), str(tmp_path / name), config, SourceOptions(), append_eod=True
        )
        preprocess(options)
        content.append([(tmp_path / f"{name}_text_document.{end}").read_bytes() for end in ("bin", "idx")])
        monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert content[0] == content[1]
    assert len(np.frombuffer(content[0][0], np.uint16)) > len(HOSTILE)
