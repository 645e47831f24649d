"""Errors of a GPU and of NCCL: what failed, on which rank, in which step and phase, and what to do.

The errors are those of torch, with its messages; no GPU takes part.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megalith.assemble.ranks import join_ranks, memory_flags
from megalith.cli import serve
from megalith.cli.main import main
from megalith.config import RunConfig, load
from megalith.distributed.board import FolderBoard, Identity, Status, write_identity
from megalith.distributed.device_errors import explain
from megalith.distributed.watchdog import FAILURE, Watchdog
from megalith.errors import DeviceError, PeerError
from megalith.serve.engine import Stats
from megalith.serve.worker import Worker

HINT = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nDevice-side assertions were explicitly omitted "
    "for this error check; the error probably arose while initializing the DSA handlers.\n"
)
OUT_OF_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.74 GiB of which 1.12 GiB is "
    "free. "
    "Process 4242 has 30.61 GiB memory in use. Of the allocated memory 28.50 GiB is allocated by PyTorch, and 1.75 GiB "
    "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
NCCL = dist.DistBackendError(
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or external "
    "library call failed or device error. \nLast error:\nsocketPollConnect: connect to 10.0.0.2<41035> returned "
    "Connection refused\nException raised from checkForNCCLErrorsInternal at /pytorch/x.cpp:1 (most recent call first):"
    "\nframe #0"
)
NCCL_TIMEOUT = dist.DistBackendError(
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=880, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600902 milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OUT_OF_MEMORY,
            ("2.00 GiB", "31.74 GiB", "28.50 GiB", "1.75 GiB", "--micro-batch-size 2", "PYTORCH_ALLOC_CONF"),
        ),
        (torch.AcceleratorError("CUDA error: out of memory" + HINT), ("out of memory", "--micro-batch-size 2")),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            ("--micro-batch",),
        ),
        (
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + HINT),
            ("illegal memory access", "CUDA_LAUNCH_BLOCKING=1"),
        ),
        (torch.AcceleratorError("CUDA error: device-side assert triggered" + HINT), ("CUDA_LAUNCH_BLOCKING=1",)),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered" + HINT), ("ECC", "nvidia-smi -q", "resume")),
        (
            torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device" + HINT),
            ("no kernel image", "megalith doctor"),
        ),
        (NCCL, ("ncclSystemError", "10.0.0.2", "NCCL_DEBUG")),
        (NCCL_TIMEOUT, ("ALLREDUCE", "600902")),
    ],
)
def test_what_failed_and_what_to_do(error: Exception, words: tuple[str, ...]) -> None:
    message = explain(error, ["--micro-batch-size 2"])
    assert all(word in message for word in words), message
    assert "\n" not in message and "frame #" not in message and "See documentation" not in message


def test_a_hardware_fault_is_no_fault_of_a_kernel() -> None:
    assert "CUDA_LAUNCH_BLOCKING" not in explain(RuntimeError("CUDA error: uncorrectable ECC error encountered"))


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("CUDA error: text of another")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, Watchdog(1.0).name_device_errors():
        raise error
    assert raised.value is error


RUN = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 --lr 1e-3 "
    "--train-iters 3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --micro-batch-size 6 "
    "--global-batch-size 24 --eval-iters 0 --num-workers 0"
)
TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def run_of(words: str = "", environ: dict[str, str] | None = None) -> RunConfig:
    return load([*RUN.split(), *words.split()], environ or {}, files=False)


@pytest.mark.parametrize(
    ("run", "named", "unnamed"),
    [
        (run_of(), ("--micro-batch-size 3", "--recompute-granularity full"), ("--use-distributed-optimizer",)),
        (run_of("", TWO), ("--use-distributed-optimizer", "--use-torch-fsdp2"), ()),
        (run_of("--use-distributed-optimizer", TWO), ("--use-torch-fsdp2",), ("(ZeRO-1)",)),
        (run_of("--use-torch-fsdp2", TWO), ("--recompute-granularity full",), ("ZeRO",)),
        (
            run_of(
                "--micro-batch-size 1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
            ),
            ("--tensor-model-parallel-size",),
            ("--micro-batch-size", "--recompute"),
        ),
    ],
)
def test_flags_that_need_less_memory(run: RunConfig, named: tuple[str, ...], unnamed: tuple[str, ...]) -> None:
    flags = "; ".join(memory_flags(run, True))
    assert all(word in flags for word in named) and not any(word in flags for word in unnamed), flags


def test_before_the_first_step_activations_are_not_the_matter() -> None:
    assert not {"--micro-batch-size", "--recompute"} & {flag[:18] for flag in memory_flags(run_of(), False)}
    watchdog, asked = Watchdog(1.0), []

    def flags(in_step: bool) -> Sequence[str]:
        asked.append(in_step)
        return ()

    watchdog.memory_flags = flags
    for point in ("load", "fwd"):
        watchdog.at(point, 1)
        with pytest.raises(DeviceError), watchdog.name_device_errors():
            raise OUT_OF_MEMORY
    assert asked == [False, True]


def test_one_process_names_step_and_phase() -> None:
    watchdog = Watchdog(1.0)
    with pytest.raises(DeviceError, match=r"rank 0 .* at step 7 in backward: CUDA out of memory") as raised:  # noqa: SIM117
        with join_ranks(run_of(), watchdog):
            watchdog.at("bwd", 7)
            raise OUT_OF_MEMORY
    assert raised.value.__cause__ is OUT_OF_MEMORY and raised.value.exit_code == 1


def _raise_on_rank_0(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, peer_failed: bool = False
) -> Watchdog:
    """Raise an error on rank 0 of 2 while it waits in a collective."""
    monkeypatch.setattr("megalith.distributed.watchdog._SECONDS_FOR_CAUSE", 0.3)
    other, there = FolderBoard(folder, 1), Identity(1, "h", 1)
    write_identity(other, there)
    other.post(Status(4, "bwd").encode())
    if peer_failed:
        other.write(
            FAILURE, json.dumps({"who": str(there), "place": "at step 4 in forward", "text": "CUDA out of memory"})
        )
    watchdog = Watchdog(30.0)
    with watchdog.guard(FolderBoard(folder, 0), 0, 2), watchdog.name_device_errors():
        watchdog.at("bwd", 4)
        watchdog.waiting()
        raise error
    return watchdog


@pytest.mark.parametrize("peer_failed", [False, True])
def test_out_of_memory_in_a_collective_is_the_ranks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer_failed: bool
) -> None:
    with pytest.raises(DeviceError, match=r"rank 0 .* of 2 failed at step 4 in backward"):
        _raise_on_rank_0(tmp_path, OUT_OF_MEMORY, monkeypatch, peer_failed)
    failure = json.loads(FolderBoard(tmp_path).read(f"{FAILURE}-0") or "")
    assert (failure["rank"], failure["step"], failure["place"]) == (0, 4, "at step 4 in backward")
    assert failure["text"].startswith("CUDA out of memory") and not failure["ours"], "the supervisor names the rank"


def test_an_error_of_nccl_is_that_of_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PeerError, match=r"rank 1 .* failed first, at step 4 in forward: CUDA out of memory"):
        _raise_on_rank_0(tmp_path, NCCL, monkeypatch, peer_failed=True)


def test_an_error_of_nccl_without_a_culprit_names_this_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watchdog, "_view_ranks", lambda self, board: [])
    with pytest.raises(DeviceError, match=r"rank 0 .* at step 4 in backward: NCCL error"):
        _raise_on_rank_0(tmp_path, NCCL, monkeypatch)


def test_a_timeout_of_nccl_collects_the_stacks_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Alarm(Exception):
        pass

    def alarm(self: Watchdog) -> None:
        raise Alarm

    monkeypatch.setattr(Watchdog, "_view_ranks", lambda self, board: [])
    monkeypatch.setattr(Watchdog, "raise_alarm", alarm)
    with pytest.raises(Alarm):
        _raise_on_rank_0(tmp_path, NCCL_TIMEOUT, monkeypatch)


def test_the_command_says_it_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trigger(self: object) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megalith.train.faults.Fault._trigger", trigger)
    monkeypatch.setenv("MEGALITH_FAULT", "raise@step=2,point=bwd")
    assert main(["train", *RUN.split(), "--device", "cpu"]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    last = printed.strip().splitlines()[-1]
    assert all(word in last for word in ("rank 0", "step 2 in backward", "31.74 GiB", "--micro-batch-size 3"))


def test_a_server_names_what_its_gpu_lacked() -> None:
    """The thread of the engine ends with the message of the watchdog, which says rank, phase and flags."""

    class Engine:
        has_work = True

        def stats(self) -> Stats:
            return Stats()

        def step(self) -> None:
            raise OUT_OF_MEMORY

    async def failure() -> str:
        watchdog = Watchdog(60.0)
        watchdog.at("serve", 0)
        watchdog.memory_flags = lambda in_step: [f"--cache-mib 1024 {in_step}"]
        return await Worker(cast("Any", Engine()), name_errors=watchdog.name_device_errors).start().failed()

    said = asyncio.run(asyncio.wait_for(failure(), 30))
    for words in ("rank 0", "serve", "Tried to allocate 2.00 GiB", "--cache-mib 1024 True"):
        assert words in said


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ([], ("--cache-mib 1024", "--max-batch 32", "--tp")),
        (["--cache-mib", "100", "--max-batch", "1", "--dtype", "float32"], ("--cache-mib 50", "--dtype bfloat16")),
    ],
)
def test_a_server_knows_flags_with_which_it_needs_less_memory(given: list[str], flags: tuple[str, ...]) -> None:
    options = serve.make_parser().parse_args(["C", *given])
    found = "; ".join(
        serve._memory_flags(
            serve._ServerOptions(
                cast("Any", SimpleNamespace(server=options, max_batch=None, dtype=options.dtype)), cast("Any", None)
            ),
            True,
        )
    )
    assert all(flag in found for flag in flags)
    assert ("--max-batch" in found) == ("--max-batch" not in given)
