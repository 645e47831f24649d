"""The steps of the quickstart, in the order in which they are told."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megalith.cli.quickstart.chart import Curve, draw, save_png
from megalith.cli.quickstart.commands import (
    COMMAND,
    Folder,
    as_typed,
    generate_arguments,
    kill_iteration,
    preprocess_arguments,
    program,
    script,
    train_arguments,
)
from megalith.cli.quickstart.corpus import Corpus, standard_library, user_texts, write_jsonl
from megalith.cli.quickstart.follow import (
    Followed,
    MetricsTail,
    Record,
    ResumeProof,
    compare_repeated_steps,
    follow_training,
    run_command,
)
from megalith.cli.quickstart.screen import Screen, TrainingBar
from megalith.cli.quickstart.sizing import (
    FEWEST_ITERATIONS,
    Machine,
    ModelSize,
    choose_iterations,
    choose_model,
)
from megalith.data.indexed import IndexedDataset
from megalith.errors import ConfigError, DataError
from megalith.tokenizers import train_byte_level_bpe

SIZE_LIMIT = 64_000_000
"""Characters of text that are taken at most: more than a run of minutes can read."""

CHARACTERS_PER_TOKEN = 3.5
CODE_PROMPT = "class FileReader:\n    def __init__(self, "
PROMPT_CHARACTERS = 48
NEW_TOKENS = 120
SAMPLE_LINES = 12
CURVE_HEIGHT = 10


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for.

    Attributes:
        files: the user's text; none for the standard library.
        json_key: field of a JSON line that holds the text.
        encoding: of the user's text, or auto.
        seconds: time to train for.
        out: folder of all output.
        prompt: text to continue, or None.
        device: of `--device`.
    """

    files: tuple[Path, ...]
    json_key: str
    encoding: str
    seconds: float
    out: Path
    prompt: str | None
    device: str = "auto"


@dataclass(frozen=True)
class Plan:
    """The run that fits this machine and this text."""

    machine: Machine
    size: ModelSize
    iterations: int


@dataclass(frozen=True)
class Trained:
    """A run that was killed and resumed, all its records, and how long both halves took."""

    records: tuple[Record, ...]
    proof: ResumeProof
    seconds: float

    def of(self, event: str) -> list[Record]:
        return [record for record in self.records if record.get("event") == event]


class Quickstart:
    """Tells the story once, in one folder."""

    def __init__(self, wishes: Wishes, screen: Screen | None = None) -> None:
        self.wishes = wishes
        self.folder = Folder(wishes.out)
        self.screen = screen or Screen()

    def run(self) -> None:
        """Go from text to a trained model.

        Raises:
            DataError: too little text, or files that cannot be read.
            ConfigError: the output folder holds something else.
            CommandFailed: a command that was run ended with an error.
        """
        started = time.perf_counter()
        self.clear_folder()
        minutes = self.wishes.seconds / 60.0
        self.screen.title(f"Megalith quickstart: text -> tokenizer -> trained GPT, {minutes:g} minutes of training")
        corpus = self.collect()
        machine = self.measure()
        plan = self.plan(machine, corpus)
        self.learn_tokenizer(corpus, plan.size.vocab_size)
        num_tokens = self.preprocess(corpus)
        if num_tokens // 10 < 2 * plan.size.seq_length:
            raise DataError(
                f"{num_tokens:,} tokens are too few for sequences of {plan.size.seq_length}; give more --data"
            )
        trained = self.train(plan)
        report = self.evaluate(plan, trained, corpus.num_characters / num_tokens)
        self.generate(corpus)
        self.draw(trained, plan)
        self.folder.report.write_text(json.dumps({**report, "seconds": time.perf_counter() - started}, indent=2) + "\n")
        self.say_next(corpus, time.perf_counter() - started)

    def clear_folder(self) -> None:
        """Make the output folder; an earlier quickstart's output in it is removed, anything else is left alone."""
        root = self.folder.root
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            if not self.folder.commands.is_file():
                raise ConfigError(f"--out {root} exists and is not of a quickstart; choose a new folder")
            for path in (self.folder.tokenizer, self.folder.data_prefix.parent, self.folder.checkpoints):
                shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(self.folder.logs, ignore_errors=True)
            for path in (self.folder.corpus, self.folder.curve, self.folder.report):
                path.unlink(missing_ok=True)
        for path in (root, self.folder.tokenizer, self.folder.data_prefix.parent, self.folder.logs):
            path.mkdir(parents=True, exist_ok=True)
        self.folder.commands.write_text(script([]), encoding="utf-8")

    def collect(self) -> Corpus:
        """Read the text and write it as documents."""
        with self.screen.step("text", "collecting documents") as line:
            if self.wishes.files:
                corpus = user_texts(self.wishes.files, SIZE_LIMIT, self.wishes.json_key, self.wishes.encoding)
            else:
                corpus = standard_library(SIZE_LIMIT)
            write_jsonl(corpus, self.folder.corpus)
            size = f"{corpus.num_characters / 1e6:.1f} M characters"
            line.text = f"{corpus.name}: {len(corpus.documents):,} texts, {size}"
        return corpus

    def measure(self) -> Machine:
        """Measure what the machine can do."""
        with self.screen.step("machine", "multiplying matrices") as line:
            from megalith.cli.quickstart.speed import measure_machine

            machine = measure_machine(self.wishes.device)
            line.text = f"{machine.name}: {machine.flops / 1e9:,.0f} GFLOP/s in {machine.precision}"
        return machine

    def plan(self, machine: Machine, corpus: Corpus) -> Plan:
        """Choose the model and the number of iterations by timing real steps."""
        with self.screen.step("model", "timing training steps") as line:
            from megalith.cli.quickstart.speed import measure_step

            def step_time(size: ModelSize) -> float:
                return measure_step(size, self._train_arguments(size, machine.precision, FEWEST_ITERATIONS)[1:])

            num_tokens = corpus.num_characters / CHARACTERS_PER_TOKEN
            size, seconds = choose_model(machine, self.wishes.seconds, num_tokens, step_time)
            iterations = choose_iterations(size, self.wishes.seconds, seconds, num_tokens)
            shape = f"GPT {size.num_layers} layers x {size.hidden_size}"
            line.text = (
                f"{shape}, {size.num_parameters / 1e6:.1f} M parameters; {iterations:,} steps of {seconds:.2f} s"
            )
        return Plan(machine, size, iterations)

    def learn_tokenizer(self, corpus: Corpus, vocab_size: int) -> None:
        """Train the byte-level BPE."""
        with self.screen.step("tokenizer", "learning byte pairs") as line:
            vocab_file, _ = train_byte_level_bpe(corpus.documents, vocab_size, self.folder.tokenizer)
            num_tokens = len(json.loads(vocab_file.read_text(encoding="utf-8")))
            line.text = f"byte-level BPE of {num_tokens:,} tokens, learned from the text"

    def preprocess(self, corpus: Corpus) -> int:
        """Turn the documents into .bin and .idx; return the number of tokens."""
        with self.screen.step("preprocess", "tokenising") as line:
            run_command(COMMAND, preprocess_arguments(self.folder), self.folder.logs / "preprocess.log")
            num_tokens = IndexedDataset(f"{self.folder.data_prefix}_text_document").num_tokens
            per_token = corpus.num_characters / num_tokens
            line.text = f"{num_tokens:,} tokens of {per_token:.1f} characters"
        return num_tokens

    def train(self, plan: Plan) -> Trained:
        """Train to the half, kill the process, start the same command again and train to the end."""
        arguments = self._train_arguments(plan.size, plan.machine.precision, plan.iterations)
        lines = [preprocess_arguments(self.folder), arguments, self._generate_arguments("def ", NEW_TOKENS)]
        self.folder.commands.write_text(script(lines), encoding="utf-8")
        tail, log = MetricsTail(self.folder.metrics), self.folder.logs / "train.log"
        started = time.perf_counter()

        def follow(kill_at: int | None) -> Followed:
            return follow_training(COMMAND, arguments, tail, log, on_record=bar.show, kill_at=kill_at)

        with TrainingBar(self.screen, plan.iterations) as bar:
            before = follow(kill_iteration(plan.iterations))
            half = time.perf_counter() - started
            step = before.of("step")[-1]["iteration"]
            self.screen.line("train", f"killed with SIGKILL after step {step}; the same command again:", half)
            after = follow(None)
        seconds = time.perf_counter() - started
        proof = compare_repeated_steps(before, after)
        self.screen.line("resume", sentence_of(proof), seconds - half)
        kept = [record for record in before.records if record.get("iteration", 0) <= proof.resumed_from]
        return Trained((*kept, *after.records), proof, seconds)

    def evaluate(self, plan: Plan, trained: Trained, characters_per_token: float) -> dict[str, object]:
        """Tell how well the model predicts text that it has not seen."""
        final = {record["split"]: record["loss"] for record in trained.of("evaluation")}
        loss = final["validation"]
        bits = loss / math.log(2) / characters_per_token
        self.screen.line(
            "evaluate",
            f"validation loss {loss:.3f}, perplexity {math.exp(loss):.1f}, {bits:.2f} bits/character",
        )
        return {
            "losses": final,
            "perplexity": {split: math.exp(value) for split, value in final.items()},
            "bits_per_character": bits,
            "iterations": plan.iterations,
            "training_seconds": trained.seconds,
            "machine": asdict(plan.machine),
            "model": {**asdict(plan.size), "num_parameters": plan.size.num_parameters},
            "resume": asdict(trained.proof),
        }

    def generate(self, corpus: Corpus) -> None:
        """Let the model continue a prompt."""
        log = self.folder.logs / "generate.log"
        with self.screen.step("generate", "continuing a prompt") as line:
            prompt = self._prompt(corpus, CODE_PROMPT)
            run_command(COMMAND, self._generate_arguments(prompt, NEW_TOKENS), log)
            line.text = "the model continues a prompt:"
        lines = log.read_text(encoding="utf-8", errors="replace").strip("\n").splitlines()
        self.screen.text([f"  {text}" for text in lines[:SAMPLE_LINES]], style="green")

    def _train_arguments(self, size: ModelSize, precision: str, iterations: int) -> list[str]:
        return [*train_arguments(self.folder, size, precision, iterations), *self._device]

    def _generate_arguments(self, prompt: str, num_tokens: int) -> list[str]:
        return [*generate_arguments(self.folder, prompt, num_tokens), *self._device]

    @property
    def _device(self) -> list[str]:
        return [] if self.wishes.device == "auto" else ["--device", self.wishes.device]

    def _prompt(self, corpus: Corpus, of_code: str) -> str:
        """What the model continues: what the user wishes, or how the last of the texts begins; of Python `of_code`."""
        return self.wishes.prompt or (start_of(corpus.documents[-1]) if self.wishes.files else of_code)

    def draw(self, trained: Trained, plan: Plan) -> None:
        """Draw the loss curve on the screen and as a PNG."""
        training = tuple((r["iteration"], r["loss"]) for r in trained.of("step") if r["loss"] is not None)
        validation = tuple((r["iteration"], r["loss"]) for r in trained.of("evaluation") if r["split"] == "validation")
        curve = Curve(training, validation, trained.proof.killed_at)
        parameters = f"{plan.size.num_parameters / 1e6:.1f} M parameters"
        saved = save_png(curve, self.folder.curve, f"Megalith quickstart: GPT of {parameters}, {plan.machine.name}")
        where = str(self.folder.curve) if saved else "as a picture with the extra `plot`: pip install matplotlib"
        self.screen.line("loss", f"of training, {where}")
        self.screen.text(draw(curve, self.screen.width, CURVE_HEIGHT, braille=self.screen.has_braille))

    def say_next(self, corpus: Corpus, seconds: float) -> None:
        """End with what to try now."""
        prompt = self._prompt(corpus, "class ").split("\n", 1)[0]
        self.screen.title(f"Done in {seconds / 60.0:.1f} minutes; everything is in {self.folder.root}/. Next:")
        self.screen.command("ask the model", as_typed(self._generate_arguments(prompt, 200)))
        self.screen.command(
            "read, change and run again what was run, with Megatron's flags", f"cat {self.folder.commands}"
        )
        self.screen.command("the same on your own text", f"{program()} quickstart --data FILE.jsonl --out my-model")


def sentence_of(proof: ResumeProof) -> str:
    """Say what the steps that were done twice prove."""
    equal = f"{proof.num_equal} of {proof.num_repeated} repeated steps equal bit for bit"
    if proof.num_equal < proof.num_repeated:
        equal += f", losses within {proof.largest_difference:.1e}"
    return f"at step {proof.resumed_from}; {equal}"


def start_of(document: str) -> str:
    """Take the first words of a document as a prompt."""
    words = document.strip()[:PROMPT_CHARACTERS].rsplit(" ", 1)
    return words[0]
