"""Dialogues to ids and loss masks: `megalith preprocess --loss-mask` beside the map of TRL, with one worker each.

    python benchmarks/dialogues.py --out benchmarks/results/dialogues-cpu.json

The peer is what TRL's SFTTrainer maps over a data set of Hugging Face: the chat template and the tokenizer by
transformers, with its mask of what an assistant says. Its time is that of the map alone, from rows in memory; ours is
that of the whole command without its imports: it loads tokenizer and template, reads a jsonl and writes the two
datasets. Ids and masks of all dialogues must be the same, or the run fails. Rounds alternate; both have one thread.

The dialogues are pieces of the sources of this Python, and the tokenizer (Qwen's pattern, 32,000 tokens) is trained on
them, unless --tokenizer names a folder. Needs trl, datasets and megalith's extra `data`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import sysconfig
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from machine import describe
from turns import Step, in_processes, seconds_in_turns

TEMPLATE = "chatml"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def make_tokenizer(texts: list[str], folder: Path, size: int = 32_000) -> None:
    """Train a byte-level BPE with Qwen's pattern and normalisation."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(QWEN), "isolated"), pre_tokenizers.ByteLevel(False, False, False)]
    bpe.pre_tokenizer = pre_tokenizers.Sequence(splits)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_dialogues(texts: list[str], count: int, file: Path) -> None:
    """Write dialogues of one to three questions and answers, half of them with a system message."""
    parts = [part for text in texts for part in re.split(r"\n\s*\n", text) if 40 < len(part) < 1500]
    rng = random.Random(1)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            messages = [{"role": "system", "content": "You are a helpful assistant."}] * rng.randint(0, 1)
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                messages.append({"role": "user", "content": rng.choice(parts)[:300]})
                messages.append({"role": "assistant", "content": rng.choice(parts)})
            out.write(json.dumps({"messages": messages}) + "\n")


def build_megalith(folder: str, file: str) -> Step:
    from megalith.config import TokenizerConfig
    from megalith.data.preprocess import PreprocessOptions, preprocess
    from megalith.data.sources import SourceOptions

    tokenizer = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    options = PreprocessOptions(
        (file,),
        str(Path(file).with_suffix("")),
        tokenizer,
        SourceOptions(keys=("messages",)),
        chat_template=TEMPLATE,
        loss_mask="assistant",
        restart=True,
    )
    return partial(preprocess, options)


def build_trl(folder: str, file: str) -> Step:
    import datasets
    from transformers import AutoTokenizer
    from trl.data_utils import _tokenize

    from megalith.tokenizers import chat_template

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = (Path(chat_template.__file__).parent / "chat_templates" / f"{TEMPLATE}.jinja").read_text()
    rows = datasets.Dataset.from_list([json.loads(line) for line in Path(file).read_text("utf-8").splitlines()])

    def tokenize(example: dict[str, Any], processing_class: Any, chat_template: str) -> dict[str, Any]:
        """What SFTTrainer maps over a data set of `messages`, in its version 1.16."""
        found = _tokenize(
            processing_class,
            example["messages"],
            return_assistant_tokens_mask=True,
            chat_template=chat_template,
            tools=None,
        )
        return {key: found[key] for key in ("input_ids", "assistant_masks")}

    given = {"processing_class": tokenizer, "chat_template": template}

    return partial(rows.map, tokenize, fn_kwargs=given, load_from_cache_file=False)


def require_equal(folder: str, file: str) -> int:
    """Return the tokens of all dialogues, which are the same by both; SystemExit otherwise."""
    from megalith.data.indexed import LOSS_MASK, IndexedDataset

    build_megalith(folder, file)()
    prefix = f"{Path(file).with_suffix('')}_messages_document"
    tokens, masks = IndexedDataset(prefix), IndexedDataset(prefix + LOSS_MASK)
    theirs: Any = build_trl(folder, file)()
    for number, row in enumerate(theirs):
        if tokens.get(number).tolist() != row["input_ids"] or masks.get(number).tolist() != row["assistant_masks"]:
            sys.exit(f"dialogue {number} has other tokens or another mask")
    return tokens.num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer.json that has ChatML's tokens")
    parser.add_argument("--dialogues", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sources]
    with tempfile.TemporaryDirectory() as temporary:
        folder, file = options.tokenizer or Path(temporary), Path(temporary) / "dialogues.jsonl"
        if options.tokenizer is None:
            make_tokenizer(texts, folder)
        make_dialogues(texts, options.dialogues, file)
        tokens, size = require_equal(str(folder), str(file)), file.stat().st_size
        given = {"megalith": build_megalith, "trl": build_trl}
        with in_processes({name: partial(build, str(folder), str(file)) for name, build in given.items()}) as steps:
            times = seconds_in_turns(steps, options.rounds)
    ratios = [theirs / ours for ours, theirs in zip(times["megalith"], times["trl"], strict=True)]
    result = {
        "machine": describe() | {"peers": {name: metadata.version(name) for name in ("trl", "datasets")}},
        "dialogues": options.dialogues,
        "tokens": tokens,
        "bytes": size,
        "seconds": times,
        "megalith_over_trl": {"median": statistics.median(ratios), "rounds": ratios},
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
