"""`megalith prove`: a command line, script or recipe in miniature over its layout, against one process."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from megalith.cli.arguments import CommandParser
from megalith.cli.from_megatron import run_of
from megalith.config import load
from megalith.config.build import imported
from megalith.errors import ConfigError, PeerError

EXIT_MISMATCH = 1


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="megalith prove",
        usage="megalith prove FLAGS | run.sh ARGUMENTS | recipe.toml FLAGS  [--gpus NxDEVICE] [--quick] "
        "[--reference PROGRAM] [--json FILE]",
        description="Train the configuration in miniature, in fp64 on CPU ranks, and compare losses, gradients, "
        "weights and every printed number with one process. FLAGS are those of `megalith train`. Of the run only its "
        "command line is read. Exit codes: 0 proven, 1 a mismatch, 2 cannot run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpus", metavar="NxDEVICE", help="GPUs of the run, such as 64xH100, where the command line does not say")
    add("--quick", action="store_true", help="prove the first miniature only")
    add(
        "--reference",
        action="append",
        default=[],
        metavar="PROGRAM",
        choices=("transformers", "megatron"),
        help="compare outputs, losses and gradients with this program too; megatron needs `make reference`",
    )
    add("--json", metavar="FILE", help="write the certificate")
    return parser


def run(argv: Sequence[str]) -> int:
    """Prove what the command line names and print the verdict; return one of the exit codes of the help text."""
    options, words = make_parser().parse_known_args(list(argv))
    if not words:
        raise ConfigError("nothing to prove: give the flags of a run, its launch script or its recipe")
    flags, processes = run_of(words)
    environ = {} if processes is None else {"RANK": "0", "WORLD_SIZE": str(processes)}
    count, _, device = (options.gpus or "").partition("x")
    if options.gpus is not None:
        if not re.fullmatch(r"[1-9]\d*", count):
            raise ConfigError(f"--gpus {options.gpus}: give a number of GPUs, and their name behind an x: 64xH100")
        environ = {"RANK": "0", "WORLD_SIZE": count}
    config = load(flags, environ, files=False, registry=imported(flags))
    import torch

    from megalith.prove.proof import prove, text
    from megalith.prove.reference import require

    for reference in options.reference:
        require(reference)
    torch.set_num_threads(1)  # forks of a process with threads hang
    try:
        proof = prove(config, list(argv), device=device, quick=options.quick, references=options.reference)
    except PeerError as error:
        raise ConfigError(f"the miniature does not run in one process: {error}") from error
    if options.json:
        certificate = json.dumps(proof.certificate(), indent=1, default=str)
        try:
            Path(options.json).write_text(certificate + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {options.json}: {error.strerror}; give a file that can be written") from error
    print(text(proof))
    return 0 if proof.holds else EXIT_MISMATCH
