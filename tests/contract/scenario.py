"""The command lines of `exit_codes.txt`, and the files that they work with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from .lines import read

_RUN = """
[model]
num_layers = 2
hidden_size = 16
num_attention_heads = 4
max_position_embeddings = 8

[train]
micro_batch_size = 2
train_iters = 2
eval_iters = 1
device = "cpu"

[schedule]
lr = 1e-3

[data]
seq_length = 8
mock_data = true

[tokenizer]
tokenizer_type = "NullTokenizer"
vocab_size = 30
"""
_LAUNCH = """#!/bin/bash
ARGS="--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8"
torchrun --nproc_per_node 1 pretrain_gpt.py $ARGS --micro-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data \\
    --tokenizer-type NullTokenizer --vocab-size 30
"""


def _prepare(folder: Path) -> None:
    """Write the files."""
    texts = {
        "run.toml": _RUN,
        "wrong.toml": "[modle]\nnum_layers = 2\n",
        "launch.sh": _LAUNCH,
        "other.sh": "#!/bin/bash\npython pretrain_mamba.py --num-layers 2\n",
        "text.jsonl": json.dumps({"text": "a word"}) + "\n",
        "numbers.jsonl": "".join(json.dumps({"text": " ".join(map(str, range(n, n + 9)))}) + "\n" for n in range(8)),
        "broken.jsonl": '{"text": "1 2 3"\n',
        "broken.idx": "no index",
        "broken.bin": "no tokens",
    }
    (folder / "sets").mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def command_lines(folder: Path) -> list[list[str]]:
    """Write the files that the command lines work with; return these in the order of the record."""
    _prepare(folder)
    return [shlex.split(words) for words, _ in read("exit_codes")]
