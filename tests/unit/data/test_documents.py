"""Lines of JSON: the fast parser, many lines at once and the patient parser find the same."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalith.data.sources import documents
from megalith.data.sources.documents import json_documents, json_texts

LIMIT = 1000
PIECES = st.sampled_from(
    [
        *(b"\\n", b"\\\\", b"\\/", b'\\"', b"\\b", b"\\u00e9", b"\\uD83D\\uDE00", b"\\ud800", b"\\udc00", b"\\u0000"),
        *(
            b"\\x",
            b"\\u12",
            b"\x00",
            b"\x1f",
            b"\x7f",
            b"\t",
            b"\r",
            b"\xff",
            b"\xc3\xa9",
            b"\xed\xa0\x80",
            b"\xf4\x90",
        ),
        *("\u4e2d\u2028\U0001f600".encode(), b"a", b" ", b"{", b"}", b"[", b'"', b","),
    ]
)
STRINGS = st.lists(PIECES, max_size=6).map(lambda parts: b'"' + b"".join(parts) + b'"')
KEYS = st.sampled_from([b'"a"', b'"a"', b'"b"', b'"b"', b'"\\u0061"', b'"c"', b'"A"', b'""', b"a"])
NUMBERS = st.sampled_from(
    [b"1", b"-0", b"1.5e3", b"1e999", b"01", b"NaN", b"-Infinity", b"9" * 30, b"9" * 700, b"+1", b".5", b"1."]
)
LITERALS = NUMBERS | st.sampled_from([b"null", b"true", b"tru", b"", b"'a'"])
SPACE = st.sampled_from([b"", b"", b" ", b"\t", b"\r", b"\x0b", b"\xc2\xa0", b"\xef\xbb\xbf"])


def _joined(parts: list[bytes]) -> bytes:
    return b",".join(parts)


VALUES: Any = st.recursive(
    STRINGS | STRINGS | LITERALS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda found: b"[" + _joined(found) + b"]")
        | st.lists(st.tuples(KEYS, inner), max_size=3).map(
            lambda found: b"{" + _joined([key + b":" + value for key, value in found]) + b"}"
        )
    ),
    max_leaves=6,
)
OBJECTS = st.lists(st.tuples(SPACE, KEYS, SPACE, VALUES), max_size=4).map(
    lambda found: b"{" + _joined([space + key + b":" + after + value for space, key, after, value in found]) + b"}"
)
PLAIN = st.text(max_size=20).map(
    lambda text: json.dumps({"a": text, "b": ""}, ensure_ascii=len(text) % 2 == 0).encode()
)
ENDS = st.sampled_from([b"", b"", b"", b"x", b"{}"])
LINES = st.tuples(SPACE, OBJECTS | PLAIN | VALUES, SPACE, ENDS).map(b"".join)


def found(lines: list[bytes], keys: tuple[str, ...]) -> list[Any]:
    return list(json_documents(lines, keys, "UTF-8", LIMIT))


@pytest.mark.parametrize("keys", [("a",), ("b", "a")])
@settings(deadline=None, max_examples=300)
@given(lines=st.lists(LINES.filter(lambda line: b"\n" not in line), max_size=5))
def test_all_ways_to_read_lines_agree(keys: tuple[str, ...], lines: list[bytes]) -> None:
    pytest.importorskip("orjson", reason="the extra data is not installed")
    fast = found(lines, keys)
    with mock.patch.object(documents, "_fast_parser", lambda: None):
        assert found(lines, keys) == fast
    texts = json_texts(lines, keys)
    if texts is not None:
        assert fast == [(number, list(of_keys)) for number, of_keys in enumerate(zip(*texts, strict=True))]
