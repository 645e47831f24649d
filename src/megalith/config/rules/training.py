"""Rules of the training itself: precision, batch, length and activation recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile

from megalith.config.rules.data import missing_validation
from megalith.config.rules.rule import (
    Draft,
    Rule,
    divisors,
    exclusive,
    forbid,
    idle,
    idle_without,
    multiples,
    note,
    notice,
    rule,
    show,
    value_of,
)
from megalith.config.run import RunConfig
from megalith.schedules.batch_size import Stage, read_steps, stepped

one_half_precision = exclusive("fp16", "bf16")


loss_scale_starts_above_its_minimum = forbid(
    lambda run: run.precision.min_loss_scale > run.precision.initial_loss_scale,
    "{min_loss_scale} is above {initial_loss_scale}; use --min-loss-scale of at most "
    "{run.precision.initial_loss_scale:g}",
)


def stages_to_come(run: RunConfig) -> Sequence[Stage]:
    """Return the stages of the batch size that the run may go through.

    A run that loads a checkpoint may be past the first ones, which fewer replicas have gone through; those that do not
    fit its own replicas are left out, and refused when the checkpoint proves not to be past them.
    """
    sizes = run.batch_sizes
    if not run.checkpoint.load:
        return sizes.stages
    coming = list(dropwhile(lambda stage: not sizes.is_whole(stage.size), sizes.stages))
    return coming or sizes.stages


def _replicas(draft: Draft) -> int:
    return max(1, draft.run.data_parallel_size)


@rule
def micro_batches_fill_the_global_batch(draft: Draft) -> str:
    train, replicas = draft.run.train, _replicas(draft)
    unit = train.micro_batch_size * replicas
    if train.global_batch_size is None or train.global_batch_size % unit == 0:
        return ""
    if train.decrease_batch_size_if_needed and train.global_batch_size > unit:
        return ""
    times = f" times data-parallel size {replicas}" if replicas > 1 else ""
    smaller = divisors(train.global_batch_size // replicas, train.micro_batch_size)
    alternative = f", or use --micro-batch-size {smaller}" if train.global_batch_size % replicas == 0 else ""
    return (
        f"{show(draft, 'global_batch_size')} is not divisible by {show(draft, 'micro_batch_size')}{times}; "
        f"nearest: {multiples(train.global_batch_size, unit)}{alternative}"
    )


@rule
def one_length_of_the_run(draft: Draft) -> str:
    train = draft.run.train
    if train.train_iters is None and train.train_samples is None:
        return "the length of the run is required: --train-iters N or --train-samples N"
    if train.train_iters is not None and train.train_samples is not None:
        return f"{show(draft, 'train_iters')} and {show(draft, 'train_samples')} exclude each other; use one of them"
    return ""


@rule
def samples_make_at_least_one_step(draft: Draft) -> str:
    train = draft.run.train
    batch = draft.run.batch_sizes.nominal_size(0)
    if train.train_samples is None or train.train_samples >= batch:
        return ""
    return f"{show(draft, 'train_samples')} is less than one global batch of {batch}; use at least {batch}"


@rule
def ramp_leads_to_the_global_batch(draft: Draft) -> str:
    train = draft.run.train
    ramp, final = train.rampup_batch_size, train.global_batch_size
    if not ramp or (final is not None and train.ramp_reaches(final)):
        return ""
    shown = show(draft, "rampup_batch_size")
    if len(ramp) != 3:
        return f"{shown}: {len(ramp)} numbers; give three: first batch size, increment, samples of the whole ramp"
    if final is None:
        return f"{shown} requires --global-batch-size, the size that it leads to"
    start, increment, _ = ramp
    if start >= final:
        return f"{shown} starts at {start}, and {show(draft, 'global_batch_size')} is not above it; start lower"
    nearest = divisors(final - start, increment)
    return (
        f"{shown}: from {start} to --global-batch-size {final} are {final - start} samples, no multiple of the "
        f"increment {increment}; use an increment of {nearest}"
    )


@rule
def one_schedule_of_the_batch_size(draft: Draft) -> str:
    train = draft.run.train
    if train.step_batch_size_schedule is None:
        return ""
    shown = show(draft, "step_batch_size_schedule")
    steps = read_steps(train.step_batch_size_schedule)
    if steps is None:
        return f"{shown}: not of the form TOKENS:SIZE TOKENS:SIZE ...; for instance '0:768 250B:1536'"
    try:
        stepped(steps, draft.run.data.seq_length)
    except ValueError as error:
        return f"{shown}: {error}"
    others = [name for name in ("global_batch_size", "rampup_batch_size") if getattr(train, name)]
    if not others:
        return ""
    return f"{shown} and {show(draft, others[0])} exclude each other; use one of them"


@rule
def micro_batches_fill_every_batch(draft: Draft) -> str:
    train, sizes = draft.run.train, draft.run.batch_sizes
    name = "rampup_batch_size" if train.rampup_batch_size else "step_batch_size_schedule"
    if len(sizes.stages) == 1 and name == "rampup_batch_size":
        return ""
    unit = sizes.unit
    wrong = [
        stage.size
        for stage in stages_to_come(draft.run)
        if stage.size < unit or not (sizes.is_whole(stage.size) or train.decrease_batch_size_if_needed)
    ]
    if not wrong or not getattr(train, name):
        return ""
    times = f" times data-parallel size {_replicas(draft)}" if _replicas(draft) > 1 else ""
    remedy = "" if wrong[0] < unit else ", or --decrease-batch-size-if-needed"
    return (
        f"{show(draft, name)}: global batches of {', '.join(map(str, wrong[:3]))}{' ...' * (len(wrong) > 3)} samples "
        f"are not divisible by {show(draft, 'micro_batch_size')}{times}; use sizes that are multiples of {unit}{remedy}"
    )


@rule
def micro_batches_fill_an_evaluation(draft: Draft) -> str:
    run = draft.run
    given = [name for name in ("eval_global_batch_size", "eval_micro_batch_size") if getattr(run.train, name)]
    if not given:
        return ""
    unit = run.eval_micro_batch_size * _replicas(draft)
    name = "eval_global_batch_size" if run.train.eval_global_batch_size else "global_batch_size"
    size = run.train.eval_global_batch_size or run.global_batch_size
    if size % unit == 0:
        return ""
    micro = show(draft, "eval_micro_batch_size" if run.train.eval_micro_batch_size else "micro_batch_size")
    times = f" times data-parallel size {_replicas(draft)}" if _replicas(draft) > 1 else ""
    return (
        f"{show(draft, name)} of an evaluation is not divisible by {micro}{times}; use "
        f"--eval-global-batch-size {multiples(size, unit)}"
    )


@rule
def validation_losses_are_measured(draft: Draft) -> str:
    run = draft.run
    wanted = {"early_stopping_patience": run.train.early_stopping_patience, "keep_best": run.checkpoint.keep_best}
    given = " and ".join(show(draft, name) for name, value in wanted.items() if value)
    if not given:
        return ""
    if not (run.train.eval_batches or run.data.full_validation):
        return (
            f"{given} with {show(draft, 'eval_iters')}: no validation loss is measured; use --eval-iters of at least "
            "1, or --full-validation"
        )
    missing = missing_validation(draft)
    return f"{given}: no validation loss is measured, since {missing}; give the run validation data" if missing else ""


@notice
def evaluations_fall_in_the_run(draft: Draft) -> str:
    run, train = draft.run, draft.run.train
    before = max(0, (train.start_eval_at_iter or 0) - 1)
    number = max(0, run.train_iters // train.eval_interval - before // train.eval_interval)
    wanted = {"early_stopping_patience": (train.early_stopping_patience or 0) + 1, "keep_best": 1}
    unused = [show(draft, name) for name, least in wanted.items() if value_of(draft, name) and number < least]
    if not unused:
        return ""
    return (
        f"{' and '.join(unused)} without effect: {show(draft, 'eval_interval')} makes {number} evaluations in "
        f"{run.train_iters} iterations"
    )


one_precision_of_gradients = exclusive("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32")


def _format_of_gradients(name: str) -> Rule:
    """Return an error if a dtype for Megatron's own FSDP differs from the one used here."""

    def check(draft: Draft) -> str:
        precision = draft.run.precision
        asked = getattr(precision, name)
        if asked == "auto":
            return ""
        if not draft.run.parallel.use_megatron_fsdp:
            return f"{show(draft, name)} is of --use-megatron-fsdp; add that or leave it out"
        kept = "fp32" if precision.grads_in_fp32 else "bf16" if precision.bf16 else "fp16"
        if asked == kept:
            return ""
        more = (
            ""
            if asked != "bf16" or not precision.bf16 or precision.grad_reduce_in_bf16
            else "add --grad-reduce-in-bf16, or "
        )
        return f"{show(draft, name)}: gradients are kept and summed in {kept} here; {more}use auto or {kept}"

    return Rule(f"gradients_have_{name}", check)


loss_scale_without_half_precision = note(
    lambda run: run.precision.loss_scale is not None and not run.precision.fp16 and not run.precision.bf16,
    "{loss_scale} has no effect: the loss is scaled only under --fp16 or --bf16",
)


@rule
def one_word_on_repeated_steps(draft: Draft) -> str:
    precision = draft.run.precision
    if precision.rerun_mode != "disabled" or precision.nan_policy != "rerun":
        return ""
    return f"{show(draft, 'rerun_mode')} and {show(draft, 'nan_policy')} exclude each other; use one of them"


@notice
def policy_without_checks(draft: Draft) -> str:
    precision = draft.run.precision
    checks = precision.stop_on_nan or precision.check_for_spiky_loss or precision.check_for_large_grads
    given = [name for name in ("nan_policy", "rerun_mode") if name in draft.given]
    if checks or not given or precision.rerun_mode == "report_stats" or precision.bad_step_policy == "stop":
        return ""
    why = "the dynamic loss scale skips such steps" if precision.dynamic_loss_scale else "nothing is checked"
    return f"{show(draft, given[0])} has no effect on losses that are not finite: {why}"


injection_needs_validation = note(
    lambda run: run.precision.error_injection_rate and run.precision.rerun_mode == "disabled",
    "{error_injection_rate} has no effect with {rerun_mode}",
)


@notice
def skipped_iterations_are_in_the_run(draft: Draft) -> str:
    train = draft.run.train
    beyond = [number for number in train.iterations_to_skip if train.train_iters and number >= train.train_iters]
    if not beyond:
        return ""
    return (
        f"--iterations-to-skip {' '.join(map(str, beyond))} has no effect: the run has {train.train_iters} iterations, "
        f"the last of them after {(train.train_iters or 1) - 1}"
    )


@rule
def phases_end_in_the_run(draft: Draft) -> str:
    train = draft.run.train
    if train.phase_transition_iterations is None:
        return ""
    words = [word.strip() for word in train.phase_transition_iterations.split(",")]
    last = train.train_iters or max(train.phase_ends, default=0) + 1
    bad = [word for word in words if not word.isdecimal() or not 0 < int(word) < last]
    if not bad:
        return ""
    limit = f", below {show(draft, 'train_iters')}" if train.train_iters else ""
    return (
        f"{show(draft, 'phase_transition_iterations')}: {bad[0] or 'an empty word'}: not an iteration; "
        f"give numbers from 1 on{limit}, such as 1000,5000"
    )


@rule
def phases_have_one_batch_size(draft: Draft) -> str:
    train = draft.run.train
    growing = [name for name in ("rampup_batch_size", "step_batch_size_schedule") if getattr(train, name)]
    if train.phase_transition_iterations is None or not growing:
        return ""
    return (
        f"{show(draft, 'phase_transition_iterations')} and {show(draft, growing[0])} exclude each other: a phase is "
        "found by its number of samples; use one batch size"
    )


the_next_phase_needs_a_checkpoint = note(
    lambda run: run.train.phase_ends and not run.checkpoint.save,
    "{phase_transition_iterations} stops the run at the end of a phase, and the next phase needs its checkpoint: give "
    "--save FOLDER",
)


gradients_are_kept_as_asked = (
    _format_of_gradients("megatron_fsdp_main_grads_dtype"),
    _format_of_gradients("megatron_fsdp_grad_comm_dtype"),
)

_DYNAMIC_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")

training_settings_are_read = (
    *idle_without("bf16", "grad_reduce_in_bf16", why="it is for --bf16; under --fp16 gradients are fp16 by default"),
    *idle_without("error_injection_rate", "error_injection_type"),
    *idle(
        _DYNAMIC_SCALE,
        lambda run: run.precision.dynamic_loss_scale,
        lambda draft: ": the loss scale moves only under --fp16 without --loss-scale",
    ),
)


_DETAILS = ("recompute_method", "recompute_num_layers")


def _given(draft: Draft) -> list[str]:
    return [name for name in _DETAILS if getattr(draft.run.train, name) is not None]


@rule
def whole_layers_are_recomputed_by_a_method(draft: Draft) -> str:
    given = _given(draft)
    if draft.run.train.recompute_granularity != "full" or len(given) == len(_DETAILS):
        return ""
    missing = {
        "recompute_method": "--recompute-method uniform (all layers, in groups) or block (the first of each stage)",
        "recompute_num_layers": "--recompute-num-layers N (layers of a group, or from the first on; 1 was the default "
        "of older Megatron versions)",
    }
    lacking = " and ".join(text for name, text in missing.items() if name not in given)
    return f"--recompute-granularity full requires {lacking}"


@rule
def selective_recomputation_has_no_method(draft: Draft) -> str:
    given = _given(draft)
    if draft.run.train.recompute_granularity != "selective" or not given:
        return ""
    return (
        f"{' and '.join(show(draft, name) for name in given)} with --recompute-granularity selective: whole layers are "
        "recomputed by --recompute-granularity full"
    )


experts_are_recomputed_once = forbid(
    lambda run: run.train.moe_layer_recompute and run.train.recompute_granularity == "full",
    "--moe-layer-recompute with --recompute-granularity full, which recomputes experts too; leave it out",
)
fused_attention_keeps_no_scores = note(
    lambda run: (
        run.train.recompute_granularity == "selective"
        and "core_attn" in (("core_attn",) if run.train.recompute_modules is None else run.train.recompute_modules)
        and not run.model.saves_attention_probabilities
    ),
    "selective recomputation of core_attn needs nothing here: fused attention stores no scores, which is what it "
    "would save; the numbers are the same",
)


@notice
def recomputed_parts_are_there(draft: Draft) -> str:
    model, train = draft.run.model, draft.run.train
    found = []
    if not model.mixture and not train.recomputed_parts.isdisjoint({"moe", "moe_act", "shared_experts"}):
        found.append("there are no experts to recompute without --num-experts")
    elif "shared_experts" in train.recomputed_parts and model.moe_shared_expert_intermediate_size is None:
        found.append("there are no shared experts without --moe-shared-expert-intermediate-size")
    if "mla_up_proj" in train.recomputed_parts and not model.multi_latent_attention:
        found.append("mla_up_proj is a part of --multi-latent-attention alone")
    name = "moe_layer_recompute" if train.moe_layer_recompute else "recompute_modules"
    return f"{show(draft, name)}: {'; '.join(found)}" if found else ""


@notice
def modules_are_recomputed_selectively(draft: Draft) -> str:
    train = draft.run.train
    if train.recompute_modules is None or train.recompute_granularity == "selective" or train.moe_layer_recompute:
        return ""
    return f"{show(draft, 'recompute_modules')} has no effect without --recompute-granularity selective"


recomputation_is_on = idle_without("recompute_granularity", *_DETAILS)
