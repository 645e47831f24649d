"""The checkpoint that a run resumes from, and its compatibility with the command line."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megalith.checkpoint import DirectoryStore
from megalith.config import ModelConfig, RunConfig
from megalith.config.from_args import MODEL_SETTINGS, changed_sources, model_from_args
from megalith.config.run import all_settings
from megalith.config.values import marked_layers
from megalith.errors import CheckpointError
from megalith.nn.precision import product_dtype_on
from megalith.tokenizers.fingerprint import fingerprint_differences, side_by_side

# Arguments that decide the shape or the meaning of the weights, with the flag that a user knows each by.
ARCHITECTURE = {name: all_settings()[name].flag for name in MODEL_SETTINGS if name != "make_vocab_size_divisible_by"}
ARCHITECTURE |= {"chooses_by": "--moe-router-load-balancing-type"}
PRODUCTS = "matrix_products"
"""In the manifest: the dtype that matrix products were computed in, which for half precision depends on the device."""


@dataclass(frozen=True)
class Identity:
    """Fingerprints of the tokenizer and the data of a run; a checkpoint keeps them so that a resume can compare."""

    tokenizer: Mapping[str, Any]
    # file name -> content; laid into every checkpoint so that it can be used alone
    tokenizer_files: Mapping[str, bytes]
    data: Mapping[str, Any]
    # record of the frozen base of LoRA's adapters (checkpoint.base); None without adapters
    base: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FoundCheckpoint:
    """A sound checkpoint to continue from."""

    iteration: int
    notes: tuple[str, ...]  # warnings: damaged or missing checkpoints that were skipped
    args: Mapping[str, Any]  # Megatron's arguments of the run that wrote it
    manifest: Mapping[str, Any] | None  # None if another program wrote it
    weights_only: bool = False  # it has weights to start from, without the state of a run

    @property
    def saved_settings(self) -> Mapping[str, Any]:
        """Configuration of the run that wrote it, or Megatron's arguments if another program did."""
        return self.args if self.manifest is None else self.manifest.get("config", {})

    @property
    def has_adapters(self) -> bool:
        """Return whether it holds LoRA's adapters alone."""
        return self.args.get("lora_rank") is not None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, kept over all resumes: the padding logits take part in the loss."""
        with reading(self.iteration):
            return int(self.args["padded_vocab_size"])


def find_checkpoint(
    store: DirectoryStore, step: int | None = None, *, thorough: bool = False
) -> FoundCheckpoint | None:
    """Return the newest valid checkpoint, or that of iteration `step`; None if the store holds none.

    Without `thorough` the files are read through by `restore`, and what it finds damaged is passed over by a thorough
    search.

    Raises:
        CheckpointError: there are checkpoints and none of them can be used.
    """
    notes: list[str] = []
    iteration: int | None = step
    if step is not None:
        if problems := store.verify(step, deferred=not thorough):
            raise CheckpointError("\n  ".join([f"--ckpt-step {step}: that checkpoint is damaged:", *problems]))
    else:
        iteration, notes = store.newest_verified(deferred=not thorough)
    if iteration is None:
        if notes:
            head = "no checkpoint here can be used; give another --load, or move these away to start afresh:"
            raise CheckpointError("\n  ".join([head, *notes]))
        return None
    args = store.common(iteration).get("args", Namespace())
    weights_only = store.weights_only(iteration)
    return FoundCheckpoint(iteration, tuple(notes), vars(args), store.manifest(iteration), weights_only)


def check_fits(found: FoundCheckpoint, run: RunConfig, identity: Identity) -> tuple[str, ...]:
    """Compare a checkpoint with the configuration of this run.

    Returns:
        Notes for the user: the changes of the data that `--accept-data-change` accepts.

    Raises:
        CheckpointError: it is of another architecture, tokenizer or (unless `--finetune` or `--accept-data-change`)
            data; names every difference.
    """
    with reading(found.iteration):
        saved = model_from_args(found.args, run.registry)
        was, now = architecture(saved), architecture(run.model)
    if adapters := _other_adapters(found, saved, run):
        raise CheckpointError(adapters)
    model = [
        f"{flag}: {_as_given(name, was[name])} in the checkpoint, {_as_given(name, now[name])} here"
        for name, flag in ARCHITECTURE.items()
        if was[name] != now[name]
    ]
    ids, rows = int(identity.tokenizer.get("vocab_size", 0)), found.args.get("padded_vocab_size")
    if rows is not None and ids > rows:
        model.append(f"the tokenizer has {ids} ids, and the embedding of the checkpoint {rows} rows")
    data: list[str] = []
    if found.manifest is not None:
        model += _other_tokenizer(found.manifest.get("tokenizer") or {}, identity.tokenizer)
        begins = found.iteration in run.train.phase_ends  # with data of its own
        if not (run.checkpoint.finetune or found.weights_only or begins):
            data = _changes("the training data", found.manifest.get("data", {}), identity.data)
    if model or (data and not run.checkpoint.accept_data_change):
        pretrained = run.checkpoint.pretrained_checkpoint if found.weights_only else None
        flag = "--pretrained-checkpoint" if pretrained else "--load"
        remedy = (
            f"give the flags, tokenizer and data of that run (--use-checkpoint-args takes the flags), or another {flag}"
        )
        if not model:
            remedy = (
                "give the data of that run, another --load, --accept-data-change to continue with this data from the "
                "next sample of that run, or --finetune to start a new run from its weights"
            )
        where = pretrained or run.checkpoint.load
        head = f"the checkpoint of iteration {found.iteration} in {where} is of another run:"
        raise CheckpointError("\n  ".join([head, *model, *data, remedy]))
    notes = (f"{change}; --accept-data-change: accepted" for change in data)
    return (*notes, *changed_sources(found.args, run.registry))


def _other_adapters(found: FoundCheckpoint, saved: ModelConfig, run: RunConfig) -> str:
    """Return why the adapters of a checkpoint, or their absence, do not fit the run; empty if they do."""
    where, rank = f"the checkpoint of iteration {found.iteration}", run.model.lora_rank
    if rank is None:
        return found.has_adapters * (
            f"{where} holds LoRA adapters alone; give --lora-rank {saved.lora_rank} to train them on, or make a full "
            "checkpoint of them: megalith checkpoint merge-lora"
        )
    if not found.has_adapters:
        return (not found.weights_only) * (
            f"{where} in --load {run.checkpoint.load} holds a full model; give it by --pretrained-checkpoint, and the "
            "folder of the adapters by --load and --save"
        )
    names = {"lora_projections": "--lora-targets"} | {
        name: all_settings()[name].flag for name in ("lora_rank", "lora_alpha", "lora_use_rslora")
    }
    pairs = [(flag, getattr(saved, name), getattr(run.model, name)) for name, flag in names.items()]
    differing = [f"{flag}: {before} in the checkpoint, {now} here" for flag, before, now in pairs if before != now]
    return "\n  ".join([f"{where} holds other adapters:", *differing, "give the flags of that run"]) * bool(differing)


def _as_given(name: str, value: Any) -> str:
    setting = all_settings().get(name)
    return str(value) if setting is None else setting.as_given(value)


def products_of(run: RunConfig, device: torch.device) -> str:
    """Return the name of the dtype in which this run computes matrix products."""
    dtype: torch.dtype = getattr(torch, run.precision.params_dtype)
    return str(product_dtype_on(device, dtype)).removeprefix("torch.")


def other_products(found: FoundCheckpoint, run: RunConfig, device: torch.device) -> str:
    """Return a warning where the run that wrote a checkpoint multiplied in another dtype; empty if not."""
    was, now = (found.manifest or {}).get(PRODUCTS), products_of(run, device)
    if was in (None, now) or found.weights_only or run.checkpoint.finetune:
        return ""
    return (
        f"matrix products were computed in {was} when the checkpoint of iteration {found.iteration} was written, and "
        f"are computed in {now} here: results will differ from an uninterrupted run from this step on"
    )


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of `ARCHITECTURE`: derived ones filled in, ineffective ones None."""
    values = {name: getattr(model, name) for name in ARCHITECTURE}
    values |= _of_experts(model)
    values |= {
        "num_query_groups": model.query_groups,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "kv_channels": model.head_size,
        "ffn_hidden_size": model.ffn_size,
        "add_qkv_bias": model.qkv_bias,
    }
    for name, marks in (
        ("no_rope_freq", marked_layers(model.no_rope_freq, model.num_layers)),
        ("window_attn_skip_freq", tuple(window is None for window in model.windows)),
    ):
        if values[name] is not None:  # a list has several spellings, and a checkpoint its own
            values[name] = _as_digits(marks)
    if model.multi_latent_attention:
        values |= {"kv_channels": None, "rope_type": model.rotary_kind}
    else:
        values |= dict.fromkeys(
            ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type")
        )
    if not model.activation.startswith("gelu_") or not model.add_bias_linear:
        values["bias_gelu_fusion"] = None
    if not model.use_rope_scaling:
        values["rope_scaling_factor"] = None
    if model.rotary_size == 0:
        values |= dict.fromkeys(("rotary_base", "rotary_percent", "rotary_interleaved"))
    if model.rotary_kind != "yarn":
        values |= dict.fromkeys(name for name in values if name.startswith(("yarn_", "mscale", "rotary_scaling")))
    return values


def _of_experts(model: ModelConfig) -> dict[str, Any]:
    """Return the MoE settings as they are compared; all None without MoE layers."""
    names = [name for name in ARCHITECTURE if name.startswith("moe_") or name in ("num_experts", "chooses_by")]
    if not model.mixture:
        return dict.fromkeys(names)
    pattern = _as_digits(map(bool, model.experts))
    given = {name: getattr(model, name) for name in names}
    by = "quantile_balancing" if model.chooses_by == "quantile_balancing" else "another"  # only that has offsets
    return {**given, "moe_layer_freq": pattern, "moe_ffn_hidden_size": model.expert_size, "chooses_by": by}


def _as_digits(marks: Iterable[bool]) -> str:
    """Return 1 for each layer that is marked, and 0 for others."""
    return "".join(str(int(mark)) for mark in marks)


def _other_tokenizer(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return both tokenizer fingerprints side by side if they differ; empty if the checkpoint has none."""
    differing = fingerprint_differences(saved, own) if saved else {}
    if not differing:
        return []
    rows = side_by_side(("the checkpoint", "this run"), differing)
    return ["the tokenizer differs (equal entries are not listed):", *(f"  {row}" for row in rows)]


def _changes(what: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    # Entries with a digest are complete descriptions, whose keys may differ.
    complete = "digest" in saved and "digest" in own
    names = dict.fromkeys((*saved, *own)) if complete else [name for name in saved if name in own]
    pairs = [(name, saved.get(name, "not there"), own.get(name, "not there")) for name in names if name != "digest"]
    return [f"{what}: {name} was {before} and is {now}" for name, before, now in pairs if before != now]


@contextmanager
def reading(iteration: int) -> Iterator[None]:
    """Turn errors about missing or malformed values into a CheckpointError that names the key."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"the checkpoint of iteration {iteration}: its common.pt has no {error}") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint of iteration {iteration}: its common.pt has a value of another kind than expected: {error}"
        ) from error
