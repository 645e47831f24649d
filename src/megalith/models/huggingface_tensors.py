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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from megalith.config import ModelConfig

OUTPUT_LAYER = "lm_head.weight"
LLAMA_ENDS = {"words": "model.embed_tokens.weight", "norm": "model.norm"}
LLAMA_LAYER, OUR_LAYER = "model.layers.", "decoder.layers."
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
        """Return the rows of a part of this tensor, as a view in the shape of the parameter."""
        return (tensor.t() if self.transposed else tensor).narrow(0, part.start, part.length)


def of_decoder(
    model: ModelConfig,
    vocab_size: int,
    names: Mapping[str, str],
    layer: Callable[[ModelConfig, int], Iterable[TheirTensor]],
    ahead: Iterable[TheirTensor] = (),
) -> Iterator[TheirTensor]:
    """Yield the tensors of a decoder; `names` are those outside of layers, `ahead` those of multi-token prediction."""
    hidden = model.hidden_size
    yield whole(names["words"], (vocab_size, hidden), "embedding.word_embeddings.weight")
    if model.position_embedding_type == "learned_absolute":
        positions = (model.max_position_embeddings, hidden)
        yield whole(names["positions"], positions, "embedding.position_embeddings.weight")
    for number in range(model.num_layers):
        yield from layer(model, number)
    yield from ahead
    yield from norm(names["norm"], (hidden,), "decoder.final_layernorm", bias=model.normalization == "LayerNorm")
    if model.untie_embeddings_and_output_weights:
        yield whole(names.get("output", OUTPUT_LAYER), (vocab_size, hidden), "output_layer.weight")


def follows_from_config(name: str) -> bool:
    """Return whether a tensor of older files holds nothing that was learned."""
    return _BUFFERS.fullmatch(name) is not None


def whole(name: str, shape: tuple[int, ...], parameter: str, *, transposed: bool = False) -> TheirTensor:
    rows = shape[-1] if transposed else shape[0]
    return TheirTensor(name, shape, (Part(parameter, 0, 0, rows),), transposed)


def norm(name: str, shape: tuple[int, ...], ours: str, *, bias: bool) -> list[TheirTensor]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return [whole(f"{name}.{kind}", shape, f"{ours}.{kind}") for kind in kinds]


def linear(name: str, shape: tuple[int, int], ours: str, bias: bool) -> Iterator[TheirTensor]:
    yield whole(f"{name}.weight", shape, f"{ours}.weight")
    if bias:
        yield whole(f"{name}.bias", shape[:1], f"{ours}.bias")


def gated(theirs: str, ours: str, model: ModelConfig, size: int) -> Iterator[TheirTensor]:
    """Yield the tensors of a gated feed-forward layer of width `size`."""
    for number, gated in enumerate(("gate", "up")):
        for kind, columns in (("weight", (model.hidden_size,)), ("bias", ()))[: 1 + model.add_bias_linear]:
            part = Part(f"{ours}linear_fc1.{kind}", 0, number * size, size)
            yield TheirTensor(f"{theirs}{gated}_proj.{kind}", (size, *columns), (part,))
    yield from linear(f"{theirs}down_proj", (model.hidden_size, size), f"{ours}linear_fc2", model.add_bias_linear)


def heads(model: ModelConfig, letter: str, first: int, parameter: str) -> tuple[Part, ...]:
    """Return the parts, one per group, of heads of one kind that start at row `first` of their fused projection."""
    size, queries = model.head_size, model.num_attention_heads // model.query_groups
    rows = queries * size if letter == "q" else size
    inside = {"q": 0, "k": queries * size, "v": (queries + 1) * size}[letter]
    return tuple(
        Part(parameter, first + group * rows, group * (queries + 2) * size + inside, rows)
        for group in range(model.query_groups)
    )
