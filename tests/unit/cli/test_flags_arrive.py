"""Flags whose effect is tested where it happens arrive there: from the command line to the object that acts on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalith.assemble import training
from megalith.assemble.data import masked_dataset_factory
from megalith.assemble.model import build_chunks, build_run_optimizer, draw_weights
from megalith.cli import train_hooks
from megalith.cli.train import set_deterministic
from megalith.config import RunConfig, load
from megalith.config.groups import LogConfig
from megalith.data.masked.bert import BertDatasetFactory
from megalith.data.masked.t5 import T5DatasetFactory
from megalith.distributed import comm
from megalith.distributed.context import ParallelContext
from megalith.optim.matrix_rules import Muon
from megalith.train.profiler import NsysMarks, TorchProfiler, build_profiler
from megalith.train.results import WindowReport
from megalith.train.state import StepCheck
from megalith.train.timers import Work

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
BASE = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --train-iters 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 30"
)
MASKED = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 8 --micro-batch-size 1 "
    "--train-iters 4 --lr 1e-3 --data-path P --tokenizer-type BertWordPieceLowerCase --vocab-file V"
)
BERT = f"{MASKED} --model-family bert --seq-length 8"
T5 = f"{MASKED} --model-family t5 --encoder-seq-length 8 --decoder-seq-length 4 --vocab-extra-ids 10"


def _run(flags: str, base: str = BASE) -> RunConfig:
    return load(f"{base} {flags}".split(), {}, files=False)


def _started(device: torch.device = CPU) -> Any:
    """As much of a started run as the hooks of recording look at."""
    context = SimpleNamespace(rank=0, device=device, world=SimpleNamespace(size=1))
    state = SimpleNamespace(iteration=0, consumed_samples=0, context=context)
    return SimpleNamespace(run=SimpleNamespace(state=state), resumed_at=None)


@pytest.mark.parametrize("base", [BERT, T5])
def test_shares_of_hidden_words_and_short_samples(base: str) -> None:
    shares = []
    for flags in ("", "--mask-prob 0.4 --short-seq-prob 0.3"):
        run = _run(flags, base)
        factory = cast(
            "BertDatasetFactory | T5DatasetFactory", masked_dataset_factory(run.data, run.model, cast(Any, None), 1)
        )
        shares.append((factory.options.masking.probability, factory.options.short_probability))
    assert shares == [(0.15, 0.1), (0.4, 0.3)]


@pytest.mark.parametrize(
    ("flags", "spiky", "large"),
    [("", False, False), ("--check-for-large-grads", False, True), ("--check-for-spiky-loss", True, False)],
)
def test_what_makes_a_step_a_bad_one(flags: str, spiky: bool, large: bool) -> None:
    check = _policy(_run(flags)).state.check
    assert (check.spiky_loss, check.large_norm) == (spiky, large)


@pytest.mark.parametrize(
    ("flags", "rate", "kind"),
    [
        ("", 0, "transient_error"),
        ("--error-injection-rate 7", 7, "transient_error"),
        ("--error-injection-rate 7 --error-injection-type persistent_error", 7, "persistent_error"),
        ("--error-injection-rate 7 --error-injection-type correct_result", 7, "correct_result"),
        ("--error-injection-rate 7 --rerun-mode disabled", 0, "transient_error"),
    ],
)
def test_errors_on_purpose(flags: str, rate: int, kind: str) -> None:
    policy = _policy(_run(flags))
    assert (policy.injector.rate, policy.injector.kind) == (rate, kind)


def _policy(run: RunConfig) -> Any:
    state = SimpleNamespace(check=StepCheck(), chunks=(), context=SimpleNamespace(rank=0))
    return training.anomaly_policy(run, cast(Any, state))


@pytest.mark.parametrize(("flags", "torchs"), [("", "medium"), ("--muon-fp32-matmul-prec high", "high")])
def test_products_of_muon(flags: str, torchs: str) -> None:
    """torch knows nothing below medium; on a CPU there is one precision."""
    run = _run(f"--optimizer muon {flags}")
    chunks = build_chunks(run, 32, ParallelContext.solo(CPU))
    draw_weights(run, chunks, 32, ParallelContext.solo(CPU))
    optimizer = build_run_optimizer(run, chunks, ParallelContext.solo(CPU))
    rules = {id(group.rule): group.rule for group in optimizer.groups if isinstance(group.rule, Muon)}
    assert {rule.matmul_precision for rule in rules.values()} == {torchs}


def test_kernels_that_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_deterministic(_run(""), CUDA)
    set_deterministic(_run("--deterministic-mode"), CPU)
    assert asked == []
    set_deterministic(_run("--deterministic-mode"), CUDA)
    assert asked == [True]


def test_slow_ranks_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    works = [Work(rank, f"h{rank}", busy, 1.0) for rank, busy in enumerate((0.1, 0.9, 0.1, 0.7))]
    monkeypatch.setattr(comm, "all_gather_objects", lambda own, axis: works)
    lines: list[str] = []
    for flags in ("--log-straggler", "--log-straggler --straggler-minmax-count 2"):
        clock = SimpleNamespace(take=lambda: 0.0)
        report = train_hooks.build_straggler_report(
            _run(flags), cast(Any, SimpleNamespace(index=0)), clock, lines.append
        )
        for _ in range(2):  # the first interval is warm-up
            report.after_window(cast(WindowReport, None))
    assert [line.count("(h") for line in lines] == [2, 4]
    assert "rank 1 (h1) 900.0 ms of work" in lines[0] and "rank 3 (h3) 700.0 ms" in lines[1]


def test_records_that_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(train_hooks, "TensorBoard", lambda folder, *, queue_size, **rest: sizes.append(queue_size))
    for flags in ("", "--tensorboard-queue-size 5"):
        train_hooks._records(_run(f"--tensorboard-dir {tmp_path} {flags}"), tmp_path, cast(Any, None), _started())
    assert sizes == [1000, 5]


@pytest.mark.parametrize(
    ("flags", "shapes", "stacks"),
    [
        ("", False, False),
        ("--pytorch-profiler-collect-shapes", True, False),
        ("--record-shapes", True, False),
        ("--pytorch-profiler-collect-callstack", False, True),
    ],
)
def test_what_a_profile_holds(flags: str, shapes: bool, stacks: bool, tmp_path: Path) -> None:
    profiler = build_profiler(_run(f"--profile {flags}").log, CPU, 0, tmp_path)
    profiler.begin()
    torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.end()
    (path,) = tmp_path.glob("*.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert any("Input Dims" in event.get("args", {}) for event in events) is shapes
    assert any(event.get("cat") == "python_function" for event in events) is stacks


def test_who_profiles_a_gpu(tmp_path: Path) -> None:
    assert isinstance(build_profiler(_run("--profile").log, CUDA, 0, tmp_path), NsysMarks)
    assert isinstance(build_profiler(_run("--profile --use-pytorch-profiler").log, CUDA, 0, tmp_path), TorchProfiler)


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("", {"hidden_states": False, "logits": False, "weights": False}),
        ("--moe-routing-trace-capture-hidden-states", {"hidden_states": True, "logits": False, "weights": False}),
        ("--moe-routing-trace-capture-logits", {"hidden_states": False, "logits": True, "weights": False}),
        ("--moe-routing-trace-dump-weights", {"hidden_states": False, "logits": False, "weights": True}),
    ],
)
def test_what_a_trace_of_routing_keeps(
    flags: str, kept: dict[str, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[LogConfig, int]] = []
    monkeypatch.setattr(train_hooks, "RoutingTrace", lambda log, rank, chunks, start: asked.append((log, start)))
    started = _started()
    started.run.state.chunks, started.run.state.iteration = (), 7
    train_hooks._routing_trace(_run(f"--num-experts 2 --moe-routing-trace-path {tmp_path} {flags}"), started)
    ((log, start),) = asked
    assert start == 7 and log.moe_routing_trace_path == str(tmp_path)
    assert kept == {
        "hidden_states": log.moe_routing_trace_capture_hidden_states,
        "logits": log.moe_routing_trace_capture_logits,
        "weights": log.moe_routing_trace_dump_weights,
    }


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Files that torch was asked to write the history of a GPU's memory to; it would need one for it."""
    written: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    yield written


def test_the_history_of_memory(snapshots: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    console = cast(Any, SimpleNamespace(print=said.append))
    for flags in ("", "--record-memory-history", "--record-memory-history --memory-snapshot-path mine.pickle"):
        for hook in train_hooks._profiles(_run(flags), tmp_path, console, _started(CUDA)):
            hook.close()
    assert snapshots == [str(tmp_path / "snapshot.pickle"), str(tmp_path / "mine.pickle")]
    assert train_hooks._profiles(_run("--record-memory-history"), tmp_path, console, _started()) == []
    assert len(said) == 1 and said[0].startswith("--record-memory-history ")
