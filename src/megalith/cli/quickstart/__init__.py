"""`megalith quickstart`: from the text on this machine to a trained model that was killed, resumed and sampled.

Each command is a process of its own, as a user would start it, kept in commands.sh.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from megalith.cli.quickstart.model import Machine, ModelSize, Plan, choose_plan, measure_machine
from megalith.cli.quickstart.text import Corpus, standard_library, user_texts
from megalith.cli.threads import wait_asleep
from megalith.config.values import local_path
from megalith.data.indexed import IndexedDataset
from megalith.errors import ConfigError, DataError, MegalithError, install_command
from megalith.report.history import Curve, History, read_history
from megalith.tokenizers import train_byte_level_bpe

COMMAND = (sys.executable, "-m", "megalith")
CHARACTERS_PER_TOKEN = 3.5
CODE_PROMPT = "def read_file(self, "
PROMPT_CHARACTERS, SAMPLE_LINES = 48, 12
CURVE_ROWS, CURVE_WIDTH = 10, 50
POLL_SECONDS = 0.1
PROBE_STEPS = 12  # the median of which is not moved by a pause of the machine
PROGRESS = re.compile(r"iteration +(\d+)/ +(\d+) .*lm loss: (\S+) \|")  # up to the bar: a line may be written in part


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megalith quickstart",
        description=(
            "Train a GPT on text of this machine, end to end: tokenizer, preprocessing, training that is killed "
            "half-way and resumed, evaluation, generated text, and the loss curve."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    about_data = "train on these .jsonl or .txt files (also .gz, .xz, ...) instead of Python's standard library"
    add("--data", nargs="+", type=local_path, metavar="FILE", help=about_data)
    add("--json-key", default="text", help="field of a JSON line that holds the text (%(default)s)")
    add("--encoding", default="auto", help="of these files, such as gb18030; detected by default")
    add("--minutes", type=float, default=3.0, help="time to train for (%(default)s)")
    add("--out", type=local_path, default=Path("quickstart"), help="folder for all output (%(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to compute on")
    add("--prompt", help="text to continue at the end (by default one that fits the data)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the quickstart; its own errors and those of the commands it runs end it."""
    options = build_parser().parse_args(argv)
    if not 0.0 < options.minutes <= 24 * 60:
        raise ConfigError(f"--minutes {options.minutes:g} is not between 0 and 1440 (a day)")
    wait_asleep()  # before torch is imported

    from megalith.assemble.model import choose_device

    choose_device(options.device)  # refused before the output of an earlier quickstart is removed
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the training is stopped, too
    Quickstart(options).run()
    return 0


def program() -> str:
    """Return `megalith` as the user's shell finds it: the bare name, or its path in an environment not activated."""
    beside = Path(sys.executable).with_name("megalith")
    if not beside.exists() or str(beside.parent) in os.environ.get("PATH", "").split(os.pathsep):
        return "megalith"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def words_of(command: str) -> list[str]:
    """Return what the shell reads behind `megalith` in a command of commands.sh."""
    return [word for word in shlex.split(command) if word != "\n"][1:]  # shlex takes a continued line for a word


def compare_repeated_steps(history: History) -> dict[str, Any]:
    """Compare the steps lost by the kill with their repetition after the resume."""
    curves = [history.curves[name] for name in ("training loss", "gradient norm", "learning rate")]
    first = [dict(point for stretch in curve.abandoned for point in stretch) for curve in curves]
    again = [dict(curve.points) for curve in curves]
    steps = list(first[0])
    return {
        "resumed_from": next(event.iteration for event in history.events if event.kind == "resume"),
        "killed_at": max(steps),
        "num_repeated": len(steps),
        "num_equal": sum(all(a[n] == b[n] for a, b in zip(first, again, strict=True)) for n in steps),
        "largest_difference": max(abs(first[0][n] - again[0][n]) for n in steps),
    }


class Quickstart:
    """Runs the steps once, in one folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out, self.console = options, options.out, Console(highlight=False)
        self.script, self.training = self.out / "commands.sh", self.out / "checkpoints" / "run"
        self.status = self.console.status("")

    def run(self) -> None:
        """Go from text to a trained model."""
        started = time.perf_counter()
        self.clear_folder()
        minutes = f"{self.options.minutes:g} minutes of training"
        self.console.print(f"[bold]Megalith quickstart: text -> tokenizer -> trained GPT, {minutes}[/]")
        corpus = self.collect()
        plan = self.plan(corpus)
        first_line = corpus.documents[-1].strip().split("\n", 1)[0]
        prompt = first_line[:PROMPT_CHARACTERS].rsplit(" ", 1)[0] if self.options.data else CODE_PROMPT
        commands = self.commands(plan, self.out, self.options.prompt or prompt)
        self.script.write_text("\n\n".join(commands), encoding="utf-8")
        _, preprocess, train, generate = map(words_of, commands)
        num_tokens = self.tokenize(corpus, plan.size, preprocess)
        report = self.train(plan, train) | self.evaluate(corpus.num_characters / num_tokens)
        self.generate(generate)
        self.draw(plan, report["resume"]["killed_at"])
        report["seconds"] = time.perf_counter() - started
        (self.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        self.show_next(generate, report["seconds"])

    def clear_folder(self) -> None:
        """Make the output folder; an earlier quickstart's output in it is removed, anything else is left alone."""
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            if not self.script.is_file():
                raise ConfigError(f"--out {self.out} exists and is not of a quickstart; choose a new folder")
            for name in ("tokenizer", "data", "checkpoints", "logs"):
                shutil.rmtree(self.out / name, ignore_errors=True)
            for name in ("corpus.jsonl", "loss.png", "report.json"):
                (self.out / name).unlink(missing_ok=True)
        for name in ("tokenizer", "data", "logs"):
            (self.out / name).mkdir(parents=True)
        self.script.touch()

    def line(self, name: str, text: str, seconds: float | None = None) -> None:
        """Print the result of a step."""
        took = "" if seconds is None else f" [dim]({seconds:.1f} s)[/]"
        self.console.print(f"[bold cyan]{name:11}[/] {escape(text)}{took}", soft_wrap=True)

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time a step; at its end, print what it passed to the function yielded."""
        results, started = list[str](), time.perf_counter()
        with self.console.status(f"{name} ...") as self.status:
            yield results.append
        self.line(name, results[-1], time.perf_counter() - started)

    def commands(self, plan: Plan, out: Path, prompt: str) -> list[str]:
        """Fill in commands.sh; return its head and the commands that preprocess, train and generate."""
        size, iterations, precision = plan.size, plan.iterations, plan.machine.precision
        values = {
            **asdict(size),
            "megalith": program(),
            "folder": Path.cwd(),
            "out": out,
            "device": self.options.device,
            "workers": os.cpu_count() or 1,
            "iterations": iterations,
            "min_lr": f"{size.learning_rate / 20:g}",
            "eval_interval": iterations // 6,
            "eval_iters": max(2, min(32_768 // size.tokens_per_step, iterations // 40)),
            "save_interval": iterations // 4,
            "prompt": prompt,
        }
        quoted = {name: shlex.quote(str(value)) for name, value in values.items()}
        quoted["precision"] = "" if precision == "fp32" else f"--{precision}"
        template = (files("megalith.cli.quickstart") / "commands.sh").read_text(encoding="utf-8")
        return [part.format_map(quoted) for part in template.split("\n\n")]

    def call(self, arguments: list[str], kill_step: int | None = None) -> Path:
        """Run a command of Megalith to its end, or a training until SIGKILL ends it in a step.

        Returns the log to which its output was appended.

        Raises:  MegalithError with the exit code of a command that failed, and the end of its output.
        """
        log = self.out / "logs" / f"{arguments[0]}.log"
        fault = {} if kill_step is None else {"MEGALITH_FAULT": f"kill9@step={kill_step},point=fwd"}
        with (
            log.open("ab") as output,
            log.open(encoding="utf-8", errors="replace") as lines,
            subprocess.Popen(
                [*COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **fault},
            ) as process,
        ):
            try:
                while process.poll() is None:
                    for found in filter(None, map(PROGRESS.search, lines)):
                        self.status.update(f"train: step {found[1]} of {found[2]}, loss {float(found[3]):.3f}")
                    time.sleep(POLL_SECONDS)
            except BaseException:
                process.terminate()  # an interrupt or an error of ours: a training saves and ends
                process.wait()
                raise
        if (code := process.returncode) != (-signal.SIGKILL if fault else 0):
            end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
            error = MegalithError(f"`megalith {arguments[0]}` ended with exit code {code}:\n{end}\n(all in {log})")
            error.exit_code = code if code >= 0 else 128 - code
            raise error
        return log

    def collect(self) -> Corpus:
        """Gather the documents to train on."""
        with self.step("text") as show:
            files, options = self.options.data, self.options
            corpus = user_texts(files, options.json_key, options.encoding) if files else standard_library()
            corpus.write(self.out / "corpus.jsonl")
            size = f"{corpus.num_characters / 1e6:.1f} M characters"
            show(f"{corpus.name}: {len(corpus.documents):,} texts, {size}")
        return corpus

    def plan(self, corpus: Corpus) -> Plan:
        """Measure the machine, and by timing real steps choose the model and the number of iterations."""
        seconds, num_tokens = self.options.minutes * 60.0, corpus.num_characters / CHARACTERS_PER_TOKEN
        with self.step("machine") as show:
            machine = measure_machine(self.options.device, seconds)
            show(f"{machine.name}: {machine.flops / 1e9:,.0f} GFLOP/s in {machine.precision}")
        with self.step("model") as show:
            plan = choose_plan(machine, seconds, num_tokens, partial(self.measure_step, machine))
            size = plan.size
            shape = f"GPT {size.num_layers} layers x {size.hidden_size}, {size.num_parameters / 1e6:.1f} M parameters"
            show(f"{shape}; {plan.iterations:,} steps of {plan.step_seconds:.2f} s")
        return plan

    def measure_step(self, machine: Machine, size: ModelSize) -> float:
        """Return the median seconds of the first steps of a training on made-up data, which is then killed."""
        with TemporaryDirectory() as folder:
            train = words_of(self.commands(Plan(machine, size, 100 * PROBE_STEPS), Path(folder), "")[2])
            mock = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(size.vocab_size - 1)]
            self.call([*train[: train.index("--data-path")], *mock], PROBE_STEPS + 1)
            steps = read_history(Path(folder) / "checkpoints" / "run").curves["seconds of a step"].points
        return statistics.median(seconds for _, seconds in steps)

    def tokenize(self, corpus: Corpus, size: ModelSize, preprocess: list[str]) -> int:
        """Train a tokenizer on the documents and write them as .bin and .idx; return the number of tokens."""
        with self.step("tokenizer") as show:
            vocab_file, _ = train_byte_level_bpe(corpus.documents, size.vocab_size, self.out / "tokenizer")
            vocab_size = len(json.loads(vocab_file.read_text(encoding="utf-8")))
            show(f"byte-level BPE of {vocab_size:,} tokens, learned from the text")
        with self.step("preprocess") as show:
            self.call(preprocess)
            num_tokens = IndexedDataset(str(self.out / "data" / "corpus_text_document")).num_tokens
            if num_tokens // 10 < 2 * size.seq_length:
                few = f"{num_tokens:,} tokens are too few for sequences of {size.seq_length}"
                raise DataError(f"{few}; give more --data")
            show(f"{num_tokens:,} tokens of {corpus.num_characters / num_tokens:.1f} characters")
        return num_tokens

    def train(self, plan: Plan, arguments: list[str]) -> dict[str, Any]:
        """Train to the half, kill the process, start the same command again and train to the end."""
        started = time.perf_counter()
        with self.step("train") as show:
            self.call(arguments, plan.kill_step)
            show(f"killed with SIGKILL after step {plan.kill_step - 1}; the same command again:")
        with self.step("resume") as show:
            self.call(arguments)
            resume = compare_repeated_steps(read_history(self.training))
            equal = f"{resume['num_equal']} of {resume['num_repeated']} repeated steps equal bit for bit"
            if resume["num_equal"] < resume["num_repeated"]:
                equal += f", losses within {resume['largest_difference']:.1e}"
            show(f"at step {resume['resumed_from']}; {equal}")
        return {
            "iterations": plan.iterations,
            "training_seconds": time.perf_counter() - started,
            "machine": asdict(plan.machine),
            "model": {**asdict(plan.size), "num_parameters": plan.size.num_parameters},
            "resume": resume,
        }

    def evaluate(self, characters_per_token: float) -> dict[str, Any]:
        """Report how well the model predicts text that it has not seen."""
        evaluations = [event.record for event in read_history(self.training).events if event.kind == "evaluation"]
        losses = {record["split"]: record["loss"] for record in evaluations}
        perplexity = {split: math.exp(loss) for split, loss in losses.items()}
        loss = losses["validation"]
        bits = loss / math.log(2) / characters_per_token
        shown = f"validation loss {loss:.3f}, perplexity {perplexity['validation']:.1f}, {bits:.2f} bits/character"
        self.line("evaluate", shown)
        return {"losses": losses, "perplexity": perplexity, "bits_per_character": bits}

    def generate(self, arguments: list[str]) -> None:
        """Let the model continue the prompt."""
        with self.step("generate") as show:
            log = self.call(arguments)
            show("the model continues a prompt:")
        lines = log.read_text(encoding="utf-8", errors="replace").strip("\n").splitlines()
        text = "\n".join(f"  {line}" for line in lines[:SAMPLE_LINES])
        self.console.print(text, style="green", markup=False, soft_wrap=True)

    def draw(self, plan: Plan, killed_at: int) -> None:
        """Show the losses of training as bars, each the mean of a part of the run, and save all of them as a PNG."""
        curves = read_history(self.training).curves
        title = f"Megalith quickstart: GPT of {plan.size.num_parameters / 1e6:.1f} M parameters, {plan.machine.name}"
        try:
            save_png(curves, killed_at, path := self.out / "loss.png", title)
            self.line("loss", f"of training, {path}")
        except ImportError:
            self.line("loss", f"of training, as a picture with matplotlib: {install_command('plot')}")
        losses = curves["training loss"].points
        size = -(-len(losses) // CURVE_ROWS)
        parts = [losses[start : start + size] for start in range(0, len(losses), size)]
        means = [statistics.fmean(loss for _, loss in part) for part in parts]
        rows = Table.grid(padding=(0, 1))
        for part, mean in zip(parts, means, strict=True):
            (first, _), (last, _) = part[0], part[-1]
            remark = f"killed at {killed_at}, resumed" if first <= killed_at <= last else ""
            bar = ProgressBar(max(means), mean, CURVE_WIDTH, complete_style="cyan", finished_style="cyan")
            rows.add_row(f"{last:>10}", f"{mean:6.2f}", bar, remark)
        self.console.print(rows)

    def show_next(self, generate: list[str], seconds: float) -> None:
        """End with what to try now; commands are never wrapped, so that they can be copied."""
        where = escape(f"everything is in {self.out}/")
        self.console.print(f"[bold]Done in {seconds / 60.0:.1f} minutes; {where}. Next:[/]")
        longer = shlex.join(generate).replace("--max-new-tokens 120", "--max-new-tokens 200")
        for about, command in (
            ("ask the model", f"{program()} {longer}"),
            ("read, change and run again what was run, with Megatron's flags", f"cat {shlex.quote(str(self.script))}"),
            ("the same on your own text", f"{program()} quickstart --data FILE.jsonl --out my-model"),
        ):
            self.console.print(f"  [dim]# {about}[/]\n  {escape(command)}", soft_wrap=True)


def save_png(curves: Mapping[str, Curve], killed_at: int, path: Path, title: str) -> None:
    """Draw the losses. Raises ImportError if matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, style in (("training", "-"), ("validation", "o")):
        steps, losses = zip(*curves[f"{name} loss"].points, strict=True)
        axes.plot(steps, losses, style, linewidth=0.8, label=name)
    axes.axvline(killed_at, color="gray", linestyle=":", label="killed, then resumed")
    axes.set(title=title, xlabel="iteration", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(str(path))
