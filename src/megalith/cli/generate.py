"""`megalith generate`: text generation with a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from megalith.cli.arguments import CommandParser, add_checkpoint_flags, below_one, load_model
from megalith.cli.threads import divide_cores
from megalith.config.groups import LaunchConfig
from megalith.config.tokenizer_flags import imported_by, tokenizer_of_flags
from megalith.config.values import local_path
from megalith.errors import ConfigError, DataError, MegalithError
from megalith.serve.request import Finished, Request, RequestError, Sampling, Token
from megalith.tokenizers.protocol import require_text
from megalith.train.streams import warn

if TYPE_CHECKING:
    from megalith.assemble.trained import Trained
    from megalith.text_model import TextModel


Reply = Callable[[str, str], object]

_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")
_TEXT_OPTIONS = (*_SAMPLING, "max_new_tokens", "greedy", "stop", "seed", "stream", "chat")
"""Options that do not apply to the [MASK] of a BERT."""


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="megalith generate",
        description="Continue a text with a trained GPT, answer it with a T5, or fill its [MASK] with a BERT. "
        "Architecture and tokenizer come from the checkpoint. Without --prompt, prompts are read interactively, with "
        "--chat as one dialogue.",
        allow_abbrev=False,
    )
    add_checkpoint_flags(parser)
    add = parser.add_argument
    add("--prompt", help="text to continue; - reads stdin (default: interactive)")
    add("--chat", action="store_true", help="prompts are messages of a dialogue, by the tokenizer's chat template")
    add(
        "--chat-template",
        type=local_path,
        metavar="FILE",
        help="Jinja template for --chat, or chatml, llama3, mistral, plain or qwen3 (default: the tokenizer's)",
    )
    add("--system", metavar="TEXT", help="system message of the dialogue")
    add("--max-new-tokens", type=int, default=100, help="maximum number of generated tokens (default: 100)")
    add("--temperature", type=float, default=0.8, help="sampling temperature; 0: greedy (default: 0.8)")
    add("--top-k", type=int, default=0, help="sample from the K most likely tokens; 0: all (default: 0)")
    add("--top-p", type=float, default=0.95, help="nucleus sampling: probability mass; 0: all (default: 0.95)")
    add("--repetition-penalty", type=float, default=1.0, help="above 1 penalizes repeated tokens (default: 1)")
    add("--greedy", action="store_true", help="always choose the most likely token")
    add("--stop", action="append", default=[], help="text that ends the output; may be repeated")
    add("--seed", type=int, default=1234, help="seed of sampling (default: 1234)")
    add("--num-samples", type=int, default=1, help="number of continuations, or candidates per [MASK] (default: 1)")
    add(
        "--json",
        action="store_true",
        help="print a JSON object a line for each continuation, with token ids and logprobs",
    )
    add("--stream", action="store_true", help="with --json: an object for each token as it comes; text always comes so")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel size of a T5 under torchrun (default: 1)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Generate for each prompt and print the result."""
    options = make_parser().parse_args(list(argv))
    sampling = {name: getattr(options, name) for name in _SAMPLING}
    if options.greedy:
        sampling["temperature"] = 0.0
    violations = Sampling(**sampling).violations() + below_one(options, "--max-new-tokens", "--num-samples", "--tp")
    violations += _not_utf_8(options)
    if options.tp > 1 and options.prompt in (None, "-"):
        violations.append(f"--tp {options.tp} needs --prompt TEXT")
    if not options.chat and (options.chat_template or options.system):
        violations.append("--chat-template and --system are for --chat")
    if options.chat and options.tp > 1:
        violations.append("--chat is for models that continue a text, and --tp for a T5")
    if violations:
        raise ConfigError(violations)
    if options.tp > 1:
        return _answer_tensor_parallel(options, sampling)
    divide_cores(LaunchConfig())
    from megalith.assemble.model import choose_device

    tokenizer = tokenizer_of_flags(options)
    device, registry = choose_device(options.device), imported_by(options)
    trained = load_model(options.checkpoint, device, options.iteration, tokenizer, registry=registry)
    reply = _build_reply(trained, options, sampling)
    if options.prompt is None:
        return _reply_to_lines(reply, json_lines=options.json)
    reply(_read_stdin() if options.prompt == "-" else options.prompt, "--prompt")
    return 0


def _reply_to_lines(reply: Reply, *, json_lines: bool) -> int:
    """Reply to each line of standard input, and return the exit code of the first that failed; 0 in a terminal."""
    code = 0
    for number, (line, text) in enumerate(_read_prompts(shows_prompt=not json_lines), start=1):
        try:
            reply(text, "the prompt")
        except MegalithError as error:  # concerns this prompt only
            if sys.stdin.isatty():
                warn(str(error))
                continue
            code = code or error.exit_code
            warn(f"megalith generate: prompt {number} of standard input (line {line}): {error}")
            if json_lines:
                _print_json(prompt=text, error=str(error))
    return code


def _keep_bad_bytes() -> None:
    """Have standard input keep bytes that are not UTF-8 as lone surrogates, so that they fail their own prompt only.

    Line ends of Windows are read as line ends, as those of a file are.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):  # not in a notebook
        sys.stdin.reconfigure(errors="surrogateescape", newline=None)


def _read_stdin() -> str:
    _keep_bad_bytes()
    text = sys.stdin.read()
    _require_utf_8(text, "--prompt - (standard input)")
    return text


def _not_utf_8(options: argparse.Namespace) -> list[str]:
    """Return which texts of the command line are not UTF-8: Python reads their bad bytes as lone surrogates."""
    found = list[str]()
    for flag, text in (("--prompt", options.prompt), ("--system", options.system)):
        try:
            _require_utf_8(text or "", f"{flag} {ascii(text)}")
        except ConfigError as error:
            found += error.violations
    return found


def _require_utf_8(text: str, name: str) -> None:
    """Raise ConfigError with the name of a text if it is not UTF-8."""
    try:
        require_text(text)
    except DataError as error:
        raise ConfigError(f"{name} is not UTF-8: {error}; give a text in UTF-8") from error


def _answer_tensor_parallel(options: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Print the answer of a T5 whose layers are tensor-parallel; the first rank samples and prints."""
    from megalith.assemble.ranks import join_ranks
    from megalith.assemble.reading import model_in, ranks_of, require_text_model, saved_args
    from megalith.text_model import TextModel

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
        _write(TextModel(trained, context), options, sampling, options.prompt, "--prompt", follows=context.rank > 0)
    return 0


def _build_reply(trained: Trained, options: argparse.Namespace, sampling: dict[str, Any]) -> Reply:
    """Return the function that prints the reply to a prompt, by the objective of the model.

    Its second argument is what errors call the prompt.
    """
    if trained.model.config.family.objective == "masked":
        _refuse_text_options(options)
        return partial(_fill_masks, trained, options)
    from megalith.text_model import TextModel

    if not options.chat:
        return partial(_write, TextModel(trained), options, sampling)
    from megalith.tokenizers.chat_template import find_template

    template = find_template(str(options.chat_template), trained.tokenizer) if options.chat_template else None
    model = TextModel(trained, chat_template=template)
    with _naming_flags():
        model.require_template()
    messages = [{"role": "system", "content": options.system}] if options.system else []
    return partial(_answer, model, options, sampling, messages)


def _answer(
    model: TextModel,
    options: argparse.Namespace,
    sampling: dict[str, Any],
    messages: list[dict[str, str]],
    text: str,
    name: str,
) -> None:
    """Print the answer to a message, and keep both in the dialogue."""
    _require_utf_8(text, name)
    asked = [*messages, {"role": "user", "content": text}]
    with _naming_flags(name):
        rendered = model.render(asked)
    answer = _write(model, options, sampling, rendered, name)
    messages[:] = [*asked, {"role": "assistant", "content": answer}]


def _refuse_text_options(options: argparse.Namespace) -> None:
    """Raise ConfigError if options are given that do not apply to the [MASK] of a BERT."""
    unused = [name for name in _TEXT_OPTIONS if getattr(options, name) != make_parser().get_default(name)]
    if unused:
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        raise ConfigError(
            f"{flags} {'is' if len(unused) == 1 else 'are'} for text generation; a BERT predicts the likeliest "
            "tokens for each [MASK]"
        )


def _fill_masks(trained: Trained, options: argparse.Namespace, text: str, name: str) -> None:
    """Print a text with the likeliest token in place of each [MASK], and the candidates with their probabilities."""
    from megalith.evaluate.fill_mask import fill_masks

    _require_utf_8(text, name)
    try:
        filled = fill_masks(trained.model, trained.tokenizer, text, options.num_samples)
    except DataError as error:
        raise ConfigError(f"{name} {error}") from error
    if options.json:
        _print_json(prompt=text, **dataclasses.asdict(filled))
        return
    print(filled.text)
    for number, candidates in enumerate(filled.masks, 1):
        shown = "  ".join(f"{candidate.text} {candidate.probability:.1%}" for candidate in candidates)
        print(f"  [MASK] {number}: {shown}")


def _print_json(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _read_prompts(*, shows_prompt: bool) -> Iterator[tuple[int, str]]:
    """Yield the lines of standard input that are not empty with their numbers, until its end or Ctrl-C."""
    _keep_bad_bytes()
    for number in itertools.count(1):
        try:
            text = input("Prompt: " if shows_prompt and sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            if sys.stdin.isatty():
                print()
            return
        if text:
            yield number, text


def _write(
    model: TextModel,
    options: argparse.Namespace,
    sampling: dict[str, Any],
    text: str,
    name: str,
    *,
    follows: bool = False,
) -> str:
    """Print the continuations of a text, or the answers to it, and return the first one; errors call the text `name`.

    A rank that `follows` the first prints nothing.
    """
    wanted = {field: getattr(options, field) for field in ("max_new_tokens", "stop", "seed", "chat")} | sampling
    _require_utf_8(text, name)
    with _naming_flags(name):
        request = model.request(text, n=options.num_samples, logprobs=0 if options.json else None, **wanted)
        if follows:
            assert not list(model.events([request]))
            return ""
        if options.json and options.stream:
            return _print_tokens(model, request)
        if options.json:
            found = model.generate([text] * options.num_samples, **wanted)
            for completion in found:
                _print_json(**dataclasses.asdict(completion))
            return found[0].text
        return _print_samples(model, request, shows_prompt=not (model.answers or options.chat))


@contextmanager
def _naming_flags(prompt: str = "--prompt") -> Iterator[None]:
    """Raise the error of a request with the name of the flag, or with that of the prompt."""
    try:
        yield
    except RequestError as error:
        flag = {"n": "num-samples", "stop_texts": "stop"}.get(error.field, error.field.replace("_", "-"))
        name = prompt if flag == "prompt" else f"--{flag}"
        raise ConfigError(f"{name} {error.message}") from error


def _print_tokens(model: TextModel, request: Request) -> str:
    texts = []
    for _, event in model.events([request]):
        if isinstance(event, Token):
            texts += [event.text] * (event.sample == 0)
            _print_json(sample=event.sample, token_id=event.id, text=event.text, logprob=event.logprob)
        elif isinstance(event, Finished):
            _print_json(sample=event.sample, finish_reason=event.reason)
    return "".join(texts)


def _print_samples(model: TextModel, request: Request, *, shows_prompt: bool) -> str:
    """Print the prompt and the samples: the first as it is generated, the others when all are complete."""
    shown = model.tokenizer.decode(request.prompt) if shows_prompt else ""
    answers, begun, full = [""] * request.n, False, False
    for _, event in model.events([request]):
        if not isinstance(event, Token):
            full |= isinstance(event, Finished) and event.reason == "length"
            continue
        if event.sample == 0:
            sys.stdout.write(event.text if begun else shown + event.text)
            sys.stdout.flush()
            begun = True
        answers[event.sample] += event.text
    sys.stdout.write("\n")
    for answer in answers[1:]:
        sys.stdout.write(f"{shown}{answer}\n")
    room = model.max_output_tokens(request)
    if full and room < request.max_new_tokens:
        warn(f"note: the text ends after {room} tokens, at the context length; --max-new-tokens is larger")
    return answers[0]
