"""`megalith evaluate` and `tasks/main.py`: evaluation of a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megalith.cli.arguments import CommandParser, add_checkpoint_flags, add_layout_flags, layout_settings, load_model
from megalith.cli.report import write_page
from megalith.cli.threads import configure_rank
from megalith.config import RunConfig
from megalith.config.environment import first_of_machine
from megalith.config.families import FAMILIES
from megalith.config.rules.family import SHORTEST_SAMPLE
from megalith.config.tokenizer_flags import imported_by, tokenizer_of_flags
from megalith.config.values import local_path, model_path
from megalith.errors import ConfigError, MegalithError
from megalith.evaluate.local_data import BENCHMARKS
from megalith.evaluate.request import DEFAULT_BATCH, DETOKENIZER_CHOICES, MASKED_TASKS, TASKS, Request

if TYPE_CHECKING:
    from megalith.assemble.trained import Trained
    from megalith.distributed.context import ParallelContext
    from megalith.evaluate.alarms import Alarm
    from megalith.evaluate.benchmark import BenchmarkResult
    from megalith.evaluate.masked import MaskedResult
    from megalith.evaluate.text import Accuracy, Listener, TextLoss

    Result = Accuracy | TextLoss | MaskedResult | BenchmarkResult

AS_MEGATRON = "tasks/main.py"
"""First argument of a command line with Megatron's flags."""

EXIT_ALARM = 7


def make_parser() -> argparse.ArgumentParser:
    tasks = "\n".join(f"  {name:12}{about}" for name, about in TASKS.items())
    parser = CommandParser(
        prog="megalith evaluate",
        description="Evaluate a trained model. Architecture and tokenizer come from the checkpoint. Under torchrun the "
        "model is sharded (--tp, --pp); the remaining ranks are data-parallel.",
        epilog=f"tasks:\n{tasks}\n\nAn implausible result raises an alarm that names the likely cause. "
        "See docs/evaluation.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_checkpoint_flags(parser)
    add_layout_flags(parser)
    add("--task", required=True, choices=tuple(TASKS), help="task, see below")
    add(
        "--data",
        type=local_path,
        metavar="FILE",
        help="evaluation set: jsonl with a text in each line, or txt; for masked and spans also the prefix of a "
        "dataset written by preprocess --split-sentences; for benchmarks the folder of their files",
    )
    add(
        "--others", nargs="+", type=model_path, default=[], metavar="C", help="benchmarks: further columns of the table"
    )
    add("--num-fewshot", type=int, metavar="N", help="benchmarks: examples before each question (default: lm-eval's)")
    add("--apply-chat-template", action="store_true", help="benchmarks: ask as in a dialogue")
    add("--chat-template", type=local_path, metavar="FILE", help="as of megalith serve (default: the tokenizer's)")
    add("--subjects", metavar="WORDS", help="mmlu, ceval, cmmlu: subjects, separated by commas (default: all)")
    add("--strict-lambada", action="store_true", help="lambada: predict the whole last word, not only its last token")
    add("--overlapping-eval", type=int, metavar="N", help="wikitext103, text: tokens scored per window (default: 32)")
    add(
        "--seq-length",
        type=int,
        metavar="N",
        help="wikitext103, text: tokens per window; masked, spans: per sample (default: the model's context length)",
    )
    add("--samples", type=int, metavar="N", help="masked, spans, benchmarks: most samples (of a subject)")
    add("--decoder-seq-length", type=int, metavar="N", help="spans: decoder tokens per sample")
    add("--detokenizer", choices=DETOKENIZER_CHOICES, default="auto", help="wikitext103: auto goes by path (default)")
    add("--micro-batch-size", type=int, default=DEFAULT_BATCH, metavar="N", help="samples per forward (default: 8)")
    add("--log-interval", type=int, default=100, metavar="N", help="batches between progress lines (default: 100)")
    add("--json", type=local_path, metavar="FILE", help="also write the result to FILE")
    add("--fail-on-alarm", action="store_true", help=f"exit with code {EXIT_ALARM} if the result is implausible")
    return parser


def run(argv: Sequence[str]) -> int:
    """Evaluate, and print the result and its alarms."""
    from megalith.compat.megatron.tasks import help_text, read_flags

    if argv and argv[0] == AS_MEGATRON:
        if {"-h", "--help"} & set(argv):
            print(help_text())
            return 0
        return _evaluate(*read_flags(argv[1:]))
    # None where it is not given: argparse sets no default where the namespace has a value.
    options = make_parser().parse_args(list(argv), argparse.Namespace(detokenizer=None))
    request = Request(
        checkpoint=options.checkpoint,
        task=options.task,
        data=options.data,
        result=options.json,
        iteration=options.iteration,
        strict=options.strict_lambada or options.task == "cloze",
        overlap=options.overlapping_eval,
        seq_length=options.seq_length,
        batch_size=options.micro_batch_size,
        log_interval=options.log_interval,
        detokenizer=options.detokenizer,
        samples=options.samples,
        decoder_seq_length=options.decoder_seq_length,
        others=tuple(options.others),
        shots=options.num_fewshot,
        chat=options.apply_chat_template,
        chat_template=options.chat_template,
        subjects=tuple(word.strip() for word in (options.subjects or "").split(",") if word.strip()),
        dtype=options.dtype,
        tokenizer=tokenizer_of_flags(options),
        registry=imported_by(options),
        settings=layout_settings(options),
    )
    if wrong := request.violations():
        raise ConfigError(wrong)
    if request.task in BENCHMARKS:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")  # read by the libraries when they are imported
        from megalith.evaluate.benchmark import require_harness

        require_harness()
    return _evaluate(request, options.fail_on_alarm, [])


def _evaluate(request: Request, fail_on_alarm: bool, notes: Sequence[str]) -> int:
    began = time.monotonic()
    first = first_of_machine(os.environ)
    _, threads = configure_rank(os.environ)

    from megalith.assemble.ranks import join_ranks

    try:
        config = _configure(request)
    except MegalithError as error:
        error.said = not first
        raise
    with join_ranks(config) as context:
        say = partial(print, flush=True) if context.rank == 0 else _print_nothing
        for line in [*([threads] if threads else []), *notes]:
            say(f"note: {line}")
        every = [dataclasses.replace(request, checkpoint=path) for path in (request.checkpoint, *request.others)]
        found = [(each, *_measure(each, context, say)) for each in every]
        alarms = [alarm for _, _, of_one, _ in found for alarm in of_one]
        if context.rank == 0:
            _show(found, say)
            if request.result is not None:
                seconds = round(time.monotonic() - began, 3)
                _write_json(request.result, [_described(*each, seconds=seconds) for each in found])
            return EXIT_ALARM if alarms and fail_on_alarm else 0
    return 0


def _print_nothing(text: str) -> None:
    pass


def _configure(request: Request) -> RunConfig:
    """Return the configuration of the ranks; ConfigError if the request does not fit the model."""
    from megalith.assemble.reading import model_in, ranks_of, require_text_model, saved_args
    from megalith.compat.megatron.tasks import contradictions

    args = saved_args(request.checkpoint, request.iteration)
    model = model_in(args, request.checkpoint, request.registry)
    if request.task not in MASKED_TASKS:
        require_text_model(model, request.checkpoint, f"--task {request.task}")
    elif model.family.objective != request.task:
        fits, wanted = model.family, [family.title for family in FAMILIES.values() if family.objective == request.task]
        raise ConfigError(
            f"--task {request.task} is for {' and '.join(wanted)}, and {request.checkpoint} holds a {fits.title}; use "
            f"--task {fits.objective if fits.objective in MASKED_TASKS else 'text or cloze'}"
        )
    wrong = contradictions(request.stated, args, request.registry)
    if request.task in ("wikitext103", "text"):
        wrong += request.windows(model.max_position_embeddings)[2]
    if request.task in MASKED_TASKS and model.position_embedding_type == "learned_absolute":
        lengths = {"--seq-length": request.seq_length, "--decoder-seq-length": request.decoder_seq_length}
        most = model.max_position_embeddings
        wrong += [
            f"{flag} {length} is longer than the {most} positions of the model (--max-position-embeddings); give "
            f"{most} or less"
            for flag, length in lengths.items()
            if length is not None and length > most
        ]
    if request.task == "masked" and request.seq_length is not None and request.seq_length < SHORTEST_SAMPLE:
        wrong.append(
            f"--seq-length {request.seq_length}: a BERT sample has three special tokens; use at least {SHORTEST_SAMPLE}"
        )
    if wrong:
        raise ConfigError(wrong)
    return ranks_of(model, request.settings, os.environ)


def _measure(
    request: Request, context: ParallelContext, say: Callable[[str], None]
) -> tuple[Result, list[Alarm], dict[str, Any]]:
    """Return the result, the alarms about it, and what was evaluated."""
    from megalith.checkpoint import split_path
    from megalith.compat.megatron.evaluation import EvaluationConsole
    from megalith.evaluate.alarms import (
        Evidence,
        alarms_of,
        never_trained,
        require_measured,
        size_difference,
        training_loss,
    )
    from megalith.evaluate.text import bundled_path

    trained = load_model(
        request.checkpoint,
        context.device,
        request.iteration,
        request.tokenizer,
        context,
        request.dtype,
        request.registry,
    )
    say(_about(request, trained, context))
    tokenizer, listener = trained.tokenizer, EvaluationConsole(say, request.log_interval)
    path = request.data or bundled_path()
    measure: Callable[..., Result] = _measure_text
    if request.task in (*MASKED_TASKS, *BENCHMARKS):
        measure = _measure_denoising if request.task in MASKED_TASKS else _measure_benchmark
    result = measure(request, path, trained, context, listener)
    require_measured(result, path)
    other = None
    if trained.tokenizer_card is None and not (trained.from_huggingface or trained.imported):
        other = size_difference(trained.args, tokenizer.vocab_size)
    evidence = Evidence(
        vocab_size=tokenizer.vocab_size,
        iteration=trained.iteration,
        other_tokenizer=other,
        never_trained=never_trained(trained.model, context),
        training_loss=training_loss(split_path(request.checkpoint)[0], trained.iteration),
    )
    about = {
        "checkpoint": str(request.checkpoint),
        "iteration": trained.iteration,
        "task": request.task,
        "data": str(path),
        "dtype": str(trained.model.dtype).removeprefix("torch."),
        "layout": dataclasses.asdict(context.layout),
        "tokenizer": tokenizer.fingerprint(),
    }
    return result, alarms_of(result, evidence), about


def _measure_text(
    request: Request, path: Path, trained: Trained, context: ParallelContext, listener: Listener
) -> Accuracy | TextLoss:
    from megalith.evaluate.score import Scorer
    from megalith.evaluate.text import Windows, measure_cloze, measure_text, measure_wikitext

    tokenizer, scorer = trained.tokenizer, Scorer(trained.gpt, context, batch_size=request.batch_size)
    length, stride, _ = request.windows(scorer.context_length)
    if request.task in ("lambada", "cloze"):
        return measure_cloze(path, scorer, tokenizer, listener, strict=request.strict)
    windows = Windows(length, stride)
    if request.task == "wikitext103":
        return measure_wikitext(path, scorer, tokenizer, windows, listener, detokenizer=request.detokenizer or "auto")
    return measure_text(path, scorer, tokenizer, windows, listener)


def _measure_denoising(
    request: Request, path: Path, trained: Trained, context: ParallelContext, listener: Listener
) -> MaskedResult:
    """Measure how well a model predicts masked tokens or corrupted spans."""
    from megalith.evaluate.masked import MaskedScorer, SampleLengths, open_samples
    from megalith.models.language_model import DenoisingModel

    assert isinstance(trained.model, DenoisingModel), "the task fits the model"
    cut = SampleLengths(request.seq_length, request.decoder_seq_length)
    with TemporaryDirectory(prefix="megalith-evaluate-") as scratch:
        samples, notes = open_samples(path, trained.model.config, trained.args, trained.tokenizer, cut, Path(scratch))
        for note in notes:
            listener.note(note)
        count = len(samples) if request.samples is None else min(request.samples, len(samples))
        listener.found(count)
        scorer = MaskedScorer(trained.model, context, batch_size=request.batch_size)
        return scorer(samples, count, listener.batch)


def _measure_benchmark(
    request: Request, path: Path, trained: Trained, context: ParallelContext, listener: Listener
) -> BenchmarkResult:
    """Ask a benchmark of a model by lm-eval."""
    from megalith.evaluate.benchmark import Asking, ask
    from megalith.evaluate.harness import MegalithLM
    from megalith.tokenizers.chat_template import find_template, template_beside

    template = None
    if request.chat:
        tokenizer, given = trained.tokenizer, request.chat_template
        template = template_beside(tokenizer) if given is None else find_template(str(given), tokenizer)
    model = MegalithLM.of(trained, context, request.batch_size, template)
    return ask(model, Asking(request.task, path, request.shots, request.chat, request.subjects, request.samples))


def _about(request: Request, trained: Trained, context: ParallelContext) -> str:
    model = trained.model
    return (
        f"checkpoint {request.checkpoint} at iteration {trained.iteration}: {model.config.num_layers} layers of "
        f"{model.config.hidden_size}, context {model.config.max_position_embeddings}, vocabulary "
        f"{trained.tokenizer.vocab_size}, {str(model.dtype).removeprefix('torch.')}, {context.layout}"
    )


_Found = tuple[Request, "Result", "list[Alarm]", dict[str, Any]]
"""A request for one checkpoint, its result and alarms, and what was evaluated."""


def _show(found: Sequence[_Found], say: Callable[[str], None]) -> None:
    from megalith.compat.megatron.evaluation import DONE, alarm_lines, between_dashes, result_line, score_lines
    from megalith.evaluate.benchmark import BenchmarkResult

    request, result, _, _ = found[0]
    if isinstance(result, BenchmarkResult):
        tables = {str(each.checkpoint): one for each, one, _, _ in found if isinstance(one, BenchmarkResult)}
        lines = score_lines(request.task, tables)
    else:
        lines = [result_line(request.task.upper(), result)]
    for line in between_dashes(*lines):
        say(line)
    say(DONE)
    sys.stdout.flush()
    for each, _, alarms, _ in found:
        if alarms and len(found) > 1:
            say(f"{each.checkpoint}:")
        for line in alarm_lines(alarms):
            say(line)


def _described(
    request: Request, result: Result, alarms: Sequence[Alarm], about: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """Return what --json has of one checkpoint."""
    return {
        **about,
        "seconds": seconds,
        "strict": request.strict,
        "result": _nan_to_none(_metrics(result)),
        "alarms": [dataclasses.asdict(alarm) for alarm in alarms],
    }


def _write_json(path: Path, described: Sequence[Mapping[str, Any]]) -> None:
    body = {**described[0], **({"others": described[1:]} if len(described) > 1 else {})}
    write_page(path, json.dumps(body, indent=1) + "\n", "--json")


def _metrics(result: Result) -> dict[str, Any]:
    from megalith.evaluate.benchmark import BenchmarkResult
    from megalith.evaluate.masked import MaskedResult
    from megalith.evaluate.text import Accuracy

    if isinstance(result, MaskedResult | BenchmarkResult):
        return result.numbers()
    names = (
        ("share", "loss")
        if isinstance(result, Accuracy)
        else ("mean", "perplexity", "adjusted_perplexity", "token_ratio", "bits_per_byte")
    )
    return {**dataclasses.asdict(result), **{name: getattr(result, name) for name in names}}


def _nan_to_none(value: Any) -> Any:
    """Return the value with None in place of NaN, which JSON cannot represent."""
    if isinstance(value, dict):
        return {name: _nan_to_none(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
