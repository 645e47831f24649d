"""Rules of BERT and T5: what they need, and what of GPT they do not have."""

from __future__ import annotations

from megalith.config.rules.rule import Draft, excluded, forbid, idle, multiples, rule, show
from megalith.config.run import RunConfig

SHORTEST_SAMPLE = 8  # tokens: three special ones, and a few words on either side
_WORD_PIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")
_NUMBERED = (*_WORD_PIECES, "SentencePieceTokenizer")
_WITH_SENTINELS = (*_NUMBERED, "HuggingFaceTokenizer")  # the last one has those that its folder names


def _is_bert(run: RunConfig) -> bool:
    return run.model.model_family == "bert"


def _is_t5(run: RunConfig) -> bool:
    return run.model.model_family == "t5"


bert_has_word_pieces = forbid(
    lambda run: _is_bert(run) and run.tokenizer.tokenizer_type not in _WORD_PIECES,
    "{tokenizer_type} has no [CLS], [SEP] and [MASK] and does not say which pieces go on a word; BERT needs "
    f"--tokenizer-type {' or '.join(_WORD_PIECES)}",
)
a_sample_of_bert_has_words = forbid(
    lambda run: _is_bert(run) and run.data.seq_length < SHORTEST_SAMPLE,
    f"{{seq_length}}: three tokens of a sample of BERT are special; use at least {SHORTEST_SAMPLE}",
)


_CAUSAL = "context parallelism is for causal attention; use --tensor-model-parallel-size with --sequence-parallel"
_SENTENCES = (
    "learns from text in sentences; give --data-path, the prefix of a dataset of megalith preprocess --split-sentences"
)

bert_is_without = excluded(
    "bert",
    _is_bert,
    {
        "context_parallel_size": _CAUSAL,
        "num_experts": "mixtures of experts are for GPT; leave it out",
        "window_size": "BERT sees all positions; leave it out",
        "softmax_type": "BERT has no attention sinks; leave it out",
        "calculate_per_token_loss": "BERT's two losses have other numbers of terms, as in Megatron; leave it out",
        "mock_data": f"BERT {_SENTENCES}",
        "data_source": f"BERT {_SENTENCES}",
        **dict.fromkeys(
            ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "dataloader_inter_document_masking"),
            "a sample of BERT is from one document and has no end of it inside; leave it out",
        ),
    },
)


token_types_are_without_the_head = idle(
    ("bert_token_types",),
    lambda run: _is_bert(run) and not run.model.bert_binary_head,
    lambda draft: (
        " without --bert-no-binary-head: the head has them" if _is_bert(draft.run) else ": the model is no BERT"
    ),
)
binary_head_is_of_bert = idle(("bert_binary_head",), _is_bert, lambda draft: ": the model is no BERT")
masking_is_of_masked_words = idle(
    ("mask_prob", "short_seq_prob"),
    lambda run: run.model.family.objective != "causal",
    lambda draft: ": GPT guesses no hidden words",
)
t5_has_a_decoder_length = forbid(
    lambda run: _is_t5(run) and run.data.decoder_seq_length is None,
    "--decoder-seq-length is required for T5 (tokens of one sample that its decoder reads, such as 128)",
)
positions_cover_the_decoder = forbid(
    lambda run: (
        _is_t5(run)
        and run.data.decoder_seq_length is not None
        and run.data.decoder_seq_length > run.model.max_position_embeddings
    ),
    "{decoder_seq_length} is longer than {max_position_embeddings}; use --max-position-embeddings "
    "{run.data.decoder_seq_length}, or a decoder sequence of at most {run.model.max_position_embeddings}",
)


@rule
def decoder_sequence_divides_over_its_ranks(draft: Draft) -> str:
    parallel, length = draft.run.parallel, draft.run.data.decoder_seq_length
    unit = parallel.tensor_model_parallel_size
    if not _is_t5(draft.run) or length is None or not parallel.sequence_parallel_here or length % unit == 0:
        return ""
    return (
        f"{show(draft, 'decoder_seq_length')} is not divisible by {show(draft, 'tensor_model_parallel_size')}, which "
        f"{show(draft, 'sequence_parallel')} needs; nearest: {multiples(length, unit)}"
    )


t5_has_sentinels = forbid(
    lambda run: _is_t5(run) and run.tokenizer.tokenizer_type in _NUMBERED and not run.tokenizer.vocab_extra_ids,
    "--vocab-extra-ids is required for T5: tokens that stand for the spans that its decoder guesses, such as 100",
)
t5_has_a_tokenizer_with_sentinels = forbid(
    lambda run: _is_t5(run) and run.tokenizer.tokenizer_type not in _WITH_SENTINELS,
    "{tokenizer_type} has no tokens <extra_id_N>, which stand for the spans that T5 guesses; use "
    f"--tokenizer-type {' or '.join(_NUMBERED)} with --vocab-extra-ids 100",
)


@rule
def relative_positions_are_those_of_t5(draft: Draft) -> str:
    kind = draft.run.model.position_embedding_type
    if _is_t5(draft.run) and kind == "yarn":
        return f"{show(draft, 'position_embedding_type')}: T5 has learned_absolute, relative, rope or none"
    if _is_t5(draft.run) or kind != "relative":
        return ""
    return "--position-embedding-type relative is that of T5; use learned_absolute, rope or yarn"


@rule
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


t5_is_without = excluded(
    "t5",
    _is_t5,
    {
        "pipeline_model_parallel_size": "T5 has no pipeline parallelism, as in Megatron: every layer of the decoder "
        "needs the encoder's output; use --tensor-model-parallel-size or --use-distributed-optimizer",
        "context_parallel_size": _CAUSAL,
        "group_query_attention": "each head of T5's cross attention has its own keys and values, as in Megatron; "
        "leave it out",
        "qk_layernorm": "T5 has no norms of heads, as in Megatron; leave it out",
        "qk_l2_norm": "T5 has no norms of heads, as in Megatron; leave it out",
        "window_size": "T5 has no window; leave it out",
        "softmax_type": "T5 has no attention sinks; leave it out",
        "attention_output_gate": "T5 has no gates of heads; leave it out",
        "no_rope_freq": "the layers of T5's two stacks are alike; leave it out",
        "mock_data": f"T5 {_SENTENCES}",
        "data_source": f"T5 {_SENTENCES}",
        "reset_attention_mask": "a sample of T5 is from one document already; leave it out",
        "dataloader_inter_document_masking": "a sample of T5 is from one document already; leave it out",
    },
)

t5_settings_are_read = idle(
    ("t5_scaled_logits", "decoder_num_layers", "decoder_seq_length"),
    _is_t5,
    lambda draft: ": the model is no T5",
)


buckets_are_of_relative_positions = idle(
    ("relative_attention_num_buckets", "relative_attention_max_distance"),
    lambda run: run.model.position_embedding_type == "relative",
    lambda draft: " without --position-embedding-type relative",
)
bias_of_logits_is_of_a_tied_t5 = idle(
    ("t5_logits_bias",),
    lambda run: _is_t5(run) and not run.model.untie_embeddings_and_output_weights,
    lambda draft: (
        ": the output layer of T5 has none where it has weights of its own"
        if _is_t5(draft.run)
        else ": the model is no T5"
    ),
)
