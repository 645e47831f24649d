"""Rules across settings: small named predicates, each with the message that names the flags, the values and a remedy.

A rule speaks only when every setting that it needs is there and readable, so that one mistake gives one message.
`RULES` concern the configuration alone, `FILE_RULES` also look at the file system; `NOTICES` are no violations but
say what has no effect.
"""

from __future__ import annotations

import re
from pathlib import Path

from megalith.config.checkpoint_rules import CHECKPOINT_RULES
from megalith.config.launch_rules import LAUNCH_NOTICES, LAUNCH_RULES
from megalith.config.layout_rules import LAYOUT_NOTICES, LAYOUT_RULES, MODEL_PARALLEL
from megalith.config.recompute_rules import RECOMPUTE_NOTICES, RECOMPUTE_RULES
from megalith.config.rule import Draft, Rule, divisors, multiples, rule, show
from megalith.config.run import all_settings
from megalith.config.values import closest

_SEPARATORS_OF_SPLIT = re.compile(r"[.0-9]+")


# --- architecture ---


@rule("hidden_size", "num_attention_heads", "kv_channels")
def hidden_size_divides_into_heads(draft: Draft) -> str:
    model = draft.run.model
    if model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0:
        return ""
    quotient, rest = divmod(model.hidden_size, model.num_attention_heads)
    return (
        f"{show(draft, 'hidden_size')} is not divisible by {show(draft, 'num_attention_heads')} "
        f"({model.hidden_size} = {quotient}*{model.num_attention_heads} + {rest}); "
        f"nearest: {multiples(model.hidden_size, model.num_attention_heads)}, "
        f"or use {divisors(model.hidden_size, model.num_attention_heads, 1)} heads"
    )


@rule("num_attention_heads", "num_query_groups", "group_query_attention")
def heads_divide_into_query_groups(draft: Draft) -> str:
    model = draft.run.model
    if not model.group_query_attention or model.num_attention_heads % model.num_query_groups == 0:
        return ""
    return (
        f"{show(draft, 'num_attention_heads')} is not divisible by {show(draft, 'num_query_groups')}; "
        f"use {divisors(model.num_attention_heads, model.num_query_groups)} groups"
    )


@rule("seq_length", "max_position_embeddings")
def positions_cover_the_sequence(draft: Draft) -> str:
    run = draft.run
    if run.data.seq_length <= run.model.max_position_embeddings:
        return ""
    return (
        f"{show(draft, 'seq_length')} is longer than {show(draft, 'max_position_embeddings')}; "
        f"use --max-position-embeddings {run.data.seq_length}, or a sequence of at most "
        f"{run.model.max_position_embeddings}"
    )


@rule("hidden_size", "ffn_hidden_size", "swiglu")
def gated_layers_have_a_width(draft: Draft) -> str:
    model = draft.run.model
    if model.ffn_size > 0:
        return ""
    return (
        f"--swiglu with {show(draft, 'hidden_size')} gives feed-forward layers of width 0 by Megatron's rule "
        f"int(8/3 x hidden / 64) x 64; give --ffn-hidden-size, for example {4 * model.hidden_size}"
    )


@rule("position_embedding_type", "rotary_percent", "kv_channels", "hidden_size", "num_attention_heads")
def rotary_positions_turn_pairs(draft: Draft) -> str:
    model = draft.run.model
    whole_heads = model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0
    if model.position_embedding_type != "rope" or not whole_heads:
        return ""
    size, head = model.rotary_size, model.head_size
    if size >= 2 and size % 2 == 0:
        return ""
    if head < 2 or model.rotary_percent == 1.0:
        return (
            f"rotary positions turn pairs of channels, and heads of {head} are odd; use an even head size by "
            f"--kv-channels {head + 1} or another --num-attention-heads"
        )
    even = max(2, size - size % 2)
    return (
        f"{show(draft, 'rotary_percent')} of heads of {head} is {size} channels, and rotary positions turn pairs; "
        f"use --rotary-percent {even / head:.6g} ({even} channels) or {min(even + 2, head - head % 2) / head:.6g}"
    )


@rule("position_embedding_type", "add_position_embedding")
def leaving_out_the_table_needs_rotary_positions(draft: Draft) -> str:
    model = draft.run.model
    if model.add_position_embedding or model.position_embedding_type == "rope":
        return ""
    return f"--no-position-embedding with {show(draft, 'position_embedding_type')}: use --position-embedding-type rope"


# --- precision ---


@rule("fp16", "bf16")
def one_half_precision(draft: Draft) -> str:
    precision = draft.run.precision
    return "--fp16 and --bf16 exclude each other; use one of them" if precision.fp16 and precision.bf16 else ""


@rule("initial_loss_scale", "min_loss_scale")
def loss_scale_starts_above_its_minimum(draft: Draft) -> str:
    precision = draft.run.precision
    if precision.min_loss_scale <= precision.initial_loss_scale:
        return ""
    return (
        f"{show(draft, 'min_loss_scale')} is above {show(draft, 'initial_loss_scale')}; "
        f"use --min-loss-scale of at most {precision.initial_loss_scale:g}"
    )


# --- batch and length ---


def _replicas(draft: Draft) -> int:
    return max(1, draft.run.data_parallel_size)


@rule("global_batch_size", "micro_batch_size", "world_size", *MODEL_PARALLEL)
def micro_batches_fill_the_global_batch(draft: Draft) -> str:
    train, replicas = draft.run.train, _replicas(draft)
    unit = train.micro_batch_size * replicas
    if train.global_batch_size is None or train.global_batch_size % unit == 0:
        return ""
    times = f" times data-parallel size {replicas}" if replicas > 1 else ""
    smaller = divisors(train.global_batch_size // replicas, train.micro_batch_size)
    alternative = f", or use --micro-batch-size {smaller}" if train.global_batch_size % replicas == 0 else ""
    return (
        f"{show(draft, 'global_batch_size')} is not divisible by {show(draft, 'micro_batch_size')}{times}; "
        f"nearest: {multiples(train.global_batch_size, unit)}{alternative}"
    )


@rule("train_iters", "train_samples")
def one_length_of_the_run(draft: Draft) -> str:
    train = draft.run.train
    if train.train_iters is None and train.train_samples is None:
        return "the length of the run is required: --train-iters N or --train-samples N"
    if train.train_iters is not None and train.train_samples is not None:
        return f"{show(draft, 'train_iters')} and {show(draft, 'train_samples')} exclude each other; use one of them"
    return ""


@rule("train_samples", "global_batch_size", "micro_batch_size", "world_size", *MODEL_PARALLEL)
def samples_make_at_least_one_step(draft: Draft) -> str:
    train = draft.run.train
    batch = train.global_batch_size or train.micro_batch_size * _replicas(draft)
    if train.train_samples is None or train.train_samples >= batch:
        return ""
    return f"{show(draft, 'train_samples')} is less than one global batch of {batch}; use at least {batch}"


# --- schedule ---

_BY_ITERS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
_BY_SAMPLES = ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")


@rule("train_iters", "train_samples", *_BY_ITERS, *_BY_SAMPLES)
def schedule_counts_as_the_run_does(draft: Draft) -> str:
    train, schedule = draft.run.train, draft.run.schedule
    if (train.train_iters is None) == (train.train_samples is None):
        return ""
    by_iters = train.train_iters is not None
    wrong, right = (_BY_SAMPLES, "iters") if by_iters else (_BY_ITERS, "samples")
    shown = [show(draft, name) for name in wrong if getattr(schedule, name)]
    if not shown:
        return ""
    length = "train_iters" if by_iters else "train_samples"
    return f"{', '.join(shown)}: the run is counted by {show(draft, length)}; use the -{right} flags of the schedule"


@rule("min_lr", "lr")
def lowest_rate_is_not_above_the_peak(draft: Draft) -> str:
    schedule = draft.run.schedule
    if schedule.min_lr <= schedule.lr:
        return ""
    return f"{show(draft, 'min_lr')} is above {show(draft, 'lr')}; use --min-lr of at most {schedule.lr:g}"


@rule("lr_warmup_init", "lr")
def warm_up_rises(draft: Draft) -> str:
    schedule = draft.run.schedule
    if schedule.lr_warmup_init <= schedule.lr:
        return ""
    return (
        f"{show(draft, 'lr_warmup_init')} is above {show(draft, 'lr')}; use --lr-warmup-init of at most {schedule.lr:g}"
    )


@rule("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples")
def one_length_of_the_warm_up(draft: Draft) -> str:
    schedule = draft.run.schedule
    if schedule.lr_warmup_fraction is None:
        return ""
    others = [name for name in ("lr_warmup_iters", "lr_warmup_samples") if getattr(schedule, name)]
    if not others:
        return ""
    return f"{show(draft, 'lr_warmup_fraction')} and {show(draft, others[0])} exclude each other; use one of them"


def _decay_length(draft: Draft) -> tuple[int, str, str] | None:
    """Length of the decay, its unit and where it comes from; None when the run has no single length."""
    train, schedule = draft.run.train, draft.run.schedule
    if (train.train_iters is None) == (train.train_samples is None):
        return None
    unit = "iters" if train.train_iters is not None else "samples"
    for name, value in (
        (f"lr_decay_{unit}", getattr(schedule, f"lr_decay_{unit}")),
        (f"train_{unit}", getattr(train, f"train_{unit}")),
    ):
        if value is not None:
            return value, unit, show(draft, name)
    return None


@rule("train_iters", "train_samples", *_BY_ITERS, *_BY_SAMPLES)
def warm_up_ends_before_the_decay_does(draft: Draft) -> str:
    decay = _decay_length(draft)
    if decay is None:
        return ""
    length, unit, source = decay
    if getattr(draft.run.schedule, f"lr_warmup_{unit}") < length:
        return ""
    return (
        f"{show(draft, f'lr_warmup_{unit}')} is not below the length of the decay, {length} {unit} ({source}); "
        f"use at most {length - 1}, or a longer --lr-decay-{unit}"
    )


@rule("lr_decay_style", "train_iters", "train_samples", *_BY_ITERS, *_BY_SAMPLES)
def wsd_has_a_final_decay(draft: Draft) -> str:
    decay = _decay_length(draft)
    if draft.run.schedule.lr_decay_style != "WSD" or decay is None:
        return ""
    length, unit, source = decay
    final = getattr(draft.run.schedule, f"lr_wsd_decay_{unit}")
    if final is None:
        return f"--lr-decay-style WSD requires --lr-wsd-decay-{unit}, the length of the final decay (at most {length})"
    if final > length:
        return f"{show(draft, f'lr_wsd_decay_{unit}')} is longer than the schedule, {source}; use at most {length}"
    return ""


@rule("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
def one_source_of_the_schedule_on_resume(draft: Draft) -> str:
    schedule = draft.run.schedule
    if not (schedule.override_opt_param_scheduler and schedule.use_checkpoint_opt_param_scheduler):
        return ""
    return (
        "--override-opt-param-scheduler (take the flags) and --use-checkpoint-opt-param-scheduler "
        "(take the checkpoint) exclude each other; use one of them"
    )


@rule("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")
def growing_weight_decay_has_two_ends(draft: Draft) -> str:
    optimizer = draft.run.optimizer
    ends = (optimizer.start_weight_decay, optimizer.end_weight_decay)
    style = show(draft, "weight_decay_incr_style")
    if optimizer.weight_decay_incr_style == "constant":
        given = [name for name in ("start_weight_decay", "end_weight_decay") if getattr(optimizer, name) is not None]
        if not given:
            return ""
        shown = ", ".join(show(draft, name) for name in given)
        return f"{shown} with {style}: use --weight-decay-incr-style linear or cosine, or --weight-decay alone"
    if None in ends:
        return f"{style} requires both --start-weight-decay and --end-weight-decay"
    if ends[0] is not None and ends[1] is not None and ends[0] > ends[1]:
        return f"{show(draft, 'start_weight_decay')} is above {show(draft, 'end_weight_decay')}; exchange them"
    return ""


# --- data and tokenizer ---


@rule("data_path", "mock_data")
def one_source_of_data(draft: Draft) -> str:
    data = draft.run.data
    if not data.data_path and not data.mock_data:
        return "data is required: --data-path PREFIX (of PREFIX.bin and PREFIX.idx), or --mock-data to try without"
    if data.data_path and data.mock_data:
        return f"{show(draft, 'data_path')} and --mock-data exclude each other; use one of them"
    return ""


@rule("data_path")
def one_dataset(draft: Draft) -> str:
    paths = draft.run.data.data_path
    if len(paths) < 2:
        return ""
    return (
        f"{show(draft, 'data_path')}: blends and weights come with the complete data path; not in this version, "
        "give one prefix"
    )


@rule("split")
def split_is_three_parts(draft: Draft) -> str:
    split = draft.run.data.split
    remedy = "; write three parts like 949,50,1"
    try:
        parts = [float(part) for part in _SEPARATORS_OF_SPLIT.findall(split)]
    except ValueError:
        return f"--split {split}: not numbers{remedy}"
    if _SEPARATORS_OF_SPLIT.sub("", split).strip(",/ "):
        return f"--split {split}: not numbers with commas between{remedy}"
    if not 1 <= len(parts) <= 3:
        return f"--split {split or chr(39) * 2}: {len(parts)} parts{remedy}"
    if parts[0] == 0:
        return f"--split {split}: nothing is left for training{remedy}"
    return ""


@rule("tokenizer_type", "vocab_file", "merge_file", "vocab_size", "tokenizer_model")
def tokenizer_has_what_it_needs(draft: Draft) -> str:
    lacking = draft.run.tokenizer.lacking
    if not lacking:
        return ""
    if draft.run.tokenizer.tokenizer_type == "NullTokenizer":
        return "--tokenizer-type NullTokenizer requires --vocab-size N"
    verb = "is" if len(lacking) == 1 else "are"
    if draft.run.tokenizer.tokenizer_type == "HuggingFaceTokenizer":
        return "--tokenizer-type HuggingFaceTokenizer requires --tokenizer-model DIR, a folder with tokenizer.json"
    mock = " (or, with --mock-data, --tokenizer-type NullTokenizer --vocab-size N)" if draft.run.data.mock_data else ""
    return f"{' and '.join(lacking)} {verb} required by {show(draft, 'tokenizer_type')}{mock}"


# --- checkpoints ---


@rule("save", "save_interval")
def saving_has_an_interval(draft: Draft) -> str:
    checkpoint = draft.run.checkpoint
    if checkpoint.save is None or checkpoint.save_interval is not None:
        return ""
    return f"{show(draft, 'save')} requires --save-interval N, the iterations between checkpoints"


# --- files ---


def _file_problem(draft: Draft, name: str, path: str) -> str:
    if Path(path).is_file():
        return ""
    what = "is a folder" if Path(path).is_dir() else f"no such file{_from_here(path)}"
    return f"{show(draft, name)}: {what}{_near(Path(path))}"


def _from_here(path: str) -> str:
    return "" if Path(path).is_absolute() else f" from {Path.cwd()}"


def _near(path: Path) -> str:
    """A file of a similar name in the same folder, as a question; the folder itself when that is missing."""
    if not path.parent.is_dir():
        return f"; the folder {path.parent} does not exist"
    guess = closest(path.name, (entry.name for entry in path.parent.iterdir() if entry.is_file()), cutoff=0.6)
    return f"; did you mean {path.parent / guess}?" if guess and guess != path.name else ""


@rule("vocab_file")
def vocabulary_file_exists(draft: Draft) -> str:
    path = draft.run.tokenizer.vocab_file
    return _file_problem(draft, "vocab_file", path) if path else ""


@rule("merge_file")
def merges_file_exists(draft: Draft) -> str:
    path = draft.run.tokenizer.merge_file
    return _file_problem(draft, "merge_file", path) if path else ""


@rule("data_path")
def dataset_exists(draft: Draft) -> str:
    if len(draft.run.data.data_path) != 1:
        return ""
    prefix = draft.run.data.data_path[0]
    missing = [prefix + ending for ending in (".bin", ".idx") if not Path(prefix + ending).is_file()]
    if not missing:
        return ""
    found = _prefix_that_was_meant(prefix)
    hint = f"; did you mean --data-path {found}?" if found else "; make them with `megalith preprocess`"
    verb = "does" if len(missing) == 1 else "do"
    return f"--data-path {prefix}: {' and '.join(missing)} {verb} not exist{_from_here(prefix)}{hint}"


def _prefix_that_was_meant(prefix: str) -> str:
    whole = [prefix.removesuffix(".bin"), prefix.removesuffix(".idx"), prefix + "_text_document"]
    for candidate in whole:
        if candidate != prefix and Path(candidate + ".bin").is_file() and Path(candidate + ".idx").is_file():
            return candidate
    folder = Path(prefix).parent
    if not folder.is_dir():
        return ""
    stems = [entry.name.removesuffix(".idx") for entry in folder.glob("*.idx")]
    guess = closest(Path(prefix).name, stems)
    return str(folder / guess) if guess and guess != Path(prefix).name else ""


def _folder_is_no_file(name: str) -> Rule:
    def check(draft: Draft) -> str:
        path = getattr(getattr(draft.run, all_settings()[name].group), name)
        if path is None or not Path(path).is_file():
            return ""
        return f"{show(draft, name)} is a file; give a folder"

    return Rule(f"{name}_is_a_folder", (name,), check)


# --- what has no effect ---


def _idle_without(name: str, other: str, why: str) -> Rule:
    """A notice for a setting that is given while the one that it serves is not."""

    def check(draft: Draft) -> str:
        setting, needed = all_settings()[name], all_settings()[other]
        value = getattr(getattr(draft.run, needed.group), other)
        if name not in draft.given or getattr(getattr(draft.run, setting.group), name) in (False, None) or value:
            return ""
        return f"{show(draft, name)} has no effect: {why}"

    return Rule(f"{name}_needs_{other}", (name, other), check)


@rule("split")
def split_without_validation(draft: Draft) -> str:
    parts = [float(part) for part in _SEPARATORS_OF_SPLIT.findall(draft.run.data.split)]
    if len(parts) > 1 and parts[1] > 0:
        return ""
    return f"--split {draft.run.data.split} has no part for validation: there is no evaluation while training"


@rule("split", "data_path")
def split_by_default(draft: Draft) -> str:
    if "split" in draft.given or not draft.run.data.data_path:
        return ""
    return f"no --split is given: {draft.run.data.split} (training, validation, test), as in Megatron"


@rule("tokenizer_type", "vocab_size")
def vocabulary_comes_from_the_file(draft: Draft) -> str:
    tokenizer = draft.run.tokenizer
    if tokenizer.tokenizer_type == "NullTokenizer" or "vocab_size" not in draft.given:
        return ""
    file = "--tokenizer-model" if tokenizer.tokenizer_type == "HuggingFaceTokenizer" else "--vocab-file"
    return f"{show(draft, 'vocab_size')} has no effect: the vocabulary is that of {file}"


@rule("lr_decay_style")
def wsd_settings_without_wsd(draft: Draft) -> str:
    names = ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
    shown = [show(draft, name) for name in names if name in draft.given]
    if draft.run.schedule.lr_decay_style == "WSD" or not shown:
        return ""
    return f"{', '.join(shown)}: no effect without --lr-decay-style WSD"


@rule("loss_scale", "fp16", "bf16")
def loss_scale_without_half_precision(draft: Draft) -> str:
    precision = draft.run.precision
    if precision.loss_scale is None or precision.fp16 or precision.bf16:
        return ""
    return f"{show(draft, 'loss_scale')} has no effect: the loss is scaled only under --fp16 or --bf16"


@rule("use_rope_scaling", "position_embedding_type")
def rope_scaling_without_rotary_positions(draft: Draft) -> str:
    model = draft.run.model
    if not model.use_rope_scaling or model.position_embedding_type == "rope":
        return ""
    return f"{show(draft, 'use_rope_scaling')} has no effect with {show(draft, 'position_embedding_type')}"


RULES: tuple[Rule, ...] = (
    hidden_size_divides_into_heads,
    heads_divide_into_query_groups,
    positions_cover_the_sequence,
    gated_layers_have_a_width,
    rotary_positions_turn_pairs,
    leaving_out_the_table_needs_rotary_positions,
    one_half_precision,
    loss_scale_starts_above_its_minimum,
    micro_batches_fill_the_global_batch,
    one_length_of_the_run,
    samples_make_at_least_one_step,
    schedule_counts_as_the_run_does,
    lowest_rate_is_not_above_the_peak,
    warm_up_rises,
    one_length_of_the_warm_up,
    warm_up_ends_before_the_decay_does,
    wsd_has_a_final_decay,
    one_source_of_the_schedule_on_resume,
    growing_weight_decay_has_two_ends,
    one_source_of_data,
    one_dataset,
    split_is_three_parts,
    tokenizer_has_what_it_needs,
    saving_has_an_interval,
    *CHECKPOINT_RULES,
    *LAYOUT_RULES,
    *LAUNCH_RULES,
    *RECOMPUTE_RULES,
)

FILE_RULES: tuple[Rule, ...] = (
    vocabulary_file_exists,
    merges_file_exists,
    dataset_exists,
    *(
        _folder_is_no_file(name)
        for name in ("save", "load", "non_persistent_global_ckpt_dir", "data_cache_path", "tensorboard_dir")
    ),
)

NOTICES: tuple[Rule, ...] = (
    split_by_default,
    split_without_validation,
    vocabulary_comes_from_the_file,
    wsd_settings_without_wsd,
    loss_scale_without_half_precision,
    rope_scaling_without_rotary_positions,
    *LAYOUT_NOTICES,
    *LAUNCH_NOTICES,
    *RECOMPUTE_NOTICES,
    _idle_without("num_query_groups", "group_query_attention", "--group-query-attention is not given"),
    _idle_without("rope_scaling_factor", "use_rope_scaling", "--use-rope-scaling is not given"),
    *(
        _idle_without(name, "save", "nothing is saved without --save")
        for name in (
            *("save_interval", "no_save_optim", "no_save_rng", "async_save", "save_retain_interval", "keep_last"),
            "non_persistent_save_interval",
        )
    ),
    _idle_without(
        "non_persistent_global_ckpt_dir", "non_persistent_ckpt_type", "--non-persistent-ckpt-type global is not given"
    ),
    *(
        _idle_without(name, "load", "nothing is loaded without --load")
        for name in ("ckpt_step", "no_load_optim", "no_load_rng", "finetune", "exit_on_missing_checkpoint")
    ),
    *(
        _idle_without(name, "recompute_granularity", "--recompute-granularity is not given")
        for name in ("recompute_method", "recompute_num_layers")
    ),
    _idle_without("tensorboard_log_interval", "tensorboard_dir", "--tensorboard-dir is not given"),
    *(
        _idle_without(name, "fp16", "the loss scale moves only under --fp16")
        for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    ),
)
