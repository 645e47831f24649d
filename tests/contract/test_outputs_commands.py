"""What commands write beside training: datasets and their cards, JSON of inspections and evaluations, exports."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cached_property

import pytest
from tests.chinese import write_text, write_vocabulary
from tests.e2e.warm import WarmProcess

from .outputs import MAPS, Commands, Found, console_lines, fields_of, file_names, missing_lines, problems, recorded

TINY = shlex.split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --micro-batch-size 2 --global-batch-size 2 --lr 1e-2 "
    "--train-iters 1 --save-interval 1 --log-interval 1 --eval-iters 0 --num-workers 0 --device cpu "
    "--make-vocab-size-divisible-by 8"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOCK = [*TINY, *shlex.split("--seq-length 16 --max-position-embeddings 32 --mock-data")]
NULL = shlex.split("--tokenizer-type NullTokenizer --vocab-size 99")
LLAMA = shlex.split(
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 24 "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
EXPERTS = shlex.split("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24")
T5 = shlex.split(
    "--model-family t5 --encoder-seq-length 16 --decoder-seq-length 16 --vocab-extra-ids 20 --split 100,0,0 "
    "--max-position-embeddings 32 --position-embedding-type relative --normalization RMSNorm --disable-bias-linear "
    "--softmax-scale 1.0 --relu --no-t5-logits-bias --t5-scaled-logits --relative-attention-num-buckets 8"
)
BERT = shlex.split(
    "--model-family bert --seq-length 32 --max-position-embeddings 32 --split 100,0,0 --no-bias-gelu-fusion"
)


class Tools(Commands):
    """Data and models that are made when they are asked for first."""

    @cached_property
    def tokenizer(self) -> list[str]:
        """The flags of a byte-level tokenizer without merges."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        letters = [chr(code) for code in (*printable, *range(0x100, 0x200 - len(printable)))]
        vocabulary = {token: number for number, token in enumerate([*letters, "<|endoftext|>"])}
        (self.folder / "vocab.json").write_text(json.dumps(vocabulary))
        (self.folder / "merges.txt").write_text("#version: 0.2\n")
        return ["--vocab-file", "vocab.json", "--merge-file", "merges.txt"]

    @cached_property
    def data(self) -> str:
        """A dataset of two keys, with a line that is left out, and one share of two."""
        lines = [json.dumps({"text": f"the king said {letter} to the queen", "title": letter}) for letter in LETTERS]
        (self.folder / "text.jsonl").write_text("\n".join([*lines, "no JSON"]) + "\n")
        words = ("--input", "text.jsonl", "--json-keys", "text", "title", "--append-eod", "--workers", 1)
        more = (*words, *self.tokenizer, "--bad-lines", "skip")
        self.run("preprocess", *more, "--output-prefix", "shared/part", "--share", "1/2")
        return self.run("preprocess", *more, "--output-prefix", "data/whole")

    @cached_property
    def sentences(self) -> list[str]:
        """The flags of a WordPiece vocabulary, with data for it."""
        write_text(self.folder / "chinese.jsonl", 40)
        write_vocabulary(self.folder / "vocab.txt")
        tokenizer = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "vocab.txt"]
        words = ("--split-sentences", "--sentence-splitter", "marks", "--workers", 1)
        self.run("preprocess", "--input", "chinese.jsonl", "--output-prefix", "chinese", *words, *tokenizer)
        return ["--vocab-file", "vocab.txt", "--data-path", "chinese_text_sentence", "--data-cache-path", "cache"]

    @cached_property
    def gpt2(self) -> str:
        """A save folder of a GPT with a tokenizer."""
        assert self.data
        data = ["--data-path", "data/whole_text_document", "--data-cache-path", "cache", "--split", "80,10,10"]
        words = [*TINY, *shlex.split("--seq-length 16 --max-position-embeddings 512"), *data, *self.tokenizer]
        self.run("train", *words, "--save", "models/gpt2")
        return "models/gpt2"

    @cached_property
    def models(self) -> dict[str, str]:
        """A save folder of each family."""
        words = {
            "llama": [*MOCK, *NULL, *LLAMA],
            "mixtral": [*MOCK, *NULL, *LLAMA, *EXPERTS],
            "bert": [*TINY, *BERT, *self.sentences],
            "t5": [*TINY, *T5, *self.sentences],
        }
        for name, command in words.items():
            self.run("train", *command, "--save", f"models/{name}")
        return {"gpt2": self.gpt2, **{name: f"models/{name}" for name in words}}


def datasets(tools: Tools) -> Found:
    """Files that preprocessing and the index cache leave, and the fields of those that are JSON."""
    assert tools.data and tools.models
    found: dict[str, dict[str, str]] = {name: file_names(tools.folder / name) for name in ("data", "shared")}
    cards = [tools.read("data/whole_text_document.card"), tools.read("chinese_text_sentence.card")]
    found[".card"] = fields_of(cards, ("files", "settings"))
    sums = [json.loads(path.read_text()) for path in (tools.folder / "cache").glob("*-checksums.json")]
    found["*-checksums.json"] = fields_of(sums)
    described = {
        re.sub(r"^[0-9a-f]{32}-|-(train|valid|test)(?=-)", "", path.name): json.loads(path.read_text())
        for path in (tools.folder / "cache").glob("*-description.txt")
    }
    found |= {name: fields_of([content]) for name, content in described.items()}
    (skipped,) = (tools.folder / "data/whole_skipped.txt").read_text().splitlines()
    form = r"\S*text\.jsonl:27: .+|\S*text\.jsonl, line 27: .+"
    found["*_skipped.txt"] = {"a line": "FILE LINE REASON" if re.fullmatch(form, skipped) else skipped}
    return found


def commands(tools: Tools) -> Found:
    """The JSON that commands print or write."""
    assert tools.models
    (tools.folder / "held-out.txt").write_text("the king said b to the queen\n" * 4)
    inspected = tools.run("data", "inspect", "data/whole_text_document", "--json")
    found = {"data inspect --json": fields_of([json.loads(inspected)], ("tokenizer.files", "tokenizer.settings"))}
    tasks = {
        "cloze": ("gpt2",),
        "text": ("gpt2", "--data", "held-out.txt"),
        "wikitext103": ("gpt2", "--data", "held-out.txt", "--detokenizer", "wiki"),
        "masked": ("bert", "--data", "chinese_text_sentence", "--samples", 4),
        "spans": ("t5", "--data", "chinese_text_sentence", "--samples", 4),
    }
    for task, (model, *words) in tasks.items():
        output = f"{task}.json"
        tools.run("evaluate", tools.models[model], "--task", task, *words, "--json", output, "--device", "cpu")
        maps = ("tokenizer.files", "tokenizer.settings")
        found[f"evaluate --task {task} --json"] = fields_of([tools.read(output)], maps)
    return found


def exports(tools: Tools) -> Found:
    """Files, fields of config.json and names of tensors in Hugging Face folders; what an import makes of one."""
    from safetensors import safe_open

    found: dict[str, dict[str, str]] = {}
    for name, model in tools.models.items():
        words = () if name not in ("llama", "mixtral") else ("--true-vocab-size", 99)
        tools.run("checkpoint", "export", model, f"exports/{name}", *words, "--no-compare")
        folder = tools.folder / "exports" / name
        found[f"{name}: files"] = file_names(folder)
        found[f"{name}: config.json"] = fields_of([tools.read(f"exports/{name}/config.json")])
        with safe_open(folder / "model.safetensors", "pt") as tensors:
            found[f"{name}: tensors"] = {key: "tensor" for key in tensors.keys()}  # noqa: SIM118
    tools.run("checkpoint", "import", "exports/gpt2", "imported", "--no-compare")
    manifest = fields_of([tools.read("imported/release/manifest.json")], MAPS)
    found["import: manifest.json"] = {name: kind for name, kind in manifest.items() if not name.startswith("config.")}
    found["import: files"] = file_names(tools.folder / "imported")
    tracker = (tools.folder / "imported/latest_checkpointed_iteration.txt").read_text()
    found["import: latest_checkpointed_iteration.txt"] = {"content": tracker}
    tools.run("checkpoint", "export", "imported", "sharded", "--max-shard-size", "4KB", "--no-compare")
    names = {re.sub(r"\d{5}", "NNNNN", name): kind for name, kind in file_names(tools.folder / "sharded").items()}
    found["--max-shard-size: files"] = names
    index = tools.read("sharded/model.safetensors.index.json")
    found["model.safetensors.index.json"] = fields_of([index], ("weight_map",))
    return found


def report(tools: Tools) -> str:
    """Return the lines of an evaluation on Megatron's command line."""
    words = ("--task", "LAMBADA", "--valid-data", "cloze.jsonl", "--strict-lambada", "--load", tools.gpt2)
    lines = [json.dumps({"text": f"the king said {letter}"}) for letter in LETTERS]
    (tools.folder / "cloze.jsonl").write_text("\n".join(lines) + "\n")
    return tools.run("evaluate", "tasks/main.py", *words, "--micro-batch-size", 8, "--device", "cpu")


SUBJECTS: dict[str, Callable[[Tools], Found]] = {"datasets": datasets, "commands": commands, "exports": exports}
CONSOLE: dict[str, Callable[[Tools], str]] = {"tasks/main.py": report}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcess) -> Iterator[Tools]:
    """Their commands."""
    with Tools(tmp_path_factory.mktemp("tools"), warm) as tools:
        yield tools


@pytest.mark.parametrize("subject", SUBJECTS)
def test_nothing_recorded_is_missing_or_of_another_type(tools: Tools, subject: str) -> None:
    assert problems(recorded(subject), SUBJECTS[subject](tools)) == []


@pytest.mark.parametrize("section", CONSOLE)
def test_the_lines_that_others_parse(tools: Tools, section: str) -> None:
    text = CONSOLE[section](tools)
    assert console_lines(section) and missing_lines(section, text) == [], text
