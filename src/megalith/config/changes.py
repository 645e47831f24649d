"""Settings that differ between a run and its checkpoint, and the effect of the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megalith.config.fields import Setting
from megalith.config.from_args import MODEL_SETTINGS
from megalith.config.run import RunConfig, all_settings, group_types
from megalith.config.saved_args import megatron_args

HARMLESS = "harmless"
LENGTH = "the length of the run"
ROUNDING = "the same numbers up to rounding (with dropout: other masks)"
ANOTHER_WAY = "the training goes another way from here"
ORDER = "other samples, or another order of them"
ARCHITECTURE = "another model"
REPLACED = "the checkpoint's value counts"

_BY_GROUP = {
    "log": HARMLESS,
    "checkpoint": HARMLESS,
    "parallel": ROUNDING,
    "launch": ROUNDING,
    "data": ORDER,
    "tokenizer": ORDER,
    "model": ARCHITECTURE,
}
# Settings whose effect differs from that of their group.
_BY_NAME = {
    **dict.fromkeys(("train_iters", "train_samples"), LENGTH),
    **dict.fromkeys(("seed", "split"), ORDER),
    **dict.fromkeys(("device", "compile", "attention_backend", "transformer_impl", "micro_batch_size"), ROUNDING),
    **dict.fromkeys(("moe_token_dispatcher_type", "attention_softmax_in_fp32", "fp32_residual_connection"), ROUNDING),
    **dict.fromkeys(
        (
            *("eval_interval", "eval_iters", "early_stopping_patience", "exit_interval", "exit_duration_in_mins"),
            *("exit_signal_handler", "exit_signal", "skip_train", "start_eval_at_iter", "full_validation"),
            *("manual_gc", "manual_gc_interval", "recompute_granularity", "recompute_method", "recompute_num_layers"),
            *("recompute_modules", "data_cache_path", "num_workers", "mmap_bin_files", "distributed_backend"),
            *("distributed_timeout_minutes", "distributed_timeout_seconds_after_init", "debug_collectives"),
            *("check_for_nan_in_loss_and_grad", "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
            "sft_sample_prompts",
            *(
                "dump_param_to_param_group_map",
                "vocab_file",
                "merge_file",
                "make_vocab_size_divisible_by",
                "use_cpu_initialization",
                "init_method_std",
                "embedding_init_method_std",
                "init_method_xavier_uniform",
                "moe_grouped_gemm",
                "moe_permute_fusion",
                "moe_router_fusion",
                "moe_pad_expert_input_to_capacity",
            ),
        ),
        HARMLESS,
    ),
    **dict.fromkeys(("no_load_optim", "no_load_rng"), ANOTHER_WAY),
}
_LEAVES_STATES_OUT = ("no_load_optim", "no_load_rng")  # at this start, whatever the start before did
_OF_THE_SAVED_SCHEDULE = (
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
)
_OF_THIS_START = (
    *("rank", "local_rank", "local_world_size", "master_addr", "master_port", "launcher", "nproc", "max_restarts"),
    *("load", "finetune", "ckpt_step"),
)
_OF_MEGATRON = (
    *("train_iters", "train_samples", "micro_batch_size", "global_batch_size", "seed", "split", "seq_length"),
    *("hidden_dropout", "attention_dropout", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("context_parallel_size", "eval_interval", "eval_iters", "log_interval", "save_interval", "fp16", "bf16"),
)


@dataclass(frozen=True)
class Change:
    """Setting whose value differs from that in the checkpoint."""

    flag: str
    # values as text; "-" for none
    was: str
    now: str
    effect: str  # one of the texts above

    def __str__(self) -> str:
        return f"{self.flag} {self.was} -> {self.now}"

    def to_dict(self) -> dict[str, str]:
        """Return the change as a dictionary of strings."""
        return asdict(self)


def changes_since(saved: Mapping[str, Any], run: RunConfig) -> list[Change]:
    """Return the settings of a run that differ from those of a checkpoint, in the order of declaration.

    Args:
        saved: configuration that wrote it (`RunConfig.to_dict`), or Megatron's flat arguments. Settings missing there
            are skipped.
    """
    grouped = all(name in saved for name in ("model", "train"))
    present = run.to_dict() if grouped else megatron_args(run)
    changes = []
    for setting in all_settings(run.registry).values():
        there, here = (saved.get(setting.group, {}), present.get(setting.group, {})) if grouped else (saved, present)
        known = setting.name in there and setting.name in here
        if not known or setting.name in _OF_THIS_START or not (grouped or _is_megatron_argument(setting)):
            continue
        was, now = there[setting.name], here[setting.name]
        was = False if setting.name in _LEAVES_STATES_OUT else was
        if was != now:
            if setting.flag != setting.positive_flag:  # the flag switches off what is on by default
                was, now = not was, not now
            changes.append(Change(setting.flag, value_text(was), value_text(now), _effect_in(run, setting)))
    return changes


def _effect_in(run: RunConfig, setting: Setting) -> str:
    if run.schedule.use_checkpoint_opt_param_scheduler and setting.name in _OF_THE_SAVED_SCHEDULE:
        return REPLACED
    return effect_of(setting)


def effect_of(setting: Setting) -> str:
    """Return the effect of continuing a run with another value of a setting."""
    of_the_run = setting.group == "model" and setting.name not in MODEL_SETTINGS
    return _BY_NAME.get(setting.name, ANOTHER_WAY if of_the_run else _BY_GROUP.get(setting.group, ANOTHER_WAY))


def change_lines(changes: list[Change], iteration: int) -> list[str]:
    """Return the changes as console lines: one each, and one for all harmless ones."""
    if not changes:
        return []
    mattering = [f"    {change}: {change.effect}" for change in changes if change.effect != HARMLESS]
    harmless = [str(change) for change in changes if change.effect == HARMLESS]
    last = [f"    harmless: {', '.join(harmless)}"] if harmless else []
    return [f"changed since the checkpoint of iteration {iteration}:", *mattering, *last]


def _is_megatron_argument(setting: Setting) -> bool:
    """Return whether Megatron's argument of this name has the same meaning."""
    return setting.group in ("schedule", "optimizer") or setting.name in _OF_MEGATRON


def value_text(value: Any) -> str:
    """Return the value of a setting as one line of text; "-" for none."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None or value == "" else f"{value:g}" if isinstance(value, float) else str(value)


assert set(_BY_GROUP) <= set(group_types()), "effects name a group that does not exist"
