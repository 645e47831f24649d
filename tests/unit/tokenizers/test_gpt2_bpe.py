"""GPT2BPETokenizer: when the fast path is exact, and what broken files say."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.errors import DataError
from megalith.tokenizers.byte_level import BYTE_OF_CHARACTER, END_OF_TEXT, bytes_of
from megalith.tokenizers.gpt2_bpe import GPT2BPETokenizer, ranks_decide

Merges = list[tuple[str, str]]


def write(
    folder: Path, merges: Merges, specials: tuple[str, ...] = (END_OF_TEXT,), header: bool = True
) -> GPT2BPETokenizer:
    tokens = [*BYTE_OF_CHARACTER, *dict.fromkeys(left + right for left, right in merges), *specials]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    lines = ["#version: 0.2"] * header + [" ".join(pair) for pair in merges]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return GPT2BPETokenizer(folder / "vocab.json", folder / "merges.txt")


def by_pairs(text: str, merges: Merges) -> list[str]:
    """GPT-2's own algorithm: join the listed pair of lowest rank, all its occurrences, until none is left."""
    rank_of = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    parts = list(text)
    while True:
        pairs = [pair for pair in zip(parts, parts[1:], strict=False) if pair in rank_of]
        if not pairs:
            return parts
        best = min(pairs, key=rank_of.__getitem__)
        joined, position = [], 0
        while position < len(parts):
            here = tuple(parts[position : position + 2]) == best
            joined.append("".join(best) if here else parts[position])
            position += 2 if here else 1
        parts = joined


def by_ranks(text: str, merges: Merges) -> list[str]:
    """tiktoken's algorithm: join the two neighbours whose joined text has the lowest rank, leftmost first."""
    rank_of = {left + right: rank for rank, (left, right) in enumerate(merges)}
    parts = list(text)
    while True:
        ranked = [(rank_of[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in rank_of]
        if not ranked:
            return parts
        _, position = min(ranked)
        parts[position : position + 2] = [parts[position] + parts[position + 1]]


def test_where_ranks_decide_both_algorithms_agree_on_every_text() -> None:
    texts = ["".join(letters) for length in range(1, 8) for letters in itertools.product("ab", repeat=length)]
    random_source = random.Random(7)
    outcomes = []
    for _ in range(150):
        parts, merges = ["a", "b"], []
        while len(merges) < 4:
            pair = (random_source.choice(parts), random_source.choice(parts))
            if "".join(pair) not in parts and len("".join(pair)) <= 7:
                merges.append(pair)
                parts.append("".join(pair))
        number = {part: rank for rank, part in enumerate(parts)}
        splits = [(number[left], number[right]) for left, right in merges]
        verdict = ranks_decide([part.encode() for part in parts], splits)
        agree = all(by_pairs(text, merges) == by_ranks(text, merges) for text in texts)
        outcomes.append((verdict, agree))
    assert (True, False) not in outcomes
    assert outcomes.count((True, True)) > 30
    assert outcomes.count((False, False)) > 30


def test_merges_that_ranks_do_not_decide_keep_their_order(tmp_path: Path) -> None:
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]  # "abc" is only made from ab + c, which never stand side by side
    tokenizer = write(tmp_path, merges)
    ids = tokenizer.encode("abc")
    assert [tokenizer.decode([number]) for number in ids] == ["a", "bc"]


def test_ids_follow_the_vocabulary_not_the_order_of_the_merges(tmp_path: Path) -> None:
    tokens = [END_OF_TEXT, "abc", "ab", *BYTE_OF_CHARACTER]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    tokenizer = GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert tokenizer.encode("abcabx") == [1, 2, tokens.index("x")]
    assert tokenizer.eod == 0


def test_end_of_text_written_out_is_plain_text(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, [("a", "b")])
    assert tokenizer.eod not in tokenizer.encode(END_OF_TEXT)
    assert tokenizer.decode(tokenizer.encode(END_OF_TEXT)) == END_OF_TEXT
    assert tokenizer.decode([tokenizer.eod]) == END_OF_TEXT


def test_every_byte_goes_there_and_back(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, [("a", "b")])
    assert sorted(b"".join(bytes_of(character) for character in BYTE_OF_CHARACTER)) == list(range(256))
    text = "".join(map(chr, range(0x2100))) + "\U0001f600\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([BYTE_OF_CHARACTER["a"] * 0 + tokenizer.encode("é")[0]]) == "\ufffd"


def test_a_merges_file_without_header_or_with_crlf_is_read_whole(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, [("a", "b"), ("ab", "c")], header=False)
    assert len(tokenizer.encode("abc")) == 1
    merges = (tmp_path / "merges.txt").read_bytes()
    (tmp_path / "merges.txt").write_bytes(b"#version: 0.2\r\n" + merges.replace(b"\n", b"\r\n"))
    assert len(GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt").encode("abc")) == 1


def test_special_tokens_need_no_merge(tmp_path: Path) -> None:
    assert write(tmp_path, [("a", "b")], specials=(END_OF_TEXT, "[PAD]", "<s>")).vocab_size == 256 + 1 + 3


def test_a_lone_surrogate_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"character 2.*U\+D800"):
        write(tmp_path, [("a", "b")]).encode("ab\ud800")


def test_ids_outside_the_vocabulary_do_not_decode(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, [("a", "b")])
    with pytest.raises(DataError, match="id 258"):
        tokenizer.decode([0, 258])
    with pytest.raises(DataError, match="id -1"):
        tokenizer.decode([-1])


MERGES: Merges = [("a", "b"), ("ab", "c"), ("d", "e")]
WEB_PAGE = "\n<!DOCTYPE html><html><body>404: Not Found</body></html>"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("vocab.json", lambda text: WEB_PAGE, "web page"),
        ("merges.txt", lambda text: WEB_PAGE, "web page"),
        ("vocab.json", lambda text: "", "is empty"),
        ("merges.txt", lambda text: " \n", "is empty"),
        ("vocab.json", lambda text: text[: len(text) // 2], "cut short or damaged"),
        ("vocab.json", lambda text: "#version: 0.2\na b\n", "is a merges.txt, not a vocab.json: --vocab-file takes"),
        ("vocab.json", lambda text: "[1, 2]", "expected one JSON object"),
        ("vocab.json", lambda text: text.replace(": 3,", ": 4,"), "do not have the ids 0 to"),
        ("vocab.json", lambda text: text.replace(f'"{END_OF_TEXT}"', '"<|other|>"'), "no <|endoftext|> token"),
        ("vocab.json", lambda text: text.replace('"q"', '"<q>"'), "1 of the 256 bytes"),
        ("merges.txt", lambda text: text.replace("d e\n", ""), "none of its 2 merges makes 1 of the 260"),
        ("merges.txt", lambda text: text[:-2] + "\n", "line 4: expected two tokens, found 'd'"),
        ("merges.txt", lambda text: text + "y z\n", "do not belong together: merge 4 (y z)"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path: Path, file: str, damage: Callable[[str], str], message: str) -> None:
    write(tmp_path, MERGES)
    whole = (tmp_path / file).read_text()
    assert damage(whole) != whole
    (tmp_path / file).write_text(damage(whole))
    with pytest.raises(DataError) as caught:
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert str(tmp_path / file) in str(caught.value)
    assert message in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    write(tmp_path, MERGES)
    (tmp_path / "merges.txt").write_bytes(b"\x1f\x8b\x08\x00compressed")
    with pytest.raises(DataError, match=r"merges.txt.*byte 1"):
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, MERGES)
    with pytest.raises(DataError, match=r"none.txt"):
        GPT2BPETokenizer(tmp_path / "vocab.json", tmp_path / "none.txt")


def test_identity_holds_paths_and_card_does_not(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, MERGES)
    paths = [str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")]
    assert tokenizer.identity() == {"class": "_GPT2BPETokenizer", "tokenizer_path": paths}
    card = json.loads(json.dumps(tokenizer.fingerprint()))
    assert card["vocab_size"] == 260 and card["special"] == {"eod": 259}
    assert str(tmp_path) not in json.dumps(card)
