"""Test and measure Megalith on the GPUs of this machine, and write what was found where others can see it.

    make gpu                                        all parts, ten minutes; run it again and it continues
    PYTHONPATH=src python3 benchmarks/gpu.py        the same without an environment of its own
    python benchmarks/gpu.py step --sizes 1.3B      one part again, one size
    python benchmarks/gpu.py --device cpu           a trial with tiny models, into build/gpu

  environment  driver, torch, what it was built for, `megalith doctor`
  peak         a square matrix product, twice in one process, beside the datasheet
  tests        `pytest tests/gpu`, file by file; needs pytest
  attention    the kernels of scaled_dot_product_attention at the shape of a 1.3B step
  step         the training step of the sizes that fit the card, GPT-2 and Llama style, eager and compiled: seconds, MFU
               over the datasheet, memory, where the time goes, how often the host waits; micro-batches are halved until
               they fit
  serve        greedy answers of a 124M model to one client and to sixteen, by the engine, and over HTTP with the extra
               `serve`

Nothing is downloaded. No case takes more than three minutes: one that does is ended, and named. Each result is kept as
soon as it is known, in gpu-NAME.json of --results (benchmarks/results); NAME is that of the card unless --name gives
another. What was measured with the same sources, torch and card is not measured again, unless its part is named. Beside
the file a report of one page is written. docs/gpu.md says how to contribute the two. The exit status is 1
if something failed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

from contender import megalith
from gpu_pages import report, write_pages
from parts import RESULTS, Clock, Found, Part, measure_chosen, parse_options, rounded

HERE = Path(__file__).parent
ROOT = HERE.parent
TESTS = ROOT / "tests" / "gpu"
SOURCES = ("src/megalith/**/*.py", "benchmarks/gpu*.py", "tests/gpu/*.py")
CASE_SECONDS, TEST_SECONDS = 170.0, 170.0
OUT_OF_MEMORY = 3

SIZES = {"1.3B": (30.0, 2048, 4), "345M": (11.0, 1024, 8), "124M": (0.0, 1024, 16), "tiny": (0.0, 64, 2)}
"""The least GiB of a card, tokens of a sample, samples of a micro-batch."""


class CaseError(RuntimeError):
    """A case has no result. The message says why."""


class OutOfMemory(CaseError):
    """The case did not fit the device."""


def run_case(words: list[object], limit: float = CASE_SECONDS) -> dict[str, Any]:
    """Run a case of gpu_cases.py; return its result.

    Raises:
        OutOfMemory, CaseError: It has none.
    """
    code, output = run_limited([sys.executable, str(HERE / "gpu_cases.py"), *map(str, words)], limit)
    if code == OUT_OF_MEMORY:
        raise OutOfMemory(output.strip().splitlines()[-1])
    if code:
        raise CaseError(output[-2000:])
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def run_limited(command: list[str], limit: float) -> tuple[int, str]:
    """Run a command in a session of its own, which ends with it; return its exit code and what it printed.

    Raises:
        CaseError: It took longer than `limit` seconds.
    """
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=stream,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what the command has left behind
                process.wait()
        output = log.read_text(encoding="utf-8", errors="replace")
    if code is None:
        raise CaseError(f"no end within {limit:.0f} s:\n{output[-2000:]}")
    return code, output


# --- what need not be measured again ----------------------------------------------------------------------------------


def digest_of_sources() -> str:
    """Return a hash of the code that is measured, in or outside a clone."""
    found = hashlib.sha256()
    for file in sorted(file for pattern in SOURCES for file in ROOT.glob(pattern)):
        found.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def is_known(options: argparse.Namespace, name: str) -> bool:
    """Return whether a result is there of the same sources and torch, complete, and its part was not named."""
    row = options.known.get(name)
    same = row is not None and all(row.get(key) == value for key, value in options.stamp.items())
    if not same or row.get("left_out") or name.split()[0] in options.parts:
        return False
    print(f"{name}: measured on {row['date']}, kept", flush=True)
    return True


def rows(options: argparse.Namespace, clock: Clock, cases: dict[str, list[object]]) -> Found:
    """Yield the result of each case that is not known, until the time of the part is over."""
    for name, words in cases.items():
        if is_known(options, name):
            continue
        if time.perf_counter() >= clock.until():
            print(f"{name}: no time is left; the next run continues here", flush=True)
            return
        yield name, {**options.stamp, **result_of(words)}


def result_of(words: list[object]) -> dict[str, Any]:
    """Return the result of a case, or why there is none. A step that does not fit has its micro-batch halved."""
    try:
        return run_case(words)
    except OutOfMemory as error:
        place = words.index("--micro-batch") + 1 if "--micro-batch" in words else 0
        if not place or words[place] == 1:
            return {"without": f"does not fit this card: {error}"}
        return result_of([*words[:place], int(str(words[place])) // 2, *words[place + 1 :]])
    except CaseError as error:
        return {"left_out": {"case": str(error)}}


# --- parts ------------------------------------------------------------------------------------------------------------


def part_environment(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    """It was looked at before all else, to name the file."""
    yield "environment", {**options.stamp, **options.environment}


def part_peak(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    cases = {
        f"peak {precision}": ["peak", "--device", options.device, "--precision", precision]
        for precision in options.precisions
    }
    yield from rows(options, clock, cases)


def part_tests(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    if importlib.util.find_spec("pytest") is None:
        yield "tests", {**options.stamp, "without": "pytest is not installed"}
        return
    chosen = "gpu" if options.device == "cuda" else "not gpu and not full"
    for file in sorted(TESTS.glob("test_*.py")):
        name = f"tests {file.name}"
        if is_known(options, name):
            continue
        xml = folder / "found.xml"
        command = [sys.executable, "-m", "pytest", str(file), "-q", "-m", chosen, "-p", "no:cacheprovider"]
        command += [f"--rootdir={ROOT}", "-o", "addopts=--import-mode=importlib", f"--junitxml={xml}"]
        try:
            _, output = run_limited(command, TEST_SECONDS)
            found = read_junit(xml) if xml.exists() else {"left_out": {"pytest": output[-2000:]}}
        except CaseError as error:
            found = {"left_out": {"pytest": str(error)}}
        xml.unlink(missing_ok=True)
        yield name, {**options.stamp, **found}


def read_junit(xml: Path) -> dict[str, Any]:
    """Return how many tests passed, why others were skipped and how often, and which failed (`left_out`)."""
    passed, skipped, failed = 0, dict[str, int](), dict[str, str]()
    for case in ElementTree.parse(xml).iter("testcase"):
        found = {child.tag: child for child in case}
        if (bad := found.get("failure", found.get("error"))) is not None:
            failed[str(case.get("name"))] = (bad.text or bad.get("message") or "")[-1500:]
        elif (skip := found.get("skipped")) is not None:
            reason = str(skip.get("message"))
            skipped[reason] = skipped.get(reason, 0) + 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "left_out": failed}


def part_attention(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    shapes = ["4x16x2048x128", "8x16x1024x64"] if options.device == "cuda" else ["1x2x64x16"]
    cases: dict[str, list[object]] = {
        f"attention {shape} {options.precision}": [
            *("attention", "--device", options.device, "--precision", options.precision, "--shape", shape)
        ]
        for shape in shapes
    }
    yield from rows(options, clock, cases)


def part_step(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    yield from rows(options, clock, step_cases(options))


def step_cases(options: argparse.Namespace) -> dict[str, list[object]]:
    """Return the steps that fit the card, the largest first: styles eager and compiled, and a mixture of experts."""
    names = options.sizes or [name for name, (least, _, _) in SIZES.items() if options.gib >= least]
    if not options.sizes:
        names = [name for name in names if (name == "tiny") == (options.device == "cpu")]
    cases = dict[str, list[object]]()
    for size in names:
        _, length, micro_batch = SIZES.get(size, SIZES["124M"])
        length, micro_batch = options.length or length, options.micro_batch or micro_batch
        styles = ["gpt2", "llama", *(["experts"] if size == names[-1] else [])]
        for style in options.styles or styles:
            for compiles in (False, True):
                if compiles and (style == "experts" or not options.compiles):
                    continue
                how = "compiled" if compiles else "eager"
                more = f" {length}" * bool(options.length) + f" {options.flags}" * bool(options.flags)
                words: list[object] = ["step", "--device", options.device, "--style", style, "--size", size]
                words += ["--length", length, "--micro-batch", micro_batch, "--precision", options.precision]
                words += ["--steps", options.rounds or 10, f"--flags={options.flags}"]
                words += ["--vocabulary", 128] if size == "tiny" else []
                cases[f"step {style} {size} {how}{more}"] = [*words, *(["--compile"] if compiles else [])]
    return cases


def part_serve(options: argparse.Namespace, folder: Path, clock: Clock) -> Found:
    size = "124M" if options.device == "cuda" else "tiny"
    kinds = ["engine", "http"]
    if missing := [name for name in ("fastapi", "uvicorn", "pydantic") if importlib.util.find_spec(name) is None]:
        kinds.remove("http")
        reason = f"{', '.join(missing)} not installed (extra serve)"
        if not is_known(options, f"serve {size} http"):
            yield f"serve {size} http", {**options.stamp, "without": reason}
    names = {kind: f"serve {size} {kind}" for kind in kinds}
    if all(is_known(options, name) for name in names.values()):
        return
    saved = folder / "saved"
    code, output = run_limited([*megalith("train"), *serve_flags(options, saved)], CASE_SECONDS)
    if code:
        raise CaseError(output[-2000:])
    shared = ["serve", "--device", options.device, "--precision", options.precision, "--folder", saved]
    shared += ["--steps", options.rounds or 3] if options.device == "cuda" else ["--steps", 1, "--streams", 1, 2]
    yield from rows(options, clock, {name: [*shared, "--kind", kind] for kind, name in names.items()})


def serve_flags(options: argparse.Namespace, saved: Path) -> list[str]:
    """Return the flags that write the checkpoint: one step, with a context for all requests."""
    layers, hidden, heads = ("12", "768", "12") if options.device == "cuda" else ("2", "64", "4")
    flags = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length 64 "
    flags += "--max-position-embeddings 1024 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer "
    flags += "--vocab-size 50303 --train-iters 1 --lr 1e-4 --eval-iters 0 --save-interval 1 --no-save-optim "
    flags += f"--device {options.device} "
    flags += {"fp32": "", "bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 4096"}[options.precision]
    return [*flags.split(), "--save", str(saved)]


PARTS = {
    "environment": Part(part_environment, 1),
    "peak": Part(part_peak, 3),
    "tests": Part(part_tests, 28),
    "attention": Part(part_attention, 4),
    "step": Part(part_step, 54),
    "serve": Part(part_serve, 10),
}
"""Shares of the time in percent."""


def summary(name: str, row: Mapping[str, Any]) -> str:
    """Return a line for the screen."""
    if "without" in row:
        found = f"skipped: {row['without']}"
    elif "passed" in row:
        skipped = [f"{count} skipped ({reason})" for reason, count in row["skipped"].items()]
        found = ", ".join([f"{row['passed']} passed", f"{len(row['left_out'])} failed", *skipped])
    elif "seconds" in row:
        mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
        found = f"{statistics.median(row['seconds']):.4f} s{mfu}"
    elif "streams" in row:
        found = ", ".join(f"{one['tokens_per_second']:.0f} tokens/s to {n}" for n, one in row["streams"].items())
    else:
        figures = row.get("teraflops", row.get("milliseconds"))
        found = "done" if figures is None else json.dumps(rounded(figures))
    return f"{name}: {found}"


def name_of_card(devices: list[dict[str, Any]]) -> str:
    """Return a name for files, such as h100-80gb-hbm3 or v100s-pcie-32gb-x2; "cpu" without a card."""
    if not devices:
        return "cpu"
    plain = re.sub(r"\b(NVIDIA|Tesla|GeForce|AMD)\b", "", devices[0]["name"])
    return re.sub(r"\W+", "-", plain.lower()).strip("-") + (f"-x{len(devices)}" if len(devices) > 1 else "")


def look_around(options: argparse.Namespace) -> None:
    """Add to the options what the environment decides: card, precision, names, what is known.

    Raises:
        CaseError: torch sees no card, or cannot be used.
    """
    options.environment = run_case(["environment", "--device", options.device])
    devices = options.environment["devices"]
    if options.device == "cuda" and not devices:
        doctor = "\n".join(line for line in options.environment["doctor"] if line.strip())
        raise CaseError(f"torch sees no CUDA device here. `megalith doctor` says:\n{doctor}")
    card = {"gib": 0.0, "bf16": True, "compiles": shutil.which("g++") is not None, "name": "CPU (a trial)"}
    card = devices[0] if devices else card
    options.gib, options.precision = card["gib"], options.precision or ("bf16" if card["bf16"] else "fp16")
    options.precisions = list(dict.fromkeys([options.precision, "fp16"])) if devices else [options.precision]
    options.compiles = card["compiles"] and not options.no_compile
    options.name = options.name or name_of_card(devices)
    options.results = options.results or (RESULTS if devices else ROOT / "build" / "gpu")
    options.results.mkdir(parents=True, exist_ok=True)
    options.stamp = {"code": digest_of_sources(), "torch": options.environment["torch"], "card": card["name"]}
    record = read_record(options)
    options.known = record.get("found", {})
    options.about = {
        "gpu": card["name"],
        "gpus": len(devices),
        "driver": options.environment["driver"],
        "by": options.by or record.get("machine", {}).get("by", ""),
    }


def read_record(options: argparse.Namespace) -> dict[str, Any]:
    path = options.results / f"gpu-{options.name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="bf16 where the card has it, else fp16")
    parser.add_argument("--sizes", nargs="+", help=f"of step: of {', '.join(SIZES)}, or LAYERSxHIDDENxHEADS")
    parser.add_argument("--styles", nargs="+", choices=("gpt2", "llama", "experts"), help="of step")
    parser.add_argument("--length", type=int, help="tokens of a sample of step")
    parser.add_argument("--micro-batch", type=int, help="samples of a micro-batch of step")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled steps out")
    parser.add_argument("--flags", default="", help="more flags of step, as in --flags=--optimizer-cpu-offload")
    parser.add_argument("--results", type=Path, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--by", help="who measures, for the table of docs/gpu.md")
    options = parse_options(parser, PARTS, 10.0, name_by_machine=False)
    if options.pages:
        write_pages()
        return 0
    try:
        look_around(options)
    except CaseError as error:
        print(error)
        return 1
    failed = list[str]()
    try:
        failed = measure_chosen("gpu", PARTS, options, summary, options.about)
    finally:
        page = options.results / f"gpu-{options.name}.md"
        page.write_text(report(options.name, read_record(options)), encoding="utf-8")
        if options.results == RESULTS:
            write_pages()
    print(f"{page} is written. docs/gpu.md says how to contribute it.")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a case that runs is ended, as by Ctrl-C
    sys.exit(main())
