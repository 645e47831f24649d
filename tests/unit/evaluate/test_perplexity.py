"""Windows against a naive version of Megatron's dataset, and perplexity against one pass per token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import DataError
from megalith.evaluate.score import Sample, Scorer
from megalith.evaluate.text import (
    TextLoss,
    Windows,
    measure_cloze,
    measure_text,
    measure_wikitext,
    read_documents,
    read_text,
    score_texts,
)

from .models import CONTEXT, VOCABULARY, Letters, small_model


def naive(num_ids: int, length: int, stride: int) -> list[tuple[int, list[int]]]:
    """(first id, ids that are scored) of each window, as Megatron's dataset masks its padded windows."""
    count = max(math.ceil(max(num_ids - 1 - stride, 0) / stride) + 1, 1)
    found = []
    for index in range(count):
        mask = [1] * len(range(num_ids)[index * stride : index * stride + length + 1])
        mask = (mask + [0] * (length + 1 - len(mask)))[1:]
        if stride != length and index != 0:
            mask[:-stride] = [0] * (length - stride)
        found.append((index * stride, [index * stride + 1 + place for place, on in enumerate(mask) if on]))
    return found


@given(st.integers(2, 60), st.integers(1, 12), st.data())
def test_windows_are_megatrons(num_ids: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length))
    windows = Windows(length, stride)
    ours = [
        (sample.ids[0], list(sample.ids[-sample.num_targets :])) for sample in windows.samples(list(range(num_ids)))
    ]
    theirs = naive(num_ids, length, stride)
    assert ours == [window for window in theirs if window[1]]
    assert windows.count(num_ids) == len(theirs)


@given(st.integers(2, 60), st.integers(1, 12), st.data())
def test_every_id_but_the_first_is_scored_once(num_ids: int, length: int, data: st.DataObject) -> None:
    samples = list(Windows(length, data.draw(st.integers(1, length))).samples(list(range(num_ids))))
    assert [target for s in samples for target in s.ids[-s.num_targets :]] == list(range(1, num_ids))
    assert all(len(sample.ids) <= length + 1 for sample in samples)


def test_a_text_of_one_token_has_no_windows() -> None:
    assert list(Windows(4, 2).samples([1])) == []


@pytest.mark.parametrize(("length", "stride"), [(16, 16), (16, 5), (8, 1), (3, 2)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_those_of_one_pass_per_window(length: int, stride: int, batch_size: int) -> None:
    model = small_model()
    ids = torch.randint(0, VOCABULARY, (45,), generator=torch.Generator().manual_seed(1))
    (ours,) = score_texts(Scorer(model, batch_size=batch_size), [ids.tolist()], Windows(length, stride))
    wanted = []
    for first, targets in naive(len(ids), length, stride):
        if targets:
            logits = model(ids[None, first : targets[-1]])[0].log_softmax(-1)
            wanted += [float(logits[target - 1 - first, ids[target]]) for target in targets]
    np.testing.assert_allclose(ours, wanted, rtol=1e-12)


def test_texts_of_several_lengths_keep_their_order() -> None:
    scorer = Scorer(small_model(), batch_size=4)
    texts = [[5, 6, 7], [1], [2, 3] * 20, []]
    together = score_texts(scorer, texts, Windows(CONTEXT, 4))
    assert [len(part) for part in together] == [2, 0, 39, 0]
    alone = score_texts(scorer, [texts[2]], Windows(CONTEXT, 4))[0]
    np.testing.assert_allclose(together[2], alone, rtol=1e-12)


def test_the_two_perplexities() -> None:
    loss = TextLoss(total=30.0, num_tokens=20, num_words=10)
    assert (loss.mean, loss.token_ratio) == (1.5, 2.0)
    assert loss.perplexity == pytest.approx(math.exp(1.5))
    assert loss.adjusted_perplexity == pytest.approx(math.exp(3.0))
    assert TextLoss(total=1e6, num_tokens=20, num_words=10).adjusted_perplexity == math.exp(20)


def test_bits_per_byte() -> None:
    assert TextLoss(total=8 * math.log(2), num_tokens=3, num_bytes=4).bits_per_byte == pytest.approx(2.0)


def test_a_text_that_the_tokenizer_cannot_encode_is_named_with_its_file(tmp_path: Path) -> None:
    class Refusing(Letters):
        def encode(self, text: str) -> list[int]:
            raise DataError("no such character")

    (file := tmp_path / "text.jsonl").write_text('{"text": "a b"}\n')
    scorer, tokenizer, windows = Scorer(small_model()), Refusing(), Windows(8, 8)
    for measure in (
        lambda: measure_text(file, scorer, tokenizer, windows, Silent()),
        lambda: measure_wikitext(file, scorer, tokenizer, windows, Silent()),
        lambda: measure_cloze(file, scorer, tokenizer, Silent(), strict=False),
    ):
        with pytest.raises(DataError, match=r"text\.jsonl.*no such character"):
            measure()


class Silent:
    """A listener that keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes(b"the king said to the queen\n")
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    scorer = Scorer(small_model())
    for measure in (measure_text, measure_wikitext):
        one, other = (measure(path, scorer, Letters(), Windows(8, 8), Silent()) for path in (plain, marked))
        assert one == other and one.num_tokens > 0
    assert measure_text(marked, scorer, Letters(), Windows(8, 8), Silent()).num_bytes == plain.stat().st_size
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "a b"}).encode())
    assert read_documents(tmp_path / "marked.jsonl") == ["a b"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("texts.json", b'[{"text": "a b"}]'),
        ("texts.csv", b"id,text\n1,a b\n"),
        ("texts.tsv", b"id\ttext\n1\ta b\n"),
        ("texts.parquet", b"PAR1\x15\x04\xff"),
        ("texts", b"ARROW1\x00\x00\xff"),
    ],
)
def test_the_markup_of_a_table_or_an_array_is_no_text(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} .*jsonl"):
        read_documents(tmp_path / name)


def test_a_table_in_place_of_a_text_is_no_wrong_encoding(tmp_path: Path) -> None:
    (tmp_path / "wiki.parquet").write_bytes(b"PAR1\x15\x04\xff")
    with pytest.raises(DataError, match=r"wiki\.parquet .*jsonl"):
        read_text(tmp_path / "wiki.parquet")


def test_nothing_is_not_a_number() -> None:
    assert math.isnan(TextLoss(0.0, 0).mean) and math.isnan(TextLoss(0.0, 0).perplexity)


def test_greedy_is_the_argmax() -> None:
    model = small_model()
    ids = torch.randint(0, VOCABULARY, (9,), generator=torch.Generator().manual_seed(3)).tolist()
    best = model(torch.tensor([ids]))[0].argmax(-1).tolist()
    right = ids[:4] + [best[3]]
    wrong = ids[:4] + [(best[3] + 1) % VOCABULARY]
    scores = Scorer(model)([Sample(right, 1), Sample(wrong, 1)])
    assert [bool(score.greedy[0]) for score in scores] == [True, False]


def test_padded_rows_count_unless_the_number_of_tokens_is_named() -> None:
    """As in Megatron's tasks with them, as in an exported model, which lacks them, without them."""
    model, tokens = small_model(), 50
    ids = torch.randint(0, tokens, (9,), generator=torch.Generator().manual_seed(3))
    logits = model(ids[None, :-1])[0]
    for num_tokens, rows in ((None, VOCABULARY), (tokens, tokens), (VOCABULARY + 5, VOCABULARY)):
        (score,) = Scorer(model, num_tokens=num_tokens)([Sample(ids.tolist(), 8)])
        wanted = logits[:, :rows].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        np.testing.assert_allclose(score.logprobs, wanted.numpy(), rtol=1e-12)
        np.testing.assert_array_equal(score.greedy, (logits[:, :rows].argmax(-1) == ids[1:]).numpy())
    with pytest.raises(DataError, match="50 rows"):
        Scorer(model, num_tokens=tokens)([Sample([1, 55], 1)])
