"""Megatron's `tools/run_text_generation_server.py` flags: those that a server uses or ignores.

Architecture and tokenizer come from the checkpoint; flags of the architecture are compared with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.compat.megatron.tasks import OF_LAUNCH, ToolParser, idle_flags, shared_values
from megalith.config import TokenizerConfig
from megalith.config.command_line import read_command_line
from megalith.config.tokenizer_flags import TOKENIZER_SETTINGS
from megalith.errors import ConfigError
from megalith.registry import EMPTY, Registry
from megalith.serve.http.settings import Defaults

PROGRAM = "tools/run_text_generation_server.py"

_USED = (
    *(*OF_LAUNCH, "load", "pretrained_checkpoint", "ckpt_step", "fp16", "bf16", "seed", "use_checkpoint_args"),
    *(*TOKENIZER_SETTINGS, "no_load_optim", "no_load_rng"),
)


@dataclass(frozen=True)
class ServerFlags:
    """Settings that a command line requests."""

    checkpoint: Path
    server: argparse.Namespace  # flags of the server itself, as in `megalith serve`
    defaults: Defaults
    iteration: int | None = None
    dtype: str | None = None
    tokenizer: TokenizerConfig | None = None
    registry: Registry = EMPTY
    settings: Mapping[str, Any] = field(default_factory=dict)  # launch and layout settings, by name
    stated: Mapping[str, Any] = field(default_factory=dict)  # settings of the architecture, by name
    seed: int | None = None  # seed of the first request without one; None: unpredictable
    max_batch: int | None = None
    notes: tuple[str, ...] = ()  # flags without effect


def _parser() -> ToolParser:
    parser = ToolParser(
        prog=PROGRAM,
        allow_abbrev=False,
        description="Megatron's text generation server: PUT /api on port 5000, and OpenAI's endpoints beside it. "
        "Architecture and tokenizer come from the checkpoint of --load; other flags are those of pretrain_gpt.py. The "
        "flags of `megalith serve` about keys, hosts and limits work here too.",
    )
    add = parser.add_argument
    add("--temperature", type=float, metavar="T", help="sampling temperature if a request sets none (1.0)")
    add("--top_k", "--top-k", type=int, metavar="K", help="top-k if a request sets none (0: all)")
    add("--top_p", "--top-p", type=float, metavar="P", help="top-p if a request sets none (0.0: all)")
    add("--num-tokens-to-generate", type=int, metavar="N", help="new tokens if a request sets none (64)")
    add("--out-seq-length", type=int, metavar="N", help="tokens of prompt and answer if a request sets none")
    add("--max-tokens-to-oom", type=int, metavar="N", help="most prompts x length of one request (no limit)")
    add("--max-batch-size", "--inference-max-requests", type=int, metavar="N", help="most sequences in a batch")
    add("--return-log-probs", action="store_true", help="no effect: requests set it")
    add("--prompts", nargs="+", metavar="TEXT", help="no effect: requests contain them")
    add("--parsers", nargs="+", metavar="NAME", help="no effect")
    return parser


def read_flags(argv: Sequence[str], server_flags: argparse.ArgumentParser) -> ServerFlags:
    """Read a command line of the script. Raises ConfigError with everything that is wrong."""
    options, rest = _parser().parse_known_args(list(argv))
    server, others = server_flags.parse_known_args(rest)
    reading = read_command_line(others)
    given, problems = reading.values, list(reading.problems)
    shared = shared_values(reading, problems, "a server", "a server divides weights")
    defaults = _defaults(options, problems)
    if problems:
        raise ConfigError(problems)
    return ServerFlags(
        **shared,
        server=server,
        defaults=defaults,
        seed=given.get("seed"),
        max_batch=options.max_batch_size,
        notes=_notes(options, given, reading.notes, reading.nothing),
    )


def _defaults(options: argparse.Namespace, problems: list[str]) -> Defaults:
    temperature = 1.0 if options.temperature is None else options.temperature
    top_k, top_p = options.top_k or 0, options.top_p or 0.0
    tokens = 64 if options.num_tokens_to_generate is None else options.num_tokens_to_generate
    for holds, text in (
        (0.0 < temperature <= 100.0, f"--temperature {temperature:g} is not above 0 and at most 100"),
        (0 <= top_k <= 1000, f"--top_k {top_k} is not between 0 and 1000"),
        (0.0 <= top_p <= 1.0, f"--top_p {top_p:g} is not between 0 and 1"),
        (not (top_k and top_p), f"--top_k {top_k} and --top_p {top_p:g} cannot both be set"),
        (tokens >= 1, f"--num-tokens-to-generate {tokens} is below 1"),
        ((options.max_tokens_to_oom or 1) > 0, f"--max-tokens-to-oom {options.max_tokens_to_oom} is below 1"),
        ((options.max_batch_size or 1) > 0, f"--max-batch-size {options.max_batch_size} is below 1"),
        ((options.out_seq_length or 1) > 0, f"--out-seq-length {options.out_seq_length} is below 1"),
    ):
        if not holds:
            problems.append(text)
    return Defaults(
        tokens_to_generate=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        length=options.out_seq_length,
        max_tokens=options.max_tokens_to_oom,
    )


def _notes(
    options: argparse.Namespace,
    given: Mapping[str, Any],
    said: Sequence[str],
    nothing: Mapping[str, Sequence[str]],
) -> tuple[str, ...]:
    idle = idle_flags(given, nothing, _USED)
    idle += [
        f"--{name.replace('_', '-')}" for name in ("return_log_probs", "prompts", "parsers") if vars(options)[name]
    ]
    notes = list(said)
    if idle:
        notes.append(f"without effect on a server: {', '.join(dict.fromkeys(idle))}")
    return tuple(notes)


def help_text() -> str:
    """Return the text of --help."""
    return _parser().format_help()
