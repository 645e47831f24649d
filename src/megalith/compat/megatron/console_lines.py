"""Megatron's console lines as pure functions of their values; nothing here prints or reads a clock.

The wording is that of the newest version (0.16.1 and the head of its repository), white space at the ends included,
because users search and parse these lines. Source: docs/reference/console.md; golden `pretrain`.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from megalith.train.results import Evaluation, Times, WindowReport


def stamp(moment: datetime) -> str:
    """Format date and time as the lines of the newest version show them."""
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f")


def as_float32(value: float) -> float:
    """Round to single precision; the learning rate is printed after this rounding."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


# Lines without alternatives, formatted with their values. Megatron's white space at the ends is kept.

parameter_type_line = "using torch.{} for parameters ...".format
micro_batches_line = "setting number of microbatches to constant {}".format
building_tokenizer_line = "> building {} tokenizer ...".format
seeds_line = "> setting random seeds to {} ...".format
initialised_line = "time to initialize megatron (seconds): {:.3f}".format
decay_style_line = "> learning rate decay style: {}".format
growth_line = "ramping up batch size from {} to {}".format
skipping_training_line = "skipping training (--skip-train is on) ...".format
train_iterations_line = "setting training iterations to {}".format
milestone_line = "[{}] datetime: {:%Y-%m-%d %H:%M:%S.%f} ".format
evaluating_line = "Evaluating on {} samples".format
evaluating_iteration_line = "Evaluating iter {}/{}".format
scheduled_line = "  scheduled an async checkpoint save at iteration {:7d} to {}".format
checkpoint_version_line = " checkpoint version {}".format
exit_at_iteration_line = "[exiting program at iteration {}] datetime: {:%Y-%m-%d %H:%M:%S.%f} ".format
exit_after_minutes_line = "[exiting program after {} minutes] datetime: {:%Y-%m-%d %H:%M:%S.%f} ".format
exit_on_signal_line = "[exiting program after receiving {}.] datetime: {:%Y-%m-%d %H:%M:%S.%f} ".format


# Start-up


def world_size_line(world: int, data: int, context: int, tensor: int, pipeline: int) -> str:
    """Return the first line of a run."""
    return (
        f"using world size: {world}, data-parallel size: {data}, context-parallel size: {context}, hierarchical "
        f"context-parallel sizes: None, tensor-model-parallel size: {tensor}, pipeline-model-parallel size: {pipeline}"
    )


def argument_dump(arguments: Mapping[str, Any]) -> str:
    """Return every argument by name, dotted to a column, sorted as Megatron sorts (whole lines, ignoring case)."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()]
    head, tail = "------------------------ arguments ------------------------", "end of arguments"
    return "\n".join([head, *sorted(lines, key=str.lower), f"-------------------- {tail} ---------------------"])


def parameters_line(number: int, tensor_rank: int = 0, pipeline_rank: int = 0) -> str:
    """Return the line with the number of parameters on one model-parallel rank."""
    return (
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tensor_rank}, {pipeline_rank}): {number}"
    )


def target_sizes_lines(train: int | None, validation: int | None, test: int | None) -> str:
    """Return the numbers of samples that the run draws from each split, None for all."""
    return (
        " > datasets target sizes (minimum size):\n"
        f"    train:      {train}\n    validation: {validation}\n    test:       {test}"
    )


def ramp_lines(start: int, increment: int, samples: int, final: int) -> str:
    """Return the description of the batch size under `--rampup-batch-size`."""
    return (
        f"will use batch size rampup starting from global batch size {start} to global batch size {final} with "
        f"batchsize increments {increment} over {samples} samples.\nsetting initial batch size to {start}"
    )


# Training and evaluation


def iteration_line(window: WindowReport, moment: datetime, *, throughput: bool = False) -> str:
    """Return the line for the steps since the last one; a value that the last step does not have is left out."""
    parts = [
        f" [{stamp(moment)}] iteration {window.iteration:8d}/{window.train_iterations:8d}",
        f"consumed samples: {window.consumed_samples:12d}",
        *([f"skipped samples: {window.skipped_samples:12d}"] if window.skipped_samples else []),
        f"elapsed time per iteration (ms): {window.seconds_per_step * 1000.0:.1f}",
    ]
    if throughput:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {window.teraflops:.1f}")
    parts.append(f"learning rate: {as_float32(window.learning_rate):.6E}")
    parts.append(f"global batch size: {window.global_batch_size:5d}")
    if window.loss is not None:
        parts.append(f"lm loss: {window.loss:.6E}")
        others = {**window.auxiliary_losses, **window.further_losses}
        parts += [f"{name}: {value:.6E}" for name, value in others.items()]
    parts.append(f"loss scale: {window.loss_scale:.1f}")
    if window.grad_norm is not None:
        parts.append(f"grad norm: {window.grad_norm:.3f}")
    if window.num_zeros is not None:
        parts.append(f"num zeros: {window.num_zeros}")
    if window.params_norm is not None:
        parts.append(f"params norm: {window.params_norm:.3f}")
    parts.append(f"number of skipped iterations: {window.num_skipped:3d}")
    parts.append(f"number of nan iterations: {window.num_nan:3d} |")
    return " | ".join(parts)


def evaluation_lines(evaluation: Evaluation) -> str:
    """Return losses and perplexities of an evaluation between dashes."""
    named = evaluation.final or evaluation.split != "validation"  # each of several validation sets has its name
    where = f" on {evaluation.split} set" if named else ""
    losses = {"lm loss": evaluation.loss, **evaluation.further_losses}
    values = "".join(
        f"{name} value: {loss:.6E} | {name} PPL: {perplexity(loss):.6E} | " for name, loss in losses.items()
    )
    line = f" validation loss at iteration {evaluation.iteration}{where} | {values}"
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def timing_lines(times: Times, option: str = "minmax") -> str:
    """Return timings in ms: minmax or max over all ranks, or each rank (`--timing-log-option`)."""
    if option == "all":
        return "\n".join(["times across ranks (ms):", *(_of_all_ranks(name, each) for name, each in times.items())])
    head = "(min, max) time across ranks (ms):" if option == "minmax" else "max time across ranks (ms):"
    return "\n".join([head, *(f"    {(name + ' '):.<48}: {_span(each, option)}" for name, each in times.items())])


def _of_all_ranks(name: str, seconds: Sequence[float]) -> str:
    ranks = [f"     rank {rank:2d}: {each * 1000.0:.2f}" for rank, each in enumerate(seconds)]
    return "\n".join([f"  {name}:", *ranks])


def _span(seconds: Sequence[float], option: str) -> str:
    longest = f"{max(seconds) * 1000.0:.2f}"
    return longest if option == "max" else f"({min(seconds) * 1000.0:.2f}, {longest})"


def perplexity(loss: float) -> float:
    """Return exp(loss), with the loss capped at 20 as Megatron does."""
    return math.exp(min(20.0, loss))


# Checkpoints


def as_typed(folder: str, *words: str | None) -> str:
    """Return a folder as one of `words` names it, which is how Megatron prints it; unchanged if none does."""
    return next((word for word in words if word and os.path.normpath(word) == os.path.normpath(folder)), folder)


def saving_line(iteration: int, directory: str, form: str, moment: datetime) -> str:
    """Return the line before a checkpoint is written; `form` is "torch_dist" or "torch"."""
    return f"[{stamp(moment)}] saving checkpoint at iteration {iteration:7d} to {directory} in {form} format"


def saved_line(iteration: int, directory: str, moment: datetime, *, tensor: int = 1, pipeline: int = 1) -> str:
    """Return the line after a checkpoint is complete on disk, said for the first tensor and pipeline rank."""
    return (
        f"  [{stamp(moment)}] successfully saved checkpoint from iteration {iteration:7d} to {directory} "
        f"[ t 1/{tensor}, p 1/{pipeline} ]"
    )


def no_checkpoint_lines(tracker: str) -> str:
    """Return the warning of a first start; `tracker` is the path of the missing tracker file."""
    return (
        f"WARNING: could not find the metadata file {tracker}\n"
        "    will not load any checkpoints and will start from random"
    )


def loading_line(directory: str, iteration: int, *, distributed: bool) -> str:
    """Return the line before a checkpoint is read; `distributed` for the torch_dist format."""
    what = "distributed checkpoint" if distributed else "checkpoint"
    return f" loading {what} from {directory} at iteration {iteration}"


def schedule_lines(values: Sequence[tuple[str, Any]], *, overridden: bool) -> list[str]:
    """Return one line for each schedule value that a resume took from the checkpoint or the command line."""
    if overridden:
        return [f" > overriding {name} value to {value}" for name, value in values]
    return [f" > using checkpoint value {value} for {name}" for name, value in values]


def loaded_line(directory: str, iteration: int, *, tensor: int = 1, pipeline: int = 1) -> str:
    """Return the line after a checkpoint is loaded, as `saved_line`."""
    place = f"[ t 1/{tensor}, p 1/{pipeline} ]"
    return f"  successfully loaded checkpoint from {directory} {place} at iteration {iteration}"
