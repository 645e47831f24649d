"""A vocabulary of the form of bert-base-chinese and text for it, made up: neither is on the machine, both are free."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

SIZE = 21128
"""Tokens of bert-base-chinese; its special ones stand where they stand there."""
_FIRST, _MARKS = 0x4E00, "\u3002\uff0c\uff1f\uff01\u201c\u201d\u3001"


def vocabulary() -> list[str]:
    """[PAD], 99 unused, [UNK] at 100 to [MASK] at 103, ASCII, marks, characters, and all but marks again with ##."""
    special = ["[PAD]", *(f"[unused{number}]" for number in range(1, 100)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    ascii_words = [*map(chr, range(0x21, 0x41)), *map(chr, range(0x5B, 0x7F)), "the", "of", "and", "bert"]
    ahead = [*special, *dict.fromkeys(ascii_words), *_MARKS]
    pieces = [f"##{word}" for word in dict.fromkeys(ascii_words)]
    pairs, odd = divmod(SIZE - len(ahead) - len(pieces), 2)
    characters = [chr(_FIRST + number) for number in range(pairs + odd)]
    return [*ahead, *characters, *pieces, *(f"##{character}" for character in characters[:pairs])]


def write_vocabulary(path: Path) -> Path:
    path.write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
    return path


def documents(count: int, seed: int = 1) -> list[str]:
    """Texts of a few Chinese sentences that come again and again, with an English one here and there."""
    random = Random(seed)
    words = [chr(_FIRST + 7 * number) + chr(_FIRST + 7 * number + 3) for number in range(40)]
    sentences = [
        "".join(random.choices(words, k=random.randint(3, 9))) + random.choice("\u3002\uff01\uff1f") for _ in range(60)
    ]
    sentences += ["The model of the BERT. ", "And the end of it! "]
    return ["".join(random.choices(sentences, k=random.randint(4, 12))) for _ in range(count)]


def write_text(path: Path, count: int) -> Path:
    """The same as jsonl."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents(count)]
    path.write_text("".join(lines), encoding="utf-8")
    return path
