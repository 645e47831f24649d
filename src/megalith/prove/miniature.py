"""Miniatures of a run: its structure kept, its sizes shrunk to the smallest with the same divisibility.

An axis above 1 becomes 2, or 4 where 2 would hide something: more tensor-parallel ranks than query groups, more
data-parallel ranks than expert-parallel ones. More than `MOST_RANKS` are divided into several miniatures, in which
every two axes of the run come together. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from math import prod
from pathlib import Path
from re import findall
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megalith.config import RunConfig, all_settings, from_values
from megalith.config.run import plain
from megalith.config.values import marked_layers, read_pattern
from megalith.data.indexed import LOSS_MASK, IndexedWriter
from megalith.errors import ConfigError
from megalith.layout import read_parts
from megalith.registry import EMPTY, Registry
from megalith.tokenizers.protocol import padded_vocab_size

MOST_RANKS = 8
STEPS, SAVED = 3, 2  # SAVED: the step after which a checkpoint is resumed
VOCABULARY = 43  # ids, an odd number: every layout pads them
SENTINELS = 10
LENGTH = 16

_LEFT_OUT: Mapping[str, Any] = {
    # Of one machine or of one place: files, dashboards, launchers, exits.
    **{f"{name}data_path": () for name in ("", "train_", "valid_", "test_")},
    **dict.fromkeys(("data_args_path", "per_split_data_args_path", "data_cache_path", "moe_routing_trace_path")),
    "sft_tokenizer_prompt_format": None,
    **dict.fromkeys(("save", "load", "pretrained_checkpoint", "ckpt_step", "ckpt_convert_format", "ckpt_convert_save")),
    **dict.fromkeys(("non_persistent_save_interval", "non_persistent_ckpt_type", "non_persistent_global_ckpt_dir")),
    **dict.fromkeys(("save_interval", "save_retain_interval", "exit_interval", "exit_duration_in_mins", "keep_last")),
    **dict.fromkeys(("tensorboard_dir", "phase_transition_iterations", "log_memory_interval")),
    **dict.fromkeys(
        ("step_batch_size_schedule", "early_stopping_patience", "nan_policy", "start_eval_at_iter", "prove")
    ),
    "mock_data": False,
    "data_source": (),
    "data_source_weights": (),
    "multiple_validation_sets": False,
    "validation_set_names": (),
    "trackers": (),
    "wandb_project": "",
    "hooks": (),
    "iterations_to_skip": (),
    "use_checkpoint_args": False,
    "use_mp_args_from_checkpoint_args": False,
    "exit_on_missing_checkpoint": False,
    "finetune": False,
    **dict.fromkeys(("no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng"), False),
    "async_save": False,
    "keep_best": False,
    "rehearse_resume": False,
    "skip_train": False,
    "profile": False,
    "error_injection_rate": 0,
    "use_cpu_initialization": False,
}
_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_IN_FP64: Mapping[str, Any] = {
    "bf16": False,
    "fp16": False,
    "grad_reduce_in_bf16": False,
    "loss_scale": None,
    "use_precision_aware_optimizer": False,
    **dict.fromkeys(_DTYPES, "fp32"),
    "optimizer_cpu_offload": False,
    "fp32_residual_connection": False,
    "accumulate_allreduce_grads_in_fp32": True,
    "attention_softmax_in_fp32": True,
    "compile": False,
    "attention_dropout": 0.0,
    "lora_dropout": 0.0,
    "moe_input_jitter_eps": None,
    "moe_router_dtype": None,
    "device": "cpu",
    "deterministic_mode": False,
}
"""What has no form in fp64 over ranks on a CPU; the certificate says that it is not covered."""
_PRECISION = (
    *("bf16", "fp16", "use_precision_aware_optimizer", "fp32_residual_connection"),
    *("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "attention_softmax_in_fp32"),
    "moe_router_dtype",
    *_DTYPES,
)
LOSS_SCALE = 64.0
"""Largest loss scale: that of a run may overflow for longer than a miniature trains, whose weights are large."""


@dataclass(frozen=True)
class Miniature:
    """A run of a few small steps with the structure of another.

    Attributes:
        axes: Of the run, those above 1 that are here -> their number of ranks.
        values: Its settings, for `from_values`.
        changed: Setting -> (value of the run, value here), where they differ.
        precision: Settings of the run's own precision, in place of those of fp64.
        dtype: Name of the dtype of its weights.
        given: Settings that the run gives.
        registry: What it registers.
    """

    axes: Mapping[str, int]
    values: Mapping[str, Any]
    changed: Mapping[str, tuple[Any, Any]]
    precision: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    given: frozenset[str] = frozenset()
    registry: Registry = EMPTY

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(size for axis, size in self.axes.items() if axis not in ("ep", "etp"))

    def __str__(self) -> str:
        return " x ".join(f"{axis}{size}" for axis, size in self.axes.items()) or "one process"

    def config(self, rank: int = 0, **other: Any) -> RunConfig:
        """Return the checked configuration of a rank; `other` settings replace those of the miniature."""
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.world_size}
        environ = {name: str(value) for name, value in place.items()}
        return from_values({**self.values, **other}, environ=environ, registry=self.registry)

    def rounded(self) -> Miniature:
        """Return the same in the run's own precision."""
        return replace(self, values=_given({**self.values, **self.precision}))

    def alone(self) -> Miniature:
        """Return the same model and batches in one process."""
        return self.without(*self.axes)

    def without(self, *axes: str) -> Miniature:
        """Return the same with one rank of these axes, in as many micro-batches as its global batch makes."""
        left = {axis: size for axis, size in self.axes.items() if axis not in axes}
        if left.keys().isdisjoint(("dp", "cp", "tp")):
            left = {axis: size for axis, size in left.items() if axis not in ("ep", "etp")}
        return replace(self, axes=left, values=_given({**self.values, **layout_settings(left)}))


def miniatures(run: RunConfig, folder: Path, *, checked: bool = True) -> list[Miniature]:
    """Return the miniatures that together have every two axes of a run.

    Args:
        folder: Of the miniature's data, for `write_data`.
        checked: Look for that data, and apply the rules of configurations.

    Raises:
        ConfigError: A miniature breaks a rule that the run keeps: its message says so and has the rule's.
    """
    sizes = _axes(run)
    layouts = [{axis: size for axis, size in sizes.items() if axis in chosen} for chosen in _cover(sizes)]
    found = [_miniature(run, axes, folder) for axes in layouts]
    for one in found if checked else ():
        try:
            one.config()
            one.alone().config()
        except ConfigError as error:
            raise ConfigError(
                [f"the miniature {one} of this configuration is none: {text}" for text in error.violations]
            ) from error
    return found


def _axes(run: RunConfig) -> dict[str, int]:
    """Return the ranks in a miniature of each axis of the run that is above 1, `ep` and `etp` included."""
    layout, groups = run.layout, run.model.query_groups
    sizes = {axis: 2 for axis in ("tp", "cp", "dp", "pp") if getattr(layout, axis) > 1}
    if 1 < groups < layout.tp:
        sizes["tp"] = 4
    if layout.ep > 1:
        sizes["ep"] = 2
        if "dp" in sizes and layout.expert_tp == layout.tp and "cp" not in sizes and layout.ep < layout.dp:
            sizes["dp"] = 4
    if layout.expert_tp != layout.tp:
        sizes["etp"] = min(layout.expert_tp, 2)
    return sizes


def _cover(sizes: Mapping[str, int]) -> list[frozenset[str]]:
    """Return sets of axes of at most `MOST_RANKS` ranks in which every two axes come together, found greedily."""
    fits = [
        frozenset(chosen)
        for count in range(len(sizes) + 1)
        for chosen in combinations(sizes, count)
        if prod(sizes[axis] for axis in chosen if axis not in ("ep", "etp")) <= MOST_RANKS and _has_room(chosen, sizes)
    ]
    left = {pair for chosen in fits for pair in _pairs(chosen)}
    found: list[frozenset[str]] = []
    while left:
        found.append(max(fits, key=lambda chosen: (len(left & _pairs(chosen)), len(chosen))))
        left -= _pairs(found[-1])
    return found or [max(fits, key=len)]


def _has_room(chosen: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    """Return whether the ranks of a stage hold the expert axes."""
    here = {axis: sizes[axis] if axis in chosen else 1 for axis in ("tp", "cp", "dp", "ep")}
    if "etp" in sizes:
        stage = here["tp"] * here["cp"] * here["dp"]
        return "etp" in chosen and stage % (sizes["etp"] * here["ep"]) == 0
    return bool(here["cp"] * here["dp"] % here["ep"] == 0)


def _pairs(axes: frozenset[str] | tuple[str, ...]) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in combinations(axes, 2)} | {frozenset((axis,)) for axis in axes}


def layout_settings(axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the settings of a layout; without an axis also those that mean nothing without it."""
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": axes.get("tp", 1),
        "context_parallel_size": axes.get("cp", 1),
        "pipeline_model_parallel_size": axes.get("pp", 1),
        "expert_model_parallel_size": axes.get("ep", 1),
        "expert_tensor_parallel_size": axes.get("etp"),
    }
    if "pp" not in axes:
        settings |= dict.fromkeys(_OF_PIPELINES)
        settings |= {
            "account_for_embedding_in_pipeline_split": False,
            "account_for_loss_in_pipeline_split": False,
            "pipeline_schedule": "auto",
        }
    if "tp" not in axes:
        settings["sequence_parallel"] = False
    return settings


_OF_PIPELINES = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
)


def _miniature(run: RunConfig, axes: Mapping[str, int], folder: Path) -> Miniature:
    settings = all_settings(run.registry)
    parts = (_training(run, axes), _model(run, axes), _layers(run, axes), layout_settings(axes))
    shrunk = {**_LEFT_OUT, **_IN_FP64, **_data(run, axes, folder)}
    if run.model.lora_rank is not None:
        base = str(folder / "-".join(["base", *axes]))
        shrunk |= {"lora_rank": min(run.model.lora_rank, 3), "pretrained_checkpoint": base}
    for part in parts:
        shrunk |= part
    own = {s.name: getattr(getattr(run, s.group), s.name) for s in settings.values() if s.group in _GROUPS}
    changed = {name: (own[name], shrunk[name]) for name in shrunk if own[name] != shrunk[name] and name not in FILES}
    kept = {name: plain(own[name]) for name in run.given if name in own and name not in shrunk}
    kept |= {
        part.name: getattr(one.settings, part.name)
        for one in run.registered
        if one.settings is not None and one.entry.kind not in ("dataset", "tokenizer")
        for part in fields(one.settings)
    }
    precision = {name: own[name] for name in _PRECISION if own[name] != shrunk[name]}
    precision |= {"hidden_dropout": 0.0}
    precision |= {name: min(own[name], LOSS_SCALE) for name in ("loss_scale", "initial_loss_scale") if own[name]}
    values, dtype = _given(kept | shrunk | _tokenizer(run, folder)), run.precision.params_dtype
    return Miniature(dict(axes), values, changed, precision, dtype, run.given, run.registry)


_GROUPS = frozenset(("model", "train", "schedule", "data", "precision", "optimizer", "checkpoint", "log", "parallel"))


FILES = ("data_path", "data_cache_path", "pretrained_checkpoint")
"""Of the miniature, in a folder that is gone afterwards."""


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out values that equal the default: rules refuse some settings only where they are given."""
    settings = all_settings()
    return {name: value for name, value in values.items() if name not in settings or value != settings[name].default}


def _layers(run: RunConfig, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the number of layers, their patterns, and the settings that count layers."""
    model, parallel, train, stages = run.model, run.parallel, run.train, axes.get("pp", 1)
    virtual = 2 if stages > 1 and parallel.virtual_stages(model.num_layers) > 1 else 1
    recomputed, in_a_part = train.recompute_num_layers, max(1, model.num_layers // max(1, _parts(run)))
    per_part = 2 if recomputed is not None and (recomputed > 1 or recomputed < in_a_part) else 1
    kinds = list(zip(model.experts, model.windows, model.rotated_layers, strict=True))
    parts = stages * virtual
    # Embedding and loss take the place of a layer each.
    counted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    counted = counted if stages > 1 else 0
    if counted:
        per_part = 2
    while parts * per_part - counted < max(2, len(set(kinds))):
        per_part += 1
    found: dict[str, Any] = {"num_layers": parts * per_part - counted}
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if stages > 1 and (first is not None or last is not None):
        given = (first if first is not None else last) or 0
        usual = model.num_layers / parallel.pipeline_model_parallel_size
        short, long = per_part, per_part + 1
        sizes = (short, long) if given < usual else (long, short) if given > usual else (short, short)
        found["num_layers"] = sum(sizes)
        found["decoder_first_pipeline_num_layers"] = sizes[0] if first is not None else None
        found["decoder_last_pipeline_num_layers"] = None if last is None else sizes[first is not None]
    text, per = parallel.pipeline_model_parallel_layout, parallel.num_layers_per_virtual_pipeline_stage
    found["num_layers_per_virtual_pipeline_stage"] = None if virtual == 1 or per is None else per_part
    found["num_virtual_stages_per_pipeline_rank"] = virtual if virtual > 1 and per is None and text is None else None
    if stages > 1 and text is not None:
        small = _fewer_parts(read_parts(text), parts, max(2, len(set(kinds))))
        found |= {"num_layers": small.count("t"), "pipeline_model_parallel_layout": small}
    if recomputed is not None:
        found["recompute_num_layers"] = min(recomputed, 2 if train.recompute_method == "uniform" else per_part - 1 or 1)
    return found | _patterns(run, kinds, found["num_layers"])


def _fewer_parts(parts: Sequence[str], number: int, layers: int) -> str:
    """Return a layout of `number` parts and at least so many layers: both ends, none where there was none, 1 or 2."""
    inner = parts[1:-1] or parts
    chosen = [parts[0], *(inner[place * len(inner) // number] for place in range(1, number - 1)), parts[-1]]
    fewest = min(part.count("t") for part in parts if "t" in part)
    counts = [0 if "t" not in part else 1 + (part.count("t") > fewest) for part in chosen]
    counts[counts.index(max(counts))] += max(0, layers - sum(counts))
    predictions = min(2, sum(part.count("m") for part in parts))  # which are computed with the loss
    return f"E{'|'.join('t' * count for count in counts)}{'m' * predictions}L"


def _parts(run: RunConfig) -> int:
    return run.parallel.pipeline_model_parallel_size * run.parallel.virtual_stages(run.model.num_layers)


def _patterns(run: RunConfig, kinds: Sequence[tuple[Any, ...]], number: int) -> dict[str, Any]:
    """Return the patterns of layers for a smaller number: every kind of layer, then layers of all depths."""
    model = run.model
    chosen = sorted({kinds.index(kind): None for kind in kinds})[:number]
    even = [round(place * (len(kinds) - 1) / max(1, number - 1)) for place in range(number)]
    chosen += [layer for layer in [*even, *range(len(kinds))] if layer not in chosen][: number - len(chosen)]
    found: dict[str, Any] = {}
    for name in ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq"):
        if (text := getattr(model, name)) is None:
            continue
        pattern = read_pattern(text)
        if isinstance(pattern, int):
            every = str(min(pattern, 2))
            divides = number % int(every) == 0 or name != "no_rope_freq"  # whose frequency has to
            marks = [int(mark) for mark in marked_layers(every, number)]
            found[name] = every if divides else str(marks).replace(" ", "")
        else:
            found[name] = str([int(pattern[layer]) for layer in sorted(chosen)]).replace(" ", "")
    return found


def _model(run: RunConfig, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the sizes of a layer."""
    model, layout, tp = run.model, run.layout, axes.get("tp", 1)
    exchanging = axes.get("cp", 1) if run.parallel.cp_comm_type == "a2a" else 1
    several = 2 if model.query_groups >= 2 * layout.tp else 1
    grouped = model.query_groups < model.num_attention_heads
    whole = 2 if model.query_groups < layout.tp else several * tp * (1 if grouped else exchanging)
    groups = min(model.query_groups, whole)
    ratio = min(model.num_attention_heads // model.query_groups, 2)
    heads = groups * ratio
    while heads % (tp * exchanging):
        heads += groups
    head = 4 if model.rotary_percent == 1.0 else 8
    own_heads = model.num_attention_heads * model.head_size != model.hidden_size
    hidden = heads * head
    by_rule = model.ffn_hidden_size is None and not (model.swiglu and hidden < 24)  # whose rule makes none of it
    found: dict[str, Any] = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": None if model.kv_channels is None else head + 2 * own_heads,
        "ffn_hidden_size": None if by_rule else hidden + 8,
        "max_position_embeddings": LENGTH if model.max_position_embeddings <= run.data.seq_length else 2 * LENGTH,
        "init_method_std": max(model.init_method_std, 0.2),
        "make_vocab_size_divisible_by": 8,
    }
    if model.group_query_attention:
        found["num_query_groups"] = groups
    if model.window_size is not None:
        found["window_size"] = ",".join(str(min(int(side), 5)) for side in findall(r"-?\d+", model.window_size))
    if model.yarn_original_max_position_embeddings is not None:
        found["yarn_original_max_position_embeddings"] = LENGTH // 2
    if model.mup_base_hidden_size is not None:
        found["mup_base_hidden_size"] = hidden // 2
    if model.mup_base_head_dim is not None:
        found["mup_base_head_dim"] = head / 2
    if model.multi_latent_attention:
        found |= {"kv_lora_rank": 8, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
        found["q_lora_rank"] = None if model.q_lora_rank is None else 6
    if model.mtp_num_layers:
        found["mtp_num_layers"] = min(model.mtp_num_layers, 2)
    if model.decoder_num_layers is not None:
        found["decoder_num_layers"] = 3
    return found | _experts(run, axes)


def _experts(run: RunConfig, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return the sizes of a mixture, without what depends on the layout in Megatron too (docs/parallelism.md)."""
    model = run.model
    if not model.mixture:
        return {}
    experts = 2 * max(2, axes.get("ep", 1))
    found: dict[str, Any] = {"num_experts": experts, "moe_router_topk": min(model.moe_router_topk, 2)}
    partly = run.layout.cp > 1 or (run.layout.tp > 1 and run.parallel.sequence_parallel)
    kinds = {"sinkhorn": "none"} if partly else {}
    kinds |= {"global_aux_loss": "aux_loss"} if partly or run.layout.dp > 1 else {}
    balanced = tuple(kinds.get(kind, kind) for kind in model.moe_router_load_balancing_type)
    found["moe_router_load_balancing_type"] = balanced
    if "none" in set(balanced) - set(model.moe_router_load_balancing_type):
        found["moe_router_pre_softmax"] = True  # in which one chosen expert has a gradient, as in sinkhorn
    found["moe_router_force_load_balancing"] = False
    if partly and model.moe_expert_capacity_factor is not None:
        found |= {"moe_expert_capacity_factor": None, "moe_pad_expert_input_to_capacity": False}
    if model.moe_ffn_hidden_size is not None:
        found["moe_ffn_hidden_size"] = 12
    if model.moe_shared_expert_intermediate_size is not None:
        found["moe_shared_expert_intermediate_size"] = 8
    if model.moe_latent_size is not None:
        found["moe_latent_size"] = 6
    if model.moe_router_num_groups is not None:
        some = (model.moe_router_group_topk or 0) < model.moe_router_num_groups
        found |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1 if some else 2}
    return found


def _training(run: RunConfig, axes: Mapping[str, int]) -> dict[str, Any]:
    """Return lengths, batches and schedules of a few steps, with everything on that is compared."""
    train, schedule, optimizer, stages = run.train, run.schedule, run.optimizer, axes.get("pp", 1)
    replicas, samples = axes.get("dp", 1), min(train.micro_batch_size, 2)
    accumulated = 1 if run.num_micro_batches == 1 else 2
    given = run.parallel.microbatch_group_size_per_vp_stage or 0
    group = stages + (stages > 1 and given > run.parallel.pipeline_model_parallel_size)
    unit = samples * replicas * group
    found: dict[str, Any] = {
        "microbatch_group_size_per_vp_stage": group if given and stages > 1 else None,
        "micro_batch_size": samples,
        "global_batch_size": unit * accumulated,
        "train_iters": STEPS,
        "train_samples": None,
        "eval_interval": 2,
        "eval_iters": min(train.eval_iters, 2),
        "eval_micro_batch_size": None if train.eval_micro_batch_size is None else min(train.eval_micro_batch_size, 2),
        "eval_global_batch_size": None if train.eval_global_batch_size is None else 2 * unit,
        "lr_decay_iters": None if schedule.lr_decay_iters is schedule.lr_decay_samples is None else STEPS,
        "lr_decay_samples": None,
        "lr_warmup_iters": int(schedule.lr_warmup_iters + schedule.lr_warmup_samples > 0),
        "lr_warmup_samples": 0,
        "lr_wsd_decay_iters": None if schedule.lr_wsd_decay_iters is schedule.lr_wsd_decay_samples is None else 1,
        "lr_wsd_decay_samples": None,
        "adam_eps": max(optimizer.adam_eps, 1e-6),
        "clip_grad": 0.05 if optimizer.clip_grad > 0 else optimizer.clip_grad,
        "log_interval": 1,
        "log_params_norm": True,
        "log_num_zeros_in_grad": True,
        "rampup_batch_size": (),
    }
    if train.rampup_batch_size:
        found |= {"rampup_batch_size": (unit, unit, unit), "global_batch_size": 2 * unit}
    return found


def _data(run: RunConfig, axes: Mapping[str, int], folder: Path) -> dict[str, Any]:
    """Return the settings of the miniature's own data, in which ends of documents make uneven numbers of tokens."""
    prefixes = [str(folder / name) for name in PREFIXES]
    blended = len(run.data.data_path) > 1 or len(run.data.train_data_path) > 1 or len(run.data.data_source) > 1
    found = {
        "data_path": ("0.3", prefixes[0], "0.7", prefixes[1]) if blended else (prefixes[0],),
        "data_cache_path": str(folder / "cache"),
        "seq_length": LENGTH,
        "split": "80,2,18",
        "full_validation": not blended or run.data.full_validation,
        "num_workers": 0,
        "padded_vocab_size": padded_vocab_size(vocabulary_of(run), 8, axes.get("tp", 1)),
    }
    if run.data.sft:
        found["sft_overlong"] = "truncate"
    elif run.model.family.objective == "causal":
        found["eod_mask_loss"] = True
    if run.data.decoder_seq_length is not None:
        found["decoder_seq_length"] = LENGTH // 2
    return found


PREFIXES = ("one", "other")


def vocabulary_of(run: RunConfig) -> int:
    """Return the ids of the miniature's tokenizer."""
    return VOCABULARY + SENTINELS * (run.model.family.objective == "spans")


def _tokenizer(run: RunConfig, folder: Path) -> dict[str, Any]:
    if run.model.family.objective == "causal":
        return {"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY - 1}
    extra = {"vocab_extra_ids": SENTINELS} if run.model.family.objective == "spans" else {}
    return {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(folder / "vocab.txt"), **extra}


def write_data(run: RunConfig, folder: Path) -> None:
    """Write the datasets that `miniatures` name: short documents of random tokens, of several sentences each."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"w{number}" for number in range(VOCABULARY - len(special))]
    (folder / "vocab.txt").write_text("\n".join([*special, *words]) + "\n", encoding="utf-8")
    causal = run.model.family.objective == "causal"
    rng = np.random.default_rng(run.train.seed)
    for prefix in PREFIXES:
        documents = []
        for _ in range(NUM_DOCUMENTS):
            lengths = rng.integers(1, 24, 1 if causal else rng.integers(2, 5))
            low, high = (0, VOCABULARY - 1) if causal else (len(special), VOCABULARY)
            tokens = rng.integers(low, high, int(lengths.sum()))
            if causal:
                tokens[-1] = VOCABULARY - 1
            documents.append((tokens, lengths.tolist()))
        _write(folder / prefix, np.uint16, documents)
        if run.data.sft:
            masks = [(rng.random(len(tokens)) < rng.random(), lengths) for tokens, lengths in documents]
            _write(folder / (prefix + LOSS_MASK), np.uint8, masks)


def _write(prefix: Path, dtype: DTypeLike, documents: Sequence[tuple[ArrayLike, list[int]]]) -> None:
    with IndexedWriter(str(prefix), dtype) as writer:
        for tokens, lengths in documents:
            writer.add_document(tokens, lengths)
        writer.finalize()


NUM_DOCUMENTS = 1500
