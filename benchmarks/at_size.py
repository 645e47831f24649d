"""A model at size for a machine without a GPU: in four layouts, beside Hugging Face's Trainer, and for two hours.

    python benchmarks/machine_text.py --out DIR/machine-text        the corpus, once
    python benchmarks/at_size.py layouts --folder DIR               four times ten minutes on two quiet cores
    python benchmarks/at_size.py pair --folder DIR --minutes 20     a session; again until both are done
    python benchmarks/at_size.py long --folder DIR --bf16           one to two hours; killed, the same command continues

  layouts   recipes/machine-text-1m.toml in one process and in DP 2, TP 2 and PP 2. Each training is killed (SIGKILL of
            all its processes) behind a step drawn at random between a fifth and four fifths; the same command ends it.
  pair      recipes/machine-text-12m.toml, and peers/trainer.py with the same initial weights, samples in the same
            order, optimizer, schedule and precision. They take turns, a step each, while the other is stopped; the
            first step of a session does not count. A session ends by SIGKILL of both, a step behind a checkpoint.
  long      recipes/machine-text-12m.toml for 15,000 steps. Kill it by hand where you like, once.

Flags of `megalith train` may follow, for all of them. Killed, the same command continues with what is in DIR. Results
go to at-size-NAME.json in benchmarks/results, tables and pictures to docs/results (`--pages`: the tables alone).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from contender import Contender, megalith, run
from machine import Disturbance, commit, describe, is_disturbed, name_of
from parts import RESULTS, read_results
from table import ratios

from megalith.assemble.data import build_datasets
from megalith.cli.quickstart import compare_repeated_steps
from megalith.config import RunConfig, load
from megalith.report.history import History, read_history
from megalith.tokenizers import build_tokenizer

HERE = Path(__file__).resolve().parent
DOCS, RECIPES = HERE.parent / "docs" / "results", HERE.parent / "recipes"
PAGE = DOCS / "learning.md"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one process": (),
    "DP 2": ("--nproc", "2"),
    "TP 2": ("--nproc", "2", "--tensor-model-parallel-size", "2"),
    "PP 2": ("--nproc", "2", "--pipeline-model-parallel-size", "2"),
}
ALONE, *DIVIDED = LAYOUTS
OURS, PEER = "megalith train", "Trainer"
STEP = r"iteration +\d+/|^step \d+:"
WINDOW = 50  # steps whose mean loss is kept
LONGEST = 4 * 3600.0  # of a wait for a step far ahead


def recipe_of(stem: str) -> str:
    return str(RECIPES / f"{stem}.toml")


def preprocess(corpus: Path) -> None:
    """Make the datasets of the corpus, with the documented commands, if they are missing."""
    vocabulary = ("--vocab-file", str(corpus / "vocab.json"), "--merge-file", str(corpus / "merges.txt"))
    for part in ("train", "valid"):
        if not (corpus / f"{part}_text_document.idx").exists():
            words = ("--input", str(corpus / f"{part}.jsonl"), "--output-prefix", str(corpus / part), "--append-eod")
            run(megalith("preprocess", *words, *vocabulary))


def window_means(losses: Mapping[int, float], width: int = WINDOW) -> list[float]:
    """Return the mean loss of each `width` steps."""
    firsts = range(1, max(losses) + 1, width)
    return [statistics.fmean(losses[n] for n in range(first, first + width) if n in losses) for first in firsts]


def differences(losses: Mapping[int, float], of: Mapping[int, float]) -> dict[str, float]:
    """Return how far two curves are apart: at the worst step, in the worst mean of WINDOW steps, in the mean."""
    apart = {step: abs(losses[step] - of[step]) for step in losses}
    step = max(apart, key=lambda step: apart[step])
    means = max(abs(a - b) for a, b in zip(window_means(losses), window_means(of), strict=True))
    found = {"worst": apart[step], "worst_mean": means, "mean": statistics.fmean(apart.values())}
    return {"step": step, **{name: float(f"{value:.3g}") for name, value in found.items()}}


def shortened(losses: Mapping[int, float]) -> list[float]:
    """Return the means of WINDOW steps as they are kept in results."""
    return [round(loss, 5) for loss in window_means(losses)]


def losses_of(history: History, curve: str = "training loss") -> dict[int, float]:
    return {int(step): loss for step, loss in history.curves[curve].points}


# --- four layouts -------------------------------------------------------------------------------------------------


def train_killed_once(layout: str, iterations: int, flags: Sequence[str]) -> History:
    """Train in a layout, kill it once and continue; returns the history of the run."""
    save = Path(f"layouts-{iterations}") / layout.replace(" ", "-")
    command = megalith("train", *LAYOUTS[layout], "--config", recipe_of("machine-text-1m"), "--log-interval", "1")
    command += ["--train-iters", str(iterations), "--save", str(save), "--load", str(save), *flags]
    was_killed = save.with_suffix(".killed")
    if not was_killed.exists():
        step = random.Random(layout).randrange(iterations // 5, iterations * 4 // 5)
        print(f"{layout}: to be killed after step {step}", flush=True)
        with closing(Contender(command, rf"iteration +{step}/")) as training:
            training.wait(1, LONGEST)
        was_killed.write_text(f"{step}\n", encoding="utf-8")
    if saved_iteration(save) < iterations:
        print(f"{layout}: killed after step {was_killed.read_text(encoding='utf-8').strip()}, now resumed", flush=True)
        with closing(Contender(command, rf"iteration +{iterations}/")) as training:
            training.wait(1, LONGEST)
            training.wait_for_end()
    return read_history(save / "run")


def saved_iteration(save: Path) -> int:
    """Return the iteration of the last complete checkpoint, 0 if there is none."""
    tracker = save / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text(encoding="utf-8")) if tracker.exists() else 0


def measure_layouts(options: argparse.Namespace) -> dict[str, Any]:
    config = load(["--config", recipe_of("machine-text-1m"), *options.flags], {}, files=False)
    iterations = options.iterations or config.train_iters
    histories = {layout: train_killed_once(layout, iterations, options.flags) for layout in LAYOUTS}
    losses = {layout: losses_of(history) for layout, history in histories.items()}
    kills = {layout: compare_repeated_steps(history) for layout, history in histories.items()}
    draw_layouts(DOCS / f"layouts-{options.name}.png", losses, kills)
    return {
        "iterations": iterations,
        "seed": config.train.seed,
        "tokens": config.global_batch_size * config.data.seq_length,
        "losses": {layout: shortened(found) for layout, found in losses.items()},
        "validation": {layout: last_of(losses_of(h, "validation loss")) for layout, h in histories.items()},
        "differences": {layout: differences(losses[layout], losses[ALONE]) for layout in DIVIDED},
        "kills": kills,
    }


def last_of(values: Mapping[int, float]) -> float:
    return values[max(values)]


def draw_layouts(path: Path, losses: Mapping[str, Mapping[int, float]], kills: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the curves on each other, the kills, and how far each curve is from that of one process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for number, (layout, found) in enumerate(losses.items()):
        color, width = f"C{number}", 4.5 - 1.2 * number  # each is seen beside the next, which is thinner
        means = window_means(found, 20)
        above.plot([10 + 20 * n for n in range(len(means))], means, color=color, linewidth=width, label=layout)
        killed = kills[layout]["killed_at"]
        above.axvline(killed, color=color, linestyle=":", linewidth=1)
        above.plot(killed, max(means) - 0.4 * number, "X", color=color)
        if layout != ALONE:
            below.plot(
                [*found], [loss - losses[ALONE][step] for step, loss in found.items()], color=color, linewidth=0.7
            )
    above.set(title="One training in four layouts, each killed once (X) and resumed")
    above.set_ylabel("training loss, mean of 20 steps (nats per token)")
    above.legend()
    below.set(xlabel="step", ylabel=f"minus {ALONE}")
    figure.savefig(path)


# --- beside Hugging Face's Trainer --------------------------------------------------------------------------------


class Pair:
    """Both trainings of one length in a folder of their own."""

    def __init__(self, iterations: int | None, flags: Sequence[str]) -> None:
        recipe = recipe_of("machine-text-12m")
        length = ("--train-iters", str(iterations)) if iterations else ()
        self.flags = [*length, *flags]
        self.run: RunConfig = load(["--config", recipe, *self.flags], {}, files=False)
        self.folder = Path(f"pair-{self.run.train_iters}")
        self.train = megalith("train", "--config", recipe, *self.flags, "--log-interval", "1")
        ours, self.start, self.samples = self.folder / "megalith", self.folder / "start", self.folder / "samples.npy"
        peer = (recipe, str(self.folder / "start-hf"), str(self.samples), "--output", str(self.folder / "trainer"))
        self.commands = {
            OURS: [*self.train, "--save", str(ours), "--load", str(ours)],
            PEER: [sys.executable, str(HERE / "peers" / "trainer.py"), *peer, *self.flags],
        }

    def prepare(self) -> None:
        """Write the samples of the run in their order, and its initial weights in the format of the peer."""
        self.folder.mkdir(exist_ok=True)
        if not self.samples.exists():
            dataset = build_datasets(self.run, build_tokenizer(self.run.tokenizer)).train
            assert dataset is not None
            rows = [dataset[number] for number in range(self.run.train_iters * self.run.global_batch_size)]
            np.save(self.samples, np.stack([np.append(row["tokens"], row["labels"][-1]) for row in rows]))
        if not (self.folder / "start-hf").exists():
            # The learning rate of the first step is 0: what it leaves are the initial weights.
            where = ("--save", str(self.start), "--load", str(self.start), "--eval-iters", "0", "--exit-interval", "1")
            run([*self.train, *where])
            run(megalith("checkpoint", "export", str(self.start), str(self.folder / "start-hf")))

    def saved(self) -> dict[str, int]:
        """Return the iteration of the last checkpoint of each."""
        theirs = [int(path.name.rpartition("-")[2]) for path in (self.folder / "trainer").glob("checkpoint-*")]
        return {OURS: saved_iteration(self.folder / "megalith"), PEER: max(theirs, default=0)}

    def losses(self) -> dict[str, dict[int, float]]:
        """Return the loss of each step of both."""
        lines = (self.folder / "trainer" / "losses.jsonl").read_text(encoding="utf-8").splitlines()
        theirs = {record["iteration"]: record["loss"] for record in map(json.loads, lines)}
        return {OURS: losses_of(read_history(self.folder / "megalith" / "run")), PEER: dict(sorted(theirs.items()))}

    def take_turns(self, until: float) -> Iterator[tuple[str, int, float]]:
        """Continue both until a time (of `time.perf_counter`) or their end; yields who, step and seconds."""
        steps, last, interval = self.saved(), self.run.train_iters, self.run.checkpoint.save_interval or 1
        trainings = dict[str, Contender]()
        try:
            for name, command in self.commands.items():
                if steps[name] < last:
                    trainings[name] = Contender(command, STEP)
                    trainings[name].warm_up(1)
                    steps[name] += 1
            first = min(steps.values())
            while (done := min(steps.values())) < last:
                if time.perf_counter() > until and done > first and done % interval == 1:
                    break  # a step behind a checkpoint
                for name in sorted(trainings, reverse=bool(steps[OURS] % 2)):
                    if steps[name] < last:
                        steps[name] += 1
                        yield name, steps[name], trainings[name].take_turn()
            for training in trainings.values() if min(steps.values()) == last else ():
                training.wait_for_end()
        finally:
            for training in trainings.values():
                training.close()

    def validation(self) -> dict[str, float]:
        """Return the validation loss of both models, by the same program on the same samples."""
        models, found = {OURS: self.folder / "megalith", PEER: self.folder / "trainer" / "model"}, dict[str, float]()
        for name, model in models.items():
            out = self.folder / f"evaluation-{model.parts[1]}"
            where = ("--finetune", "--load", str(model), "--save", str(out))  # so that both see the first samples
            run([*self.train, "--skip-train", *where])
            found[name] = evaluated(out / "run")
        return found


def evaluated(run: Path) -> float:
    """Return the first validation loss of a run."""
    events = [event.record for event in read_history(run).events if event.kind == "evaluation"]
    return next(record["loss"] for record in events if record["split"] == "validation")


def measure_pair(options: argparse.Namespace) -> dict[str, Any] | None:
    """Run a session of the pair; returns the result once both are done."""
    pair = Pair(options.iterations, options.flags)
    pair.prepare()
    kept = pair.folder / "seconds.json"
    seconds: dict[str, dict[str, float]] = json.loads(kept.read_text()) if kept.exists() else {OURS: {}, PEER: {}}
    for name, step, value in pair.take_turns(time.perf_counter() + 60 * options.minutes):
        seconds[name][str(step)] = round(value, 4)
        kept.write_text(json.dumps(seconds), encoding="utf-8")
    if min(pair.saved().values()) < pair.run.train_iters:
        print(f"checkpoints of steps {pair.saved()} of {pair.run.train_iters}; the same command continues", flush=True)
        return None
    losses, both = pair.losses(), sorted(set(seconds[OURS]) & set(seconds[PEER]), key=int)
    tokens = pair.run.global_batch_size * pair.run.data.seq_length
    draw_pair(DOCS / f"pair-{options.name}.png", losses, seconds, tokens)
    return {
        "iterations": pair.run.train_iters,
        "seed": pair.run.train.seed,
        "tokens": tokens,
        "ours": OURS,
        "seconds": {name: [seconds[name][step] for step in both] for name in (OURS, PEER)},
        "losses": {name: shortened(found) for name, found in losses.items()},
        "validation": pair.validation(),
        "differences": differences(losses[PEER], losses[OURS]),
    }


def draw_pair(
    path: Path, losses: Mapping[str, Mapping[int, float]], seconds: Mapping[str, Mapping[str, float]], tokens: int
) -> None:
    """Draw the losses of both over tokens, where they should be one curve, and over the seconds of their steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    by_tokens, by_seconds = figure.subplots(1, 2, sharey=True)
    for number, (name, found) in enumerate(losses.items()):
        style = {"color": f"C{number}", "linewidth": 2.4 - 1.4 * number, "label": name}
        median = statistics.median(seconds[name].values())
        spent = np.cumsum([seconds[name].get(str(step), median) for step in found]) / 60
        by_tokens.plot([step * tokens / 1e6 for step in found], [*found.values()], **style)
        by_seconds.plot(spent, [*found.values()], **style)
    by_tokens.set(xlabel="million tokens", ylabel="training loss (nats per token)")
    by_seconds.set(xlabel="minutes of steps")
    by_seconds.legend()
    figure.savefig(path)


# --- at length ----------------------------------------------------------------------------------------------------

EVAL_ITERS = 640  # batches of nearly all of the validation text
LONG = ("--lr-warmup-iters", "200", "--save-interval", "500", "--eval-interval", "500")


def measure_long(options: argparse.Namespace) -> dict[str, Any]:
    """Train alone, or continue; returns the result at the end."""
    iterations = options.iterations or 15_000
    save = f"long-{iterations}"
    command = ["--config", recipe_of("machine-text-12m"), "--train-iters", str(iterations), *LONG, *options.flags]
    config = load(command, {}, files=False)
    if saved_iteration(Path(save)) < iterations:
        run(megalith("train", *command, "--save", save, "--load", save))
    history = read_history(Path(save, "run"))
    losses, validation = losses_of(history), losses_of(history, "validation loss")
    tokens = config.global_batch_size * config.data.seq_length
    draw_long(DOCS / f"long-{options.name}.png", losses, validation, tokens)
    seconds = [*losses_of(history, "seconds of a step").values()]
    where = ("--finetune", "--load", save, "--save", f"{save}-evaluation")
    run(megalith("train", *command, "--skip-train", "--eval-iters", str(EVAL_ITERS), *where))
    return {
        "iterations": iterations,
        "seed": config.train.seed,
        "tokens": tokens,
        "minutes": round(sum(seconds) / 60, 1),
        "median": round(statistics.median(seconds), 3),
        "losses": shortened(losses),
        "validation": validation,
        "whole": evaluated(Path(f"{save}-evaluation", "run")),
        "kill": compare_repeated_steps(history),
    }


def draw_long(path: Path, losses: Mapping[int, float], validation: Mapping[int, float], tokens: int) -> None:
    """Draw the training loss and the validation loss over tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    means = window_means(losses)
    middles = [(WINDOW / 2 + WINDOW * number) * tokens / 1e6 for number in range(len(means))]
    axes.plot(middles, means, linewidth=0.8, label=f"training, mean of {WINDOW} steps")
    axes.plot(
        [step * tokens / 1e6 for step in validation], [*validation.values()], "o-", markersize=3, label="validation"
    )
    axes.set(xlabel="million tokens", ylabel="loss (nats per token)")
    axes.legend()
    figure.savefig(path)


# --- the page -----------------------------------------------------------------------------------------------------


def page(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with its tables brought up to date."""
    for part, table in (("layouts", layouts_table), ("pair", pair_table), ("long", long_table)):
        found = {
            f"{result['machine']['processor']} ({name})": {**result["found"][part], "name": name}
            for name, result in sorted(results.items())
            if part in result["found"]
        }
        tables = ["\n".join(table({machine: result})) for machine, result in found.items()]
        lines = "\n" + "\n\n".join(tables) if found else "Not run yet at its length."
        mark = f"<!-- written by benchmarks/at_size.py {part} -->\n"
        before, _, rest = text.partition(mark)
        text = before + mark + lines.rstrip() + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
    return text


def layouts_table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the section on layouts."""
    for machine, result in found.items():
        tokens = result["iterations"] * result["tokens"]
        yield f"![Four curves](layouts-{result['name']}.png)\n"
        size = f"{result['iterations']:,} steps of {result['tokens']:,} tokens, {tokens / 1e6:.1f}M in all"
        yield f"{machine}, seed {result['seed']}, {result['date']}: {size}."
        yield ""
        head = "| layout | killed after step | resumed from | steps repeated | of them equal bit for bit "
        losses = f"| loss of the last {WINDOW} steps | validation loss "
        yield f"{head}{losses}| from one process: worst step | worst mean of {WINDOW} steps |"
        yield f"|{9 * '---|'}"
        for layout, kill in result["kills"].items():
            apart = result["differences"].get(layout)
            shown = (
                [f"{apart['worst']:.1e} (step {apart['step']})", f"{apart['worst_mean']:.1e}"] if apart else ["", ""]
            )
            losses = f"{result['losses'][layout][-1]:.4f} | {result['validation'][layout]:.4f}"
            repeated = f"{kill['killed_at']} | {kill['resumed_from']} | {kill['num_repeated']} | {kill['num_equal']}"
            yield f"| {layout} | {repeated} | {losses} | {' | '.join(shown)} |"


def pair_table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the section on the pair."""
    for machine, result in found.items():
        loaded = " *loaded*" if is_disturbed(result) else ""
        tokens, steps = result["tokens"], result["iterations"]
        yield f"![Losses of both](pair-{result['name']}.png)\n"
        size = f"{steps:,} steps of {tokens:,} tokens, {steps * tokens / 1e6:.2f}M in all"
        flags = f", `{' '.join(result['flags'])}`" if result["flags"] else ""
        yield f"{machine}{loaded}{flags}, seed {result['seed']}, {result['date']}: {size}."
        yield ""
        yield f"| | median step | steps together | loss of the last {WINDOW} steps | validation loss |"
        yield "|---|---|---|---|---|"
        for name, seconds in result["seconds"].items():
            losses = f"{result['losses'][name][-1]:.4f} | {result['validation'][name]:.4f}"
            yield f"| {name} | {statistics.median(seconds):.3f} s | {sum(seconds) / 60:.1f} min | {losses} |"
        ratio, apart = ratios(result, PEER), result["differences"]
        tenths = statistics.quantiles(ratio, n=10)
        yield ""
        yield (
            f"The Trainer's seconds over Megalith's in the same step, {len(ratio):,} steps: median "
            f"**{statistics.median(ratio):.2f}**, a tenth below {tenths[0]:.2f}, a tenth above {tenths[-1]:.2f}. "
            f"Losses differ at most by {apart['worst']:.1e} (step {apart['step']}), {apart['mean']:.1e} in the mean, "
            f"means of {WINDOW} steps by at most {apart['worst_mean']:.1e}."
        )


def long_table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the section on the long training."""
    for machine, result in found.items():
        tokens, steps, kill = result["tokens"], result["iterations"], result["kill"]
        yield f"![Training and validation loss](long-{result['name']}.png)\n"
        size = f"{steps:,} steps of {tokens:,} tokens, {steps * tokens / 1e6:.1f}M in all"
        flags = f", `{' '.join(result['flags'])}`" if result["flags"] else ""
        took = f"{result['minutes']:.0f} minutes of steps, {result['median']:.3f} s the median one"
        yield f"{machine}{flags}, seed {result['seed']}, {result['date']}: {size}, {took}."
        yield f"Killed after step {kill['killed_at']:,}, resumed from {kill['resumed_from']:,}:"
        yield f"of the {kill['num_repeated']} steps that were repeated {kill['num_equal']} are equal bit for bit."
        yield ""
        shown = {step: loss for step, loss in result["validation"].items() if int(step) % (steps // 10) == 0}
        yield f"| iteration | {' | '.join(f'{int(step):,}' for step in shown)} |"
        yield f"|{(len(shown) + 1) * '---|'}"
        yield f"| validation loss of 16 batches | {' | '.join(f'{loss:.4f}' for loss in shown.values())} |"
        yield ""
        seen = EVAL_ITERS * tokens / 1e6
        yield f"At the end, over {seen:.2f}M tokens of the validation text: **{result['whole']:.4f}**."


# --- the command --------------------------------------------------------------------------------------------------

PARTS = {"layouts": measure_layouts, "pair": measure_pair, "long": measure_long}


def keep(name: str, part: str, result: dict[str, Any]) -> None:
    """Write a result to the file of the machine."""
    path = RESULTS / f"at-size-{name}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"found": {}}
    record["machine"] = describe()
    record["found"][part] = result
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS, nargs="?", help="what to run; not needed with --pages")
    parser.add_argument("--folder", type=Path, help="where the corpus and the runs lie")
    parser.add_argument("--iterations", type=int, help="length of the training (default: the recipe's)")
    parser.add_argument("--minutes", type=float, default=20.0, help="of a session of the pair (default: %(default)g)")
    parser.add_argument("--name", default=name_of(describe()), help="name of the machine (default: %(default)s)")
    parser.add_argument("--pages", action="store_true", help="run nothing, write the page from the results")
    options, options.flags = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started ends too
    if not options.pages:
        if options.part is None or options.folder is None or not (options.folder / "machine-text").is_dir():
            parser.error("give a part, and --folder with machine-text in it (benchmarks/machine_text.py)")
        os.chdir(options.folder)  # recipes name the data relative to it
        preprocess(Path("machine-text"))
        disturbance = Disturbance(os.getloadavg()[0])
        if (result := PARTS[options.part](options)) is None:
            sys.exit(75)  # not at its end; as `megalith train` after a signal
        stamp = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "flags": options.flags}
        keep(options.name, options.part, {**result, **disturbance.record(), **stamp})
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), read_results("at-size")), encoding="utf-8")


if __name__ == "__main__":
    main()
