"""The least memory that a run needs, whatever else it does: weights, gradients and optimizer states. Without torch.

`check_memory` refuses what even that excludes on the devices of this machine; what it does not know it does not refuse.
"""

from __future__ import annotations

import ctypes
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from megalith.config import ParallelConfig, RunConfig
from megalith.config.rules.layout import processes_fill_the_layout
from megalith.config.rules.rule import Draft
from megalith.distributed.machine import memory_limit
from megalith.errors import LayoutError
from megalith.plan.devices import GIB
from megalith.plan.time import Layers

_LEAST_ASKED = 2 * GIB  # runs that need less fit any device: none is asked
_ACCELERATORS = ("nvidia*", "dxg", "kfd", "dri/renderD*", "accel*", "davinci*", "hl*", "neuron*", "xpu*")
_NO_GPU = ("", "-1", "NoDevFiles")  # of CUDA_VISIBLE_DEVICES


@dataclass(frozen=True)
class DeviceMemory:
    """Memory for tensors: its bytes, how many ranks of a machine share it, and what has it."""

    size: int
    ranks: int
    name: str


def least_bytes(run: RunConfig, vocab_size: int = 0) -> int:
    """Return the bytes of weights, gradients and optimizer states that the fullest rank holds at least.

    Of a layout that the processes do not fill: what each holds if all is divided evenly. 0 if it is not known.

    Args:
        vocab_size: padded; 0 where it is not known.
    """
    layout = run.layout
    if run.model.registered_layers or run.model.family.encoder_decoder:
        return 0
    if layout.world_size != run.launch.world_size:
        return least_bytes(_alone(run), vocab_size) // run.launch.world_size
    held, states = bytes_of_a_parameter(run)
    dense, experts = layout.cp * layout.dp, layout.tp * layout.cp * layout.dp // (layout.expert_tp * layout.ep)
    found = 0.0
    for numbers in _stage_parameters(run, vocab_size):
        least = 0.0
        for number, replicas in zip(numbers, (dense, experts), strict=True):
            kept = held / replicas if run.fully_sharded else held
            least += number * (kept + states / (replicas if run.parallel.sharding_setting else 1))
        found = max(found, least)
    return int(found)


def _stage_parameters(run: RunConfig, vocab_size: int) -> Iterator[tuple[float, float]]:
    """Yield the parameters of a rank of each pipeline stage, outside of experts and in them."""
    last, tied = run.layout.pp - 1, not run.model.untie_embeddings_and_output_weights
    for stage, chunks in enumerate(run.stages):
        kinds = (run.model.experts[layer] for chunk in chunks for layer in chunk)
        tables = 1 if last == 0 and tied else (stage == 0) + (stage == last)
        yield Layers(run, vocab_size).parameters(kinds, tables)


def checkpoint_bytes(run: RunConfig, vocab_size: int) -> int | None:
    """Return the bytes of weights and optimizer states in a checkpoint; 0 of adapters, None where they are unknown."""
    if run.model.registered_layers or run.model.family.encoder_decoder:
        return None
    if run.model.lora_rank is not None:
        return 0
    weight = 4 if run.precision.params_dtype == "float32" else 2
    states = 0.0 if run.checkpoint.no_save_optim else _state_bytes(run)
    (numbers,) = _stage_parameters(_alone(run), vocab_size)
    return int(sum(numbers) * (weight + states))


def disk_warning(run: RunConfig, vocab_size: int, free: Callable[[Path], int], *, resumed: bool) -> str:
    """Return a line if the checkpoints of a run do not fit beside each other on the disk of `--save`; else "".

    Args:
        free: returns the free bytes of the disk of a folder.
        resumed: checkpoints of this run may be there already: only one more is counted.
    """
    settings, each = run.checkpoint, checkpoint_bytes(run, vocab_size)
    if settings.save is None or not each:
        return ""
    save = Path(settings.save).absolute()
    number = 1 if resumed else ceil(run.train_iters / (settings.save_interval or run.train_iters))
    if settings.keep_last is not None:  # while one more is written
        number = min(number, settings.keep_last + 1)
    elif settings.save_retain_interval is not None:
        number = min(number, 2)
    room = free(next(folder for folder in (save, *save.parents) if folder.is_dir()))
    if number * each <= room:
        return ""
    fewer = ", give --keep-last N" if number > 2 else ""
    return (
        f"--save {settings.save}: {number} checkpoint{'s' * (number > 1)} of at least {each / GIB:.3g} GiB do not fit "
        f"the {room / GIB:.3g} GiB that are free there; free some space{fewer} or save to another folder"
    )


def bytes_of_a_parameter(run: RunConfig) -> tuple[int, float]:
    """Return the bytes of the weight and its gradient, and of the states of the optimizer, by what is known of it."""
    half = run.precision.params_dtype != "float32"
    if run.model.lora_rank is not None:  # of a frozen weight; adapters are few
        return (2 if half else 4), 0.0
    gradient = 4 if run.precision.grads_in_fp32 else 2
    return (2 if half else 4) + gradient, _state_bytes(run) * (1 - run.optimizer.offloaded)


def _state_bytes(run: RunConfig) -> int:
    """Return the bytes of the moments and master weight of a parameter, by what is known of the optimizer."""
    half, chosen = run.precision.params_dtype != "float32", run.optimizer
    sizes = {"bf16": 2, "fp16": 2, "fp32": 4}
    moments = {
        "adam": sizes[chosen.exp_avg_dtype] + sizes[chosen.exp_avg_sq_dtype],
        "sgd": 4 * (chosen.sgd_momentum > 0),
    }
    return moments.get(str(chosen.optimizer), 0) + half * sizes[chosen.main_params_dtype]


def check_memory(draft: Draft, room_of: Callable[[RunConfig], DeviceMemory | None] | None = None) -> str:
    """Return the violation that the devices of this machine cannot hold weights, gradients and optimizer states.

    Args:
        room_of: finds their memory; `find_room` by default.
    """
    run = draft.run
    if run.log.plan == "off":
        return ""
    vocab_size = run.data.padded_vocab_size or run.tokenizer.vocab_size or 0
    try:
        least = least_bytes(run, vocab_size)
    except (LayoutError, ValueError, ZeroDivisionError):  # another rule says what is wrong
        return ""
    local = run.launch.local_world_size or 1
    if least * local < _LEAST_ASKED or (room := (room_of or find_room)(run)) is None or least * room.ranks <= room.size:
        return ""
    held, states = bytes_of_a_parameter(run)
    filled = not processes_fill_the_layout.broken(draft)
    how = f"in this layout ({run.layout})" if filled else "even if they are divided evenly"
    shared = f", which {room.ranks} processes share" if room.ranks > 1 else ""
    return (
        f"weights, gradients and optimizer states ({held + states:g} bytes of each parameter) take at least "
        f"{least / GIB:.1f} GiB in each of {run.launch.world_size} processes {how}, and {room.name} has "
        f"{room.size / GIB:.1f} GiB of memory{shared}: {', '.join(_remedies(run, vocab_size, room))}"
    )


def _remedies(run: RunConfig, vocab_size: int, room: DeviceMemory) -> Iterator[str]:
    """Yield what would fit, by this bound."""
    number, each = run.launch.world_size, room.size // room.ranks
    if run.layout.world_size == number and not run.parallel.sharding_setting and run.layout.dp * run.layout.cp > 1:
        zero1, zero3 = (
            replace(run.parallel, use_distributed_optimizer=True),
            replace(run.parallel, use_torch_fsdp2=True),
        )
        for parallel in (zero1, zero3):
            if (least := least_bytes(replace(run, parallel=parallel), vocab_size)) <= each:
                yield f"with --{parallel.sharding_setting.replace('_', '-')} they take {least / GIB:.1f} GiB"
                break
    alone = _alone(run)

    def least_of(layers: int) -> int:
        return least_bytes(replace(alone, model=replace(alone.model, num_layers=layers)), vocab_size)

    total = least_bytes(alone, vocab_size)
    if total > each * number:
        enough = ceil(total / each)
        yield f"use at least {enough} such devices" if room.ranks == 1 else f"use {total / GIB:.1f} GiB of memory"
        if layers := bisect_right(range(1, run.model.num_layers), each * number, key=least_of):
            yield f"or --num-layers {layers} or less"
    yield f"see `megalith plan` with these flags and --gpus {number}xDEVICE"
    yield "or start regardless by --plan off"


def _alone(run: RunConfig) -> RunConfig:
    return replace(run, parallel=ParallelConfig(), launch=replace(run.launch, world_size=1))


def find_room(run: RunConfig) -> DeviceMemory | None:
    """Return the memory of the devices that the run would take on this machine, of different GPUs the largest.

    None if it is not known: no driver answers, and there may be an accelerator.
    """
    if run.train.device != "cpu":
        if os.environ.get("CUDA_VISIBLE_DEVICES") in _NO_GPU:
            return None
        if found := _largest_gpu():
            return DeviceMemory(found[0], 1, found[1])
        if run.train.device != "auto" or any(any(Path("/dev").glob(pattern)) for pattern in _ACCELERATORS):
            return None
    with suppress(OSError, AttributeError):  # systems that swap without a limit have no such file
        swap = re.search(r"^SwapTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if swap and (limit := memory_limit()):
            return DeviceMemory(limit + 1024 * int(swap[1]), run.launch.local_world_size or 1, "this machine")
    return None


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _largest_gpu() -> tuple[int, str] | None:
    """Return memory and name of the largest NVIDIA GPU, as its driver has them (NVML); None if it does not answer."""
    with suppress(OSError, AttributeError):
        nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        found = []
        for number in range(count.value):
            gpu, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
            if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(gpu)):
                return None
            if nvml.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(memory)) or nvml.nvmlDeviceGetName(gpu, name, 96):
                return None  # its memory is that of the host
            found.append((int(memory.total), name.value.decode(errors="replace")))
        return max(found, default=None)
    return None
