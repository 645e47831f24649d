"""Plan of a ladder: a family of model sizes, and the runs that train them.

A size keeps the proportions of the configuration: heads, query groups and a given feed-forward width grow with the
width, so that the size of a head stays. Sizes are counted without embeddings and output layer, as the model has them.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalith.cli.arguments import below_one
from megalith.config import ModelConfig, RunConfig, load
from megalith.config.command_line import read_command_line, without_settings
from megalith.config.run import all_settings
from megalith.errors import ConfigError

FEWEST_SIZES, FEWEST_RATIOS = 3, 2  # with fewer the law's five constants cannot be told apart
_LONG = 10**9  # stands for the lengths of the runs while the configuration is checked
_SAVES = 10  # of a run without --save-interval
_OF_RUNS = {  # the ladder's own on a command line; a recipe for single runs may have them
    "train_iters": "the length follows from --tokens-per-parameter (of a sweep: --sweep-iters)",
    "eval_interval": "each run is evaluated at its end",
    "early_stopping_patience": "each run is evaluated at its end",
    "save": "the runs are saved in --folder",
    "load": "the runs continue from --folder",
}
_FOLDERS = (
    "tensorboard_dir",
    "non_persistent_global_ckpt_dir",
    "non_persistent_local_ckpt_dir",
)  # each run has its own
_MOST_TOKENS = 1e6  # for each parameter
_LISTS = ("depths", "widths", "tokens_per_parameter", "check", "sweep_lr")
_REFUSED = {
    "train_samples": "the length follows from --tokens-per-parameter",
    "lr_decay_iters": "the learning rate decays over each run; give the warm-up by --lr-warmup-fraction",
    "lr_decay_samples": "the learning rate decays over each run; give the warm-up by --lr-warmup-fraction",
    "rampup_batch_size": "give one --global-batch-size",
    "step_batch_size_schedule": "give one --global-batch-size",
    "num_experts": "the law counts parameters that every token meets; give a dense model",
    "skip_train": "the runs are trained; leave it out",
    "finetune": "a stopped run would begin again with the weights it has; leave it out",
    "ckpt_step": "the runs continue from their last checkpoints; leave it out",
    **{
        f"no_{what}": "a stopped run could not be resumed; leave it out"
        for what in ("save_optim", "save_rng", "load_optim", "load_rng")
    },
}


@dataclass(frozen=True)
class Size:
    """A model of the family.

    Attributes:
        settings: those that make the size, by name.
        parameters: N, without embeddings and output layer.
    """

    layers: int
    width: int
    settings: Mapping[str, int] = field(hash=False)
    parameters: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}"


@dataclass(frozen=True)
class Rung:
    """A run of the ladder; `purpose` is sweep (of learning rates), fit or check."""

    purpose: str
    size: Size
    iterations: int
    tokens: int
    lr: float

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return f"{self.size}-iters{self.iterations}-lr{self.lr:g}"


@dataclass(frozen=True)
class Plan:
    """What a ladder trains; sizes ascend."""

    base: RunConfig
    words: Sequence[str]  # of megalith train, for all runs
    sizes: Sequence[Size]
    ratios: Sequence[float]
    check: Sequence[float]  # tokens per parameter of the largest size, which is not fitted
    sweep_lr: Sequence[float]
    sweep_sizes: int
    sweep_iters: int | None
    lr_horizon_exponent: float = 0.0

    @property
    def mup_base(self) -> int | None:
        """Return the width of the smallest size, where it is the base of muP and no setting says another."""
        model = self.base.model
        return self.sizes[0].width if model.use_mup and model.mup_base_hidden_size is None else None

    def config(self) -> dict[str, dict[str, Any]]:
        """Return the settings by group that all runs share."""
        settings = self.base.to_dict()
        if self.mup_base is not None:
            settings["model"] = {**settings["model"], "mup_base_hidden_size": self.mup_base}
        return settings

    def sweep(self) -> list[Rung]:
        """Return the runs that find the learning rate."""
        return [
            self._rung("sweep", size, self._sweep_iterations(size), lr)
            for size in self.sizes[: self.sweep_sizes]
            for lr in self.sweep_lr
        ]

    def fitted(self, lr: float) -> list[Rung]:
        """Return the runs of the fit, by size; `lr` is the rate of a run as long as those of the sweep."""
        sizes = self.sizes[:-1] if self.check else self.sizes
        return [self._at_horizon("fit", size, ratio, lr) for size in sizes for ratio in self.ratios]

    def checked(self, lr: float) -> list[Rung]:
        """Return the runs of the largest size that are predicted; `lr` as of `fitted`."""
        return [self._at_horizon("check", self.sizes[-1], ratio, lr) for ratio in self.check]

    def rungs(self) -> list[Rung]:
        """Return all runs in their order, with the learning rate of the configuration where a sweep finds another."""
        return [*self.sweep(), *self.fitted(self.base.schedule.lr), *self.checked(self.base.schedule.lr)]

    def arguments(self, rung: Rung, folder: Path) -> list[str]:
        """Return the arguments of `megalith train` that start or continue a run in a folder."""
        schedule, checkpoint = self.base.schedule, self.base.checkpoint
        place = str(folder / rung.name)
        words = [*self.words, "--train-iters", str(rung.iterations), "--save", place, "--load", place]
        words += ["--lr", f"{rung.lr:g}", "--min-lr", f"{schedule.min_lr * rung.lr / schedule.lr:g}"]
        words += ["--eval-interval", str(rung.iterations + 1)]  # once, at the end: all on the same samples
        words += [word for name, value in rung.size.settings.items() for word in (_flag(name), str(value))]
        if self.mup_base is not None:
            words += ["--mup-base-hidden-size", str(self.mup_base)]
        for name in _FOLDERS:
            if shared := getattr(getattr(self.base, all_settings()[name].group), name):
                words += [_flag(name), str(Path(shared) / rung.name)]
        if checkpoint.save_interval is None:
            words += ["--save-interval", str(max(1, rung.iterations // _SAVES))]
        return words if checkpoint.keep_last is not None else [*words, "--keep-last", "1"]

    def _at_horizon(self, purpose: str, size: Size, ratio: float, lr: float) -> Rung:
        """Return a run whose rate falls with its length: Bjorck et al. 2024, arXiv:2409.19913."""
        iterations = self._iterations(size, ratio)
        factor = (iterations / self._sweep_iterations(self.sizes[0])) ** -self.lr_horizon_exponent
        return self._rung(purpose, size, iterations, lr if factor == 1 else float(f"{lr * factor:.3g}"))

    def _sweep_iterations(self, size: Size) -> int:
        return self.sweep_iters or self._iterations(size, self.ratios[0])

    def _iterations(self, size: Size, ratio: float) -> int:
        return max(1, round(ratio * size.parameters / self._tokens_per_step))

    @property
    def _tokens_per_step(self) -> int:
        return self.base.global_batch_size * self.base.data.seq_length

    def _rung(self, purpose: str, size: Size, iterations: int, lr: float) -> Rung:
        return Rung(purpose, size, iterations, iterations * self._tokens_per_step, lr)


def make_plan(options: argparse.Namespace, training: Sequence[str]) -> Plan:
    """Return the plan of a command line.

    Raises:
        ConfigError: with all violations, those of the configuration of each run included.
    """
    given = read_command_line(training).values
    problems = [*_problems(options), *_sweep_problems(options)]
    problems += [
        f"{all_settings()[name].flag} {given[name]}: {reason}; leave it out"
        for name, reason in _OF_RUNS.items()
        if name in given
    ]
    try:
        others = without_settings(training, ["train_samples", *_OF_RUNS])
        base = load([*others, "--train-iters", str(_LONG)], files=False)
    except ConfigError as error:
        own = [text for text in error.violations if str(_LONG) in text and "--train-samples" in text]  # of a recipe
        problems += [f"--train-samples: {_REFUSED['train_samples']}"] if own else []
        raise ConfigError([*problems, *(text for text in error.violations if text not in own)]) from error
    problems += [
        f"{all_settings()[name].flag}: {remedy}"
        for name, remedy in _REFUSED.items()
        if name in given or getattr(getattr(base, all_settings()[name].group), name)
    ]
    if not base.schedule.lr:
        problems.append("--lr 0: nothing is learnt; give a rate above 0")
    if "rank" in base.given:
        problems.append("the ladder starts processes itself; start it as one, with --nproc N for runs of N processes")
    if not (base.train.eval_iters or base.data.full_validation):
        problems.append("--eval-iters 0: the ladder compares validation losses; give --eval-iters or --full-validation")
    sizes = list(_sizes(base.model, options.depths, options.widths, problems))
    plan = Plan(
        base,
        training,
        sorted(sizes, key=lambda size: size.parameters),
        sorted(options.tokens_per_parameter),
        sorted(options.check),
        sorted(options.sweep_lr),
        options.sweep_sizes,
        options.sweep_iters,
        options.lr_horizon_exponent,
    )
    problems += [] if problems else [*_repeated(plan), *_violations(plan, Path(options.folder), files=not options.plan)]
    if problems:
        raise ConfigError(problems)
    return plan


def _repeated(plan: Plan) -> list[str]:
    """Return which ratios and rates make the same run twice, whose copies would pass for further measurements."""
    lr, found = plan.base.schedule.lr, dict[tuple[str, str], list[float]]()
    lists = {"--tokens-per-parameter": plan.ratios, "--check": plan.check, "--sweep-lr": plan.sweep_lr}
    for (flag, values), rungs in zip(lists.items(), (plan.fitted(lr), plan.checked(lr), plan.sweep()), strict=True):
        for rung, value in zip(rungs, itertools.cycle(values), strict=False):
            found.setdefault((flag, rung.name), []).append(value)
    same = dict[tuple[str, str], list[str]]()
    for (flag, name), values in found.items():
        if len(values) > 1:
            same.setdefault((flag, " ".join(map(str, values))), []).append(name)
    return [
        f"{flag} {values}: one run, not {len(values.split())} ({', '.join(names)}); give values further apart"
        for (flag, values), names in same.items()
    ]


def _violations(plan: Plan, folder: Path, *, files: bool) -> list[str]:
    """Return what is wrong with the configurations of the runs, with the runs where it is not all of them."""
    runs, found = plan.rungs(), dict[str, list[str]]()
    for rung in runs:
        try:
            load(plan.arguments(rung, folder), files=files)
        except ConfigError as error:
            for text in error.violations:
                found.setdefault(text, []).append(rung.name)
    return [text if len(names) == len(runs) else f"{', '.join(names)}: {text}" for text, names in found.items()]


def _problems(options: argparse.Namespace) -> list[str]:
    """Return what is wrong with the ladder's own flags."""
    lists = {f"--{name.replace('_', '-')}": getattr(options, name) for name in _LISTS}
    found = [
        f"{flag} {value:g} is not above 0; leave it out"
        for flag, values in lists.items()
        for value in values
        if not 0 < value < math.inf
    ]
    found += [
        f"{flag} {value:g}: at most {_MOST_TOKENS:,.0f} tokens for each parameter; give less"
        for flag in ("--tokens-per-parameter", "--check")
        for value in lists[flag]
        if _MOST_TOKENS < value < math.inf
    ]
    found += [
        f"{flag} {value:g} is given {values.count(value)} times; give it once"
        for flag, values in lists.items()
        for value in dict.fromkeys(values)
        if values.count(value) > 1 and not (flag in ("--depths", "--widths") and options.depths and options.widths)
    ]
    depths, widths, ratios = options.depths, options.widths, options.tokens_per_parameter
    if depths and widths and len(depths) != len(widths):
        found.append(f"--depths has {len(depths)} values, --widths {len(widths)}; give as many, or one flag alone")
    if not (depths or widths):
        found.append("no sizes; give --depths or --widths, or both in pairs")
    if not ratios and not (options.sweep_lr and options.sweep_iters):
        found.append(
            "--tokens-per-parameter is missing; without it give --sweep-lr and --sweep-iters for a sweep alone"
        )
    if ratios and len(ratios) < FEWEST_RATIOS:
        found.append(f"--tokens-per-parameter has one value; give {FEWEST_RATIOS} or more to tell size from data")
    sizes = list(itertools.zip_longest(depths, widths))
    found += [
        f"--depths {size[0]} with --widths {size[1]} is given {sizes.count(size)} times; give each size once"
        for size in dict.fromkeys(sizes)
        if len(depths) == len(widths) and sizes.count(size) > 1
    ]
    fitted = len(set(sizes)) - bool(options.check)
    if ratios and (depths or widths) and fitted < FEWEST_SIZES:
        beside = " beside the largest, which --check leaves out" if options.check else ""
        found.append(f"--depths, --widths: sizes to fit: {fitted}; give {FEWEST_SIZES} or more{beside}")
    exponent = options.lr_horizon_exponent
    if not 0 <= exponent < 1:
        found.append(f"--lr-horizon-exponent {exponent:g} is not in [0, 1); 0.32 is that of arXiv:2409.19913")
    elif exponent and not ratios:
        found.append(f"--lr-horizon-exponent {exponent:g} has no effect without --tokens-per-parameter; leave it out")
    if options.check and not ratios:
        found.append("--check needs --tokens-per-parameter: without a fit nothing is predicted")
    return found


def _sweep_problems(options: argparse.Namespace) -> list[str]:
    """Return what is wrong with --sweep-sizes and --sweep-iters."""
    found = below_one(options, "--sweep-sizes", "--sweep-iters")
    number = max(len(options.depths), len(options.widths))
    if number and options.sweep_sizes > number:
        found.append(
            f"--sweep-sizes {options.sweep_sizes} is above the number of sizes, {number}; give {number} or less"
        )
    given = {"--sweep-sizes": options.sweep_sizes, "--sweep-iters": options.sweep_iters}
    if not options.sweep_sizes_given:
        del given["--sweep-sizes"]
    if not options.sweep_lr:
        found += [
            f"{flag} {value} has no effect without --sweep-lr; give rates, or leave it out"
            for flag, value in given.items()
            if value is not None
        ]
    return found


def _sizes(model: ModelConfig, depths: Sequence[int], widths: Sequence[int], problems: list[str]) -> Iterator[Size]:
    """Yield the sizes; what is no whole number is added to `problems`."""
    grow = ["num_attention_heads"]
    grow += ["num_query_groups"] if model.group_query_attention else []
    grow += ["ffn_hidden_size"] if model.ffn_hidden_size is not None else []
    for layers, given in itertools.zip_longest(depths, widths, fillvalue=0):
        layers = layers or model.num_layers
        width = given or layers * model.hidden_size // model.num_layers
        if layers < 1 or width < 1:
            continue
        if not given and layers * model.hidden_size % model.num_layers:
            problems.append(
                f"--depths {layers}: --hidden-size {model.hidden_size} x {layers} / --num-layers {model.num_layers} is "
                "no whole number; choose another depth, or give --widths too"
            )
            continue
        settings: dict[str, Any] = {"num_layers": layers, "hidden_size": width}
        settings |= {name: getattr(model, name) * width // model.hidden_size for name in grow}
        uneven = [name for name in grow if getattr(model, name) * width % model.hidden_size]
        for name in uneven:
            value = getattr(model, name)
            problems.append(
                f"{'--widths' if widths else '--depths'}: {_flag(name)} {value} of --hidden-size {model.hidden_size} "
                f"is no whole number at a width of {width}; give multiples of "
                f"{model.hidden_size // math.gcd(model.hidden_size, value)}"
            )
        if not uneven:
            yield Size(layers, width, settings, count_parameters(replace(model, **settings)))


def count_parameters(model: ModelConfig) -> int:
    """Return the parameters of a model without embeddings and output layer."""
    import torch

    from megalith.models.families import model_class

    built = model_class(model)(model, 1, device=torch.device("meta"))
    names = ((name, parameter.numel()) for name, parameter in built.named_parameters())
    return sum(count for name, count in names if not name.startswith(("embedding.", "output_layer.")))


def _flag(name: str) -> str:
    return all_settings()[name].flag
