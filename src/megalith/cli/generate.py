"""`megalith generate`: continue a text with a trained model."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megalith.errors import ConfigError, MegalithError
from megalith.serve.request import Finished, Request, RequestError, Sampling, Token

if TYPE_CHECKING:
    from megalith.assemble.trained import Trained
    from megalith.models.t5 import T5
    from megalith.serve.engine import Engine
    from megalith.tokenizers import Tokenizer


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see megalith generate --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megalith generate",
        description="Continue a text with a trained GPT, or answer it with a T5. Architecture and tokenizer come from "
        "the checkpoint. Without --prompt it asks for one text after the other.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="the folder that --save named, or one iter_* folder in it")
    parser.add_argument("--prompt", help="the text to continue; - reads it from standard input; asked for if absent")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="tokens to add at most (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="choose among the k most likely; 0: all (default)")
    parser.add_argument("--top-p", type=float, default=0.95, help="choose among the likeliest of this sum; 0: all")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: fewer repeated tokens")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument("--stop", action="append", default=[], help="a text that ends the answer; may be repeated")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the choices (default: 1234)")
    parser.add_argument("--num-samples", type=int, default=1, help="how many continuations (default: 1)")
    parser.add_argument("--iteration", type=int, help="which checkpoint; the newest sound one if absent")
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="of a T5 whose layers N processes of torchrun share; a GPT over several processes is served",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print each prompt and its continuations."""
    options = _parser().parse_args(list(argv))
    sampling = Sampling(
        0.0 if options.greedy else options.temperature,
        options.top_k,
        options.top_p,
        repetition_penalty=options.repetition_penalty,
    )
    violations = sampling.violations()
    for flag, value in (
        ("--max-new-tokens", options.max_new_tokens),
        ("--num-samples", options.num_samples),
        ("--tp", options.tp),
    ):
        if value < 1:
            violations.append(f"{flag} {value} is below 1; give 1 or more")
    if options.tp > 1 and options.prompt in (None, "-"):
        violations.append(f"--tp {options.tp} needs --prompt TEXT, which all processes read")
    if violations:
        raise ConfigError(violations)
    if options.tp > 1:
        return _answer_together(sampling, options)

    from megalith.assemble.model import choose_device
    from megalith.assemble.trained import load_trained

    trained = load_trained(options.checkpoint, choose_device(options.device), options.iteration)
    for note in trained.notes:
        print(f"WARNING: {note}", file=sys.stderr)
    reply = _replying(trained, sampling, options)
    if options.prompt is not None:
        reply(sys.stdin.read() if options.prompt == "-" else options.prompt)
        return 0
    for text in _typed():
        try:
            reply(text)
        except MegalithError as error:  # of this text only
            print(error, file=sys.stderr)
    return 0


def _answer_together(sampling: Sampling, options: argparse.Namespace) -> int:
    """Print what a T5 answers whose layers several processes share; each chooses the same tokens, the first prints."""
    from megalith.assemble.ranks import join_ranks
    from megalith.assemble.reading import model_in, ranks_of, require_text_model, saved_args
    from megalith.assemble.trained import load_trained
    from megalith.models.t5 import T5

    model = model_in(saved_args(options.checkpoint, options.iteration), options.checkpoint)
    if model.model_family != "t5":
        require_text_model(model, options.checkpoint, f"--tp {options.tp} is for a T5; a continuation")
        raise ConfigError(
            f"--tp {options.tp} is for a T5; a GPT over several processes is served: torchrun --nproc_per_node "
            f"{options.tp} -m megalith serve {options.checkpoint} --tp {options.tp}"
        )
    settings = {"tensor_model_parallel_size": options.tp, "device": options.device}
    with join_ranks(ranks_of(model, settings, os.environ)) as context:
        trained = load_trained(options.checkpoint, context.device, options.iteration, context=context)
        assert isinstance(trained.model, T5), "the args say so"
        first = context.rank == 0
        for note in trained.notes if first else ():
            print(f"WARNING: {note}", file=sys.stderr)
        _answer(trained, trained.model, options.prompt, sampling=sampling, options=options, shown=first)
    return 0


def _replying(trained: Trained, sampling: Sampling, options: argparse.Namespace) -> Callable[[str], None]:
    """What is done with each text, by the family of the model."""
    from megalith.models.t5 import T5

    if isinstance(trained.model, T5):
        return partial(_answer, trained, trained.model, sampling=sampling, options=options)
    return partial(_continue, trained, _engine(trained, options), sampling=sampling, options=options)


def _answer(
    trained: Trained,
    model: T5,
    text: str,
    *,
    sampling: Sampling,
    options: argparse.Namespace,
    shown: bool = True,
) -> None:
    """Print what T5 writes for a text: the spans that stand for its <extra_id_N>, where it was trained on these.

    Where several processes compute, one shows it.
    """
    from megalith.data.masked.t5 import decoder_start
    from megalith.serve.spans import answer

    if options.stop:
        raise ConfigError("--stop is for models that continue a text; an answer of T5 ends by itself")
    tokenizer = trained.tokenizer
    ids, start = with_sentinels(tokenizer, text), decoder_start(tokenizer)
    for number in range(options.num_samples):
        said = answer(
            model,
            ids,
            start=start,
            end=tokenizer.special.get("eos", tokenizer.eod),
            most=options.max_new_tokens,
            sampling=sampling,
            seed=options.seed + number,
            tokens=tokenizer.vocab_size,
        )
        told = tokenizer.decode(list(said)) + "\n"
        sys.stdout.write(told if shown else "")


def with_sentinels(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text in which <extra_id_N> stands for itself, whatever the tokenizer makes of it."""
    ids = list[int]()
    for part in re.split(r"(<extra_id_\d+>)", text):
        match = re.fullmatch(r"<extra_id_(\d+)>", part)
        if match is None:
            ids += tokenizer.encode(part) if part.strip() else []
        elif int(match[1]) < len(tokenizer.extra_ids):
            ids.append(tokenizer.extra_ids[int(match[1])])
        else:
            raise ConfigError(f"--prompt has {part}, and the tokenizer {len(tokenizer.extra_ids)} tokens <extra_id_N>")
    return ids


def _typed() -> Iterator[str]:
    """The texts that the user types, until the end of the input or Ctrl-C."""
    while True:
        try:
            text = input("Prompt: " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print()
            return
        if text:
            yield text


def _engine(trained: Trained, options: argparse.Namespace) -> Engine:
    """An engine whose cache holds all samples of the longest text."""
    from megalith.serve.engine import Engine, Limits
    from megalith.serve.model_runner import ModelRunner, blocks_for

    samples, context = options.num_samples, trained.model.config.max_position_embeddings
    runner = ModelRunner(trained.gpt, samples * blocks_for(context))
    return Engine(runner, trained.tokenizer, Limits(running=max(64, samples), samples=max(128, samples)))


def _continue(trained: Trained, engine: Engine, text: str, *, sampling: Sampling, options: argparse.Namespace) -> None:
    """Print the continuations of a text, the first as it grows, the others behind it."""
    ids = trained.tokenizer.encode(text)
    request = Request(
        tuple(ids),
        options.max_new_tokens,
        sampling,
        seed=options.seed,
        n=options.num_samples,
        stop_texts=tuple(options.stop),
    )
    shown = trained.tokenizer.decode(ids)
    answers, begun = [""] * options.num_samples, False
    try:
        for event in engine.run(request):
            if isinstance(event, Finished) and event.reason == "error":
                raise MegalithError(event.message)
            if not isinstance(event, Token):
                continue
            if event.sample == 0:
                sys.stdout.write(event.text if begun else shown + event.text)
                sys.stdout.flush()
                begun = True
            answers[event.sample] += event.text
    except RequestError as error:
        flag = {"n": "num-samples", "stop_texts": "stop"}.get(error.field, error.field.replace("_", "-"))
        raise ConfigError(f"--{flag} {error.message}") from error
    sys.stdout.write("\n")
    for answer in answers[1:]:
        sys.stdout.write(f"{shown}{answer}\n")
