"""Rules of BERT and T5: settings they require, and settings of GPT they do not support."""

from __future__ import annotations

from megalith.config.rules.rule import Draft, excluded, forbid, idle, multiples, rule, show
from megalith.config.run import RunConfig

SHORTEST_SAMPLE = 8  # tokens: three special tokens, and a few words on either side
_WORD_PIECES = ("BertWordPieceLowerCase", "BertWordPieceCase")
_NUMBERED = (*_WORD_PIECES, "SentencePieceTokenizer")
_WITH_SENTINELS = (*_NUMBERED, "HuggingFaceTokenizer")  # HuggingFaceTokenizer has the sentinels of its folder


def _is_bert(run: RunConfig) -> bool:
    return run.model.model_family == "bert"


def _is_t5(run: RunConfig) -> bool:
    return run.model.model_family == "t5"


bert_has_word_pieces = forbid(
    lambda run: _is_bert(run) and run.tokenizer.tokenizer_type not in _WORD_PIECES,
    "{tokenizer_type} has no [CLS], [SEP] and [MASK], or does not mark the pieces inside a word; BERT requires "
    f"--tokenizer-type {' or '.join(_WORD_PIECES)}",
)
a_sample_of_bert_has_words = forbid(
    lambda run: _is_bert(run) and run.data.seq_length < SHORTEST_SAMPLE,
    f"{{seq_length}}: three tokens of each BERT sample are special tokens; use at least {SHORTEST_SAMPLE}",
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
        "num_experts": "MoE is supported for GPT only; leave it out",
        "window_size": "BERT attends to all positions; leave it out",
        "softmax_type": "BERT has no attention sinks; leave it out",
        "calculate_per_token_loss": "the losses of BERT have different numbers of terms, as in Megatron; leave it out",
        "mock_data": f"BERT {_SENTENCES}",
        "data_source": f"BERT {_SENTENCES}",
        **dict.fromkeys(
            ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "dataloader_inter_document_masking"),
            "a BERT sample is from one document and contains no end-of-document token; leave it out",
        ),
    },
)


token_types_are_without_the_head = idle(
    ("bert_token_types",),
    lambda run: _is_bert(run) and not run.model.bert_binary_head,
    lambda draft: (
        " without --bert-no-binary-head: the binary head always has token types"
        if _is_bert(draft.run)
        else ": the model is no BERT"
    ),
)
binary_head_is_of_bert = idle(("bert_binary_head",), _is_bert, lambda draft: ": the model is no BERT")
masking_is_of_masked_words = idle(
    ("mask_prob", "short_seq_prob"),
    lambda run: run.model.family.objective != "causal",
    lambda draft: ": GPT has no masked words",
)
t5_has_a_decoder_length = forbid(
    lambda run: _is_t5(run) and run.data.decoder_seq_length is None,
    "--decoder-seq-length is required for T5 (number of decoder tokens of a sample, such as 128)",
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
    "--vocab-extra-ids is required for T5: number of sentinel tokens, one for each masked span, such as 100",
)
t5_has_a_tokenizer_with_sentinels = forbid(
    lambda run: _is_t5(run) and run.tokenizer.tokenizer_type not in _WITH_SENTINELS,
    "{tokenizer_type} has no sentinel tokens <extra_id_N>, which T5 requires; use "
    f"--tokenizer-type {' or '.join(_NUMBERED)} with --vocab-extra-ids 100",
)


@rule
def relative_positions_are_those_of_t5(draft: Draft) -> str:
    kind = draft.run.model.position_embedding_type
    if _is_t5(draft.run) and kind == "yarn":
        return f"{show(draft, 'position_embedding_type')}: T5 supports learned_absolute, relative, rope and none"
    if _is_t5(draft.run) or kind != "relative":
        return ""
    return "--position-embedding-type relative is for T5 only; use learned_absolute, rope or yarn"


@rule
def buckets_have_distances(draft: Draft) -> str:
    model = draft.run.model
    if model.position_embedding_type != "relative":
        return ""
    if model.relative_attention_num_buckets % 2:
        return (
            f"{show(draft, 'relative_attention_num_buckets')} is odd, and half of the buckets are for later positions"
        )
    exact = model.relative_attention_num_buckets // 2  # of the decoder, which has more exact buckets than the encoder
    if model.relative_attention_max_distance > exact:
        return ""
    return (
        f"{show(draft, 'relative_attention_max_distance')}: the first {exact} distances have one bucket each; use a "
        f"value above {exact}"
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
        "qk_layernorm": "T5 has no query and key norms, as in Megatron; leave it out",
        "qk_l2_norm": "T5 has no query and key norms, as in Megatron; leave it out",
        "window_size": "T5 has no sliding-window attention; leave it out",
        "softmax_type": "T5 has no attention sinks; leave it out",
        "attention_output_gate": "T5 has no attention output gate; leave it out",
        "no_rope_freq": "all layers of a T5 stack have the same position embedding; leave it out",
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
    lambda draft: ": an untied output layer of T5 has no bias" if _is_t5(draft.run) else ": the model is no T5",
)
