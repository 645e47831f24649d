"""The texts behind tokenised benchmarks, by Megatron's rules."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from megalith.evaluate import text as detokenizers
from megalith.evaluate.text import detokenizer_for, ptb, unchanged, wikitext


@pytest.mark.parametrize(
    ("tokenised", "plain"),
    [
        (" = Robert Boulter = ", " = Robert Boulter = "),
        (" = = Career = = ", " == Career == "),
        (" = = = Stage = = = \n", " === Stage ===\n"),
        ("= = = = Deep = = = =", "==== Deep ===="),
        ("the 1 @,@ 000 @-@ ton , 3 @.@ 5 m ship .", "the 1,000-ton, 3.5 m ship ."),
        ("one ; two : three ! four ? five . six", "one; two: three! four? five. six"),
        ("( very old ) [ 1 ] { x }", "(very old) [1] {x}"),
        ('he said " yes " to it', 'he said "yes" to it'),
        ("the ' big ' one", "the 'big' one"),
        ("the boys ' game", "the boys' game"),
        ("the town 's mayor", "the town's mayor"),
        ("20 \u00b0 C", "20\u00b0C"),
        ("a N b", "a 1 b"),
        ("line one \n line two", "line one\nline two"),
        ("nothing to do", "nothing to do"),
    ],
)
def test_wikitext(tokenised: str, plain: str) -> None:
    assert wikitext(tokenised) == plain


@pytest.mark.parametrize(
    ("tokenised", "plain"),
    [
        ("it did n't cost $ N million", "it didn't cost $1 million"),
        ("the company 's shares", "the company's shares"),
        ("rank # N of all \n next", "rank #1 of all\nnext"),
        ("up N points", "up1 points"),  # Megatron's own slip, kept
    ],
)
def test_ptb(tokenised: str, plain: str) -> None:
    assert ptb(tokenised) == plain


@pytest.mark.parametrize(
    ("path", "chosen"),
    [
        ("data/wikitext-103/wiki.test.tokens", wikitext),
        ("/home/wiki/any.txt", wikitext),
        ("ptb.test.txt", ptb),
        ("ptb-and-wiki.txt", ptb),
        ("lambada_test.jsonl", unchanged),
    ],
)
def test_the_path_chooses(path: str, chosen: object) -> None:
    found = detokenizer_for(path)
    assert found is not None and found[1] is chosen


def test_a_path_that_names_no_benchmark() -> None:
    assert detokenizer_for("valid.txt") is None


def test_the_examples_of_the_docstrings() -> None:
    assert doctest.testmod(detokenizers).failed == 0


def test_the_whole_of_wikitext_2_as_lm_eval_does_it(shared: Path) -> None:
    """lm-eval carries the same rules for its task wikitext: an outside witness, on real text."""
    witness = pytest.importorskip(
        "lm_eval.tasks.wikitext.preprocess_wikitext", reason="the witness needs the eval extra (lm-eval)"
    )
    text = (shared / "data" / "wikitext-2" / "test.txt").read_text(encoding="utf-8")
    assert wikitext(text) == witness.wikitext_detokenizer({"page": text})


def test_no_token_marks_are_left_in_wikitext_2(shared: Path) -> None:
    text = (shared / "data" / "wikitext-2" / "test.txt").read_text(encoding="utf-8")
    assert len(re.findall(" @[-,.]@ ", text)) > 1000
    assert not re.findall(" @[-,.]@ ", wikitext(text))
