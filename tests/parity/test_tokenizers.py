"""The ids of the real Megatron's tokenizers, and of independent references on arbitrary text."""

from __future__ import annotations

import base64
import functools
import json
import random
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalith.config import TokenizerConfig
from megalith.errors import DataError
from megalith.tokenizers import Tokenizer, build_tokenizer, padded_vocab_size
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megalith.tokenizers.huggingface import HuggingFaceTokenizer
from megalith.tokenizers.null import NullTokenizer
from megalith.tokenizers.sentence_piece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer
from megalith.tokenizers.tik_token import PATTERNS, TikTokenizer
from megalith.tokenizers.word_piece import WordPieceTokenizer

MAKERS: dict[str, Callable[[Path, Mapping[str, Any]], Tokenizer]] = {
    "_GPT2BPETokenizer": lambda model, _: GPT2BPETokenizer(*byte_pair_files(model)),
    "_HuggingFaceTokenizer": lambda model, _: HuggingFaceTokenizer(model),
    "_SentencePieceTokenizer": lambda model, case: SentencePieceTokenizer(model, **case["kwargs"]),
    "_GPTSentencePieceTokenizer": lambda model, _: GPTSentencePieceTokenizer(model),
    "_Llama2Tokenizer": lambda model, _: Llama2Tokenizer(model),
    "CustomTikTokenizer": lambda model, case: TikTokenizer(model, pattern=case["name"][-2:], **case["kwargs"]),
}
"""Kind of a case -> the tokenizer of its model."""


def byte_pair_files(folder: Path) -> tuple[Path, Path]:
    """The vocabulary and the merges in a folder, whatever stands before their names."""
    (vocab,), (merges,) = folder.glob("*vocab.json"), folder.glob("*merges.txt")
    return vocab, merges


def model_of(shared: Path, case: Mapping[str, Any]) -> Path:
    """Where the model of a case lies: beside it, among the inputs of the indexed datasets, or OpenAI's."""
    model: str = case["model"]
    if model.startswith("OpenAI"):
        return shared / "data" / "gpt2"
    _, inputs, path = model.partition("/inputs/")
    return shared / "golden" / "indexed" / "inputs" / path if inputs else shared / "golden" / "tokenizers" / model


@pytest.fixture(scope="module")
def golden(shared: Path) -> Callable[[str], Any]:
    return lambda name: json.loads((shared / "golden" / "tokenizers" / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def openai(shared: Path) -> GPT2BPETokenizer:
    folder = shared / "data" / "gpt2"
    return GPT2BPETokenizer(folder / "gpt2-vocab.json", folder / "gpt2-merges.txt")


def test_ids_texts_and_special_ids_of_every_case(shared: Path, golden: Callable[[str], Any]) -> None:
    cases = [case for case in golden("manifest")["cases"] if case["name"] not in ("null", "padded_vocab")]
    assert {case["kind"] for case in cases} == set(MAKERS)
    texts = golden("texts")
    for named in cases:
        expected = golden(named["file"].removesuffix(".json"))
        tokenizer = MAKERS[named["kind"]](model_of(shared, expected), expected)
        assert (tokenizer.vocab_size, tokenizer.eod) == (expected["vocab_size"], expected["eod"]), named
        assert tokenizer.encode_batch(texts) == expected["ids"], named
        other = expected["detok_if_different"]
        back = [text if changed is None else changed for text, changed in zip(texts, other, strict=True)]
        assert [tokenizer.decode(ids) for ids in expected["ids"]] == back, named
        for role in ("bos", "eos", "cls", "sep", "mask"):
            # What a class of Megatron does not have is an error there, or -1; the model may have it all the same.
            if isinstance(expected[role], int) and expected[role] >= 0 and role in tokenizer.special:
                assert tokenizer.special[role] == expected[role], (named, role)
        has_pad = isinstance(expected["pad"], int) and expected["pad"] >= 0
        assert tokenizer.pad == (expected["pad"] if has_pad else None), named


@pytest.mark.parametrize(("key", "lower_case"), [("lower", True), ("cased", False)])
def test_word_pieces(key: str, lower_case: bool, shared: Path) -> None:
    folder = shared / "golden" / "bert_t5"
    expected = json.loads((folder / "wordpiece.json").read_text())
    tokenizer = WordPieceTokenizer(folder / "data" / "vocab.txt", lower_case=lower_case)
    assert tokenizer.encode_batch(expected["strings"]) == expected[key]
    assert tokenizer.vocab_size == expected["vocab_size"]["lower"]
    special = {name: number for name, number in expected["special"].items() if isinstance(number, int)}
    assert special.items() <= tokenizer.special.items()
    longer = WordPieceTokenizer(folder / "data" / "vocab.txt", lower_case=lower_case, vocab_extra_ids=100)
    assert longer.vocab_size == expected["vocab_size"]["extra100"]
    assert [longer.extra_ids[0], longer.extra_ids[-1]] == expected["special"]["extra_ids_first_last"]


def test_card_holds_the_hashes_of_the_files(openai: GPT2BPETokenizer, golden: Callable[[str], Any]) -> None:
    expected = golden("gpt2bpe_openai50257")
    assert openai.fingerprint()["files"] == {
        "vocab.json": expected["vocab_sha256"],
        "merges.txt": expected["merges_sha256"],
    }


def test_null_tokenizer(golden: Callable[[str], Any]) -> None:
    (case,) = [case for case in golden("manifest")["cases"] if case["name"] == "null"]
    tokenizer = build_tokenizer(TokenizerConfig("NullTokenizer", vocab_size=case["vocab_size"] - 1))
    assert isinstance(tokenizer, NullTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (case["vocab_size"], case["eod"])
    for row in golden("null"):
        if row["ids"] == "ValueError":
            with pytest.raises(DataError, match="whole numbers"):
                tokenizer.encode(row["text"])
        else:
            assert tokenizer.encode(row["text"]) == row["ids"]


def test_padded_vocabulary(golden: Callable[[str], Any]) -> None:
    table = golden("padded_vocab")
    assert len(table["rows"]) > 100
    for vocab_size, divisible_by, tp, padded in table["rows"]:
        assert padded_vocab_size(vocab_size, divisible_by, tp) == padded


@pytest.fixture(scope="module")
def library(shared: Path) -> Callable[[str], list[int]]:
    from tokenizers import ByteLevelBPETokenizer

    folder = shared / "data" / "gpt2"
    tokenizer = ByteLevelBPETokenizer.from_file(str(folder / "gpt2-vocab.json"), str(folder / "gpt2-merges.txt"))
    return lambda text: tokenizer.encode(text).ids


def test_library_agrees_on_real_text(
    shared: Path, openai: GPT2BPETokenizer, library: Callable[[str], list[int]]
) -> None:
    text = (shared / "data" / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")
    assert openai.encode(text) == library(text)


def test_gpt2_takes_the_fast_path(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("megalith.tokenizers.gpt2_bpe._reference_encoder")
    tokenizer = GPT2BPETokenizer(shared / "data/gpt2/gpt2-vocab.json", shared / "data/gpt2/gpt2-merges.txt")
    assert tokenizer.encode("as it is") == [292, 340, 318]


# Text as it is, text in which words and spaces are likely, and runs of the same.
ANY_TEXT = (
    st.text(max_size=200)
    | st.text(alphabet=" \t\n\r\u00a0'sdmtlvreab1./-", max_size=60)
    | st.builds(lambda letter, times: letter * times, st.characters(exclude_categories=["Cs"]), st.integers(0, 600))
)
fuzzed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(fuzzed, max_examples=150)
@given(text=ANY_TEXT)
def test_library_agrees_on_any_text(text: str, openai: GPT2BPETokenizer, library: Callable[[str], list[int]]) -> None:
    ids = openai.encode(text)
    assert ids == library(text)
    assert openai.decode(ids) == text


def written_out(text: str, ids: Mapping[str, int], pieces: Callable[[str], list[int]]) -> Iterator[int]:
    """T5's ids: of the special tokens in a text the leftmost first, what stands before it by itself."""
    found = [(text.index(token), order, token) for order, token in enumerate(ids) if token in text]
    if not found:
        yield from pieces(text)
        return
    place, _, token = min(found)
    yield from pieces(text[:place])
    yield ids[token]
    yield from written_out(text[place + len(token) :], ids, pieces)


T5_TEXT = st.lists(
    ANY_TEXT
    | st.sampled_from(["<s>", "</s>", "<EOD>", "<extra_id_1>", "<extra_id_10>", "<MASK>", "<pad>", "<PAD>", " "]),
    max_size=6,
).map("".join)


@settings(fuzzed, max_examples=100)
@given(text=T5_TEXT)
def test_sentencepiece_agrees_on_any_text(text: str, shared: Path) -> None:
    model, tokenizers = _sentence_piece(shared)
    pieces = model.encode(text)
    assert tokenizers[0].encode(text) == [model.bos_id(), *pieces]
    assert tokenizers[1].encode(text) == pieces
    t5 = tokenizers[2]
    ids = {t5._token_of[number]: number for number in (*t5.special.values(), *t5.extra_ids)}
    assert t5.encode(text) == list(written_out(text, ids, model.encode))
    for tokenizer in tokenizers[:2]:
        assert tokenizer.decode(pieces) == model.decode(pieces)


_MADE: dict[Path, Any] = {}


def _sentence_piece(
    shared: Path,
) -> tuple[Any, tuple[Llama2Tokenizer, GPTSentencePieceTokenizer, SentencePieceTokenizer]]:
    path = shared / "golden" / "tokenizers" / "sp.model"
    if path not in _MADE:
        made = Llama2Tokenizer(path), GPTSentencePieceTokenizer(path), SentencePieceTokenizer(path, 12)
        _MADE[path] = sentencepiece.SentencePieceProcessor(model_file=str(path)), made
    return _MADE[path]


@pytest.fixture(scope="module", params=["v1", "v2"])
def ranked(request: pytest.FixtureRequest, shared: Path) -> tuple[TikTokenizer, Callable[[str], list[int]]]:
    """A TikTokenizer, and its ids by the plain algorithm: the pair of lowest rank is joined, the leftmost first."""
    path = shared / "golden" / "tokenizers" / "tik.vocab.json"
    entries = json.loads(path.read_text())[:880]
    rank_of = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    pattern = regex.compile(PATTERNS[request.param])

    def reference(text: str) -> list[int]:
        ids = []
        for word in pattern.findall(text):
            parts = [bytes([byte]) for byte in word.encode()]
            while True:
                pairs = [(rank_of.get(a + b), at) for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
                ranks = [(rank, at) for rank, at in pairs if rank is not None]
                if not ranks:
                    break
                _, at = min(ranks)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            ids += [rank_of[part] + 20 for part in parts]
        return ids

    return TikTokenizer(path, pattern=request.param, vocab_size=900, num_special_tokens=20), reference


@settings(fuzzed, max_examples=100)
@given(text=st.text(max_size=120) | st.text(alphabet=" \t\n\r/'sSdDtTaA1.\u0301\u01c5", max_size=60))
def test_ranks_agree_on_any_text(text: str, ranked: tuple[TikTokenizer, Callable[[str], list[int]]]) -> None:
    tokenizer, reference = ranked
    ids = tokenizer.encode(text)
    assert ids == reference(text)
    assert tokenizer.decode(ids) == text


def google(text: str, ids: Mapping[str, int], *, lower_case: bool) -> list[int]:
    """BERT's ids as its paper's program finds them, one character after the other."""
    kept = ""
    for letter in text:
        category, code = unicodedata.category(letter), ord(letter)
        if letter in "\t\n\r " or category == "Zs":
            kept += " "
        elif code in (0, 0xFFFD) or category in ("Cc", "Cf"):
            continue
        elif any(low <= code <= high for low, high in CHINESE):
            kept += f" {letter} "
        else:
            kept += letter
    words = []
    for word in kept.split():
        if lower_case:
            word = "".join(a for a in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(a) != "Mn")
        apart = ""
        for letter in word:
            marks = (
                33 <= ord(letter) <= 47
                or 58 <= ord(letter) <= 64
                or 91 <= ord(letter) <= 96
                or 123 <= ord(letter) <= 126
            )
            apart += f" {letter} " if marks or unicodedata.category(letter).startswith("P") else letter
        words += apart.split()
    return [number for word in words for number in google_pieces(word, ids)]


CHINESE = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F)),
    *((0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


def google_pieces(word: str, ids: Mapping[str, int]) -> list[int]:
    unknown = [ids["[UNK]"]]
    if len(word) > 200:
        return unknown
    found, begin = [], 0
    while begin < len(word):
        mark = "##" if begin else ""
        ends = [end for end in range(len(word), begin, -1) if mark + word[begin:end] in ids]
        if not ends:
            return unknown
        found.append(ids[mark + word[begin : ends[0]]])
        begin = ends[0]
    return found


@pytest.fixture(scope="module")
def chinese(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary as bert-base-chinese's: every common character, with and without ##, letters and some words."""
    special = ["[PAD]", *(f"[unused{number}]" for number in range(1, 20)), "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<S>"]
    letters = [chr(code) for code in (*range(33, 127), *range(0xA1, 0x180), *range(0x391, 0x3CA), *range(0x410, 0x450))]
    marks = list("\u3001\u3002\u300a\u300b\uff0c\uff01\uff1a\uff1f\u2026\u2014\u201c\u201d")
    han = [chr(code) for code in range(0x4E00, 0x5200)]
    words = ["the", "we", "##us", "##ing", "Hello", "hello", "2021", "##21", "cafe", "\u03c3\u03c2"]
    plain = [token for token in dict.fromkeys((*letters, *marks, *han)) if token.strip()]
    tokens = dict.fromkeys((*special, *plain, *(f"##{token}" for token in plain), *words))
    path = tmp_path_factory.mktemp("chinese") / "vocab.txt"
    path.write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["lower", "case"])
def bert(request: pytest.FixtureRequest, chinese: Path) -> tuple[WordPieceTokenizer, Callable[[str], list[int]]]:
    tokenizer = WordPieceTokenizer(chinese, lower_case=request.param)
    ids = {token: number for number, token in enumerate(chinese.read_text(encoding="utf-8").splitlines())}
    return tokenizer, lambda text: google(text, ids, lower_case=request.param)


BERT_TEXT = (
    ANY_TEXT
    | st.text(alphabet=st.characters(min_codepoint=0x4DF0, max_codepoint=0x5210), max_size=80)
    | st.text(
        alphabet="theusing 2021Hel\u4e2d\u4e00\u3002\uff0c\u00e9\u0301\u03a3\u03c3\u0130\u2260\u1fef#[]", max_size=60
    )
)


@settings(fuzzed, max_examples=100)
@given(text=BERT_TEXT)
def test_word_pieces_of_any_text(text: str, bert: tuple[WordPieceTokenizer, Callable[[str], list[int]]]) -> None:
    tokenizer, reference = bert
    assert tokenizer.encode(text) == reference(text)


def test_chinese(chinese: Path) -> None:
    """A character is a word, whether there are spaces or not; marks stand alone; what is not known is [UNK]."""
    tokenizer = WordPieceTokenizer(chinese, lower_case=True)
    ids = tokenizer.encode("\u4e2d\u56fd\u4eba\uff0cHELLO\u4e16\u754c2021\u5e74 \U00020000\u3002")
    tokens = [tokenizer.tokens[number] for number in ids]
    unknown = "[UNK]"
    wanted = ["\u4e2d", unknown, "\u4eba", "\uff0c", "hello", "\u4e16", unknown, "2021", unknown, unknown, "\u3002"]
    assert tokens == wanted
    from tokenizers import BertWordPieceTokenizer

    library = BertWordPieceTokenizer(str(chinese), lowercase=True)
    text = " ".join(token for token in tokenizer.tokens if "[" not in token and "<" not in token)
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


@functools.cache
def every_category() -> list[str]:
    """Up to 12 characters of each category of Unicode, surrogates left out, alone and between letters."""
    source, by_category = random.Random(5), dict[str, list[str]]()
    codes = [*range(0x3100), *range(0x3100, 0x110000, 97)]  # the first have the rare categories
    for code in source.sample(codes, len(codes)):
        if len(found := by_category.setdefault(unicodedata.category(chr(code)), [])) < 12:
            found.append(chr(code))
    some = [letter for name, letters in sorted(by_category.items()) if name != "Cs" for letter in letters]
    assert len(by_category) == 30 and len(some) > 250
    return ["".join(some), *(f"a{letter}b {letter}{letter} {letter}" for letter in some)]


def test_byte_pairs_of_every_category(openai: GPT2BPETokenizer, library: Callable[[str], list[int]]) -> None:
    for text in every_category():
        ids = openai.encode(text)
        assert ids == library(text), repr(text)
        assert openai.decode(ids) == text


def test_word_pieces_of_every_category(bert: tuple[WordPieceTokenizer, Callable[[str], list[int]]]) -> None:
    tokenizer, reference = bert
    for text in every_category():
        assert tokenizer.encode(text) == reference(text), repr(text)


def test_ranks_of_every_category(ranked: tuple[TikTokenizer, Callable[[str], list[int]]]) -> None:
    tokenizer, reference = ranked
    for text in every_category():
        assert tokenizer.encode(text) == reference(text), repr(text)


@pytest.mark.full
@pytest.mark.parametrize("block", range(0, 0x110000, 0x8000))
def test_every_character_of_unicode(
    block: int, openai: GPT2BPETokenizer, library: Callable[[str], list[int]], bert: Any, ranked: Any
) -> None:
    letters = [chr(code) for code in range(block, block + 0x8000) if not 0xD800 <= code < 0xE000]
    texts = [f" {a}{b}x{a} {b}" for a, b in zip(letters[::2], letters[1::2], strict=True)]
    for text in ["".join(letters), *texts]:
        assert openai.encode(text) == library(text), repr(text)
        for tokenizer, reference in (bert, ranked):
            assert tokenizer.encode(text) == reference(text), repr(text)


@pytest.mark.full
@settings(fuzzed, max_examples=20_000)
@given(text=ANY_TEXT | T5_TEXT | BERT_TEXT)
def test_long_fuzz(
    text: str, openai: GPT2BPETokenizer, library: Callable[[str], list[int]], bert: Any, ranked: Any, shared: Path
) -> None:
    assert openai.encode(text) == library(text)
    for tokenizer, reference in (bert, ranked):
        assert tokenizer.encode(text) == reference(text)
    model, (llama, plain, _) = _sentence_piece(shared)
    assert llama.encode(text)[1:] == plain.encode(text) == model.encode(text)


@pytest.mark.parametrize("text", ["x" * 100_000, " " * 100_000, "ab" * 50_000, "\n" * 100_000, "\u4e2d" * 30_000])
def test_long_runs(text: str, openai: GPT2BPETokenizer, bert: Any) -> None:
    """None of them takes a time that grows with the square of the length, nor ends in a stack overflow."""
    assert openai.decode(openai.encode(text)) == text
    tokenizer, reference = bert
    assert tokenizer.encode(text[:5000]) == reference(text[:5000])
    tokenizer.encode(text)


def test_what_is_no_text_is_an_error(openai: GPT2BPETokenizer, bert: Any, ranked: Any, shared: Path) -> None:
    """Broken UTF-8, read with surrogateescape, is lone surrogates; so are halves of a pair out of JSON escapes."""
    broken = [b"ab\xff".decode("utf-8", "surrogateescape"), json.loads('"ab\\ud83d"')]
    _, pieces = _sentence_piece(shared)
    for tokenizer in (openai, bert[0], ranked[0], *pieces):
        for text in broken:
            with pytest.raises(DataError, match=r"character 2 .*\(U\+D[8C]"):
                tokenizer.encode(text)
            with pytest.raises(DataError, match="lone surrogate"):
                tokenizer.encode_batch(["ab", text])
