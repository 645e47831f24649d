"""`--ckpt-convert-format`: a training command line that converts its checkpoint instead of training.

Megatron builds the model, loads into it and saves. Here the files are converted without a model, by the first of the
processes; the result has the layout that the run would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith.config import RunConfig
from megalith.config.saved_args import megatron_args
from megalith.errors import CheckpointError


def convert_instead(config: RunConfig) -> int:
    """Convert the checkpoint of `--load` as the run would save it.

    Raises:
        CheckpointError: it is missing, damaged, of another architecture, or cannot be written.
        LayoutError: the model does not divide so.
    """
    if config.launch.rank != 0:
        return 0
    from megalith.checkpoint.adapted import args_of
    from megalith.checkpoint.convert import Wanted, convert
    from megalith.checkpoint.locate import locate
    from megalith.checkpoint.source import open_source
    from megalith.compat.megatron import console
    from megalith.train.streams import warn

    settings = config.checkpoint
    form, load, save = settings.ckpt_convert_format, settings.load, settings.ckpt_convert_save
    assert form is not None and load is not None and save is not None, "a rule of the configuration"
    found = locate(Path(load), settings.ckpt_step)
    source = open_source(found)
    common = source.common()
    _check_architecture(config, args_of(common), found)
    iteration = int(common.get("iteration") or 0)
    print(console.loading_line(load, iteration, distributed=source.format == "torch_dist"))
    wanted = Wanted(
        format=form,
        tp=config.parallel.tensor_model_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
        ep=config.parallel.expert_model_parallel_size,
        optimizer=not (settings.no_load_optim or settings.no_save_optim or settings.finetune),
        dtype=config.precision.params_dtype,
        run_args=megatron_args(config),
    )
    made = convert(Path(load), Path(save) / form, wanted, iteration=settings.ckpt_step)
    for note in made.notes:
        warn(f"note: {note}")
    print(f"> converted checkpoint: {source.format} -> {form}.")
    print(f"{made.path}: {made.bytes / 2**20:.1f} MiB in {made.seconds:.1f} s")
    return 0


def _check_architecture(config: RunConfig, args: Mapping[str, Any], found: Path) -> None:
    """Refuse to write the checkpoint of one model under the command line of another.

    Raises:
        CheckpointError: names every difference.
    """
    from megalith.config.foreign_args import model_of
    from megalith.train.checkpoint_fit import ARCHITECTURE, architecture

    was, now = architecture(model_of(args)), architecture(config.model)
    lines = [
        f"{flag}: {was[name]} in the checkpoint, {now[name]} here"
        for name, flag in ARCHITECTURE.items()
        if was[name] != now[name]
    ]
    if lines:
        raise CheckpointError("\n  ".join([f"{found} is of another model:", *lines, "give the flags of that run"]))
