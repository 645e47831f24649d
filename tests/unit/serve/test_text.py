"""Text that ends at whole characters and before stop texts."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from megalith.serve.request import StopTexts, TextStream


def _decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def _pieces(data: bytes, before: bytes = b"") -> list[str]:
    stream = TextStream(_decode, before)
    return [*(stream.push(byte) for byte in data), stream.rest()]


def test_characters_are_shown_when_they_are_whole() -> None:
    data = "a\u00e9\u20acz".encode()
    assert [piece for piece in _pieces(data) if piece] == ["a", "\u00e9", "\u20ac", "z"]
    assert "".join(_pieces(data[:-2])) == "a\u00e9\ufffd"


@given(st.text(max_size=20), st.text(max_size=12))
def test_the_pieces_are_the_text(text: str, before: str) -> None:
    text, before = (value.encode("utf-8", "ignore").decode() for value in (text, before))
    assert "".join(_pieces(text.encode(), before.encode())) == text


def test_bytes_that_are_no_text_do_not_stop_the_stream() -> None:
    assert _pieces(b"\xff" * 40 + b"ok")[-3:-1] != ["", ""]
    assert "".join(_pieces(b"\xff" * 40 + b"ok")).endswith("ok")


@given(
    st.lists(st.sampled_from([b"\xe5", b"\xff", b"\x80", "\u65e5".encode(), "\U0001f451".encode(), b"a"]), max_size=24)
)
def test_no_character_is_lost_behind_broken_bytes(parts: list[bytes]) -> None:
    data = b"".join(parts)
    assert "".join(_pieces(data)) == _decode(data)


def test_words_that_are_joined_by_what_stands_before_them() -> None:
    words = ["Hello", "world", "again"]

    def decode(ids: Sequence[int]) -> str:  # as SentencePiece does: no space in front of the first
        return " ".join(words[token] for token in ids)

    stream = TextStream(decode, (0,))
    assert [stream.push(1), stream.push(2), stream.push(0), stream.rest()] == [" world", " again", " Hello", ""]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_what_is_shown_is_what_stands_before_the_first_stop_text(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    watch, shown, place, stop = StopTexts(stops), "", 0, None
    while place < len(text) and stop is None:
        size = data.draw(st.integers(1, 3))
        piece, stop = watch.push(text[place : place + size])
        shown, place = shown + piece, place + size
    shown += watch.rest()
    read = text[:place]
    found = [read.find(stop) for stop in stops if stop in read]
    assert shown == (read[: min(found)] if found else read)
    assert (stop is not None) == bool(found)
