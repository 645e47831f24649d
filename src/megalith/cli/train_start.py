"""Console lines of a training run before its first step, in Megatron's order and words.

The order: docs/reference/console.md#start-up. Lines without use for Megatron's users go to the log only.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import torch

from megalith.assemble.observer import StartObserver
from megalith.checkpoint.store.store import TRACKER_FILE
from megalith.compat.megatron import console
from megalith.compat.megatron.screen import Screen
from megalith.config import RunConfig
from megalith.config.changes import Change, change_lines
from megalith.config.render import note_lines
from megalith.config.saved_args import megatron_args
from megalith.data.build import Datasets
from megalith.tokenizers import Tokenizer
from megalith.tokenizers.protocol import padding_message, tensor_parallel_note
from megalith.train.checkpoint_fit import products_of
from megalith.train.checkpoint_restore import Resumed
from megalith.train.results import Times
from megalith.train.state import TrainState


class StartConsole(StartObserver):
    """Observer that prints the start of a run."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.note, self.warn, self.log = screen.say, screen.warn, screen.note  # type: ignore[method-assign]

    def configured(self, config: RunConfig, device: torch.device) -> None:
        _print_configuration(config, self._screen, device)
        self.note(console.building_tokenizer_line(config.tokenizer.tokenizer_type))

    def changed(self, changes: Sequence[Change], iteration: int) -> None:
        for line in change_lines(list(changes), iteration):
            self.note(line)

    def vocabulary_padded(self, config: RunConfig, tokenizer: Tokenizer, padded: int, *, resumed: bool) -> None:
        self.note(padding_message(tokenizer.vocab_size, padded))
        if resumed or config.data.padded_vocab_size is not None:
            return  # a resumed run keeps the rows of its checkpoint in any layout
        divisible_by, tensor_parallel = (
            config.model.make_vocab_size_divisible_by,
            config.parallel.tensor_model_parallel_size,
        )
        if note := tensor_parallel_note(tokenizer.vocab_size, divisible_by, tensor_parallel):
            self.note(note)

    def initialized(self, config: RunConfig, seconds: float) -> None:
        self.note(console.seeds_line(config.train.seed))
        self.note(console.initialised_line(seconds))
        self.note(console.milestone_line("after megatron is initialized", datetime.now()))

    def building_model(self, config: RunConfig) -> None:
        self.note(f"building {config.model.title} model ...")

    def model_built(self, config: RunConfig, parameters: Sequence[tuple[int, int, int]]) -> None:
        for number, tensor_rank, pipeline_rank in parameters:
            self.note(console.parameters_line(number, tensor_rank, pipeline_rank))
        self.note(console.decay_style_line(config.schedule.lr_decay_style))

    def no_checkpoint(self, load: str | None) -> None:
        self.note(console.no_checkpoint_lines(f"{load}/{TRACKER_FILE}"))

    def loading(self, path: str, iteration: int, config: RunConfig, *, distributed: bool) -> None:
        where = console.as_typed(path, config.checkpoint.load)
        self.note(console.loading_line(where, iteration, distributed=distributed))

    def loaded(self, path: str, iteration: int, config: RunConfig, resumed: Resumed, state: TrainState) -> None:
        self.note(console.checkpoint_version_line(resumed.version))
        if resumed.schedule is not None:
            for line in console.schedule_lines(resumed.schedule.values, overridden=resumed.schedule.overridden):
                self.note(line)
        layout, where = state.context.layout, console.as_typed(path, config.checkpoint.load)
        self.note(console.loaded_line(where, iteration, tensor=layout.tp, pipeline=layout.pp))

    def setup_done(self) -> None:
        what = "after model, optimizer, and learning rate scheduler are built"
        self.note(console.milestone_line(what, datetime.now()))

    def building_datasets(self, sizes: tuple[int | None, int | None, int | None]) -> None:
        self.log("> building train, validation, and test datasets ...")
        self.note(console.target_sizes_lines(*sizes))

    def datasets_built(self, config: RunConfig, datasets: Datasets) -> None:
        for dataset in (*datasets, *datasets.further_valid):
            if dataset is not None:
                self.note(f"    {dataset.name}: {dataset.summary}")
        self.note(f"> finished creating {config.model.title} datasets ...")

    def data_done(self) -> None:
        self.note(console.milestone_line("after dataloaders are built", datetime.now()))
        self.log("done with setup ...")

    def timed(self, config: RunConfig, times: Times) -> None:
        self.note(console.timing_lines(times, config.log.timing_log_option))


def _print_configuration(config: RunConfig, screen: Screen, device: torch.device) -> None:
    parallel = config.parallel
    screen.say(
        console.world_size_line(
            config.launch.world_size,
            config.data_parallel_size,
            parallel.context_parallel_size,
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
        )
    )
    virtual = parallel.virtual_stages(config.model.num_layers)
    screen.note(f"Number of virtual stages per pipeline stage: {virtual if virtual > 1 else None}")
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count > 1 else ''}" if device.type == "cpu" else ""
    screen.say(f"running on {_device_name(device)}{threads}, torch {torch.__version__}{_products(config, device)}")
    nccl_asked_for = "distributed_backend" in config.given and parallel.distributed_backend == "nccl"
    if device.type == "cpu" and nccl_asked_for:
        screen.say("no GPU: --distributed-backend nccl becomes gloo")
    if device.type == "cpu" and config.optimizer.offloaded:
        screen.say("no GPU: --optimizer-cpu-offload has no effect")
    screen.say(console.parameter_type_line(config.precision.params_dtype))
    if config.precision.bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        screen.warn(f"WARNING: {_device_name(device)} emulates bf16, which is slow; use --fp16")
    screen.note(console.argument_dump(megatron_args(config)))
    for line in note_lines(config):
        screen.say(line)
    sizes = config.batch_sizes
    if len(sizes.stages) == 1:
        screen.say(console.micro_batches_line(config.num_micro_batches))
    elif config.train.rampup_batch_size:
        start, increment, samples = config.train.rampup_batch_size
        screen.say(console.ramp_lines(start, increment, samples, sizes.final))
    else:
        stages = ", ".join(f"{stage.size} from sample {stage.start}" for stage in sizes.stages)
        screen.say(f"global batch sizes: {stages}")
    if config.train.train_samples is not None:
        screen.note(console.train_iterations_line(config.train_iters))


def _products(config: RunConfig, device: torch.device) -> str:
    """Return a remark if half-precision matrix products are computed in fp32 on this device; else ""."""
    if not (config.precision.bf16 or config.precision.fp16) or products_of(config, device.type) != "float32":
        return ""
    kept = "bf16" if config.precision.bf16 else "fp16"
    return f"; no fast {kept} matmul on this CPU: computed in fp32 and rounded to {kept}"


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
