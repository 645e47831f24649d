"""`megalith generate`: continue a text with a trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megalith.errors import ConfigError
from megalith.serve.request import Sampling

if TYPE_CHECKING:
    from megalith.assemble.trained import Trained


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see megalith generate --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megalith generate",
        description="Continue a text with a trained model. Architecture and tokenizer come from the checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="the folder that --save named, or one iter_* folder in it")
    parser.add_argument("--prompt", required=True, help="the text to continue; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="tokens to add at most (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="choose among the k most likely; 0: all (default)")
    parser.add_argument("--top-p", type=float, default=0.95, help="choose among the likeliest of this sum; 0: all")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the choices (default: 1234)")
    parser.add_argument("--num-samples", type=int, default=1, help="how many continuations (default: 1)")
    parser.add_argument("--iteration", type=int, help="which checkpoint; the newest sound one if absent")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    return parser


def run(argv: Sequence[str]) -> int:
    """Print the prompt and its continuations."""
    options = _parser().parse_args(list(argv))
    sampling = Sampling(0.0 if options.greedy else options.temperature, options.top_k, options.top_p)
    violations = sampling.violations()
    for flag, value in (("--max-new-tokens", options.max_new_tokens), ("--num-samples", options.num_samples)):
        if value < 1:
            violations.append(f"{flag} {value} is below 1; give 1 or more")
    if violations:
        raise ConfigError(violations)

    from megalith.assemble.model import choose_device
    from megalith.assemble.trained import load_trained

    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    trained = load_trained(options.checkpoint, choose_device(options.device), options.iteration)
    for note in trained.notes:
        print(f"WARNING: {note}", file=sys.stderr)
    for number in range(options.num_samples):
        _print_sample(trained, prompt, options.max_new_tokens, sampling, options.seed + number)
    return 0


def _print_sample(trained: Trained, prompt: str, max_new_tokens: int, sampling: Sampling, seed: int) -> None:
    """Print one continuation as it grows."""
    import torch

    from megalith.serve.generation import generate, printable_pieces

    tokenizer = trained.tokenizer
    ids = tokenizer.encode(prompt)
    tokens = generate(
        trained.model,
        ids,
        max_new_tokens,
        sampling,
        torch.Generator().manual_seed(seed),
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
    )
    sys.stdout.write(tokenizer.decode(ids))
    for piece in printable_pieces(tokens, tokenizer.decode):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
