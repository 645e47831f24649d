"""Fine-tuning beside TRL and PEFT: the time of a step and the memory, of all weights and of adapters, on a small Qwen3.

    python benchmarks/finetune.py --out benchmarks/results/finetune-cpu.json

`megalith train --sft` and peers/sft.py (SFTTrainer) start as commands from the same Hugging Face folder and the same
jsonl, both in fp32 with packed rows, and take their steps in turns, the others stopped. Memory is the most resident of
the process of each; beyond the interpreter it is that less the same of the same command with a model of one layer of 16
channels on rows of 128 tokens, which has the same imports and data. It is measured twice: with the allocator that
`megalith train` sets, which the peer gets too, and with glibc's own for both.

The dialogues and the tokenizer are those of dialogues.py. Needs trl, peft, datasets and megalith's extra `data`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from contender import in_turns, megalith, run
from dialogues import TEMPLATE, make_dialogues, make_tokenizer
from machine import Disturbance, commit, describe

from megalith.tokenizers import chat_template

HERE = Path(__file__).parent
VOCABULARY, LENGTH, ACCUMULATE, RANK, STEPS_OF_MEMORY = 8192, 1024, 4, 16, 4
SIZES = {"small": (8, 256, 768, 4, LENGTH), "nothing": (1, 16, 16, 1, 128)}
"""Layers, hidden size, size of the MLP, heads, tokens of a row."""
GLIBC = "GLIBC_TUNABLES=glibc.malloc.arena_max=1000"
"""Leaves the allocator as it is: who sets this is taken to have configured it."""


def make_model(size: str, tokenizer: Path, folder: Path) -> None:
    """Write a Qwen3 with random weights, and the tokenizer."""
    import transformers

    layers, hidden, mlp, heads, length = SIZES[size]
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=hidden // heads,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


def commands_of(size: str, model: Path, dialogues: Path, rank: int, steps: int) -> dict[str, list[str]]:
    """Return the two commands that fine-tune a model, all weights or adapters of a rank."""
    length = SIZES[size][-1]
    ours = f"--pretrained-checkpoint {model} --use-checkpoint-args --sft --train-data-path {dialogues}"
    ours += f" --sft-tokenizer-prompt-format {TEMPLATE} --sft-overlong truncate --seq-length {length}"
    ours += f" --max-position-embeddings {length} --micro-batch-size 1 --global-batch-size {ACCUMULATE}"
    ours += f" --train-iters {steps} --lr 1e-4 --lr-decay-style constant --log-interval 1 --eval-iters 0"
    ours += f" --lora-rank {rank} --lora-alpha 32" if rank else ""
    template = Path(chat_template.__file__).parent / "chat_templates" / f"{TEMPLATE}.jinja"
    theirs = f"{model} {dialogues} --template {template} --length {length} --accumulate {ACCUMULATE} --steps {steps}"
    theirs += f" --lora-rank {rank}"
    return {
        "megalith": megalith("train", *ours.split()),
        "trl": [sys.executable, str(HERE / "peers" / "sft.py"), *theirs.split()],
    }


def seconds_of_steps(commands: dict[str, list[str]], rounds: int) -> dict[str, Any]:
    found = in_turns(commands, r"iteration +\d+/|^step \d+:", time.perf_counter(), rounds=(rounds, rounds), warm_up=3)
    ratios = [theirs / ours for ours, theirs in zip(found["megalith"], found["trl"], strict=True)]
    return {"seconds": found, "times_as_fast": {"median": statistics.median(ratios), "rounds": ratios}}


def peaks(commands: dict[str, dict[str, list[str]]], rounds: int, before: Sequence[str]) -> dict[str, Any]:
    """Return the most resident MiB of each command in each round, and what of it is beyond that of `nothing`."""
    whole: dict[str, dict[str, list[float]]] = {size: {name: [] for name in commands[size]} for size in commands}
    for number in range(rounds):
        for size, pair in commands.items():
            for name in sorted(pair, reverse=bool(number % 2)):
                whole[size][name].append(run([*before, *pair[name]]).peak_mib)
    medians = {size: {name: statistics.median(mib) for name, mib in found.items()} for size, found in whole.items()}
    beyond = {name: medians["small"][name] - medians["nothing"][name] for name in medians["small"]}
    return {"whole": whole, "beyond_the_interpreter": beyond, "trl_over_megalith": beyond["trl"] / beyond["megalith"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["time", "memory"], help="time, memory (default: both)")
    parser.add_argument("--dialogues", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory-rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    load = os.getloadavg()[0]
    disturbance = Disturbance(load)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sources]
    packages = ("trl", "peft", "datasets", "accelerate")
    result: dict[str, Any] = {
        "machine": describe() | {"peers": {name: metadata.version(name) for name in packages}},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["HF_HOME"] = temporary
        folder, file = Path(temporary), Path(temporary) / "dialogues.jsonl"
        (folder / "tokenizer").mkdir()
        make_tokenizer(texts, folder / "tokenizer", VOCABULARY)
        make_dialogues(texts, options.dialogues, file)
        for size in SIZES:
            make_model(size, folder / "tokenizer", folder / size)
        for what, rank in (("all weights", 0), ("adapters", RANK)):
            found = result[what] = dict[str, Any]()
            if "time" in options.parts:
                commands = commands_of("small", folder / "small", file, rank, 100_000)
                found["time"] = seconds_of_steps(commands, options.rounds)
            if "memory" in options.parts:
                short = {size: commands_of(size, folder / size, file, rank, STEPS_OF_MEMORY) for size in SIZES}
                found["memory"] = peaks(short, options.memory_rounds, [])
                found["memory, glibc's allocator"] = peaks(short, options.memory_rounds, ["env", GLIBC])
            print(what, json.dumps(found, indent=1), flush=True)
    result |= disturbance.record()
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
