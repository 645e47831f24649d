"""`megalith quickstart`: train a GPT on text of this machine, kill and resume the training, and sample the model.

Each step runs as a process of its own, with the command line that a user would type; commands.sh keeps them.
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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape

from megalith.cli.quickstart import chat
from megalith.cli.quickstart.model import MODEL_SIZES, Machine, ModelSize, Plan, choose_plan, measure_machine
from megalith.cli.quickstart.text import Corpus, standard_library, user_texts
from megalith.config.values import DEVICES, local_path
from megalith.data.indexed import IndexedDataset
from megalith.errors import ConfigError, MegalithError, install_command
from megalith.report.history import History, read_history
from megalith.tokenizers import train_byte_level_bpe

COMMAND = (sys.executable, "-m", "megalith")
CHARACTERS_PER_TOKEN = 3.5
CODE_PROMPT = "def read_file(self, "
PROMPT_CHARACTERS, SHOWN_LINES, SHOWN_ANSWERS = 48, 12, 3
GPT2_FILES = "--vocab-file {out}/tokenizer/vocab.json --merge-file {out}/tokenizer/merges.txt"
CHAT_SHARE = 0.8  # iterations of fine-tuning for each of the training
PROBE_STEPS = 12  # enough that a pause of the machine does not move their median
PROGRESS = re.compile(r"iteration +(\d+)/ +(\d+) .*lm loss: (\S+)")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megalith quickstart",
        description="Train a small GPT on local text, kill and resume the training, evaluate it and generate text.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    about_data = ".jsonl or .txt files to train on, also .gz, .xz, ... (default: Python's standard library)"
    add("--data", nargs="+", type=local_path, metavar="FILE", help=about_data)
    add("--json-key", default="text", help="key of the text in the lines of .jsonl files (default: %(default)s)")
    add("--encoding", default="auto", help="encoding of the files, such as gb18030 (default: detected)")
    add("--minutes", type=float, default=3.0, help="training time (default: %(default)s)")
    add("--out", type=local_path, default=Path("quickstart"), help="output folder (default: %(default)s)")
    add("--device", choices=DEVICES, default="auto", help="device to train on (default: %(default)s)")
    add("--chat", action="store_true", help="then fine-tune it on questions about Python's library, and ask it some")
    add("--prompt", help="text that the trained model continues (default: a beginning that fits the data)")
    return parser


def run(argv: Sequence[str]) -> int:
    """Run the quickstart and return 0.

    Raises:  MegalithError if an option, the data or one of the commands fails; it carries the exit code.
    """
    options = make_parser().parse_args(argv)
    if not 0.0 < options.minutes <= 24 * 60:
        raise ConfigError(f"--minutes {options.minutes:g} is not between 0 and 1440 (a day)")
    from megalith.assemble.model import choose_device

    choose_device(options.device)  # fails early
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # `call` then stops its command
    Quickstart(options).run()
    return 0


def program() -> str:
    """Return what to type for `megalith`: the name, or its path where the environment is not activated."""
    beside = Path(sys.executable).with_name("megalith")
    if not beside.exists() or shutil.which("megalith") == str(beside):
        return "megalith"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def words_of(command: str) -> list[str]:
    """Return the arguments of `megalith` in a command of commands.sh."""
    return [word for word in shlex.split(command) if word != "\n"][1:]  # shlex returns a continued line as a word


def compare_repeated_steps(history: History) -> dict[str, Any]:
    """Compare the steps after the last checkpoint before the kill with their repetition after the resume.

    A repeated step is equal if loss, gradient norm and learning rate are the same bit for bit.
    """
    curves = [history.curves[name] for name in ("training loss", "gradient norm", "learning rate")]
    killed = [dict(point for stretch in curve.abandoned for point in stretch) for curve in curves]
    resumed = [dict(curve.points) for curve in curves]
    steps = list(killed[0])
    return {
        "resumed_from": next(event.iteration for event in history.events if event.kind == "resume"),
        "killed_at": max(steps),
        "num_repeated": len(steps),
        "num_equal": sum(all(a[n] == b[n] for a, b in zip(killed, resumed, strict=True)) for n in steps),
        "largest_difference": max(abs(killed[0][n] - resumed[0][n]) for n in steps),
    }


class Quickstart:
    """One run of all steps in one output folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out, self.console = options, options.out, Console(highlight=False)
        self.script, self.training = self.out / "commands.sh", self.out / "checkpoints" / "run"
        self.status = self.console.status("")

    def run(self) -> None:
        """Run all steps, write report.json and print what to try next."""
        started = time.perf_counter()
        self.console.print(f"[bold]Megalith quickstart: a GPT in {self.options.minutes:g} minutes of training[/]")
        corpus = self.collect()  # fails before the output of an earlier quickstart is removed
        self.clear_folder()
        with (self.out / "corpus.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in corpus.documents)
        plan = self.plan(corpus)
        first_line = corpus.documents[-1].strip().split("\n", 1)[0]
        prompt = first_line[:PROMPT_CHARACTERS].rsplit(" ", 1)[0] if self.options.data else CODE_PROMPT
        commands = self.commands(plan, self.out, self.options.prompt or prompt)
        self.script.write_text("\n\n".join(commands), encoding="utf-8")
        _, preprocess, train, generate, *tune = map(words_of, commands)
        num_tokens = self.tokenize(corpus, plan.size, preprocess)
        report = self.train(plan, train) | self.evaluate(corpus.num_characters / num_tokens)
        self.generate(generate)
        self.draw(plan)
        if self.options.chat:
            report["chat"] = self.chat(corpus, tune)
        report["seconds"] = time.perf_counter() - started
        (self.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        self.show_next(generate, report["seconds"])

    def clear_folder(self) -> None:
        """Create the output folder; remove the output of an earlier quickstart in it, and nothing else.

        Raises:  ConfigError if the folder has files but is not of a quickstart, or cannot be written to.
        """
        used = self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir()))
        if used and not self.script.is_file():
            raise ConfigError(f"--out {self.out} exists and is not of a quickstart; choose a new folder")
        made = ("tokenizer", "data", "checkpoints", "chat", "logs", "loss.png", "report.json")
        try:
            for name in (*made, "corpus.jsonl", "dialogues.jsonl", "held-out.jsonl"):
                path = self.out / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            for name in ("tokenizer", "data", "logs"):
                (self.out / name).mkdir(parents=True)
            self.script.touch()
        except OSError as error:
            raise ConfigError(f"--out {self.out}: cannot be written to: {error.strerror}; choose another") from error

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Show that a step is running; at its end, print the text passed to the yielded function, and its time."""
        results, started = list[str](), time.perf_counter()
        with self.console.status(f"{name} ...") as self.status:
            yield results.append
        seconds = time.perf_counter() - started
        took = f" [dim]({seconds:.1f} s)[/]" if seconds >= 0.05 else ""
        self.console.print(f"[bold cyan]{name:11}[/] {escape(results[-1])}{took}", soft_wrap=True)

    def commands(self, plan: Plan, out: Path, prompt: str) -> list[str]:
        """Fill in commands.sh; return its head and the commands that preprocess, train and generate."""
        size, iterations, precision = plan.size, plan.iterations, plan.machine.precision
        values = {
            **asdict(size),
            "megalith": program(),
            "folder": Path.cwd(),
            "out": out,
            "device": self.options.device,
            "iterations": iterations,
            "min_lr": f"{size.learning_rate / 20:g}",
            "eval_interval": iterations // 6,
            "eval_iters": max(2, min(32_768 // size.tokens_per_step, iterations // 40)),
            "save_interval": iterations // 4,
            "prompt": prompt,
            "question": chat.QUESTIONS[0].format("read_file"),
            "chat_iterations": round(CHAT_SHARE * iterations),
            "chat_lr": f"{2 * size.learning_rate:g}",
        }
        quoted = {name: shlex.quote(str(value)) for name, value in values.items()}
        quoted["precision"] = "" if precision == "fp32" else f"--{precision}"
        kind = ("HuggingFace", "--tokenizer-model {out}/tokenizer") if self.options.chat else ("GPT2BPE", GPT2_FILES)
        quoted["tokenizer"] = f"--tokenizer-type {kind[0]}Tokenizer {kind[1].format(out=quoted['out'])}"
        scripts = ("commands.sh", "chat.sh")[: 1 + self.options.chat]
        template = "\n".join((files(__package__) / name).read_text(encoding="utf-8") for name in scripts)
        return [part.format_map(quoted) for part in template.split("\n\n")]

    def call(self, arguments: list[str], kill_step: int | None = None) -> list[str]:
        """Run a command of Megalith, show its progress, append its output to its log and return the lines of it.

        Args:
            kill_step: training step in which the command ends itself with SIGKILL.

        Raises:  MegalithError with the exit code of a command that failed, and the end of its output.
        """
        log, lines = self.out / "logs" / f"{arguments[0]}.log", list[str]()
        fault = {} if kill_step is None else {"MEGALITH_FAULT": f"kill9@step={kill_step},point=fwd"}
        command, environment = [*COMMAND, *arguments], {**os.environ, **fault}
        with (
            log.open("a", encoding="utf-8") as file,
            Popen(
                command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, encoding="utf-8", errors="replace", env=environment
            ) as process,
        ):
            try:
                for line in process.stdout or ():
                    file.write(line)
                    lines.append(line)
                    if found := PROGRESS.search(line):
                        self.status.update(f"train: step {found[1]} of {found[2]}, loss {float(found[3]):.3f}")
            except BaseException:
                process.terminate()  # on this signal a training saves a checkpoint and ends
                file.write(process.communicate()[0])
                raise
        if (code := process.returncode) != (-signal.SIGKILL if fault else 0):
            end = "".join(lines[-SHOWN_LINES:])
            error = MegalithError(f"`megalith {arguments[0]}` ended with exit code {code}:\n{end}(all in {log})")
            error.exit_code = code if code >= 0 else 128 - code
            raise error
        return lines

    def collect(self) -> Corpus:
        """Collect the documents to train on."""
        with self.step("text") as show:
            wanted = self.options
            corpus = user_texts(wanted.data, wanted.json_key, wanted.encoding) if wanted.data else standard_library()
            show(f"{corpus.name}: {len(corpus.documents):,} documents, {corpus.num_characters / 1e6:.1f} M characters")
        return corpus

    def plan(self, corpus: Corpus) -> Plan:
        """Measure the machine, and choose the model and the number of iterations by timing real steps."""
        seconds, num_tokens = self.options.minutes * 60.0, corpus.num_characters / CHARACTERS_PER_TOKEN
        with self.step("machine") as show:
            machine = measure_machine(self.options.device, seconds)
            show(f"{machine.name}: {machine.flops / 1e9:,.0f} GFLOP/s in {machine.precision}")
        with self.step("model") as show:
            of_chat = tuple(replace(size, vocab_size=chat.VOCAB_SIZE) for size in MODEL_SIZES)
            sizes = of_chat if self.options.chat else MODEL_SIZES
            plan = choose_plan(machine, seconds, num_tokens, partial(self.measure_step, machine), sizes)
            size = plan.size
            shape = f"GPT {size.num_layers} layers x {size.hidden_size}, {size.num_parameters / 1e6:.1f} M parameters"
            show(f"{shape}; {plan.iterations:,} steps of {plan.step_seconds:.2f} s")
        return plan

    def measure_step(self, machine: Machine, size: ModelSize) -> float:
        """Return the median seconds of the first steps of a training on mock data, which is then killed."""
        with TemporaryDirectory() as folder:
            train = words_of(self.commands(Plan(machine, size, 100 * PROBE_STEPS), Path(folder), "")[2])
            mock = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(size.vocab_size - 1)]
            self.call([*train[: train.index("--data-path")], *mock], PROBE_STEPS + 1)
            steps = read_history(Path(folder) / "checkpoints" / "run").curves["seconds of a step"].points
        return statistics.median(seconds for _, seconds in steps)

    def tokenize(self, corpus: Corpus, size: ModelSize, preprocess: list[str]) -> int:
        """Train a tokenizer on the documents, preprocess them and return the number of tokens."""
        with self.step("tokenizer") as show:
            reserved = len(chat.SPECIAL) * self.options.chat
            vocab_file, _ = train_byte_level_bpe(corpus.documents, size.vocab_size - reserved, self.out / "tokenizer")
            if self.options.chat:
                chat.write_chat_tokenizer(self.out / "tokenizer")
            vocab_size = len(json.loads(vocab_file.read_text(encoding="utf-8")))
            show(f"byte-level BPE of {vocab_size:,} tokens, learned from the text")
        with self.step("preprocess") as show:
            self.call(preprocess)
            num_tokens = IndexedDataset(str(self.out / "data" / "corpus_text_document")).num_tokens
            show(f"{num_tokens:,} tokens of {corpus.num_characters / num_tokens:.1f} characters")
        return num_tokens

    def train(self, plan: Plan, arguments: list[str]) -> dict[str, Any]:
        """Train until the process is killed halfway, run the same command again to the end and return the report."""
        started = time.perf_counter()
        with self.step("train") as show:
            self.call(arguments, plan.kill_step)
            show(f"killed with SIGKILL after step {plan.kill_step - 1}; running the same command again:")
        with self.step("resume") as show:
            self.call(arguments)
            resume = compare_repeated_steps(read_history(self.training))
            equal = f"{resume['num_equal']} of {resume['num_repeated']} repeated steps are equal bit for bit"
            show(f"from step {resume['resumed_from']}; {equal} (losses within {resume['largest_difference']:g})")
        return {
            "iterations": plan.iterations,
            "training_seconds": time.perf_counter() - started,
            "machine": asdict(plan.machine),
            "model": {**asdict(plan.size), "num_parameters": plan.size.num_parameters},
            "resume": resume,
        }

    def evaluate(self, characters_per_token: float) -> dict[str, Any]:
        """Return loss and perplexity of the held-out splits, measured at the end of the training."""
        evaluations = [event.record for event in read_history(self.training).events if event.kind == "evaluation"]
        losses = {record["split"]: record["loss"] for record in evaluations}
        perplexity = {split: math.exp(loss) for split, loss in losses.items()}
        loss = losses["validation"]
        bits = loss / math.log(2) / characters_per_token
        with self.step("evaluate") as show:
            show(f"validation loss {loss:.3f}, perplexity {perplexity['validation']:.1f}, {bits:.2f} bits/character")
        return {"losses": losses, "perplexity": perplexity, "bits_per_character": bits}

    def generate(self, arguments: list[str]) -> None:
        """Sample the model and print the beginning of the text."""
        with self.step("generate") as show:
            lines = "".join(self.call(arguments)).strip("\n").splitlines()
            show("the model continues a prompt:")
        text = "\n".join(f"  {line}" for line in lines[:SHOWN_LINES])
        self.console.print(text, style="green", markup=False, soft_wrap=True)

    def chat(self, corpus: Corpus, commands: list[list[str]]) -> dict[str, Any]:
        """Fine-tune the model on questions about the library's functions; return how it answers held-out ones."""
        started = time.perf_counter()
        with self.step("dialogues") as show:
            sources = (standard_library() if self.options.data else corpus).documents
            trained, held_out = chat.write_dialogues(sources, self.out)
            show(f"{trained:,} questions about documented functions, {held_out} held out with other names")
            for command in commands[:2]:
                self.call(command)
        with self.step("fine-tune") as show:
            self.call(commands[2])
            loss = read_history(self.out / "chat" / "run").curves["validation loss"].points[-1][1]
            show(f"on the answers alone; loss on held-out answers {loss:.3f}")
        with self.step("answers") as show:
            answers = chat.ask(self.out / "chat", self.out / "held-out.jsonl", self.options.device)
            right = sum(answer.right for answer in answers)
            show(f"{right} of {len(answers)} questions about held-out names answered in form:")
        for answer in answers[:SHOWN_ANSWERS]:
            self.console.print(
                f"  {answer.question}\n  [green]{escape(answer.text)}[/]", highlight=False, soft_wrap=True
            )
        return {
            "seconds": time.perf_counter() - started,
            "dialogues": trained,
            "asked": len(answers),
            "answered": right,
        }

    def draw(self, plan: Plan) -> None:
        """Print the training loss after each quarter of the run and, with matplotlib, plot the losses as loss.png."""
        with self.step("loss") as show:
            curves = read_history(self.training).curves
            steps, losses = zip(*curves["training loss"].points, strict=True)
            quarters = " -> ".join(f"{losses[(len(losses) - 1) * quarter // 4]:.2f}" for quarter in range(5))
            try:
                from matplotlib.figure import Figure
            except ImportError:
                show(f"{quarters}; for a picture install matplotlib: {install_command('plot')}")
                return
            figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
            axes = figure.add_subplot()
            axes.plot(steps, losses, linewidth=0.8, label="training")
            axes.plot(*zip(*curves["validation loss"].points, strict=True), "o", label="validation")
            axes.axvline(plan.kill_step - 1, color="gray", linestyle=":", label="killed, then resumed")
            model = f"GPT of {plan.size.num_parameters / 1e6:.1f} M parameters"
            axes.set(title=f"{model}, {plan.machine.name}", xlabel="iteration", ylabel="loss (nats per token)")
            axes.legend()
            figure.savefig(path := self.out / "loss.png")
            show(f"{quarters}; picture: {path}")

    def show_next(self, generate: list[str], seconds: float) -> None:
        """Print commands to try next, unwrapped, so that they can be copied."""
        where = escape(f"everything is in {self.out}/ (its commands in {self.script.name})")
        self.console.print(f"[bold]Done in {seconds / 60.0:.1f} minutes; {where}. Next:[/]")
        for purpose, arguments in (
            ("ask the model", generate),
            *[("talk to it", ["generate", str(self.out / "chat"), "--chat"])] * self.options.chat,
            *[("or in the browser", ["serve", str(self.out / "chat")])] * self.options.chat,
            ("curves of the run, as a page", ["report", str(self.training.parent)]),
            ("the same on your own text", ["quickstart", "--data", "FILE.jsonl", "--out", "my-model"]),
        ):
            command = f"{program()} {shlex.join(arguments)}"
            self.console.print(f"  [dim]# {purpose}[/]\n  {escape(command)}", soft_wrap=True)
