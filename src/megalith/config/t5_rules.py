"""Rules of T5: what it needs, and what of other models it has not."""

from __future__ import annotations

from collections.abc import Callable

from megalith.config.rule import Draft, Rule, multiples, rule, show
from megalith.config.run import RunConfig

_NUMBERED = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer")
_WITH_SENTINELS = (*_NUMBERED, "HuggingFaceTokenizer")  # the last one has those that its folder names


def _is_t5(draft: Draft) -> bool:
    return draft.run.model.model_family == "t5"


@rule("model_family", "decoder_seq_length")
def t5_has_a_decoder_length(draft: Draft) -> str:
    if not _is_t5(draft) or draft.run.data.decoder_seq_length is not None:
        return ""
    return "--decoder-seq-length is required for T5 (tokens of one sample that its decoder reads, such as 128)"


@rule("model_family", "decoder_seq_length", "max_position_embeddings", "position_embedding_type")
def positions_cover_the_decoder(draft: Draft) -> str:
    run, length = draft.run, draft.run.data.decoder_seq_length
    if not _is_t5(draft) or length is None or length <= run.model.max_position_embeddings:
        return ""
    return (
        f"{show(draft, 'decoder_seq_length')} is longer than {show(draft, 'max_position_embeddings')}; "
        f"use --max-position-embeddings {length}, or a decoder sequence of at most {run.model.max_position_embeddings}"
    )


@rule("model_family", "decoder_seq_length", "sequence_parallel", "tensor_model_parallel_size")
def decoder_sequence_divides_over_its_ranks(draft: Draft) -> str:
    parallel, length = draft.run.parallel, draft.run.data.decoder_seq_length
    unit = parallel.tensor_model_parallel_size
    if not _is_t5(draft) or length is None or not parallel.sequence_parallel_here or length % unit == 0:
        return ""
    return (
        f"{show(draft, 'decoder_seq_length')} is not divisible by {show(draft, 'tensor_model_parallel_size')}, which "
        f"{show(draft, 'sequence_parallel')} needs; nearest: {multiples(length, unit)}"
    )


@rule("model_family", "tokenizer_type", "vocab_extra_ids")
def t5_has_sentinels(draft: Draft) -> str:
    tokenizer = draft.run.tokenizer
    if not _is_t5(draft) or tokenizer.tokenizer_type not in _NUMBERED or tokenizer.vocab_extra_ids:
        return ""
    return "--vocab-extra-ids is required for T5: tokens that stand for the spans that its decoder guesses, such as 100"


@rule("model_family", "tokenizer_type")
def t5_has_a_tokenizer_with_sentinels(draft: Draft) -> str:
    if not _is_t5(draft) or draft.run.tokenizer.tokenizer_type in _WITH_SENTINELS:
        return ""
    return (
        f"{show(draft, 'tokenizer_type')} has no tokens <extra_id_N>, which stand for the spans that T5 guesses; use "
        f"--tokenizer-type {' or '.join(_NUMBERED)} with --vocab-extra-ids 100"
    )


@rule("model_family", "position_embedding_type")
def relative_positions_are_those_of_t5(draft: Draft) -> str:
    if draft.run.model.position_embedding_type != "relative" or _is_t5(draft):
        return ""
    return "--position-embedding-type relative is that of T5; use learned_absolute, rope or yarn"


@rule("position_embedding_type", "relative_attention_num_buckets", "relative_attention_max_distance")
def buckets_have_distances(draft: Draft) -> str:
    model = draft.run.model
    if model.position_embedding_type != "relative":
        return ""
    if model.relative_attention_num_buckets % 2:
        return (
            f"{show(draft, 'relative_attention_num_buckets')} is odd, and half of the buckets are for later positions"
        )
    exact = model.relative_attention_num_buckets // 2  # of the decoder, which has more of them
    if model.relative_attention_max_distance > exact:
        return ""
    return (
        f"{show(draft, 'relative_attention_max_distance')}: {exact} distances have a bucket of their own, so that it "
        f"must be above {exact}"
    )


def _without(what: str, used: Callable[[RunConfig], bool], name: str, why: str) -> Rule:
    """A rule against a setting that T5 has not."""

    @rule("model_family", name)
    def check(draft: Draft) -> str:
        return f"{show(draft, name)}: {why}" if _is_t5(draft) and used(draft.run) else ""

    return Rule(f"t5_has_no_{what}", check.needs, check.check)


T5_RULES: tuple[Rule, ...] = (
    t5_has_a_decoder_length,
    positions_cover_the_decoder,
    decoder_sequence_divides_over_its_ranks,
    t5_has_sentinels,
    t5_has_a_tokenizer_with_sentinels,
    relative_positions_are_those_of_t5,
    buckets_have_distances,
    _without(
        "pipeline",
        lambda run: run.parallel.pipeline_model_parallel_size > 1,
        "pipeline_model_parallel_size",
        "T5 has no pipeline parallelism, as in Megatron: every layer of the decoder needs the encoder's output; use "
        "--tensor-model-parallel-size or --use-distributed-optimizer",
    ),
    _without(
        "context_parallelism",
        lambda run: run.parallel.context_parallel_size > 1,
        "context_parallel_size",
        "context parallelism is for causal attention; use --tensor-model-parallel-size with --sequence-parallel",
    ),
    _without(
        "query_groups",
        lambda run: run.model.group_query_attention,
        "group_query_attention",
        "each head of T5's cross attention has its own keys and values, as in Megatron; leave it out",
    ),
    _without(
        "norms_of_heads",
        lambda run: run.model.qk_layernorm,
        "qk_layernorm",
        "T5 has no norms of heads, as in Megatron; leave it out",
    ),
    _without(
        "l2_norms_of_heads",
        lambda run: run.model.qk_l2_norm,
        "qk_l2_norm",
        "T5 has no norms of heads, as in Megatron; leave it out",
    ),
    _without("window", lambda run: run.model.window_size is not None, "window_size", "T5 has no window; leave it out"),
    _without(
        "sinks",
        lambda run: run.model.softmax_type != "vanilla",
        "softmax_type",
        "T5 has no attention sinks; leave it out",
    ),
    _without(
        "gates_of_heads",
        lambda run: run.model.attention_output_gate,
        "attention_output_gate",
        "T5 has no gates of heads; leave it out",
    ),
    _without(
        "layers_without_positions",
        lambda run: run.model.no_rope_freq is not None,
        "no_rope_freq",
        "the layers of T5's two stacks are alike; leave it out",
    ),
    _without(
        "yarn",
        lambda run: run.model.position_embedding_type == "yarn",
        "position_embedding_type",
        "T5 has learned_absolute, relative, rope or none",
    ),
    _without(
        "mock_data",
        lambda run: run.data.mock_data,
        "mock_data",
        "T5 learns from text in sentences; give --data-path, the prefix of a dataset of megalith preprocess "
        "--split-sentences",
    ),
    _without(
        "documents",
        lambda run: run.data.masks_documents,
        "reset_attention_mask",
        "a sample of T5 is from one document already; leave it out",
    ),
)


def _idle_without_t5(name: str, default: object) -> Rule:
    """A notice for a setting that only T5 reads."""

    @rule("model_family", name)
    def check(draft: Draft) -> str:
        group = draft.run.data if name == "decoder_seq_length" else draft.run.model
        idle = not _is_t5(draft) and getattr(group, name) != default
        return f"{show(draft, name)} has no effect: the model is no T5" if idle else ""

    return Rule(f"{name}_needs_t5", check.needs, check.check)


@rule("relative_attention_num_buckets", "relative_attention_max_distance", "position_embedding_type", "model_family")
def buckets_need_relative_positions(draft: Draft) -> str:
    model = draft.run.model
    defaults = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    given = [name for name, value in defaults.items() if getattr(model, name) != value]
    if not given or model.position_embedding_type == "relative":
        return ""
    return f"{' and '.join(show(draft, name) for name in given)}: no effect without --position-embedding-type relative"


@rule("model_family", "t5_logits_bias", "untie_embeddings_and_output_weights")
def the_bias_of_logits_is_of_a_tied_t5(draft: Draft) -> str:
    model = draft.run.model
    if model.t5_logits_bias or (_is_t5(draft) and not model.untie_embeddings_and_output_weights):
        return ""
    why = "the output layer of T5 has none where it has weights of its own" if _is_t5(draft) else "the model is no T5"
    return f"--no-t5-logits-bias has no effect: {why}"


T5_NOTICES: tuple[Rule, ...] = (
    the_bias_of_logits_is_of_a_tied_t5,
    _idle_without_t5("t5_scaled_logits", False),
    _idle_without_t5("decoder_num_layers", None),
    _idle_without_t5("decoder_seq_length", None),
    buckets_need_relative_positions,
)
