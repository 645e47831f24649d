"""The steps of the quickstart. Each command is a process of its own, as a user would start it, kept in commands.sh."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.table import Table

from megalith.cli.quickstart.model import Machine, Plan, choose_iterations, choose_model, measure_machine, measure_step
from megalith.cli.quickstart.text import Corpus, standard_library, user_texts
from megalith.data.indexed import IndexedDataset
from megalith.errors import ConfigError, DataError, MegalithError, install_command
from megalith.tokenizers import train_byte_level_bpe
from megalith.train.metrics import read_metrics

COMMAND = (sys.executable, "-m", "megalith")
CHARACTERS_PER_TOKEN = 3.5
CODE_PROMPT = "class FileReader:\n    def __init__(self, "
PROMPT_CHARACTERS, NEW_TOKENS, SAMPLE_LINES = 48, 120, 12
CURVE_ROWS, CURVE_WIDTH = 10, 50
POLL_SECONDS = 0.05

TOKENIZER = """--tokenizer-type GPT2BPETokenizer --vocab-file {out}/tokenizer/vocab.json
    --merge-file {out}/tokenizer/merges.txt"""
PREPROCESS = "preprocess --input {out}/corpus.jsonl --output-prefix {out}/data/corpus --append-eod --workers {workers}"
TRAIN = """train --num-layers {size.num_layers} --hidden-size {size.hidden_size}
    --num-attention-heads {size.num_attention_heads} --ffn-hidden-size {size.ffn_hidden_size}
    --seq-length {size.seq_length} --max-position-embeddings {size.seq_length} --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size {size.batch_size} --global-batch-size {size.batch_size} --train-iters {iterations}
    --lr {size.learning_rate:g} --min-lr {min_lr:g} --lr-decay-style cosine --lr-warmup-iters {warmup}
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --data-path {out}/data/corpus_text_document --split 94,4,2 --eval-interval {eval_interval} --eval-iters {eval_iters}
    --save {out}/checkpoints --load {out}/checkpoints --save-interval {save_interval} --log-interval 10"""
GENERATE = (
    "generate {out}/checkpoints --prompt {prompt} --max-new-tokens {tokens} --temperature 0.6 --top-k 40 --seed 1"
)

Record = dict[str, Any]
"""One line of metrics.jsonl: "event" and its values."""

T = TypeVar("T")


def words_of(template: str, **values: object) -> list[str]:
    """Fill in a command line, word by word: a value with spaces stays one word."""
    return [word.format(**values) for word in template.split()]


def train_arguments(out: Path, plan: Plan) -> list[str]:
    """Return the command line of the training, with Megatron's flags."""
    size, iterations, precision = plan.size, plan.iterations, plan.machine.precision
    words = words_of(
        f"{TRAIN} {TOKENIZER}",
        out=out,
        size=size,
        iterations=iterations,
        min_lr=size.learning_rate / 20,
        warmup=max(1, iterations // 25),
        eval_interval=max(1, iterations // 6),
        eval_iters=max(2, min(32_768 // size.tokens_per_step, iterations // 40)),
        save_interval=plan.save_interval,
    )
    return words if precision == "fp32" else [*words, f"--{precision}"]


def program() -> str:
    """Return `megalith` as the user's shell finds it: the bare name, or its path in an environment not activated."""
    beside = Path(sys.executable).with_name("megalith")
    if not beside.exists() or str(beside.parent) in os.environ.get("PATH", "").split(os.pathsep):
        return "megalith"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def script_of(arguments: Sequence[str]) -> str:
    """Return a command as part of a shell script, one flag a line."""
    words = [" \\\n    " + word if word.startswith("--") else " " + shlex.quote(word) for word in arguments]
    return "\n" + program() + "".join(words) + "\n"


class CommandFailed(MegalithError):
    """A command that the quickstart ran ended with an error; carries that command's exit code."""

    def __init__(self, command: str, exit_code: int, log: Path) -> None:
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
        super().__init__(f"`megalith {command}` ended with exit code {exit_code}:\n{end}\n(all in {log})")


def run_command(arguments: Sequence[str], log: Path, watch: Callable[[], bool] = lambda: False) -> None:
    """Run a command of Megalith to its end, its output going to `log`; SIGKILL it once `watch` returns True."""
    killed, command = False, [*COMMAND, *arguments]
    with (
        log.open("ab") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                if not killed and (killed := watch()):
                    process.kill()
                time.sleep(POLL_SECONDS)
        except BaseException:
            process.terminate()  # an interrupt or an error of ours: a training saves and ends
            process.wait()
            raise
    if process.returncode and not killed:
        raise CommandFailed(arguments[0], process.returncode, log)


def last_step(path: Path) -> Record:
    """Return the newest step of a metrics.jsonl that is being written; an empty record before the first."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 14)))
        lines = file.read().split(b"\n")[:-1]
    return next((json.loads(line) for line in reversed(lines) if line.startswith(b'{"event": "step"')), {})


def compare_repeated_steps(before: Sequence[Record], after: Sequence[Record]) -> dict[str, Any]:
    """Compare the steps lost by the kill, in the records of then, with their repetition in those of the whole run."""
    first, second = ({r["iteration"]: r for r in records if r["event"] == "step"} for records in (before, after))
    resumed_from = next(record["iteration"] for record in reversed(after) if record["event"] == "resume")
    repeated = [number for number in first if number > resumed_from]
    names = ("loss", "grad_norm", "learning_rate")
    return {
        "resumed_from": resumed_from,
        "killed_at": max(first),
        "num_repeated": len(repeated),
        "num_equal": sum(all(first[n][name] == second[n][name] for name in names) for n in repeated),
        "largest_difference": max((abs(first[n]["loss"] - second[n]["loss"]) for n in repeated), default=0.0),
    }


def save_png(steps: Sequence[Record], evaluations: Sequence[Record], killed_at: int, path: Path, title: str) -> bool:
    """Draw the losses; return False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for records, style, label in ((steps, "-", "training"), (evaluations, "o", "validation")):
        axes.plot([r["iteration"] for r in records], [r["loss"] for r in records], style, linewidth=0.8, label=label)
    axes.axvline(killed_at, color="gray", linestyle=":", label="killed, then resumed")
    axes.set(title=title, xlabel="iteration", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(str(path))
    return True


class Quickstart:
    """Runs the steps once, in one folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out, self.console = options, options.out, Console(highlight=False)
        self.commands, self.metrics = self.out / "commands.sh", self.out / "checkpoints" / "run" / "metrics.jsonl"
        self.device = [] if options.device == "auto" else ["--device", options.device]

    def run(self) -> None:
        """Go from text to a trained model."""
        started = time.perf_counter()
        self.clear_folder()
        minutes = f"{self.options.minutes:g} minutes of training"
        self.console.print(f"[bold]Megalith quickstart: text -> tokenizer -> trained GPT, {minutes}[/]")
        corpus = self.step("text", self.collect)
        machine = self.step("machine", self.measure)
        plan = self.step("model", partial(self.plan, machine, corpus))
        self.step("tokenizer", partial(self.learn_tokenizer, corpus, plan))
        num_tokens = self.step("preprocess", partial(self.preprocess, corpus, plan))
        report = self.train(plan)
        report |= self.evaluate(corpus.num_characters / num_tokens)
        sample = self.step("generate", partial(self.generate, corpus))
        self.console.print(sample, style="green", markup=False, soft_wrap=True)
        self.draw(plan, report["resume"]["killed_at"])
        report["seconds"] = time.perf_counter() - started
        (self.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        self.show_next(corpus, report["seconds"])

    def clear_folder(self) -> None:
        """Make the output folder; an earlier quickstart's output in it is removed, anything else is left alone."""
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            if not self.commands.is_file():
                raise ConfigError(f"--out {self.out} exists and is not of a quickstart; choose a new folder")
            for name in ("tokenizer", "data", "checkpoints", "logs"):
                shutil.rmtree(self.out / name, ignore_errors=True)
            for name in ("corpus.jsonl", "loss.png", "report.json"):
                (self.out / name).unlink(missing_ok=True)
        for name in ("tokenizer", "data", "logs"):
            (self.out / name).mkdir(parents=True)
        head = "#!/usr/bin/env bash\n# What `megalith quickstart` ran, in this order.\nset -e\n"
        self.commands.write_text(f"{head}cd {shlex.quote(str(Path.cwd()))}\n", encoding="utf-8")

    def line(self, name: str, text: str, seconds: float | None = None) -> None:
        """Print the result of a step."""
        took = "" if seconds is None else f" [dim]({seconds:.1f} s)[/]"
        self.console.print(f"[bold cyan]{name:11}[/] {escape(text)}{took}", soft_wrap=True)

    def step(self, name: str, work: Callable[[], tuple[T, str]]) -> T:
        """Do a step, then print what came out and how long it took."""
        started = time.perf_counter()
        with self.console.status(f"{name} ..."):
            result, text = work()
        self.line(name, text, time.perf_counter() - started)
        return result

    def call(self, arguments: list[str], log: str, watch: Callable[[], bool] = lambda: False) -> Path:
        """Run a command of Megalith and keep it in commands.sh; return the file with its output."""
        with self.commands.open("a", encoding="utf-8") as script:
            script.write(script_of(arguments))
        run_command(arguments, path := self.out / "logs" / log, watch)
        return path

    def collect(self) -> tuple[Corpus, str]:
        options = self.options
        corpus = user_texts(options.data, options.json_key, options.encoding) if options.data else standard_library()
        corpus.write(self.out / "corpus.jsonl")
        size = f"{corpus.num_characters / 1e6:.1f} M characters"
        return corpus, f"{corpus.name}: {len(corpus.documents):,} texts, {size}"

    def measure(self) -> tuple[Machine, str]:
        machine = measure_machine(self.options.device)
        return machine, f"{machine.name}: {machine.flops / 1e9:,.0f} GFLOP/s in {machine.precision}"

    def plan(self, machine: Machine, corpus: Corpus) -> tuple[Plan, str]:
        """Choose the model and the number of iterations by timing real steps."""
        seconds, num_tokens = self.options.minutes * 60.0, corpus.num_characters / CHARACTERS_PER_TOKEN
        size, step_seconds = choose_model(
            machine,
            seconds,
            num_tokens,
            lambda size: measure_step(size, [*train_arguments(self.out, Plan(machine, size))[1:], *self.device]),
        )
        plan = Plan(machine, size, choose_iterations(size, seconds, step_seconds, num_tokens))
        shape = f"GPT {size.num_layers} layers x {size.hidden_size}, {size.num_parameters / 1e6:.1f} M parameters"
        return plan, f"{shape}; {plan.iterations:,} steps of {step_seconds:.2f} s"

    def learn_tokenizer(self, corpus: Corpus, plan: Plan) -> tuple[None, str]:
        vocab_file, _ = train_byte_level_bpe(corpus.documents, plan.size.vocab_size, self.out / "tokenizer")
        num_tokens = len(json.loads(vocab_file.read_text(encoding="utf-8")))
        return None, f"byte-level BPE of {num_tokens:,} tokens, learned from the text"

    def preprocess(self, corpus: Corpus, plan: Plan) -> tuple[int, str]:
        """Tokenise the documents into .bin and .idx; return the number of tokens."""
        self.call(words_of(f"{PREPROCESS} {TOKENIZER}", out=self.out, workers=os.cpu_count() or 1), "preprocess.log")
        num_tokens = IndexedDataset(str(self.out / "data" / "corpus_text_document")).num_tokens
        length = plan.size.seq_length
        if num_tokens // 10 < 2 * length:
            raise DataError(f"{num_tokens:,} tokens are too few for sequences of {length}; give more --data")
        return num_tokens, f"{num_tokens:,} tokens of {corpus.num_characters / num_tokens:.1f} characters"

    def train(self, plan: Plan) -> Record:
        """Train to the half, kill the process, start the same command again and train to the end."""
        arguments = [*train_arguments(self.out, plan), *self.device]
        started = time.perf_counter()
        with Progress(console=self.console, transient=True, disable=not self.console.is_terminal) as bar:
            task = bar.add_task("train", total=plan.iterations)

            def watch(kill_at: float) -> bool:
                step = last_step(self.metrics)
                if not step:
                    return False
                description = "train" if step["loss"] is None else f"train, loss {step['loss']:.3f}"
                bar.update(task, completed=step["iteration"], description=description)
                return bool(step["iteration"] >= kill_at)

            log = self.call(arguments, "train.log", partial(watch, plan.kill_iteration))
            before, half = read_metrics(self.metrics), time.perf_counter() - started
            step = last_step(self.metrics)["iteration"]
            self.line("train", f"killed with SIGKILL after step {step}; the same command again:", half)
            run_command(arguments, log, partial(watch, math.inf))
        seconds = time.perf_counter() - started
        resume = compare_repeated_steps(before, read_metrics(self.metrics))
        equal = f"{resume['num_equal']} of {resume['num_repeated']} repeated steps equal bit for bit"
        if resume["num_equal"] < resume["num_repeated"]:
            equal += f", losses within {resume['largest_difference']:.1e}"
        self.line("resume", f"at step {resume['resumed_from']}; {equal}", seconds - half)
        return {
            "iterations": plan.iterations,
            "training_seconds": seconds,
            "machine": asdict(plan.machine),
            "model": {**asdict(plan.size), "num_parameters": plan.size.num_parameters},
            "resume": resume,
        }

    def evaluate(self, characters_per_token: float) -> Record:
        """Report how well the model predicts text that it has not seen."""
        losses = {r["split"]: r["loss"] for r in read_metrics(self.metrics) if r["event"] == "evaluation"}
        perplexity = {split: math.exp(loss) for split, loss in losses.items()}
        loss = losses["validation"]
        bits = loss / math.log(2) / characters_per_token
        shown = f"validation loss {loss:.3f}, perplexity {perplexity['validation']:.1f}, {bits:.2f} bits/character"
        self.line("evaluate", shown)
        return {"losses": losses, "perplexity": perplexity, "bits_per_character": bits}

    def generate_arguments(self, prompt: str, tokens: int) -> list[str]:
        return [*words_of(GENERATE, out=self.out, prompt=prompt, tokens=tokens), *self.device]

    def prompt(self, corpus: Corpus, of_code: str) -> str:
        """Return the user's prompt, or the beginning of the last of the user's texts, or `of_code`."""
        beginning = corpus.documents[-1].strip()[:PROMPT_CHARACTERS].rsplit(" ", 1)[0]
        return self.options.prompt or (beginning if self.options.data else of_code)

    def generate(self, corpus: Corpus) -> tuple[str, str]:
        log = self.call(self.generate_arguments(self.prompt(corpus, CODE_PROMPT), NEW_TOKENS), "generate.log")
        lines = log.read_text(encoding="utf-8", errors="replace").strip("\n").splitlines()
        return "\n".join(f"  {line}" for line in lines[:SAMPLE_LINES]), "the model continues a prompt:"

    def draw(self, plan: Plan, killed_at: int) -> None:
        """Show the losses of training as bars, each the mean of a part of the run, and save all of them as a PNG."""
        records = [record for record in read_metrics(self.metrics) if record.get("loss") is not None]
        steps = [record for record in records if record["event"] == "step"]
        evaluations = [record for record in records if record.get("split") == "validation"]
        title = f"Megalith quickstart: GPT of {plan.size.num_parameters / 1e6:.1f} M parameters, {plan.machine.name}"
        saved = save_png(steps, evaluations, killed_at, path := self.out / "loss.png", title)
        where = str(path) if saved else f"as a picture with matplotlib: {install_command('plot')}"
        self.line("loss", f"of training, {where}")
        size = -(-len(steps) // CURVE_ROWS)
        parts = [steps[start : start + size] for start in range(0, len(steps), size)]
        means = [statistics.fmean(record["loss"] for record in part) for part in parts]
        rows = Table.grid(padding=(0, 1))
        for part, mean in zip(parts, means, strict=True):
            first, last = part[0]["iteration"], part[-1]["iteration"]
            remark = f"killed at {killed_at}, resumed" if first <= killed_at <= last else ""
            bar = ProgressBar(max(means), mean, CURVE_WIDTH, complete_style="cyan", finished_style="cyan")
            rows.add_row(f"{last:>10}", f"{mean:6.2f}", bar, remark)
        self.console.print(rows)

    def show_next(self, corpus: Corpus, seconds: float) -> None:
        """End with what to try now; commands are never wrapped, so that they can be copied."""
        prompt = self.prompt(corpus, "class ").split("\n", 1)[0]
        where = escape(f"everything is in {self.out}/")
        self.console.print(f"[bold]Done in {seconds / 60.0:.1f} minutes; {where}. Next:[/]")
        for about, command in (
            ("ask the model", f"{program()} {shlex.join(self.generate_arguments(prompt, 200))}"),
            ("read, change and run again what was run, with Megatron's flags", f"cat {self.commands}"),
            ("the same on your own text", f"{program()} quickstart --data FILE.jsonl --out my-model"),
        ):
            self.console.print(f"  [dim]# {about}[/]\n  {escape(command)}", soft_wrap=True)
