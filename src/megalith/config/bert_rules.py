"""Rules of BERT: what it needs, and what of other models it has not."""

from __future__ import annotations

from collections.abc import Callable

from megalith.config.rule import Draft, Rule, rule, show
from megalith.config.run import RunConfig

_WORD_PIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")
SHORTEST_SAMPLE = 8  # tokens: three special ones, and a few words on either side
_LEAVE_OUT = "leave it out"


def _is_bert(draft: Draft) -> bool:
    return draft.run.model.model_family == "bert"


@rule("model_family", "tokenizer_type")
def bert_has_word_pieces(draft: Draft) -> str:
    if not _is_bert(draft) or draft.run.tokenizer.tokenizer_type in _WORD_PIECES:
        return ""
    return (
        f"{show(draft, 'tokenizer_type')} has no [CLS], [SEP] and [MASK] and does not say which pieces go on a word; "
        f"BERT needs --tokenizer-type {' or '.join(_WORD_PIECES)}"
    )


@rule("model_family", "seq_length")
def a_sample_of_bert_has_words(draft: Draft) -> str:
    if not _is_bert(draft) or draft.run.data.seq_length >= SHORTEST_SAMPLE:
        return ""
    return f"{show(draft, 'seq_length')}: three tokens of a sample of BERT are special; use at least {SHORTEST_SAMPLE}"


def _without(name: str, used: Callable[[RunConfig], bool], why: str) -> Rule:
    """A rule against a setting that BERT has not."""

    @rule("model_family", name)
    def check(draft: Draft) -> str:
        return f"{show(draft, name)}: {why}" if _is_bert(draft) and used(draft.run) else ""

    return Rule(f"bert_has_no_{name}", check.needs, check.check)


BERT_RULES: tuple[Rule, ...] = (
    bert_has_word_pieces,
    a_sample_of_bert_has_words,
    _without(
        "context_parallel_size",
        lambda run: run.parallel.context_parallel_size > 1,
        "context parallelism is for causal attention; use --tensor-model-parallel-size with --sequence-parallel",
    ),
    _without("num_experts", lambda run: run.model.mixture, f"mixtures of experts are for GPT; {_LEAVE_OUT}"),
    _without("window_size", lambda run: run.model.window_size is not None, f"BERT sees all positions; {_LEAVE_OUT}"),
    _without(
        "softmax_type", lambda run: run.model.softmax_type != "vanilla", f"BERT has no attention sinks; {_LEAVE_OUT}"
    ),
    _without(
        "calculate_per_token_loss",
        lambda run: run.model.calculate_per_token_loss,
        f"BERT's two losses have other numbers of terms, as in Megatron; {_LEAVE_OUT}",
    ),
    _without(
        "mock_data",
        lambda run: run.data.mock_data,
        "BERT learns from text in sentences; give --data-path, the prefix of a dataset of megalith preprocess "
        "--split-sentences",
    ),
    *(
        _without(
            name,
            lambda run, name=name: bool(getattr(run.data, name)),  # type: ignore[misc]
            f"a sample of BERT is from one document and has no end of it inside; {_LEAVE_OUT}",
        )
        for name in (
            "eod_mask_loss",
            "reset_position_ids",
            "reset_attention_mask",
            "dataloader_inter_document_masking",
        )
    ),
)


@rule("model_family", "bert_binary_head", "bert_token_types")
def binary_head_needs_bert(draft: Draft) -> str:
    model = draft.run.model
    if _is_bert(draft) and model.bert_token_types and model.bert_binary_head:
        return "--bert-token-types has no effect without --bert-no-binary-head: the head has them"
    given = [] if model.bert_binary_head else ["--bert-no-binary-head"]
    given += ["--bert-token-types"] if model.bert_token_types else []
    if _is_bert(draft) or not given:
        return ""
    return f"{' and '.join(given)}: no effect, as the model is no BERT"


@rule("model_family", "mask_prob", "short_seq_prob")
def masking_needs_masked_words(draft: Draft) -> str:
    given = [name for name in ("mask_prob", "short_seq_prob") if name in draft.given]
    if draft.run.model.model_family in ("bert", "t5") or not given:
        return ""
    return f"{' and '.join(show(draft, name) for name in given)}: no effect, as GPT guesses no hidden words"


BERT_NOTICES: tuple[Rule, ...] = (binary_head_needs_bert, masking_needs_masked_words)
