"""`megalith generate`: text generation with a trained model."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megalith.cli.arguments import CommandParser, add_checkpoint_flags, below_one, load_model
from megalith.config.tokenizer_flags import imported_by, tokenizer_of_flags
from megalith.errors import ConfigError, DataError, MegalithError
from megalith.serve.request import Finished, Request, RequestError, Sampling, Token
from megalith.train.streams import warn

if TYPE_CHECKING:
    from megalith.assemble.trained import Trained
    from megalith.config.families import Objective
    from megalith.distributed.context import ParallelContext
    from megalith.serve.engine import Engine, Limits


_SAMPLING_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "greedy", "stop", "seed")
"""Options that do not apply to the [MASK] of a BERT."""


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="megalith generate",
        description="Continue a text with a trained GPT, answer it with a T5, or fill its [MASK] with a BERT. "
        "Architecture and tokenizer come from the checkpoint. Without --prompt, prompts are read interactively.",
        allow_abbrev=False,
    )
    add_checkpoint_flags(parser)
    add = parser.add_argument
    add("--prompt", help="text to continue; - reads stdin (default: interactive)")
    add("--max-new-tokens", type=int, default=100, help="maximum number of generated tokens (default: 100)")
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0: greedy (default: 0.8)")
    add("--top-k", type=int, default=0, help="sample from the K most likely tokens; 0: all (default: 0)")
    add("--top-p", type=float, default=0.95, help="nucleus sampling: probability mass; 0: all (default: 0.95)")
    add("--repetition-penalty", type=float, default=1.0, help="above 1 penalizes repeated tokens (default: 1)")
    add("--greedy", action="store_true", help="always choose the most likely token")
    add("--stop", action="append", default=[], help="text that ends the output; may be repeated")
    add("--seed", type=int, default=1234, help="seed of sampling (default: 1234)")
    add("--num-samples", type=int, default=1, help="number of continuations, or candidates per [MASK] (default: 1)")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel size of a T5 under torchrun (default: 1)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Generate for each prompt and print the result."""
    options = make_parser().parse_args(list(argv))
    sampling = Sampling(
        0.0 if options.greedy else options.temperature,
        options.top_k,
        options.top_p,
        repetition_penalty=options.repetition_penalty,
    )
    violations = sampling.violations() + below_one(options, "--max-new-tokens", "--num-samples", "--tp")
    if options.tp > 1 and options.prompt in (None, "-"):
        violations.append(f"--tp {options.tp} needs --prompt TEXT")
    if violations:
        raise ConfigError(violations)
    if options.tp > 1:
        return _answer_tensor_parallel(sampling, options)

    from megalith.assemble.model import choose_device

    tokenizer = tokenizer_of_flags(options)
    device, registry = choose_device(options.device), imported_by(options)
    trained = load_model(options.checkpoint, device, options.iteration, tokenizer, registry=registry)
    reply = _build_reply(trained, sampling, options)
    if options.prompt is not None:
        reply(sys.stdin.read() if options.prompt == "-" else options.prompt)
        return 0
    for text in _read_prompts():
        try:
            reply(text)
        except MegalithError as error:  # concerns this prompt only
            print(error, file=sys.stderr)
    return 0


def _answer_tensor_parallel(sampling: Sampling, options: argparse.Namespace) -> int:
    """Print the answer of a T5 whose layers are tensor-parallel; the first rank samples and prints."""
    from megalith.assemble.ranks import join_ranks
    from megalith.assemble.reading import model_in, ranks_of, require_text_model, saved_args

    registry = imported_by(options)
    model = model_in(saved_args(options.checkpoint, options.iteration), options.checkpoint, registry)
    if not model.family.encoder_decoder:
        require_text_model(model, options.checkpoint, f"--tp {options.tp} is for a T5; a continuation")
        raise ConfigError(
            f"--tp {options.tp} is for a T5; serve a GPT instead: torchrun --nproc_per_node "
            f"{options.tp} -m megalith serve {shlex.quote(str(options.checkpoint))} --tp {options.tp}"
        )
    settings = {"tensor_model_parallel_size": options.tp, "device": options.device}
    tokenizer = tokenizer_of_flags(options)
    with join_ranks(ranks_of(model, settings, os.environ)) as context:
        trained = load_model(
            options.checkpoint, context.device, options.iteration, tokenizer, context, registry=registry
        )
        _answer_text(trained, options.prompt, sampling=sampling, options=options, context=context)
    return 0


def _build_reply(trained: Trained, sampling: Sampling, options: argparse.Namespace) -> Callable[[str], None]:
    """Return the function that prints the reply to a prompt, by the objective of the model."""
    replies: dict[Objective, Callable[[], Callable[[str], None]]] = {
        "causal": lambda: partial(
            _continue_text, trained, _build_engine(trained, options), sampling=sampling, options=options
        ),
        "masked": lambda: partial(_fill_masks, trained, options=options),
        "spans": lambda: partial(_answer_text, trained, sampling=sampling, options=options),
    }
    return replies[trained.model.config.family.objective]()


def _answer_text(
    trained: Trained,
    text: str,
    *,
    sampling: Sampling,
    options: argparse.Namespace,
    context: ParallelContext | None = None,
) -> None:
    """Print what T5 writes for a text: the spans for its <extra_id_N> if it was trained on span corruption.

    All tensor-parallel ranks call this.
    """
    from megalith.serve.engine import Engine
    from megalith.serve.model_runner import RankRunner, blocks_for, decoder_prompt_of, runner_of, text_ids

    try:
        ids = text_ids(trained.tokenizer, text)
    except DataError as error:
        raise ConfigError(f"--prompt {error}") from error
    if not ids:
        raise ConfigError("--prompt is empty; give a text for the encoder")
    model = trained.writer
    length = model.config.max_position_embeddings
    if model.config.position_embedding_type != "learned_absolute":
        length = max(len(ids), options.max_new_tokens)
    blocks = blocks_for(len(ids)) + options.num_samples * blocks_for(1 + min(length, options.max_new_tokens))
    if context is not None:
        shared = RankRunner(model, context, blocks, context_length=length)
        if context.rank > 0:
            shared.follow()
            return
    runner = runner_of(model, blocks, context_length=length) if context is None else shared
    engine = Engine(
        runner, trained.tokenizer, _limits(options), decoder_prompt=decoder_prompt_of(model, trained.tokenizer)
    )
    try:
        _print_samples(engine, _request(ids, sampling, options), "")
    finally:
        engine.close()


def _fill_masks(trained: Trained, text: str, *, options: argparse.Namespace) -> None:
    """Print a text with the likeliest token in place of each [MASK], and the candidates with their probabilities."""
    from megalith.evaluate.fill_mask import fill_masks

    unused = [name for name in _SAMPLING_OPTIONS if getattr(options, name) != make_parser().get_default(name)]
    if unused:
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        raise ConfigError(
            f"{flags} {'is' if len(unused) == 1 else 'are'} for text generation; a BERT predicts the likeliest "
            "tokens for each [MASK]"
        )
    try:
        filled = fill_masks(trained.model, trained.tokenizer, text, options.num_samples)
    except DataError as error:
        raise ConfigError(f"--prompt {error}") from error
    print(filled.text)
    for number, candidates in enumerate(filled.masks, 1):
        shown = "  ".join(f"{candidate.text} {candidate.probability:.1%}" for candidate in candidates)
        print(f"  [MASK] {number}: {shown}")


def _read_prompts() -> Iterator[str]:
    """Yield the prompts that the user types, until the end of the input or Ctrl-C."""
    while True:
        try:
            text = input("Prompt: " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print()
            return
        if text:
            yield text


def _limits(options: argparse.Namespace) -> Limits:
    """Return limits under which one engine draws all samples of a request at once."""
    from megalith.serve.engine import Limits

    samples = options.num_samples
    return Limits(max_num_seqs=max(64, samples), samples=max(128, samples))


def _build_engine(trained: Trained, options: argparse.Namespace) -> Engine:
    """Build an engine whose KV cache holds `--num-samples` sequences of the model's context length."""
    from megalith.serve.engine import Engine
    from megalith.serve.model_runner import blocks_for, runner_of

    runner = runner_of(trained.gpt, options.num_samples * blocks_for(trained.model.config.max_position_embeddings))
    return Engine(runner, trained.tokenizer, _limits(options))


def _request(ids: Sequence[int], sampling: Sampling, options: argparse.Namespace) -> Request:
    return Request(
        tuple(ids),
        options.max_new_tokens,
        sampling,
        seed=options.seed,
        n=options.num_samples,
        stop_texts=tuple(options.stop),
    )


def _continue_text(
    trained: Trained, engine: Engine, text: str, *, sampling: Sampling, options: argparse.Namespace
) -> None:
    ids = trained.tokenizer.encode(text)
    _print_samples(engine, _request(ids, sampling, options), trained.tokenizer.decode(ids))


def _print_samples(engine: Engine, request: Request, shown: str) -> None:
    """Print the samples after `shown`: the first as it is generated, the others when all are complete."""
    answers, begun, full = [""] * request.n, False, False
    try:
        for event in engine.run(request):
            if isinstance(event, Finished) and event.reason == "error":
                raise MegalithError(event.message)
            if not isinstance(event, Token):
                full |= isinstance(event, Finished) and event.reason == "length"
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
    room = engine.max_output_tokens(len(request.prompt))
    if full and room < request.max_new_tokens:
        warn(f"note: the text ends after {room} tokens, at the context length; --max-new-tokens is larger")
