"""Questions and answers out of docstrings, and what counts as an answer."""

from __future__ import annotations

import json
from pathlib import Path

from megalith.cli.quickstart.chat import ANSWER, documented_functions, is_answer, is_held_out, write_dialogues

SOURCE = '''
class Shelf:
    def put(self, book, *, at=0, **more):
        """put a book on the shelf. It must be sound.

        More of it.
        """

    def _hidden(self):
        """Hide what is there."""

    def odd(self):
        """Return `this` and that."""

async def read_lines(path, *rest):
    """Read the lines
    of a file, e.g. all of them"""

def none(): pass
'''


def test_a_documented_function_gives_one_sentence() -> None:
    found = {function.name: function.answer for function in documented_functions([SOURCE, "def broken("])}
    assert found["put"] == "`put(book, at, **more)`: Put a book on the shelf."
    assert found["read_lines"] == "`read_lines(path, *rest)`: Read the lines of a file, e.g. all of them."
    assert set(found) == {"put", "read_lines"}


def test_names_are_learnt_or_asked() -> None:
    names = [f"name_{number}" for number in range(2000)]
    assert 60 < sum(map(is_held_out, names)) < 200


def test_what_is_asked_was_not_learnt(tmp_path: Path) -> None:
    functions = [f'def act_{n}(a{n}):\n    """Act on number {n} at once."""\n' for n in range(300)]
    counts = write_dialogues(functions, tmp_path)
    rows = [
        [json.loads(line)["messages"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("dialogues.jsonl", "held-out.jsonl")
    ]
    assert counts == tuple(map(len, rows)) and min(counts) > 0
    learnt, asked = ({ANSWER.fullmatch(row[1]["content"])[1] for row in some} for some in rows)  # type: ignore[index]
    assert not learnt & asked
    assert all(is_answer(row, row[1]["content"]) for some in rows for row in some)
    assert all(is_held_out(name) for name in asked) and not any(map(is_held_out, learnt))
    write_dialogues(functions, tmp_path)
    assert [json.loads(line)["messages"] for line in (tmp_path / "held-out.jsonl").read_text().splitlines()] == rows[1]


def test_an_answer_has_the_name_one_sentence_and_an_end() -> None:
    asked = [
        {"role": "user", "content": "Explain `put`."},
        {"role": "assistant", "content": "`put(book)`: Put a book."},
    ]
    assert is_answer(asked, "`put()`: Return what is there.")
    for wrong in (
        "`take(book)`: Put a book.",
        "`put(book)`: Put a book",
        "`put(book)` Put a book.",
        "put(book): Put.",
        "",
    ):
        assert not is_answer(asked, wrong)
    assert not is_answer(asked, "`put(book)`: Put a book.\nAnd more.")
