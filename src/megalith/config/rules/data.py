"""Rules of the data and of its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megalith.config.data_sources import PATHS, parse_blend
from megalith.config.rules.rule import Draft, Rule, forbid, idle_without, note, notice, rule, show, value_of
from megalith.config.run import all_settings
from megalith.config.values import holds_paths, remote
from megalith.errors import ConfigError

_SEPARATORS_OF_SPLIT = re.compile(r"[.0-9]+")

_BY_SPLIT = PATHS[2:5]
_NAMES_OF_PATHS = tuple(setting.name for setting in all_settings().values() if holds_paths(setting))


@rule
def paths_are_local(draft: Draft) -> str:
    """Refuse `scheme://`, which would become a folder of that name."""
    found: dict[str, list[str]] = {}
    for setting in map(all_settings().__getitem__, _NAMES_OF_PATHS):
        value = value_of(draft, setting.name)
        for word in filter(None, value if setting.many else (value,)):
            if problem := remote(str(word)):
                found.setdefault(problem, []).append(f"{setting.positive_flag} {word}")
    return "; ".join(f"{', '.join(words)}: {problem}" for problem, words in found.items())


def flag_of(name: str) -> str:
    return all_settings()[name].positive_flag


@rule
def one_source_of_data(draft: Draft) -> str:
    data = draft.run.data
    ways = [names for names in (PATHS[:1], PATHS[1:2], _BY_SPLIT, PATHS[5:]) if any(getattr(data, n) for n in names)]
    flags = [flag_of(next(name for name in names if getattr(data, name))) for names in ways]
    flags += ["--mock-data"] if data.mock_data else []
    flags += ["--data-source"] if data.data_source else []
    if not flags:
        return "data is required: --data-path PREFIX (of PREFIX.bin and PREFIX.idx), or --mock-data to try without"
    if flags == ["--data-path", "--mock-data"]:
        return f"{show(draft, 'data_path')} and --mock-data exclude each other; use one of them"
    return f"{' and '.join(flags)} exclude each other; use one of them" if len(flags) > 1 else ""


def _blend_is_readable(name: str) -> Rule:
    def check(draft: Draft) -> str:
        words = getattr(draft.run.data, name)
        try:
            if words:
                parse_blend(words, flag_of(name))
        except ConfigError as error:
            return str(error)
        return ""

    return Rule(f"{name}_is_a_blend", check)


@rule
def datasets_have_weights(draft: Draft) -> str:
    names, weights = draft.run.data.data_source, draft.run.data.data_source_weights
    if len(names) == len(weights) or (len(names) == 1 and not weights):
        return ""
    if not names:
        return f"{show(draft, 'data_source_weights')}: there is no --data-source that they are of; leave them out"
    return (
        f"{show(draft, 'data_source')}: {len(names)} datasets need as many --data-source-weights, and {len(weights)} "
        "are given"
    )


@rule
def training_has_data(draft: Draft) -> str:
    data = draft.run.data
    given = [flag_of(name) for name in _BY_SPLIT if getattr(data, name)]
    if not given or data.train_data_path:
        return ""
    return f"{' and '.join(given)} without --train-data-path: nothing is left for training; give it too"


@rule
def no_split_of_splits(draft: Draft) -> str:
    if "split" not in draft.given:
        return ""
    flags = [flag_of(name) for name in (*_BY_SPLIT, "per_split_data_args_path") if getattr(draft.run.data, name)]
    if not flags:
        return ""
    return f"{show(draft, 'split')} with {flags[0]}: each split has data of its own there; leave out --split"


data_is_loaded_here = forbid(
    lambda run: run.data.dataloader_type == "external",
    "--dataloader-type external is a loader that your script passes to Megatron; here a script passes "
    "train_step its own iterator of batches (examples/simple_train_loop.py): use single or cyclic",
)


@rule
def full_validation_needs_no_weights(draft: Draft) -> str:
    data = draft.run.data
    words = data.valid_data_path if any(data.paths_of_splits) else data.data_path
    if not data.full_validation or (data.multiple_validation_sets and data.valid_data_path):
        return ""
    try:
        blend = parse_blend(words, "") if words else None
    except ConfigError:
        return ""
    if blend is None or blend.weights is None or (data.valid_data_path and len(blend.prefixes) == 1):
        return ""
    return (
        "--full-validation takes every validation sample once, and weights share out a given number of them; name the "
        "validation data without weights (--valid-data-path), or add --multiple-validation-sets"
    )


validation_sets_are_named = forbid(
    lambda run: (
        run.data.multiple_validation_sets and not run.data.valid_data_path and not run.data.per_split_data_args_path
    ),
    '--multiple-validation-sets evaluates the datasets of --valid-data-path (or of "valid" in '
    "--per-split-data-args-path) one by one, and none are given",
)


@rule
def validation_sets_have_as_many_names(draft: Draft) -> str:
    data = draft.run.data
    if not (data.validation_set_names and data.multiple_validation_sets and data.valid_data_path):
        return ""
    try:
        count = len(parse_blend(data.valid_data_path, "").prefixes)
    except ConfigError:
        return ""
    names = data.validation_set_names
    if len(names) == len(set(names)) == count:
        return ""
    return (
        f"{show(draft, 'validation_set_names')}: --valid-data-path names {count} datasets; give each a name of its own"
    )


@rule
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


def missing_validation(draft: Draft) -> str:
    """Return why a run has no validation data by its flags; "" if it may have."""
    data = draft.run.data
    if any(data.paths_of_splits):
        return "" if data.valid_data_path else "--valid-data-path is not given"
    parts = _SEPARATORS_OF_SPLIT.findall(data.split)
    has_part = len(parts) > 1 and parts[1].strip("0.") != ""
    if has_part or data.mock_data or data.per_split_data_args_path:
        return ""
    return f"--split {data.split} has no part for validation"


@notice
def split_without_validation(draft: Draft) -> str:
    missing = missing_validation(draft)
    return f"{missing}: there is no evaluation while training" if missing else ""


split_of_mock_data = note(
    lambda run: run.data.mock_data,
    "{split} has no effect: --mock-data gives each split a third, as in Megatron",
    given="split",
)


@notice
def split_by_default(draft: Draft) -> str:
    data = draft.run.data
    if "split" in draft.given or not (data.data_path or data.data_args_path):
        return ""
    return f"no --split is given: {draft.run.data.split} (training, validation, test), as in Megatron"


@rule
def documents_end_in_one_way(draft: Draft) -> str:
    data = draft.run.data
    flags = [flag_of(name) for name in ("reset_attention_mask", "reset_position_ids") if getattr(data, name)]
    if not data.dataloader_inter_document_masking or not flags:
        return ""
    return (
        f"{' and '.join(flags)} with --dataloader-inter-document-masking: the one looks for end-of-document tokens, "
        "the other for the borders of the documents of the dataset; use one of them"
    )


@rule
def conversations_need_no_marks(draft: Draft) -> str:
    data = draft.run.data
    names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "dataloader_inter_document_masking")
    flags = [flag_of(name) for name in names if getattr(data, name)]
    if not data.sft or not flags:
        return ""
    return (
        f"{' and '.join(flags)} with --sft: conversations are separated by their borders, and the loss mask of the "
        "dataset says what is predicted; leave it out"
    )


conversations_are_prepared = forbid(
    lambda run: run.data.sft and (run.data.mock_data or run.data.data_source),
    "--sft needs conversations: give their file, or the prefix that megalith preprocess --loss-mask made of it "
    "(--train-data-path), not --mock-data or --data-source",
)
conversations_are_for_gpt = forbid(
    lambda run: run.data.sft and run.model.family.objective != "causal",
    "--sft trains a decoder to continue conversations, which {model_family} is not; leave it out",
)
loss_of_conversations_is_per_token = note(
    lambda run: run.data.sft and not run.model.calculate_per_token_loss,
    "--sft with {calculate_per_token_loss}: a token weighs the more the fewer tokens are predicted in its micro-batch",
)
prompts_are_for_gpt = forbid(
    lambda run: run.log.sample_prompts and run.model.family.objective != "causal",
    "{sample_prompts}: a decoder continues prompts, which {model_family} is not; leave it out",
)


@rule
def prompts_are_answered_by_whole_models(draft: Draft) -> str:
    run = draft.run
    names = ["sft_sample_prompts"] if run.data.sft and run.data.sft_sample_prompts else []
    names += ["sample_prompts"] if run.log.sample_prompts else []
    if not names or not (run.layout.pp > 1 or run.layout.cp > 1 or run.fully_sharded):
        return ""
    return (
        f"{' and '.join(show(draft, name) for name in names)}: answers are computed by ranks that have all layers and "
        "positions: not with --pipeline-model-parallel-size or --context-parallel-size above 1, or FSDP2; leave it "
        "out, and ask a checkpoint with megalith generate"
    )


settings_of_conversations = idle_without(
    "sft", "sft_packing", "sft_overlong", "sft_sample_prompts", "sft_tokenizer_prompt_format"
)

weights_of_validation_sets_do_nothing = note(
    lambda run: run.data.multiple_validation_sets and _weights(run.data.valid_data_path) is not None,
    "the weights of {valid_data_path} have no effect: --multiple-validation-sets blends nothing",
)


@notice
def surplus_is_of_weighted_blends(draft: Draft) -> str:
    data = draft.run.data
    in_a_file = data.data_args_path is not None or data.per_split_data_args_path is not None
    weighted = any(_weights(words) is not None for words in (data.data_path, *data.paths_of_splits))
    if "mid_level_dataset_surplus" not in draft.given or in_a_file or weighted:
        return ""
    return f"{show(draft, 'mid_level_dataset_surplus')} has no effect: there is no blend with weights"


def _weights(words: Sequence[str]) -> tuple[float, ...] | None:
    """Return the weights of a blend; None without weights, or if it cannot be parsed, which another rule reports."""
    try:
        return parse_blend(words, "").weights if words else None
    except ConfigError:
        return None


reset_positions_are_learned_ones = note(
    lambda run: run.data.reset_position_ids and not run.model.adds_position_embeddings,
    "--reset-position-ids has no effect: {position_embedding_type} turns queries and keys by their distance, which "
    "stays the same inside a document",
)
full_validation_counts_by_itself = note(
    lambda run: run.data.full_validation and run.train.eval_batches,
    "{eval_iters} counts for the test alone: --full-validation goes over the whole split",
    given="eval_iters",
)


blends_are_readable = tuple(map(_blend_is_readable, (PATHS[0], *_BY_SPLIT)))
names_of_sets_are_read = idle_without(
    "multiple_validation_sets", "validation_set_names", why="there is one validation set"
)


@rule
def tokenizer_has_what_it_needs(draft: Draft) -> str:
    tokenizer = draft.run.tokenizer
    missing_flags = tokenizer.missing_flags
    if not missing_flags:
        return ""
    if missing_flags == ("--vocab-size",):
        return "--tokenizer-type NullTokenizer requires --vocab-size N"
    if missing_flags == ("--tokenizer-model",):
        what = "DIR, a folder with tokenizer.json" if tokenizer.is_hugging_face else "FILE"
        return f"--tokenizer-type {tokenizer.tokenizer_type} requires --tokenizer-model {what}"
    verb = "is" if len(missing_flags) == 1 else "are"
    mock = " (or, with --mock-data, --tokenizer-type NullTokenizer --vocab-size N)" if draft.run.data.mock_data else ""
    return f"{' and '.join(missing_flags)} {verb} required by {show(draft, 'tokenizer_type')}{mock}"


@rule
def tokenizer_flags_agree(draft: Draft) -> str:
    return "; ".join(draft.run.tokenizer.contradictions)


def _read_by_its_kind(name: str) -> Rule:
    """Make the notice for a setting of the tokenizer that its kind does not look at."""

    def check(draft: Draft) -> str:
        kind = draft.run.tokenizer.tokenizer_type
        if name not in draft.given or name in draft.run.tokenizer.taken:
            return ""
        because = ": the vocabulary is that of its files" if name == "vocab_size" else ""
        return f"{show(draft, name)} has no effect with --tokenizer-type {kind}{because}"

    return Rule(f"{name}_is_read", check, notice=True)


tokenizer_settings_are_read = tuple(
    _read_by_its_kind(name)
    for name in (
        *("vocab_file", "merge_file", "tokenizer_model", "vocab_size", "vocab_extra_ids", "tiktoken_pattern"),
        *("tiktoken_num_special_tokens", "tokenizer_hf_no_include_special_tokens"),
        *("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
    )
)
