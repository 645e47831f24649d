"""The tensors of Hugging Face's models and the parameters of ours: one table, read both ways.

Every tensor of theirs is made of rows of our parameters, the other way round as well:

    q_proj, k_proj, v_proj     linear_qkv: for each group its queries, its key, its value (`nn.attention`)
    gate_proj, up_proj         linear_fc1: all gates, then all ups; of each expert too
    c_attn (GPT-2)             all queries, all keys, all values; GPT-2's linear layers are stored transposed
    the others                 whole

Where the embedding is tied there is no `lm_head.weight`. The order is that of `state_dict` of their models, by which
the shards of a large model are cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.huggingface import Family
from megalith.models.huggingface_bert import ARCHITECTURES as BERT
from megalith.models.huggingface_deepseek import KIND as DEEPSEEK
from megalith.models.huggingface_deepseek import PROJECTIONS
from megalith.models.huggingface_experts import NAMES, projections
from megalith.models.huggingface_t5 import ABSENT as T5
from megalith.models.language_model import WORD_EMBEDDINGS

GPT2_PREFIX = "transformer."
"""Before the names of GPT-2's tensors; files written by the bare model, as the first on the hub, are without it."""

_LLAMA_LAYER, _GPT2_LAYER, _OUR_LAYER = "model.layers.", "transformer.h.", "decoder.layers."
# What files hold besides: masks and frequencies, which follow from the configuration; tied weights once more; BERT's
# pooler, which a model without the head that reads it has no use for; a table of positions that T5 never read.
_BUFFERS = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|"
    r"bert\.embeddings\.position_ids|cls\.predictions\.decoder\.(weight|bias)|bert\.pooler\.dense\.(weight|bias)|"
    r"(encoder|decoder)\.embed_tokens\.weight|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)


@dataclass(frozen=True)
class Part:
    """Rows of a tensor that are rows of a parameter.

    Attributes:
        parameter: its name in our model.
        start: the first row in the tensor of Hugging Face; after transposing it, where it is transposed.
        at: the first row in the parameter.
        length: how many rows.
    """

    parameter: str
    start: int
    at: int
    length: int


@dataclass(frozen=True)
class TheirTensor:
    """A tensor of a Hugging Face model.

    Attributes:
        name: in its files.
        shape: in its files.
        parts: what of our parameters it is; together all of it.
        transposed: parts are rows of its transpose.
        again: what it is stands in another tensor too, from which it is read.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    transposed: bool = False
    again: bool = False

    def rows(self, tensor: Tensor, part: Part) -> Tensor:
        """Of this tensor the rows that are a part; a view that is shaped as in the parameter."""
        return (tensor.t() if self.transposed else tensor).narrow(0, part.start, part.length)


def tensors_of(family: Family, model: ModelConfig, vocab_size: int) -> list[TheirTensor]:
    """Return all tensors of a model in the order of its `state_dict`; `vocab_size` counts the rows of the embedding."""
    if family.model_type in BERT:
        return list(_bert(model, vocab_size))
    if family.model_type in T5:
        return list(_t5(model, vocab_size))
    layers = _LAYERS.get(family.model_type, partial(_llama_layer, family))
    names = _GPT2_ENDS if family.model_type == "gpt2" else _LLAMA_ENDS
    hidden = model.hidden_size
    found = [_whole(names["words"], (vocab_size, hidden), "embedding.word_embeddings.weight")]
    if model.position_embedding_type == "learned_absolute":
        positions = (model.max_position_embeddings, hidden)
        found.append(_whole(names["positions"], positions, "embedding.position_embeddings.weight"))
    for layer in range(model.num_layers):
        found += layers(model, layer)
    for depth in range(model.predictions):
        found += _deepseek_prediction(model, depth, vocab_size)
    found += _norm(names["norm"], (hidden,), "decoder.final_layernorm", bias=model.normalization == "LayerNorm")
    if model.untie_embeddings_and_output_weights:
        found.append(_whole("lm_head.weight", (vocab_size, hidden), "output_layer.weight"))
    return found


def follows_from_config(name: str) -> bool:
    """Whether a tensor of older files holds nothing that was learned."""
    return _BUFFERS.fullmatch(name) is not None


def _bert(model: ModelConfig, vocab_size: int) -> Iterator[TheirTensor]:
    hidden, layers = model.hidden_size, model.num_layers
    words, embeddings = (vocab_size, hidden), "bert.embeddings."
    yield _whole(f"{embeddings}word_embeddings.weight", words, "embedding.word_embeddings.weight")
    positions = (model.max_position_embeddings, hidden)
    yield _whole(f"{embeddings}position_embeddings.weight", positions, "embedding.position_embeddings.weight")
    yield _whole(f"{embeddings}token_type_embeddings.weight", (2, hidden), "embedding.tokentype_embeddings.weight")
    published = model.apply_residual_connection_post_layernorm
    if published:
        yield from _norm(f"{embeddings}LayerNorm", (hidden,), "encoder.layers.0.input_layernorm", bias=True)
    for layer in range(layers):
        yield from _bert_layer(model, layer, published=published)
    if not published:
        yield from _norm("bert.encoder.ln", (hidden,), "encoder.final_layernorm", bias=True)
    if model.bert_binary_head:
        yield from _linear("bert.pooler.dense", (hidden, hidden), "pooler.dense", bias=True)
    yield _whole("cls.predictions.bias", (vocab_size,), "output_layer.bias")
    yield from _linear("cls.predictions.transform.dense", (hidden, hidden), "lm_head.dense", bias=True)
    yield from _norm("cls.predictions.transform.LayerNorm", (hidden,), "lm_head.layer_norm", bias=True)
    if model.bert_binary_head:
        yield from _linear("cls.seq_relationship", (2, hidden), "binary_head", bias=True)


def _bert_layer(model: ModelConfig, layer: int, *, published: bool) -> Iterator[TheirTensor]:
    """A layer; the norms of BERT as published stand behind the residual sums, those of Megatron before the branches."""
    theirs, ours, hidden = f"bert.encoder.layer.{layer}.", f"encoder.layers.{layer}.", model.hidden_size
    last, behind = layer == model.num_layers - 1, f"encoder.layers.{layer + 1}.input_layernorm"
    if not published:
        yield from _norm(f"{theirs}attention.ln", (hidden,), f"{ours}input_layernorm", bias=True)
    for letter, name in (("q", "query"), ("k", "key"), ("v", "value")):
        for kind, columns in (("weight", (hidden,)), ("bias", ())):
            parts = _heads(model, letter, 0, f"{ours}self_attention.linear_qkv.{kind}")
            yield TheirTensor(f"{theirs}attention.self.{name}.{kind}", (hidden, *columns), parts)
    attention, square = f"{theirs}attention.output.", (hidden, hidden)
    yield from _linear(f"{attention}dense", square, f"{ours}self_attention.linear_proj", bias=True)
    norm = f"{attention}LayerNorm" if published else f"{theirs}ln"
    yield from _norm(norm, (hidden,), f"{ours}pre_mlp_layernorm", bias=True)
    ffn = model.ffn_size
    yield from _linear(f"{theirs}intermediate.dense", (ffn, hidden), f"{ours}mlp.linear_fc1", bias=True)
    yield from _linear(f"{theirs}output.dense", (hidden, ffn), f"{ours}mlp.linear_fc2", bias=True)
    if published:
        norm = "encoder.final_layernorm" if last else behind
        yield from _norm(f"{theirs}output.LayerNorm", (hidden,), norm, bias=True)


def _t5(model: ModelConfig, vocab_size: int) -> Iterator[TheirTensor]:
    words, norm = (vocab_size, model.hidden_size), (model.hidden_size,)
    yield _whole("shared.weight", words, "embedding.word_embeddings.weight")
    for stack, layers in model.stacks.items():
        for layer in range(layers):
            yield from _t5_layer(model, stack, layer)
        yield from _norm(f"{stack}.final_layer_norm", norm, f"{stack}.final_layernorm", bias=False)
    if model.untie_embeddings_and_output_weights:
        yield _whole("lm_head.weight", words, "lm_head.output_layer.weight")


def _t5_layer(model: ModelConfig, stack: str, layer: int) -> Iterator[TheirTensor]:
    hidden, width, norm = model.hidden_size, model.num_attention_heads * model.head_size, (model.hidden_size,)
    theirs, ours = f"{stack}.block.{layer}.layer.", f"{stack}.layers.{layer}."
    for letter in "qkv":
        parts = _heads(model, letter, 0, f"{ours}self_attention.linear_qkv.weight")
        yield TheirTensor(f"{theirs}0.SelfAttention.{letter}.weight", (width, hidden), parts)
    own = f"{ours}self_attention.linear_proj"
    yield from _linear(f"{theirs}0.SelfAttention.o", (hidden, width), own, bias=False)
    if layer == 0:
        table = (model.relative_attention_num_buckets, model.num_attention_heads)
        bias = "relative_attention_bias.weight"
        yield _whole(f"{theirs}0.SelfAttention.{bias}", table, f"{stack}_relative_pos_emb.{bias}")
    yield from _norm(f"{theirs}0.layer_norm", norm, f"{ours}input_layernorm", bias=False)
    if stack == "decoder":
        yield from _across(model, f"{theirs}1.EncDecAttention.", f"{ours}cross_attention.")
        yield from _norm(f"{theirs}1.layer_norm", norm, f"{ours}pre_cross_attn_layernorm", bias=False)
    last, ffn = f"{theirs}{2 if stack == 'decoder' else 1}.", model.ffn_size
    for number, name in enumerate(("wi_0", "wi_1") if model.gated else ("wi",)):
        part = Part(f"{ours}mlp.linear_fc1.weight", 0, number * ffn, ffn)
        yield TheirTensor(f"{last}DenseReluDense.{name}.weight", (ffn, hidden), (part,))
    yield from _linear(f"{last}DenseReluDense.wo", (hidden, ffn), f"{ours}mlp.linear_fc2", bias=False)
    yield from _norm(f"{last}layer_norm", norm, f"{ours}pre_mlp_layernorm", bias=False)


def _across(model: ModelConfig, theirs: str, ours: str) -> Iterator[TheirTensor]:
    """Attention to the encoder: for each head its key and then its value in one projection (`nn.cross_attention`)."""
    size, heads, hidden = model.head_size, model.num_attention_heads, model.hidden_size
    width = heads * size
    yield from _linear(f"{theirs}q", (width, hidden), f"{ours}linear_q", bias=False)
    for inside, letter in enumerate("kv"):
        parts = tuple(
            Part(f"{ours}linear_kv.weight", head * size, (2 * head + inside) * size, size) for head in range(heads)
        )
        yield TheirTensor(f"{theirs}{letter}.weight", (width, hidden), parts)
    yield from _linear(f"{theirs}o", (hidden, width), f"{ours}linear_proj", bias=False)


_GPT2_ENDS = {
    "words": f"{GPT2_PREFIX}wte.weight",
    "positions": f"{GPT2_PREFIX}wpe.weight",
    "norm": f"{GPT2_PREFIX}ln_f",
}
_LLAMA_ENDS = {"words": "model.embed_tokens.weight", "norm": "model.norm"}


def _whole(name: str, shape: tuple[int, ...], parameter: str, *, transposed: bool = False) -> TheirTensor:
    rows = shape[-1] if transposed else shape[0]
    return TheirTensor(name, shape, (Part(parameter, 0, 0, rows),), transposed)


def _norm(name: str, shape: tuple[int, ...], ours: str, *, bias: bool) -> list[TheirTensor]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return [_whole(f"{name}.{kind}", shape, f"{ours}.{kind}") for kind in kinds]


def _gpt2_layer(model: ModelConfig, layer: int) -> Iterator[TheirTensor]:
    theirs, ours, hidden = f"{_GPT2_LAYER}{layer}.", f"{_OUR_LAYER}{layer}.", model.hidden_size

    def linear(name: str, parameter: str, inputs: int, outputs: int) -> Iterator[TheirTensor]:
        yield _whole(f"{theirs}{name}.weight", (inputs, outputs), f"{ours}{parameter}.weight", transposed=True)
        yield _whole(f"{theirs}{name}.bias", (outputs,), f"{ours}{parameter}.bias")

    yield from _norm(f"{theirs}ln_1", (hidden,), f"{ours}input_layernorm", bias=True)
    qkv = f"{ours}self_attention.linear_qkv"
    yield TheirTensor(f"{theirs}attn.c_attn.weight", (hidden, 3 * hidden), _all_heads(model, f"{qkv}.weight"), True)
    yield TheirTensor(f"{theirs}attn.c_attn.bias", (3 * hidden,), _all_heads(model, f"{qkv}.bias"))
    yield from linear("attn.c_proj", "self_attention.linear_proj", hidden, hidden)
    yield from _norm(f"{theirs}ln_2", (hidden,), f"{ours}pre_mlp_layernorm", bias=True)
    yield from linear("mlp.c_fc", "mlp.linear_fc1", hidden, model.ffn_size)
    yield from linear("mlp.c_proj", "mlp.linear_fc2", model.ffn_size, hidden)


def _llama_layer(family: Family, model: ModelConfig, layer: int) -> Iterator[TheirTensor]:
    theirs, ours, hidden = f"{_LLAMA_LAYER}{layer}.", f"{_OUR_LAYER}{layer}.", model.hidden_size
    attention, size = f"{ours}self_attention.", model.head_size

    def kinds(bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The tensors of a linear layer, with the shape behind the rows."""
        return iter([("weight", (hidden,)), ("bias", ())] if bias else [("weight", (hidden,))])

    for letter, heads in (("q", model.num_attention_heads), ("k", model.query_groups), ("v", model.query_groups)):
        for kind, columns in kinds(model.qkv_bias):
            parts = _heads(model, letter, 0, f"{attention}linear_qkv.{kind}")
            yield TheirTensor(f"{theirs}self_attn.{letter}_proj.{kind}", (heads * size, *columns), parts)
    context = model.num_attention_heads * size
    yield from _linear(f"{theirs}self_attn.o_proj", (hidden, context), f"{attention}linear_proj", model.add_bias_linear)
    if model.qk_layernorm:
        for letter in "qk":
            yield from _norm(f"{theirs}self_attn.{letter}_norm", (size,), f"{attention}{letter}_layernorm", bias=False)
    if model.experts[layer]:
        yield from _experts(family.model_type, model, layer)
    else:
        yield from _gated(f"{theirs}mlp.", f"{ours}mlp.", model, model.ffn_size)
    yield from _norm(f"{theirs}input_layernorm", (hidden,), f"{ours}input_layernorm", bias=False)
    yield from _norm(f"{theirs}post_attention_layernorm", (hidden,), f"{ours}pre_mlp_layernorm", bias=False)


def _gated(theirs: str, ours: str, model: ModelConfig, size: int) -> Iterator[TheirTensor]:
    """A gated feed-forward layer of this width."""
    for number, gated in enumerate(("gate", "up")):
        for kind, columns in (("weight", (model.hidden_size,)), ("bias", ()))[: 1 + model.add_bias_linear]:
            part = Part(f"{ours}linear_fc1.{kind}", 0, number * size, size)
            yield TheirTensor(f"{theirs}{gated}_proj.{kind}", (size, *columns), (part,))
    yield from _linear(f"{theirs}down_proj", (model.hidden_size, size), f"{ours}linear_fc2", model.add_bias_linear)


def _deepseek_prediction(model: ModelConfig, depth: int, vocab_size: int) -> Iterator[TheirTensor]:
    number, hidden = model.num_layers + depth, model.hidden_size
    theirs, ours, table = f"{_LLAMA_LAYER}{number}.", f"mtp.layers.{depth}.", (vocab_size, hidden)
    output = "output_layer.weight" if model.untie_embeddings_and_output_weights else WORD_EMBEDDINGS
    yield replace(_whole(f"{theirs}embed_tokens.weight", table, WORD_EMBEDDINGS), again=True)
    for name in ("enorm", "hnorm"):
        yield from _norm(f"{theirs}{name}", (hidden,), f"{ours}{name}", bias=False)
    yield _whole(f"{theirs}eh_proj.weight", (hidden, 2 * hidden), f"{ours}eh_proj.weight")
    yield from _deepseek_layer(model, number)
    yield from _norm(f"{theirs}shared_head.norm", (hidden,), f"{ours}final_layernorm", bias=False)
    yield replace(_whole(f"{theirs}shared_head.head.weight", table, output), again=True)


def _our_layer(model: ModelConfig, layer: int) -> tuple[str, int]:
    """What the names of a layer begin with here, and its experts; those of prediction are like the last one."""
    ahead = layer - model.num_layers
    prefix = f"{_OUR_LAYER}{layer}." if ahead < 0 else f"mtp.layers.{ahead}.transformer_layer."
    return prefix, model.experts[min(layer, model.num_layers - 1)]


def _deepseek_layer(model: ModelConfig, layer: int) -> Iterator[TheirTensor]:
    theirs, hidden = f"{_LLAMA_LAYER}{layer}.", model.hidden_size
    ours, experts = _our_layer(model, layer)
    heads, queries = model.num_attention_heads, model.num_attention_heads * model.latent_query_size
    rank, turned = model.kv_lora_rank, model.qk_pos_emb_head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (rank + turned, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (model.qk_head_dim + model.v_head_dim), rank),
        "o_proj": (hidden, heads * model.v_head_dim),
    }
    if model.q_lora_rank is None:
        shapes["q_proj"] = (queries, hidden)
    else:
        of_queries = {"q_a_proj": (model.q_lora_rank, hidden), "q_b_proj": (queries, model.q_lora_rank)}
        shapes |= {**of_queries, "q_a_layernorm": (model.q_lora_rank,)}
    for name, parameter in PROJECTIONS.items():
        if name in shapes:
            yield _whole(f"{theirs}self_attn.{name}.weight", shapes[name], f"{ours}self_attention.{parameter}.weight")
    if experts:
        yield from _experts(DEEPSEEK, model, layer)
        bias = (experts,)
        yield _whole(f"{theirs}mlp.gate.e_score_correction_bias", bias, f"{ours}mlp.router.expert_bias")
        size = model.moe_shared_expert_intermediate_size
        assert size is not None, "a rule of the family"
        yield from _gated(f"{theirs}mlp.shared_experts.", f"{ours}mlp.shared_experts.", model, size)
    else:
        yield from _gated(f"{theirs}mlp.", f"{ours}mlp.", model, model.ffn_size)
    yield from _norm(f"{theirs}input_layernorm", (hidden,), f"{ours}input_layernorm", bias=False)
    yield from _norm(f"{theirs}post_attention_layernorm", (hidden,), f"{ours}pre_mlp_layernorm", bias=False)


_LAYERS = {"gpt2": _gpt2_layer, DEEPSEEK: _deepseek_layer}


def _experts(kind: str, model: ModelConfig, layer: int) -> Iterator[TheirTensor]:
    theirs, (prefix, experts) = f"{_LLAMA_LAYER}{layer}.", _our_layer(model, layer)
    ours, hidden, size = f"{prefix}mlp.", model.hidden_size, model.expert_size
    yield _whole(f"{theirs}{NAMES[kind].module}.gate.weight", (experts, hidden), f"{ours}router.weight")
    for expert in range(experts):
        local = f"{ours}experts.local_experts.{expert}."
        for name, projection in projections(kind, theirs, expert):
            if projection == "down":
                yield _whole(name, (hidden, size), f"{local}linear_fc2.weight")
            else:
                start = size if projection == "up" else 0
                yield TheirTensor(name, (size, hidden), (Part(f"{local}linear_fc1.weight", 0, start, size),))


def _linear(name: str, shape: tuple[int, int], ours: str, bias: bool) -> Iterator[TheirTensor]:
    yield _whole(f"{name}.weight", shape, f"{ours}.weight")
    if bias:
        yield _whole(f"{name}.bias", shape[:1], f"{ours}.bias")


def _heads(model: ModelConfig, letter: str, first: int, parameter: str) -> tuple[Part, ...]:
    """The heads of one kind, which start at row `first` of their tensor, in the fused projection: one part a group."""
    size, queries = model.head_size, model.num_attention_heads // model.query_groups
    rows = queries * size if letter == "q" else size
    inside = {"q": 0, "k": queries * size, "v": (queries + 1) * size}[letter]
    return tuple(
        Part(parameter, first + group * rows, group * (queries + 2) * size + inside, rows)
        for group in range(model.query_groups)
    )


def _all_heads(model: ModelConfig, parameter: str) -> tuple[Part, ...]:
    """The heads of GPT-2's fused projection: all queries, all keys, all values."""
    parts = (_heads(model, letter, n * model.hidden_size, parameter) for n, letter in enumerate("qkv"))
    return tuple(part for of_kind in parts for part in of_kind)
