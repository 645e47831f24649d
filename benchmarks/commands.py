"""The commands that users type against the best they could pick instead, measured from outside.

    python benchmarks/commands.py                          all parts: make bench
    python benchmarks/commands.py step decode --rounds 5   some of them

  step        `megalith train` on mock data, beside peers/train.py (a compiled GPT, Hugging Face, our own library)
  decode      `megalith serve` over HTTP, beside peers/generate.py (the engine alone, Hugging Face, llama.cpp)
  preprocess  `megalith preprocess` of jsonl with GPT-2's kind of vocabulary, beside peers/preprocess.py; the bytes of
              .bin and .idx must be the same
  start       `megalith train` of 124M to the end of its first step, beside `import torch`
  ranks       16 data-parallel ranks to the end of their first step, and the memory of the largest

All contenders have the same cores, precision and allocator. They take turns; a turn of `step` and `decode` continues
processes that are stopped meanwhile. A ratio is the median over rounds of the peer's time over Megalith's: above 1
Megalith is faster. Results go to commands-NAME.json in benchmarks/results, the table of all of them to
docs/results/benchmarks.md. NAME is chosen with --name, by default after the processor.

llama.cpp takes part if llama_cpp (extra `bench`) is installed; preprocessing needs gigatoken (extra `data`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from contender import Contender, in_turns, megalith, run_seconds

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "results", HERE.parent / "docs" / "results" / "benchmarks.md"
MEBIBYTE = 1 << 20
ITERATION = r"iteration +\d+/"

Size = tuple[int, int, int, int, int, int]
"""Layers, hidden size, heads, sequence, micro-batch, vocabulary."""
SIZES: dict[str, Size] = {"124M": (12, 768, 12, 1024, 2, 50304), "10M": (6, 384, 6, 256, 64, 128)}


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


def ratios(seconds: Mapping[str, Sequence[float]], ours: str) -> dict[str, float]:
    """Return how many times as long as ours the others take, round by round."""
    return {
        name: round(statistics.median(b / a for a, b in zip(seconds[ours], values, strict=True)), 3)
        for name, values in seconds.items()
        if name != ours
    }


def row(seconds: Mapping[str, Sequence[float]], ours: str, **more: Any) -> dict[str, Any]:
    rounded = {name: [round(value, 4) for value in values] for name, values in seconds.items()}
    return {"ours": ours, "seconds": rounded, "ratio": ratios(seconds, ours), **more}


def part_step(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found = {}
    for name, size in SIZES.items():
        shape = dict(zip(("layers", "hidden", "heads", "sequence", "batch", "vocabulary"), size, strict=True))
        sized = [text for key, value in shape.items() for text in (f"--{key}", value)]
        for precision in options.precisions:
            commands = {"megalith train": train_command(size, precision)}
            for kind in ("compiled", "library", *(("huggingface",) if name == "124M" else ())):
                commands[kind] = peer("train.py", kind, "--precision", precision, *sized)
            seconds = in_turns(commands, rf"{ITERATION}|^step \d+:", options.rounds, 2, 3)
            found[f"step {name} {precision}"] = say(f"step {name} {precision}", row(seconds, "megalith train"))
    return found


def part_decode(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds are those of a round of all streams; `tokens` says how many there are in one."""
    saved, exported, found = folder / "saved", folder / "exported", {}
    one_step = train_command(SIZES["124M"], "fp32", "--save", str(saved), "--save-interval", "1")
    one_step[one_step.index("--train-iters") + 1] = "1"
    one_step[one_step.index("--seq-length") + 1] = "64"
    run_seconds([*one_step, "--micro-batch-size", "1", "--no-save-optim"])
    run_seconds(megalith("checkpoint", "export", str(saved), str(exported)))
    for precision in options.precisions:
        gguf = write_gguf(exported, folder / f"{precision}.gguf", precision)
        for streams in (1, 16):
            files = {"http": saved, "engine": saved, "huggingface": exported, **({"llama": gguf} if gguf else {})}
            commands = {
                kind: peer("generate.py", kind, file, "--precision", precision, "--streams", streams)
                for kind, file in files.items()
            }
            name = f"decode {streams} streams {precision}"
            seconds = in_turns(commands, r"^round \d+:", options.rounds, 2 if streams == 1 else 1, 2)
            tokens = 64 if streams == 1 else sum(count for _, count in _peer_requests(streams))
            found[name] = say(name, row(seconds, "http", tokens=tokens))
    return found


def _peer_requests(streams: int) -> list[tuple[list[int], int]]:
    sys.path.insert(0, str(HERE / "peers"))
    from generate import requests

    made: list[tuple[list[int], int]] = requests(streams, 1)
    return made


def write_gguf(exported: Path, path: Path, precision: str) -> Path | None:
    """Write a GPT-2 of Hugging Face as GGUF for llama.cpp; None if llama_cpp or gguf is not installed."""
    if importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec("gguf") is None:
        return None
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


def part_preprocess(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from data import Vocabulary, text_of_this_python, texts_of

    vocabulary = Vocabulary(options.vocab_file, options.merge_file) if options.vocab_file else _vocabulary(folder)
    texts, found = texts_of(text_of_this_python(), 160), {}
    for megabytes in options.megabytes:
        source = folder / f"{megabytes}.jsonl"
        write_jsonl(source, texts, megabytes)
        files = ["--vocab-file", vocabulary.vocab_file, "--merge-file", vocabulary.merge_file, "--append-eod"]
        for workers in (1, 2):
            ours = megalith("preprocess", "--input", str(source), "--output-prefix", str(folder / "ours"), *files)
            ours += ["--tokenizer-type", "GPT2BPETokenizer", "--workers", str(workers)]
            given = (source, folder / "script", vocabulary.vocab_file, vocabulary.merge_file, workers)
            script = peer("preprocess.py", *given)
            seconds: dict[str, list[float]] = {"megalith preprocess": [], "script": []}
            for number in range(options.rounds + 1):
                seconds["megalith preprocess"].append(run_seconds(ours))
                seconds["script"].append(run_seconds(script))
                if not number:
                    for ending in (".bin", ".idx"):
                        if digest(folder / f"ours_text_document{ending}") != digest(folder / f"script{ending}"):
                            raise SystemExit(f"the {ending} of the command and of the script differ")
                for path in folder.glob("ours_text_document.*"):
                    path.unlink()
            timed = {name: values[1:] for name, values in seconds.items()}  # the first round warms the page cache
            name = f"preprocess {megabytes} MiB, {workers} workers"
            found[name] = say(name, row(timed, "megalith preprocess", mebibytes=megabytes))
        source.unlink()
    return found


def _vocabulary(folder: Path) -> Any:
    """Train a byte-level BPE of GPT-2's size on the text of this Python."""
    from data import Vocabulary, text_of_this_python, texts_of
    from tokenizers import ByteLevelBPETokenizer

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(
        texts_of(text_of_this_python(), 16), 50257, special_tokens=["<|endoftext|>"], show_progress=False
    )
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def part_start(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    command = train_command(SIZES["124M"], "fp32")
    command[command.index("--seq-length") + 1] = "64"
    command[command.index("--micro-batch-size") + 1] = "1"
    seconds: dict[str, list[float]] = {"megalith train": [], "import torch": []}
    for _ in range(options.rounds + 1):
        seconds["megalith train"].append(run_seconds(command, ITERATION))
        seconds["import torch"].append(run_seconds([sys.executable, "-c", "import torch"]))
    timed = {name: values[1:] for name, values in seconds.items()}
    return {"start 124M": say("start 124M", row(timed, "megalith train"))}


def part_ranks(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Proportional set sizes count a page that processes share once over all of them."""
    size = (2, 128, 2, 64, 1, 256)
    seconds: dict[str, list[float]] = {"megalith train --nproc 16": [], "16 x import torch": []}
    memory = list[float]()
    for _ in range(options.rounds):
        began = time.perf_counter()
        contender = Contender([*train_command(size, "fp32"), "--nproc", "16", "--global-batch-size", "16"], ITERATION)
        try:
            contender.wait(1)
            seconds["megalith train --nproc 16"].append(contender.times[0] - began)
            contender.wait(3)
            memory.append(max(proportional_mib(contender.process_ids())))
        finally:
            contender.close()
        began = time.perf_counter()
        children = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(16)]
        for child in children:
            child.wait()
        seconds["16 x import torch"].append(time.perf_counter() - began)
    found = row(seconds, "megalith train --nproc 16", largest_rank_mib=[round(value, 1) for value in memory])
    return {"ranks 16": say("ranks 16", found)}


def proportional_mib(process_ids: Sequence[int]) -> list[float]:
    found = []
    for number in process_ids:
        text = Path(f"/proc/{number}/smaps_rollup").read_text(encoding="ascii")
        match = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
        assert match is not None
        found.append(int(match[1]) / 1024)
    return found


PARTS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "step": part_step,
    "decode": part_decode,
    "preprocess": part_preprocess,
    "start": part_start,
    "ranks": part_ranks,
}


def say(name: str, found: dict[str, Any]) -> dict[str, Any]:
    medians = ", ".join(f"{kind} {statistics.median(values):.3f} s" for kind, values in found["seconds"].items())
    print(f"{name}: {medians}; ratios {found['ratio']}", flush=True)
    return found


def machine() -> dict[str, Any]:
    """Processor, the features that decide how fast it multiplies, and versions."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    flags = set(re.findall(r"\S+", (re.search(r"^flags.*", info, re.MULTILINE) or [""])[0]))
    model = re.search(r"^model name\s*: (.*)", info, re.MULTILINE)
    packages = ("torch", "transformers", "gigatoken", "orjson", "llama_cpp_python", "megalith")
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "features": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in flags],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of all machines: a line for each measurement, a column for each machine."""
    names = list(results)
    lines = [
        "# Benchmarks of the commands",
        "",
        "Written by `make bench` from `benchmarks/results/commands-*.json`. A ratio is the peer's time over",
        "Megalith's in the same round, median over the rounds: **above 1 Megalith is faster**. Seconds are medians.",
        "",
        "| machine | processor | features | cores | torch | date |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        about = result["machine"]
        versions = about["versions"]
        lines.append(
            f"| {name} | {about['processor']} | {', '.join(about['features'])} | {about['cores']} | "
            f"{versions.get('torch', '')} | {result['date']} |"
        )
    lines += ["", f"| what | peer | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    kinds = dict.fromkeys(
        (part, kind)
        for result in results.values()
        for part, found in result["found"].items()
        for kind in found["ratio"]
    )
    for part, kind in kinds:
        cells = [_cell(result["found"].get(part), kind) for result in results.values()]
        lines.append(f"| {part} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: Mapping[str, Any] | None, kind: str) -> str:
    if found is None or kind not in found["ratio"]:
        return ""
    ours, theirs = (statistics.median(found["seconds"][name]) for name in (found["ours"], kind))
    more = ""
    if "tokens" in found:
        more = f"; {found['tokens'] / ours:.1f} and {found['tokens'] / theirs:.1f} tokens/s"
    if "mebibytes" in found:
        more = f"; {found['mebibytes'] / ours:.0f} and {found['mebibytes'] / theirs:.0f} MiB/s"
    if "largest_rank_mib" in found:
        more = f"; largest rank {statistics.median(found['largest_rank_mib']):.0f} MiB"
    return f"**{found['ratio'][kind]:.2f}** ({ours:.2f} s and {theirs:.2f} s{more})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["bf16", "fp32"])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[160, 1000], help="sizes of preprocess")
    parser.add_argument("--vocab-file", help="GPT-2's vocabulary (default: one of its size is trained)")
    parser.add_argument("--merge-file")
    parser.add_argument("--name", help="name of the machine in the table and of the result file")
    parser.add_argument("--folder", type=Path, help="where checkpoints and texts lie; a temporary one by default")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's second start finds the byte code of the first
    about = machine()
    name = options.name or re.sub(r"\W+", "-", f"{about['processor']} {about['features'][-1:]}").strip("-").lower()
    path = RESULTS / f"commands-{name}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"found": {}}
    record |= {"machine": about, "date": time.strftime("%Y-%m-%d"), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for part in options.parts or PARTS:
            record["found"] |= PARTS[part](options, Path(folder))
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    results = {
        file.stem.removeprefix("commands-"): json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(RESULTS.glob("commands-*.json"))
    }
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
