"""What a training run writes: console lines, metrics, curves, the files of run and checkpoint, locks and trackers."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.chinese import write_text, write_vocabulary
from tests.e2e.warm import WarmProcess

from .outputs import MAPS, Commands, Found, console_lines, fields_of, file_names, missing_lines, problems, recorded

MODEL = (
    *("--num-layers", 2, "--hidden-size", 16, "--num-attention-heads", 2, "--max-position-embeddings", 16),
    *("--micro-batch-size", 1, "--lr", 1e-2, "--log-interval", 1, "--num-workers", 0, "--eval-iters", 1),
    *("--hidden-dropout", 0, "--attention-dropout", 0, "--make-vocab-size-divisible-by", 8, "--device", "cpu"),
)
GPT = (*MODEL, "--seq-length", 16, "--tokenizer-type", "NullTokenizer", "--vocab-size", 99)
SHORT = ("--global-batch-size", 2, "--train-iters", 2, "--eval-interval", 2, "--save-interval", 2)
MOCK = (*GPT, "--mock-data", *SHORT)
GROWING = (
    *(*GPT, "--rampup-batch-size", 2, 2, 4, "--global-batch-size", 4, "--train-iters", 6, "--lr-decay-iters", 6),
    *("--data-path", 0.3, "numbers_text_document", 0.7, "more_text_document", "--split", "80,10,10"),
    *("--data-cache-path", "cache", "--eval-interval", 2, "--save-interval", 2, "--save", "growing"),
    *("--load", "growing", "--log-throughput", "--log-params-norm", "--log-num-zeros-in-grad"),
    *("--timing-log-level", 2, "--tensorboard-dir", "curves", "--log-memory-to-tensorboard"),
    *("--log-validation-ppl-to-tensorboard", "--log-world-size-to-tensorboard", "--log-timers-to-tensorboard"),
)
WANDB = '''
"""Stands in for the package: writes what it is asked for."""
import json, os, types
class Error(Exception): pass
def setup(): return types.SimpleNamespace(settings=types.SimpleNamespace(mode=None))
def login(prompt=True, verify=True): return False
def note(**values):
    with open("wandb.jsonl", "a") as file: file.write(json.dumps(values) + "\\n")
def init(**options):
    note(init=options)
    log = lambda values, step: note(log=values, step=step)
    return types.SimpleNamespace(id="id", log=log, finish=lambda: None, summary={})
'''


class Runs(Commands):
    """A few runs of a few steps, each made when it is asked for first; the text is what its first rank printed."""

    def __init__(self, folder: Path, warm: WarmProcess) -> None:
        (folder / "wandb.py").write_text(WANDB)  # commands look for modules in the folder that they run in
        super().__init__(folder, warm)

    @cached_property
    def data(self) -> str:
        lines = [json.dumps({"text": " ".join(str(n * k % 99) for n in range(40))}) for k in range(1, 60)]
        (self.folder / "numbers.jsonl").write_text("\n".join(lines))
        words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--workers", 1)
        return "".join(
            self.run("preprocess", "--input", "numbers.jsonl", "--output-prefix", prefix, *words)
            for prefix in ("numbers", "more")
        )

    @cached_property
    def first(self) -> str:
        """A new run that ends at an iteration, with growing batches and saves beside the training."""
        assert self.data
        passing = ("--non-persistent-save-interval", 3, "--non-persistent-ckpt-type", "global")
        more = ("--async-save", "--log-progress", "--log-gradient-noise-scale")
        wandb = ("--wandb-project", "project", "--wandb-exp-name", "name")
        groups = ("--dump-param-to-param-group-map", "groups.json")
        return self.run("train", *GROWING, *passing, *more, *wandb, *groups, "--exit-interval", 4)

    @cached_property
    def resumed(self) -> str:
        """The same run to its end, under another schedule."""
        assert self.first
        return self.run("train", *GROWING, "--lr", 2e-2, "--override-opt-param-scheduler")

    @cached_property
    def stopped(self) -> dict[str, Any]:
        """A run that gets SIGTERM: its text, and the save folder while it works."""
        long = ("--train-iters", 100000, "--eval-interval", 100000, "--save-interval", 100000)
        words = (*MOCK, *long, "--save", "stopped")
        running = self.start("train", *words)
        running.wait_for("iteration        1/")
        save = self.folder / "stopped"
        found = {"lock": self.read("stopped/.megalith-lock"), "names": [path.name for path in save.iterdir()]}
        running.send(signal.SIGTERM)
        finished = running.finish()
        assert finished.code == 75, finished.text
        return {**found, "text": finished.text}

    @cached_property
    def bad(self) -> str:
        """A run with a step that is not finite, which is skipped."""
        spoil = "nan@step=2,point=activation,module=decoder.layers.1.mlp"  # by tests/spoil.py
        words = ("--nan-policy", "skip", "--decoupled-lr", 1e-3)
        return self.run("train", *MOCK, *words, "--save", "bad", SPOIL=spoil)

    @cached_property
    def half(self) -> str:
        """A run in fp16 whose first steps overflow, with a profile of the second."""
        profile = ("--profile", "--profile-step-start", 1, "--profile-step-end", 2)
        return self.run("train", *MOCK, "--fp16", "--initial-loss-scale", 2.0**60, *profile, "--save", "half")

    @cached_property
    def experts(self) -> str:
        """A mixture of experts with multi-token prediction and a trace of its routing."""
        experts = ("--num-experts", 4, "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", 0.01)
        trace = ("--moe-routing-trace-path", "trace", "--moe-router-topk", 2, "--mtp-num-layers", 1)
        return self.run("train", *MOCK, *experts, *trace, "--save", "experts", "--tensorboard-dir", "expert-curves")

    @cached_property
    def sentences(self) -> str:
        """Data of BERT and T5."""
        write_text(self.folder / "chinese.jsonl", 40)
        write_vocabulary(self.folder / "vocab.txt")
        words = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "vocab.txt", "--split-sentences")
        more = ("--sentence-splitter", "marks", "--workers", 1)
        return self.run("preprocess", "--input", "chinese.jsonl", "--output-prefix", "chinese", *words, *more)

    def masked(self, family: str, *words: object) -> str:
        assert self.sentences
        data = ("--data-path", "chinese_text_sentence", "--split", "80,10,10", "--vocab-file", "vocab.txt")
        more = ("--tensorboard-dir", f"{family}-curves", "--save", family, "--data-cache-path", "cache")
        return self.run("train", "--model-family", family, *MODEL, *words, *data, *more, *SHORT)

    @cached_property
    def bert(self) -> str:
        return self.masked("bert", "--seq-length", 16)

    @cached_property
    def t5(self) -> str:
        lengths = ("--encoder-seq-length", 16, "--decoder-seq-length", 16, "--vocab-extra-ids", 20)
        return self.masked("t5", *lengths)

    @cached_property
    def ranks(self) -> str:
        """Two tensor-parallel ranks that save in Megatron's format of one file a rank."""
        words = ("--tensor-model-parallel-size", 2, "--ckpt-format", "torch", "--log-straggler")
        return self.run_ranks(2, *MOCK, *words, "--save", "ranks")

    @cached_property
    def stages(self) -> str:
        """Two pipeline stages that save in torch_dist."""
        return self.run_ranks(2, *MOCK, "--pipeline-model-parallel-size", 2, "--save", "stages")


def metrics(runs: Runs) -> Found:
    """metrics.jsonl: the fields of each kind of record."""
    assert all((runs.resumed, runs.stopped, runs.bad, runs.half, runs.experts, runs.bert))
    folders = ("growing", "stopped", "bad", "half", "experts", "bert")
    records = [record for folder in folders for record in runs.read_lines(f"{folder}/run/metrics.jsonl")]
    kinds = {record["event"] for record in records}
    maps = ("source_tokens", "expert_load")
    return {kind: fields_of([record for record in records if record["event"] == kind], maps) for kind in kinds}


def curves(runs: Runs) -> Found:
    """Tags of TensorBoard, and names that W&B gets."""
    assert all((runs.resumed, runs.experts, runs.bert, runs.t5))
    arguments = {f"{name}/text_summary" for name in _arguments(runs)}
    found: dict[str, dict[str, str]] = {}
    for name in ("", "expert-", "bert-", "t5-"):
        section = f"TensorBoard, {name.rstrip('-') or 'gpt'}"
        tags = _tags(runs.folder / f"{name}curves")
        texts = {tag for tag, kind in tags.items() if kind == "text"}
        found[section] = {tag: kind for tag, kind in tags.items() if kind != "text"}
        if texts >= arguments:
            found[section]["NAME/text_summary of each argument"] = "text"
    asked = runs.read_lines("wandb.jsonl")
    found["wandb.init"] = fields_of([entry["init"] for entry in asked if "init" in entry], ("config",))
    found["wandb.Run.log"] = fields_of([entry["log"] for entry in asked if "log" in entry])
    return found


def _tags(folder: Path) -> dict[str, str]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = {}
    for path in folder.glob("events.out.tfevents.*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[value.tag] = value.metadata.plugin_data.plugin_name or found.get(value.tag, "scalars")
    return {tag: kind.removesuffix("s") for tag, kind in found.items()}


def files(runs: Runs) -> Found:
    """Names of the files of runs, checkpoints and caches."""
    assert all((runs.resumed, runs.half, runs.experts, runs.ranks, runs.stages))
    runs.run("report", "growing")
    found = {name: file_names(runs.folder / name) for name in ("growing", "half", "ranks", "stages", "trace", "cache")}
    place = r"\.claimed-run\.[0-9a-f]{8}\.\d+\.\d*"
    names = [re.sub(place, ".claimed-run.PLACE.PID.BORN", name) for name in runs.stopped["names"]]
    found["a save folder in use"] = dict.fromkeys(names, "entry")
    found["curves"] = file_names(runs.folder / "curves")
    return found


def checkpoint(runs: Runs) -> Found:
    """Content of the JSON files, of common.pt and of the per-rank files; names of tensors."""
    from torch.distributed.checkpoint import FileSystemReader

    assert all((runs.resumed, runs.experts, runs.bert, runs.t5, runs.ranks))
    manifests = [runs.read(f"{folder}/manifest.json") for folder in ("growing/iter_0000006", "bert/iter_0000002")]
    settings = runs.read("growing/run/config.json")
    found: dict[str, dict[str, str]] = {
        "manifest.json": {
            name: kind for name, kind in fields_of(manifests, MAPS).items() if not name.startswith("config.")
        },
        "metadata.json": fields_of([runs.read("growing/iter_0000006/metadata.json")]),
        ".megalith-lock": fields_of([runs.stopped["lock"]]),
        "config.json": {f"{group}.{name}": "setting" for group, values in settings.items() for name in values},
        "--dump-param-to-param-group-map": fields_of([runs.read("groups.json")], ("",)),
        "router_trace_rank0.jsonl": fields_of(runs.read_lines("trace/router_trace_rank0.jsonl")),
        "common.pt": _fields_of_state(runs.folder / "growing/iter_0000006/common.pt"),
        "model_optim_rng.pt": _fields_of_state(runs.folder / "ranks/iter_0000002/mp_rank_01/model_optim_rng.pt"),
        "args": dict.fromkeys(_arguments(runs), "argument"),
    }
    trackers = {folder: (runs.folder / folder / "latest_checkpointed_iteration.txt") for folder in ("growing", "ranks")}
    found["latest_checkpointed_iteration.txt"] = {
        "content": "decimal digits alone" if all(path.read_text().isdigit() for path in trackers.values()) else "other"
    }
    for name, folder in (("gpt", "growing/iter_0000006"), ("experts", "experts"), ("bert", "bert"), ("t5", "t5")):
        path = runs.folder / folder if "/" in folder else runs.folder / folder / "iter_0000002"
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        kinds = {key: type(value).__name__.removesuffix("StorageMetadata").lower() for key, value in metadata.items()}
        found[f"torch_dist, {name}"] = {re.sub(r"/shard_[\d._]+$", "/shard_N", key): kinds[key] for key in kinds}
    return found


TORCH = "amsgrad|capturable|decoupled_weight_decay|differentiable|foreach|fused|maximize"
"""What torch's AdamW puts into its parameter groups, which changes from version to version."""


def _fields_of_state(path: Path) -> dict[str, str]:
    state = torch.load(path, weights_only=False)
    fields = {**fields_of([{**state, "args": None}]), "args": type(state["args"]).__name__}
    others = {name: kind for name, kind in fields.items() if not re.search(rf"\.({TORCH})$", name)}
    return {re.sub(r"\.\d+(?=\.|$)", ".N", name): kind for name, kind in others.items()}


def _arguments(runs: Runs) -> dict[str, Any]:
    assert runs.resumed
    return dict(vars(torch.load(runs.folder / "growing/iter_0000006/common.pt", weights_only=False)["args"]))


SUBJECTS: dict[str, Callable[[Runs], Found]] = {
    "metrics": metrics,
    "curves": curves,
    "files": files,
    "checkpoint": checkpoint,
}

CONSOLE: dict[str, Callable[[Runs], str]] = {
    "a new run": lambda runs: runs.first,
    "log.txt": lambda runs: (runs.folder / "growing/run/log.txt").read_text() if runs.first else "",
    "a resumed run": lambda runs: runs.resumed,
    "a run that a signal stops": lambda runs: runs.stopped["text"],
    "a step that is not finite": lambda runs: runs.bad,
    "overflow in fp16": lambda runs: runs.half,
    "experts": lambda runs: runs.experts,
    "BERT": lambda runs: runs.bert,
    "two ranks": lambda runs: runs.ranks,
    "progress.txt": lambda runs: (runs.folder / "growing/progress.txt").read_text() if runs.first else "",
    "preprocessing": lambda runs: runs.data,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, warm: WarmProcess) -> Iterator[Runs]:
    """Their commands."""
    with Runs(tmp_path_factory.mktemp("runs"), warm) as runs:
        yield runs


@pytest.mark.parametrize("subject", SUBJECTS)
def test_nothing_recorded_is_missing_or_of_another_type(runs: Runs, subject: str) -> None:
    if subject == "curves":
        pytest.importorskip("tensorboard", reason="the extra `track` is not installed")
    assert problems(recorded(subject), SUBJECTS[subject](runs)) == []


@pytest.mark.parametrize("section", CONSOLE)
def test_the_lines_that_others_parse(runs: Runs, section: str) -> None:
    text = CONSOLE[section](runs)
    assert console_lines(section) and missing_lines(section, text) == [], text
