"""Rules of the tokenizer: each kind has what it needs, and what it does not look at is said."""

from __future__ import annotations

from megalith.config.rule import Draft, Rule, rule, show

_BECAUSE = {"vocab_size": ": the vocabulary is that of its files"}


@rule("tokenizer_type", "vocab_file", "merge_file", "vocab_size", "tokenizer_model")
def tokenizer_has_what_it_needs(draft: Draft) -> str:
    tokenizer = draft.run.tokenizer
    lacking = tokenizer.lacking
    if not lacking:
        return ""
    if lacking == ("--vocab-size",):
        return "--tokenizer-type NullTokenizer requires --vocab-size N"
    if lacking == ("--tokenizer-model",):
        what = "DIR, a folder with tokenizer.json" if tokenizer.tokenizer_type == "HuggingFaceTokenizer" else "FILE"
        return f"--tokenizer-type {tokenizer.tokenizer_type} requires --tokenizer-model {what}"
    verb = "is" if len(lacking) == 1 else "are"
    mock = " (or, with --mock-data, --tokenizer-type NullTokenizer --vocab-size N)" if draft.run.data.mock_data else ""
    return f"{' and '.join(lacking)} {verb} required by {show(draft, 'tokenizer_type')}{mock}"


@rule(
    *("tokenizer_type", "vocab_size", "tokenizer_special_tokens", "tiktoken_num_special_tokens"),
    *("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
)
def tokenizer_flags_agree(draft: Draft) -> str:
    return "; ".join(draft.run.tokenizer.contradictions)


def _without_effect(name: str) -> Rule:
    """A notice for a setting of the tokenizer that its kind does not look at."""

    def check(draft: Draft) -> str:
        kind = draft.run.tokenizer.tokenizer_type
        if name not in draft.given or name in draft.run.tokenizer.taken:
            return ""
        return f"{show(draft, name)} has no effect with --tokenizer-type {kind}{_BECAUSE.get(name, '')}"

    return Rule(f"{name}_needs_its_tokenizer", ("tokenizer_type", name), check)


TOKENIZER_RULES: tuple[Rule, ...] = (
    tokenizer_has_what_it_needs,
    tokenizer_flags_agree,
)

TOKENIZER_NOTICES: tuple[Rule, ...] = tuple(
    _without_effect(name)
    for name in (
        *("vocab_file", "merge_file", "tokenizer_model", "vocab_size", "vocab_extra_ids", "tiktoken_pattern"),
        *("tiktoken_num_special_tokens", "tokenizer_hf_no_include_special_tokens"),
        *("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
    )
)
