"""`megalith prove`: a command line, script or recipe in miniature over its layout, against one process."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megalith.cli.arguments import CommandParser
from megalith.cli.from_megatron import run_of
from megalith.cli.launch import package_environment
from megalith.cli.report import write_page
from megalith.config import RunConfig, load
from megalith.config.build import imported
from megalith.errors import ConfigError, MegalithError, PeerError
from megalith.evaluate.request import unwritable
from megalith.plan import cache_folder
from megalith.plan.remember import remember, versions
from megalith.prove.miniature import miniatures
from megalith.train.streams import warn

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
    wrong = [] if options.json is None else unwritable(Path(options.json), "--json")
    count, _, device = (options.gpus or "").partition("x")
    if options.gpus is not None:
        if not re.fullmatch(r"[1-9]\d*", count):
            wrong.append(f"--gpus {options.gpus}: give a number of GPUs, and their name behind an x: 64xH100")
            raise ConfigError(wrong)
        environ = {"RANK": "0", "WORLD_SIZE": count}
    try:
        config = load(flags, environ, files=False, registry=imported(flags))
    except ConfigError as error:
        raise ConfigError([*wrong, *error.violations]) from error
    if wrong:
        raise ConfigError(wrong)
    if not environ and config.launch.world_size == 1:
        warn("note: one process is proven, which has no layout; --gpus NxDEVICE says how many GPUs the run has")
    import torch

    from megalith.prove.proof import prove, text
    from megalith.prove.reference import require

    for reference in options.reference:
        require(reference, config.model)
    torch.set_num_threads(1)  # forks of a process with threads hang
    try:
        proof = prove(config, list(argv), device=device, quick=options.quick, references=options.reference)
    except PeerError as error:
        raise ConfigError(f"the miniature does not run in one process: {error}") from error
    certificate = json.dumps(proof.certificate(), indent=1, default=str)
    if proof.holds and not options.quick and (path := _remembered(config)) is not None:
        remember(path, certificate)
    print(text(proof))
    if options.json is not None:
        write_page(Path(options.json), certificate + "\n", "--json")
    return 0 if proof.holds else EXIT_MISMATCH


def _remembered(config: RunConfig) -> Path | None:
    """Return the file of the certificate of these miniatures and this version; None if a run has code of its own."""
    if config.registry.imports:
        return None
    content = [
        [dict(one.axes), one.values, one.precision, one.dtype]
        for one in miniatures(config, Path("data"), checked=False)
    ]
    words = json.dumps([content, *versions()], sort_keys=True, default=str)
    return cache_folder("prove") / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.json"


def prove_first(config: RunConfig, argv: Sequence[str], folder: Path, say: Callable[[str], None]) -> str:
    """Return the SHA-256 of the certificate of a run (`--prove first`), which is written to its folder.

    Structures that this version has proven are remembered. The proof is a process of its own, on the CPU.

    Args:
        argv: Flags of `megalith train`.

    Raises:
        MegalithError: There is a mismatch.
        ConfigError: The proof cannot run, or takes longer than the other ranks wait.
    """
    path, seconds = _remembered(config), 48.0 * config.parallel.distributed_timeout_minutes
    certificate = folder / "certificate.json"
    if path is not None and path.is_file():
        say(f"proven before: {path}")
        certificate.write_bytes(path.read_bytes())
    else:
        waiting = f"; the other {config.launch.world_size - 1} ranks wait" if config.launch.world_size > 1 else ""
        say(f"proving the configuration in miniature, for at most {seconds:.0f} s{waiting} ...")
        words = ["prove", *argv, "--gpus", str(config.launch.world_size), "--json", str(certificate)]
        environ = {**package_environment(), "CUDA_VISIBLE_DEVICES": ""}
        certificate.unlink(missing_ok=True)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "megalith", *words],
                env=environ,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"--prove first: no verdict within {seconds:.0f} s, four fifths of --distributed-timeout-minutes; run "
                "`megalith prove` with these flags beforehand, whose verdict is remembered"
            ) from error
        say(done.stdout.rstrip() or done.stderr.rstrip())
        if done.returncode:
            proven = f"the verdict is in {certificate}" if certificate.is_file() else done.stderr.strip()[-2000:]
            kind = MegalithError if done.returncode == EXIT_MISMATCH and certificate.is_file() else ConfigError
            raise kind(f"--prove first: the configuration is not proven, so the training does not start: {proven}")
    return str(json.loads(certificate.read_text(encoding="utf-8"))["sha256"])
