"""Console lines of a training run before its first step, in Megatron's order and words.

The order: docs/reference/console.md#start-up. Lines without use for Megatron's users go to the log only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

import torch

from megalith.assemble.observer import StartObserver
from megalith.checkpoint.files.commit import free_bytes
from megalith.checkpoint.store.store import TRACKER_FILE
from megalith.compat.megatron import console_lines
from megalith.compat.megatron.run_console import RunConsole
from megalith.config import RunConfig
from megalith.config.changes import Change, change_lines
from megalith.config.render import note_lines
from megalith.config.saved_args import megatron_args
from megalith.data.build import Datasets
from megalith.device import capability_of, is_host, lacks_peer_access
from megalith.distributed.machine import memory_limit
from megalith.models.attention_kernels import describe_attention
from megalith.plan import cache_folder
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import padding_message, tensor_parallel_note
from megalith.train.checkpoint_fit import products_of
from megalith.train.checkpoint_restore import Resumed
from megalith.train.results import Times
from megalith.train.state import TrainState


class StartConsole(StartObserver):
    """Observer that prints the start of a run."""

    def __init__(self, console: RunConsole) -> None:
        self._console = console
        self.info, self.warn, self.log = console.print, console.warn, console.log  # type: ignore[method-assign]

    def configured(self, config: RunConfig, device: torch.device) -> None:
        self._device = device
        _print_configuration(config, self._console, device)
        self.info(console_lines.building_tokenizer_line(config.tokenizer.tokenizer_type))

    def changed(self, changes: Sequence[Change], iteration: int) -> None:
        for line in change_lines(list(changes), iteration):
            self.info(line)

    def vocabulary_padded(self, config: RunConfig, tokenizer: Tokenizer, padded: int, *, resumed: bool) -> None:
        self.info(padding_message(tokenizer.vocab_size, padded))
        if config.launch.rank == 0 and config.log.plan != "off" and cache_folder().is_dir():
            from megalith.plan.plan import device_here, warning_of  # others need not wait for its import

            able, shared = capability_of(self._device), memory_limit() // (config.launch.local_world_size or 1)
            memory = shared if is_host(self._device) else able.memory
            if note := warning_of(config, padded, device_here(able.name, able.compute, memory)):
                self.warn(note)
        if config.launch.rank == 0 and config.checkpoint.save is not None:
            from megalith.plan.bound import disk_warning

            if note := disk_warning(config, padded, free_bytes, resumed=resumed):
                self.warn(note)
        if resumed or config.data.padded_vocab_size is not None:
            return  # a resumed run keeps the rows of its checkpoint in any layout
        divisible_by, tensor_parallel = (
            config.model.make_vocab_size_divisible_by,
            config.parallel.tensor_model_parallel_size,
        )
        if note := tensor_parallel_note(tokenizer.vocab_size, divisible_by, tensor_parallel):
            self.info(note)

    def initialized(self, config: RunConfig, seconds: float) -> None:
        self.info(console_lines.seeds_line(config.train.seed))
        self.info(console_lines.initialised_line(seconds))
        self.info(console_lines.milestone_line("after megatron is initialized", datetime.now()))

    def building_model(self, config: RunConfig) -> None:
        self.info(f"building {config.model.title} model ...")

    def model_built(self, config: RunConfig, parameters: Sequence[tuple[int, int, int]]) -> None:
        for number, tensor_rank, pipeline_rank in parameters:
            self.info(console_lines.parameters_line(number, tensor_rank, pipeline_rank))
        self.info(console_lines.decay_style_line(config.schedule.lr_decay_style))

    def no_checkpoint(self, load: str | None) -> None:
        self.info(console_lines.no_checkpoint_lines(f"{load}/{TRACKER_FILE}"))

    def loading(self, path: str, iteration: int, config: RunConfig, *, distributed: bool) -> None:
        where = console_lines.as_typed(path, config.checkpoint.load)
        self.info(console_lines.loading_line(where, iteration, distributed=distributed))

    def loaded(self, path: str, iteration: int, config: RunConfig, resumed: Resumed, state: TrainState) -> None:
        self.info(console_lines.checkpoint_version_line(resumed.version))
        if resumed.schedule is not None:
            for line in console_lines.schedule_lines(resumed.schedule.values, overridden=resumed.schedule.overridden):
                self.info(line)
        layout, where = state.context.layout, console_lines.as_typed(path, config.checkpoint.load)
        self.info(console_lines.loaded_line(where, iteration, tensor=layout.tp, pipeline=layout.pp))

    def setup_done(self) -> None:
        what = "after model, optimizer, and learning rate scheduler are built"
        self.info(console_lines.milestone_line(what, datetime.now()))

    def building_datasets(self, sizes: tuple[int | None, int | None, int | None]) -> None:
        self.log("> building train, validation, and test datasets ...")
        self.info(console_lines.target_sizes_lines(*sizes))

    def datasets_built(self, config: RunConfig, datasets: Datasets) -> None:
        for dataset in (*datasets, *datasets.further_valid):
            if dataset is not None:
                self.info(f"    {dataset.name}: {dataset.summary}")
        self.info(f"> finished creating {config.model.title} datasets ...")

    def data_done(self) -> None:
        self.info(console_lines.milestone_line("after dataloaders are built", datetime.now()))
        self.log("done with setup ...")

    def timed(self, config: RunConfig, times: Times) -> None:
        self.info(console_lines.timing_lines(times, config.log.timing_log_option))


def _print_configuration(config: RunConfig, console: RunConsole, device: torch.device) -> None:
    parallel = config.parallel
    console.print(
        console_lines.world_size_line(
            config.launch.world_size,
            config.data_parallel_size,
            parallel.context_parallel_size,
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
    )
    virtual = parallel.virtual_stages(config.model.num_layers)
    console.log(f"Number of virtual stages per pipeline stage: {virtual if virtual > 1 else None}")
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count > 1 else ''}" if is_host(device) else ""
    console.print(f"running on {_device_name(device)}{threads}, torch {torch.__version__}{_products(config, device)}")
    nccl_asked_for = "distributed_backend" in config.given and parallel.distributed_backend == "nccl"
    if is_host(device) and nccl_asked_for:
        console.print("no GPU: --distributed-backend nccl becomes gloo")
    if is_host(device) and config.optimizer.offloaded:
        console.print("no GPU: --optimizer-cpu-offload has no effect")
    for line in _about_gpu(config, device):
        console.print(line)
    console.print(console_lines.parameter_type_line(config.precision.params_dtype))
    if config.precision.bf16 and not is_host(device) and torch.bfloat16 not in capability_of(device).half:
        console.warn(f"WARNING: {_device_name(device)} emulates bf16, which is slow; use --fp16")
    console.log(console_lines.argument_dump(megatron_args(config)))
    for line in note_lines(config):
        console.print(line)
    sizes = config.batch_sizes
    if len(sizes.stages) == 1:
        console.print(console_lines.micro_batches_line(config.num_micro_batches))
    elif config.train.rampup_batch_size:
        start, increment, samples = config.train.rampup_batch_size
        console.print(console_lines.ramp_lines(start, increment, samples, sizes.final))
    else:
        stages = ", ".join(f"{stage.size} from sample {stage.start}" for stage in sizes.stages)
        console.print(f"global batch sizes: {stages}")
    if config.train.train_samples is not None:
        console.log(console_lines.train_iterations_line(config.train_iters))


def _about_gpu(config: RunConfig, device: torch.device) -> Iterator[str]:
    """Yield what a run on an accelerator says of it: the attention kernel, and missing peer access."""
    if is_host(device):
        return
    yield f"attention: {describe_attention(config.model, getattr(torch, config.precision.params_dtype), device)}"
    if (config.launch.local_world_size or 1) > 1 and lacks_peer_access(device):
        yield "no peer access between the GPUs of this machine: NCCL sends through host memory"


def _products(config: RunConfig, device: torch.device) -> str:
    """Return a remark if half-precision matrix products are computed in fp32 on this device; else ""."""
    if not (config.precision.bf16 or config.precision.fp16) or products_of(config, device) != "float32":
        return ""
    kept = "bf16" if config.precision.bf16 else "fp16"
    return f"; no fast {kept} matmul on this CPU: computed in fp32 and rounded to {kept}"


def _device_name(device: torch.device) -> str:
    return "cpu" if is_host(device) else f"{device} ({capability_of(device).name})"
