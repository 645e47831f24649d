"""Training of a byte-level BPE, so that a corpus gets a vocabulary of its own without a download."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megalith.errors import DataError
from megalith.tokenizers.byte_level import BYTE_OF_CHARACTER, END_OF_TEXT


def train_byte_level_bpe(documents: Iterable[str], vocab_size: int, out_dir: str | Path) -> tuple[Path, Path]:
    """Learn a GPT-2 style tokenizer: 256 bytes, then merges by frequency, `<|endoftext|>` as the last id.

    The same documents give the same files. A small corpus may have fewer repeated pairs than asked for; the
    vocabulary is then smaller than `vocab_size`.

    Args:
        documents: texts; `<|endoftext|>` inside them is plain text.
        vocab_size: number of ids including `<|endoftext|>`, at least 257.
        out_dir: folder that receives vocab.json and merges.txt; made if absent.

    Returns:
        The paths of vocab.json and merges.txt.

    Raises:
        DataError: `vocab_size` cannot hold the bytes, or there is no text.
    """
    smallest = len(BYTE_OF_CHARACTER) + 1
    if vocab_size < smallest:
        raise DataError(
            f"a byte-level vocabulary of {vocab_size} is too small: {smallest} hold the bytes and {END_OF_TEXT}"
        )
    ids, merges = _learn(documents, vocab_size - 1)
    if not merges:
        raise DataError("the documents hold no pair of characters that occurs twice: too little text for a tokenizer")
    ids[END_OF_TEXT] = len(ids)
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    vocab_file, merge_file = folder / "vocab.json", folder / "merges.txt"
    vocab_file.write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    merge_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return vocab_file, merge_file


def _learn(documents: Iterable[str], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens with ids in order of id, and the merges in order."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    learner = Tokenizer(BPE())
    learner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=sorted(BYTE_OF_CHARACTER), show_progress=False
    )
    learner.train_from_iterator(documents, trainer)
    model = json.loads(learner.to_str())["model"]
    ids = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    # tokenizers before 0.20 writes a merge as one string, later ones as a pair.
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return ids, [(left, right) for left, right in merges]
