"""The commands that users type against the best they could pick instead, measured from outside.

    make bench                                    all parts, 15 minutes on two cores
    python benchmarks/commands.py step decode     some of them

  step        `megalith train` on mock data, beside peers/train.py (a compiled GPT, Hugging Face, our own library)
  decode      `megalith serve` over HTTP, beside peers/generate.py (the engine alone, Hugging Face, llama.cpp)
  preprocess  `megalith preprocess` of jsonl with GPT-2's kind of vocabulary, beside peers/preprocess.py; the bytes of
              .bin and .idx must be the same
  start       `megalith train` of 124M to the end of its first step, beside `import torch`
  checkpoint  saving and loading 350M with its Adam state, beside torch.distributed.checkpoint: peers/checkpoint.py
  ranks       16 data-parallel ranks to the end of their first step, and the memory of the largest

All contenders have the same cores, precision and allocator, and take turns; in `step` and `decode` all but one are
stopped meanwhile. bf16 is measured where the processor multiplies it. Results go to commands-NAME.json in
benchmarks/results as soon as there are any, at the end to docs/results/benchmarks.md and the READMEs. NAME is chosen
with --name, by default after the processor. A part that fails does not stop the others; the exit status is then 1.

llama.cpp takes part if llama_cpp and gguf (extra `bench`) are installed; preprocessing needs the extra `data`. `step`
needs 20 GB of memory, `checkpoint` 12 GB of memory and of disk.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from contender import Contender, Ran, alternate, in_turns, megalith, run, run_seconds
from data import Vocabulary, text_of_this_python, texts_of
from machine import BF16_FEATURES, describe
from parts import Clock, Found, Part, measure_chosen, parse_options, read_results
from table import page, quote, summary

HERE = Path(__file__).parent
ROOT = HERE.parent
TABLE, QUOTING = ROOT / "docs" / "results" / "benchmarks.md", (ROOT / "README.md", ROOT / "README.zh.md")
MEBIBYTE = 1 << 20
ITERATION = r"iteration +\d+/"

Size = tuple[int, int, int, int, int, int]
"""Layers, hidden size, heads, sequence, micro-batch, vocabulary."""
SIZES: dict[str, Size] = {"124M": (12, 768, 12, 1024, 2, 50304), "10M": (6, 384, 6, 256, 64, 128)}
STREAMS = (1, 1, 16)
"""Numbers of streams of successive turns."""


def train_command(size: Size, precision: str, *more: str) -> list[str]:
    """Return `megalith train` on mock data; it does not end by itself."""
    layers, hidden, heads, sequence, batch, vocabulary = size
    shape = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {sequence}"
    shape += f" --max-position-embeddings {sequence} --micro-batch-size {batch} --hidden-dropout 0"
    rest = f"--attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size {vocabulary - 1}"
    rest += " --train-iters 100000 --lr 1e-4 --lr-decay-style constant --log-interval 1 --eval-iters 0"
    flags = ["--bf16"] if precision == "bf16" else []
    return megalith("train", *shape.split(), *rest.split(), *flags, *more)


def peer(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(HERE / "peers" / script), *map(str, arguments)]


def precisions_of(options: argparse.Namespace, features: Sequence[str]) -> list[str]:
    """Return the chosen precisions, by default those that the processor multiplies."""
    if options.precisions:
        return list(options.precisions)
    if BF16_FEATURES & set(features):
        return ["bf16", "fp32"]
    print("without bf16, which this processor does not multiply (--precisions bf16 measures it)", flush=True)
    return ["fp32"]


def part_step(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    precisions = precisions_of(options, describe()["features"])
    rows = [(name, precision) for name in SIZES for precision in precisions]
    for number, (name, precision) in enumerate(rows):
        keys = ("layers", "hidden", "heads", "sequence", "batch", "vocabulary")
        sized = [text for key, value in zip(keys, SIZES[name], strict=True) for text in (f"--{key}", value)]
        commands = {"megalith train": train_command(SIZES[name], precision)}
        for kind in ("compiled", "library", *(("huggingface",) if name == "124M" else ())):
            commands[kind] = peer("train.py", kind, "--precision", precision, *sized)
        left_out: dict[str, str] = {}
        until = clock.until(1 / (len(rows) - number))
        pattern = rf"{ITERATION}|^step \d+:"
        seconds = in_turns(commands, pattern, until, rounds=clock.turns(), left_out=left_out)
        yield f"step {name} {precision}", {"ours": "megalith train", "seconds": seconds, "left_out": left_out}


def save_model(size: Size, folder: Path) -> tuple[Path, Path]:
    """Train a model for one step; returns its checkpoint and its export."""
    saved, exported = folder / "saved", folder / "exported"
    one_step = train_command(size, "fp32", "--save", str(saved), "--save-interval", "1", "--no-save-optim")
    one_step[one_step.index("--train-iters") + 1] = "1"
    one_step[one_step.index("--seq-length") + 1] = "64"
    run_seconds([*one_step, "--micro-batch-size", "1"])
    run_seconds(megalith("checkpoint", "export", str(saved), str(exported)))
    return saved, exported


def part_decode(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    """Seconds are those of a round of all streams; `tokens` says how many there are in one."""
    saved, exported = save_model(SIZES["124M"], folder)
    precisions = precisions_of(options, describe()["features"])
    for number, precision in enumerate(precisions):
        files, left_out = {"http": saved, "engine": saved, "huggingface": exported}, dict[str, str]()
        if missing := [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]:
            print(f"llama.cpp takes no part: {' and '.join(missing)} not installed (extra bench)", flush=True)
        else:
            files["llama.cpp"] = write_gguf(exported, folder / f"{precision}.gguf", precision)
        commands = {
            kind: peer("generate.py", kind, file, "--precision", precision, "--streams", *STREAMS)
            for kind, file in files.items()
        }
        until, (least, most) = clock.until(1 / (len(precisions) - number)), clock.turns()
        rounds = (least * len(STREAMS), most * len(STREAMS))
        turns = in_turns(commands, r"^(warm-up|round \d+):", until, rounds=rounds, left_out=left_out)
        for streams, plural in ((1, ""), (16, "s")):
            seconds = {
                kind: [value for turn, value in enumerate(values) if STREAMS[turn % len(STREAMS)] == streams]
                for kind, values in turns.items()
            }
            row = {"ours": "http", "seconds": seconds, "left_out": left_out, "tokens": _tokens_of_a_round(streams)}
            yield f"decode {streams} stream{plural} {precision}", row


def _tokens_of_a_round(streams: int) -> int:
    sys.path.insert(0, str(HERE / "peers"))
    from generate import requests

    return sum(count for _, count in requests(streams, 1))


def write_gguf(exported: Path, path: Path, precision: str) -> Path:
    """Write a GPT-2 of Hugging Face as GGUF for llama.cpp; returns the path."""
    import gguf
    import numpy as np
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(exported)
    config, writer = model.config, gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_tokenizer_model("gpt2")  # ids alone are decoded: any names serve
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * config.vocab_size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    names = {"ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output"}
    names |= {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    outer = {"wte.weight": "token_embd.weight", "wpe.weight": "position_embd.weight"}
    outer |= {"ln_f.weight": "output_norm.weight", "ln_f.bias": "output_norm.bias"}
    for name, value in model.transformer.state_dict().items():
        if name in outer:
            target = outer[name]
        elif match := re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name):
            target = f"blk.{match[1]}.{names[match[2]]}.{match[3]}"
            value = value.t() if value.dim() == 2 else value
        else:
            continue
        if value.dim() == 2 and precision == "bf16" and target != "position_embd.weight":
            data = value.contiguous().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(target, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(target, value.contiguous().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Preprocessing:
    """The command and the script over the same text and vocabulary.

    Args:
        vocabulary: two files; one of GPT-2's size is trained if None.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary | None = None) -> None:
        for package in ("gigatoken", "orjson"):
            if importlib.util.find_spec(package) is None:
                raise RuntimeError(f"{package} is not installed, which the peer needs (extra data)")
        self._folder, self._vocabulary = folder, vocabulary or train_vocabulary(folder)
        self._texts = texts_of(text_of_this_python(), 160)

    def source(self, megabytes: int) -> Path:
        """Return a jsonl file of this size."""
        path = self._folder / f"{megabytes}.jsonl"
        if not path.exists():
            write_jsonl(path, self._texts, megabytes)
        return path

    def ours(self, megabytes: int, workers: int) -> Ran:
        """Run the command; it finds no output of an earlier run."""
        for path in self._folder.glob("ours_text_document.*"):
            path.unlink()
        vocab_file, merge_file = self._vocabulary.vocab_file, self._vocabulary.merge_file
        files = ["--vocab-file", vocab_file, "--merge-file", merge_file, "--append-eod", "--workers", str(workers)]
        places = ["--input", str(self.source(megabytes)), "--output-prefix", str(self._folder / "ours")]
        return run(megalith("preprocess", *places, *files, "--tokenizer-type", "GPT2BPETokenizer"))

    def script(self, megabytes: int, workers: int) -> Ran:
        files = self._vocabulary.vocab_file, self._vocabulary.merge_file
        return run(peer("preprocess.py", self.source(megabytes), self._folder / "script", *files, workers))

    def compare(self, megabytes: int) -> None:
        """Raise RuntimeError if the last outputs of both differ."""
        for ending in (".bin", ".idx"):
            if digest(self._folder / f"ours_text_document{ending}") != digest(self._folder / f"script{ending}"):
                raise RuntimeError(f"{megabytes} MiB: the {ending} of the command and of the script differ")


def part_preprocess(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    """A small input comes first, which warms the page cache up."""
    chosen = Vocabulary(options.vocab_file, options.merge_file) if options.vocab_file else None
    work = Preprocessing(folder, chosen)
    rows = [(size, workers) for size in options.megabytes for workers in (1, 2)]
    for number, (size, workers) in enumerate([(1, 1), *rows]):
        work.source(size)
        turns = {
            "megalith preprocess": lambda size=size, workers=workers: work.ours(size, workers).seconds,
            "script": lambda size=size, workers=workers: work.script(size, workers).seconds,
        }
        seconds = alternate(turns, clock.until(1 / (len(rows) + 1 - number)), clock.turns() if number else (1, 1))
        work.compare(size)
        if number:
            row = {"ours": "megalith preprocess", "seconds": seconds, "mebibytes": size}
            yield f"preprocess {size} MiB, {workers} worker{'s' * (workers > 1)}", row


def train_vocabulary(folder: Path) -> Vocabulary:
    """Train a byte-level BPE of GPT-2's size on the text of this Python."""
    from tokenizers import ByteLevelBPETokenizer

    made, texts = ByteLevelBPETokenizer(), texts_of(text_of_this_python(), 16)
    made.train_from_iterator(texts, 50257, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save_model(str(folder))
    return Vocabulary(str(folder / "vocab.json"), str(folder / "merges.txt"))


def write_jsonl(path: Path, texts: Sequence[str], megabytes: int) -> None:
    """Write the texts over and over until the file has its size."""
    lines = [(json.dumps({"text": text}, ensure_ascii=False) + "\n").encode() for text in texts]
    left = megabytes * MEBIBYTE
    with path.open("wb") as file:
        while left > 0:
            for line in lines:
                left -= file.write(line)
                if left <= 0:
                    return


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(MEBIBYTE):
            found.update(block)
    return found.hexdigest()


def part_start(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    """The first turns do not count: they warm the page cache up."""
    command = train_command(SIZES["124M"], "fp32")
    command[command.index("--seq-length") + 1] = "64"
    command[command.index("--micro-batch-size") + 1] = "1"
    turns = {
        "megalith train": lambda: run_seconds(command, ITERATION),
        "import torch": lambda: import_torch(1),
    }
    alternate(turns, 0.0, (1, 1))
    yield "start 124M", {"ours": "megalith train", "seconds": alternate(turns, clock.until(), clock.turns())}


def part_checkpoint(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    for number, world in enumerate((1, 2)):
        least, most = clock.turns(9)
        seconds = max(0.0, clock.until(1 / (2 - number)) - time.perf_counter())
        place = Path(tempfile.mkdtemp(dir=folder))
        script = peer("checkpoint.py", place, "--size", options.checkpoint_size, "--seconds", seconds)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [script[0], *launch, *script[1:], "--rounds", str(least), str(most)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        rounds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for what in ("save", "load"):
            found = {kind: [one["seconds"][f"{kind} {what}"] for one in rounds] for kind in ("megalith", "dcp")}
            row = {"ours": "megalith", "seconds": found, "mebibytes": round(rounds[0]["bytes"] / MEBIBYTE)}
            yield f"checkpoint {what}, {world} process{'es' * (world > 1)}", row
        shutil.rmtree(place)


def start_ranks(number: int) -> tuple[float, float, float]:
    """Start data-parallel ranks of a tiny model on a global batch of 16.

    Returns:
        seconds to the end of the first step; seconds of the third; the largest rank's proportional set size in MiB.
    """
    command = train_command((2, 128, 2, 64, 1, 256), "fp32", "--global-batch-size", "16", "--nproc", str(number))
    began, contender = time.perf_counter(), Contender(command, ITERATION)
    try:
        contender.wait(3)
        first, second, third = contender.times[:3]
        return first - began, third - second, contender.largest_mib()
    finally:
        contender.close()


def import_torch(number: int) -> float:
    """Return the seconds of so many processes at once that do nothing else."""
    began = time.perf_counter()
    children = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(number)]
    for child in children:
        child.wait()
    return time.perf_counter() - began


def part_ranks(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    memory = list[float]()

    def ours() -> float:
        first_step, _, largest = start_ranks(16)
        memory.append(largest)
        return first_step

    turns = {"megalith train": ours, "16 x import torch": lambda: import_torch(16)}
    seconds = alternate(turns, clock.until(), clock.turns())
    figures = {
        "first step": {"unit": "s", "values": seconds["megalith train"]},
        "largest rank": {"unit": "MiB", "values": memory},
    }
    yield "ranks 16", {"ours": "megalith train", "seconds": seconds, "figures": figures}


PARTS = {
    "step": Part(part_step, 42),
    "decode": Part(part_decode, 28),
    "preprocess": Part(part_preprocess, 11),
    "start": Part(part_start, 4),
    "checkpoint": Part(part_checkpoint, 9),
    "ranks": Part(part_ranks, 6),
}
"""Shares of the time in percent."""


def write_pages() -> None:
    """Write the table of all machines, and the quotes of it in the READMEs."""
    results = read_results("commands")
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(page(results), encoding="utf-8")
    for file in QUOTING:
        file.write_text(quote(file.read_text(encoding="utf-8"), results), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), help="of step and decode")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[160, 1000], help="sizes of preprocess")
    parser.add_argument("--checkpoint-size", choices=("350M", "124M", "50M", "10M"), default="350M")
    parser.add_argument("--vocab-file", help="GPT-2's vocabulary (default: one of its size is trained)")
    parser.add_argument("--merge-file")
    options, failed = parse_options(parser, PARTS, 15.0), list[str]()
    try:
        if not options.pages:
            failed = measure_chosen("commands", PARTS, options, summary)
    finally:
        write_pages()
    print(f"{TABLE.relative_to(ROOT)} is written")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
