"""Rules of activation recomputation, which are Megatron's."""

from __future__ import annotations

from megalith.config.idle import idle_without
from megalith.config.rule import Draft, Rule, rule, show

_DETAILS = ("recompute_method", "recompute_num_layers")


def _given(draft: Draft) -> list[str]:
    return [name for name in _DETAILS if getattr(draft.run.train, name) is not None]


@rule("recompute_granularity", *_DETAILS)
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


@rule("recompute_granularity", *_DETAILS)
def selective_recomputation_has_no_method(draft: Draft) -> str:
    given = _given(draft)
    if draft.run.train.recompute_granularity != "selective" or not given:
        return ""
    return (
        f"{' and '.join(show(draft, name) for name in given)} with --recompute-granularity selective: whole layers are "
        "recomputed by --recompute-granularity full"
    )


@rule("recompute_granularity", "compile")
def compiled_blocks_are_not_recomputed(draft: Draft) -> str:
    train = draft.run.train
    if not train.compile or train.recompute_granularity != "full":
        return ""
    return "--compile with --recompute-granularity full is not tested yet; leave one of them out"


@rule("recompute_granularity")
def selective_recomputation_needs_nothing(draft: Draft) -> str:
    if draft.run.train.recompute_granularity != "selective":
        return ""
    return (
        "--recompute-granularity selective needs nothing here: fused attention stores no scores, which is what it "
        "would save; the numbers are the same"
    )


RECOMPUTE_RULES: tuple[Rule, ...] = (
    whole_layers_are_recomputed_by_a_method,
    selective_recomputation_has_no_method,
    compiled_blocks_are_not_recomputed,
)
RECOMPUTE_NOTICES: tuple[Rule, ...] = (
    selective_recomputation_needs_nothing,
    *(
        idle_without(name, "recompute_granularity", "--recompute-granularity is not given")
        for name in ("recompute_method", "recompute_num_layers")
    ),
)
