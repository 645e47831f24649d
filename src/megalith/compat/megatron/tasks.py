"""Megatron's `tasks/main.py` flags: those that an evaluation uses, ignores or refuses.

The architecture comes from the checkpoint. Flags of the architecture are compared with it, because a script written for
another model is a mistake that would otherwise show only as a bad score.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megalith.config import all_settings
from megalith.config.command_line import read_command_line
from megalith.config.from_args import model_from_args
from megalith.config.reading import Reading
from megalith.config.tokenizer_flags import TOKENIZER_SETTINGS, tokenizer_from
from megalith.config.values import local_path
from megalith.errors import ConfigError
from megalith.evaluate.request import DEFAULT_BATCH, Request
from megalith.registry import EMPTY, Registry

TASKS = {"LAMBADA": "lambada", "WIKITEXT103": "wikitext103"}
"""Megatron's name -> ours."""

_FINE_TUNING = "it fine-tunes a BERT model, and this program pretrains and measures them (megalith evaluate)"
_RETRIEVAL = "retrieval over an index of Wikipedia (faiss, ICT, ORQA) is not part of this program"
REFUSED = {
    "RACE": _FINE_TUNING,
    "MNLI": _FINE_TUNING,
    "QQP": _FINE_TUNING,
    "ICT-ZEROSHOT-NQ": _RETRIEVAL,
    "RETRIEVER-EVAL": _RETRIEVAL,
    "RET-FINETUNE-NQ": _RETRIEVAL,
    "MSDP": "multi-stage dialogue prompting is not part of this program",
    "MSDP-PROMPT": "multi-stage dialogue prompting is not part of this program",
    "MSDP-EVAL-F1": "multi-stage dialogue prompting is not part of this program",
}
_OF_OTHER_TASKS = (
    *("--qa-data-dev", "--qa-data-test", "--faiss-match", "--faiss-topk-retrievals"),
    *("--train-with-neg", "--train-hard-neg", "--val-av-rank-hard-neg", "--val-av-rank-other-neg"),
)
_WITHOUT_EFFECT = {"train_data": "nothing is trained", "epochs": "nothing is trained", "keep_last": "no batch is left"}

OF_LAUNCH = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "distributed_backend"),
    *("distributed_timeout_minutes", "distributed_timeout_seconds_after_init", "debug_collectives", "device"),
)
"""Settings of a training run that say how the processes of an evaluation or a server work together."""

# Settings of a training run that an evaluation uses.
_USED = (
    *("load", "pretrained_checkpoint", "ckpt_step", "micro_batch_size", "seq_length", "log_interval"),
    *("fp16", "bf16"),
    *(*OF_LAUNCH, *TOKENIZER_SETTINGS),
)
_NOT_ARCHITECTURE = (  # settings of the model group that do not change an evaluation
    *("hidden_dropout", "attention_dropout", "init_method_std", "use_cpu_initialization", "add_position_embedding"),
    *("attention_backend", "transformer_impl", "make_vocab_size_divisible_by", "attention_softmax_in_fp32"),
)


class ToolParser(argparse.ArgumentParser):
    """Parser of the flags of one of Megatron's programs; errors are ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> ToolParser:
    parser = ToolParser(
        prog="tasks/main.py",
        allow_abbrev=False,
        description="Megatron's zero-shot tasks. Architecture and tokenizer come from the checkpoint; other flags are "
        "those of pretrain_gpt.py. `megalith evaluate` does the same with fewer flags.",
    )
    add = parser.add_argument
    add("--task", required=True, metavar="TASK", help="LAMBADA or WIKITEXT103")
    add("--valid-data", nargs="*", default=None, metavar="FILE", help="the file to measure on")
    add("--strict-lambada", action="store_true", help="score the whole last word, not only its last token")
    add("--overlapping-eval", type=int, metavar="N", help="tokens that each later window scores (32)")
    add("--eval-micro-batch-size", type=int, metavar="N", help="instead of --micro-batch-size")
    add("--train-data", nargs="+", metavar="FILE", help="no effect: nothing is trained")
    add("--epochs", type=int, metavar="N", help="no effect: nothing is trained")
    add("--keep-last", action="store_true", help="no effect: no batch is left out")
    add("--json", type=local_path, metavar="FILE", help="also write the result to FILE (not in Megatron)")
    add("--fail-on-alarm", action="store_true", help="exit with code 7 if the result raises an alarm (not in Megatron)")
    return parser


def read_flags(argv: Sequence[str], *, files: bool = True) -> tuple[Request, bool, list[str]]:
    """Return the evaluation that a command line of tasks/main.py requests, --fail-on-alarm, and notes.

    Raises ConfigError with everything that is wrong; `files` as of `Request.violations`.
    """
    options, rest = _parser().parse_known_args(list(argv))
    if options.task in REFUSED:
        raise ConfigError(f"--task {options.task} is not supported: {REFUSED[options.task]}; {', '.join(TASKS)} are")
    if options.task not in TASKS:
        raise ConfigError(f"--task {options.task} is not known; use {' or '.join(TASKS)}")
    reading = read_command_line(rest)
    given = reading.values
    problems = [_of_another_task(problem) for problem in reading.problems]
    shared = shared_values(reading, problems, "tasks/main.py", "an evaluation divides samples and weights")
    data = options.valid_data or []
    if len(data) > 1:
        problems.append(f"--valid-data {' '.join(data)}: {options.task} takes one file")
    request = Request(
        **shared,
        task=TASKS[options.task],
        data=Path(data[0]) if data else None,
        result=options.json,
        strict=options.strict_lambada,
        overlap=options.overlapping_eval,
        seq_length=given.get("seq_length"),
        batch_size=options.eval_micro_batch_size or given.get("micro_batch_size", DEFAULT_BATCH),
        log_interval=given.get("log_interval", all_settings()["log_interval"].default),
    )
    # Scripts give the flags of all tasks, as Megatron takes them.
    unread = request.unread()
    request = dataclasses.replace(request, **{one.field: getattr(Request, one.field) for one in unread})
    problems += request.violations(files=files)
    if problems:
        raise ConfigError(problems)
    notes = _notes(options, reading.notes, given, reading.nothing)
    notes += [f"{one.given} has no effect: {options.task} does not read it" for one in unread]
    return request, options.fail_on_alarm, notes


def shared_values(reading: Reading, problems: list[str], program: str, divides: str) -> dict[str, Any]:
    """Return what evaluations and servers take from Megatron's flags of training, by the names of their fields.

    Args:
        divides: what several processes of it do, for the message about context parallelism.
    """
    given = reading.values
    if reading.recipe:
        problems.append(f"--config {reading.recipe}: {program} reads no recipe; give the flags")
    checkpoint = given.get("load") or given.get("pretrained_checkpoint")
    if not checkpoint:
        problems.append("--load is missing (the folder of the checkpoint); Megatron would use random weights")
    if given.get("context_parallel_size", 1) > 1:
        problems.append(
            f"--context-parallel-size {given['context_parallel_size']}: {divides}, not sequences; use "
            "--tensor-model-parallel-size"
        )
    if "nproc" in given:
        problems.append(f"--nproc {given['nproc']}: start several processes with torchrun --nproc_per_node")
    tokenizer = None
    try:
        tokenizer = tokenizer_from(given)
    except ConfigError as error:
        problems += error.violations
    return {
        "checkpoint": Path(checkpoint or "."),
        "iteration": given.get("ckpt_step"),
        "dtype": "float16" if given.get("fp16") else "bfloat16" if given.get("bf16") else None,
        "tokenizer": tokenizer,
        "settings": {name: given[name] for name in OF_LAUNCH if name in given},
        "stated": stated_architecture(given),
    }


def idle_flags(given: Mapping[str, Any], nothing: Mapping[str, Sequence[str]], used: Sequence[str]) -> list[str]:
    """Return the flags of training that are given and not `used`; of the launch and the model there are other notes."""
    settings = all_settings()
    idle = [
        settings[name].positive_flag
        for name in given
        if name not in used and settings[name].group not in ("launch", "model")
    ]
    return idle + [flag for flags in nothing.values() for flag in flags]


def stated_architecture(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a command line that describe the architecture, for `contradictions`."""
    settings = all_settings()
    return {
        name: value
        for name, value in given.items()
        if settings[name].group == "model" and name not in _NOT_ARCHITECTURE and value is not None
    }


def contradictions(stated: Mapping[str, Any], args: Mapping[str, Any], registry: Registry = EMPTY) -> list[str]:
    """Return where a command line and a checkpoint disagree on the architecture, each naming both values."""
    model, settings = model_from_args(args, registry), all_settings()
    resolved = {
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "num_query_groups": model.query_groups,
    }
    found = []
    for name, value in stated.items():
        held = resolved.get(name, getattr(model, name))
        if name == "num_query_groups" and not stated.get("group_query_attention"):
            continue  # without effect, as in training
        if name == "bias_gelu_fusion" and model.swiglu:
            continue  # there is no GELU
        if held != value:
            setting = settings[name]
            found.append(
                f"{setting.flag} {setting.as_given(value)} contradicts the checkpoint ({setting.as_given(held)}); "
                "leave it out (the checkpoint has it), or give the intended checkpoint"
            )
    return found


def _of_another_task(problem: str) -> str:
    flag = problem.split(" ", 1)[0]
    return f"{flag} belongs to a task that is not supported: {_RETRIEVAL}" if flag in _OF_OTHER_TASKS else problem


def _notes(
    options: argparse.Namespace, said: Sequence[str], given: Mapping[str, Any], nothing: Mapping[str, Sequence[str]]
) -> list[str]:
    settings = all_settings()
    idle = idle_flags(given, nothing, _USED)
    idle += [settings[name].positive_flag for name in given if name in _NOT_ARCHITECTURE]
    notes = list(said)
    if idle:
        notes.append(f"without effect on an evaluation: {', '.join(dict.fromkeys(idle))}")
    for name, reason in _WITHOUT_EFFECT.items():
        if getattr(options, name):
            notes.append(f"--{name.replace('_', '-')} has no effect: {reason}")
    return notes


def help_text() -> str:
    """Return the text of --help."""
    return _parser().format_help()
