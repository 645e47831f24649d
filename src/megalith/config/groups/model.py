"""The settings of the architecture."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting

_WORK_TRAINING = "the complete training options"


@dataclass(frozen=True)
class ModelConfig:
    """The architecture: enough to build a GPT as a library object."""

    num_layers: int = setting(help="number of transformer layers", unit="layers", at_least=1)
    hidden_size: int = setting(help="width of the model", at_least=1)
    num_attention_heads: int = setting(help="number of query heads", unit="heads", at_least=1)
    max_position_embeddings: int = setting(
        help="longest sequence, and rows of the learned position table", unit="tokens", at_least=1
    )
    group_query_attention: bool = setting(False, help="share each key and value head between several query heads")
    num_query_groups: int = setting(
        1, help="key and value heads under --group-query-attention", unit="heads", at_least=1
    )
    ffn_hidden_size: int | None = setting(
        None,
        help="width of the feed-forward layers; 4 x hidden, or int(8/3 x hidden / 64) x 64 with --swiglu",
        at_least=1,
    )
    kv_channels: int | None = setting(None, help="size of one head; hidden / heads unless given", at_least=1)
    position_embedding_type: str = setting(
        "learned_absolute",
        help="how positions enter the model",
        choices=("learned_absolute", "rope", "none"),
        shorthands={"--use-rotary-position-embeddings": "rope"},
        later=("yarn", "mrope", "relative"),
        later_with=_WORK_TRAINING,
    )
    add_position_embedding: bool = setting(
        True,
        help="table of positions; obsolete, with rotary positions only",
        off=("--no-position-embedding",),
        nothing="--position-embedding-type says whether there is a table of positions",
    )
    rotary_base: int = setting(10000, help="base of the rotary frequencies", at_least=1)
    rotary_percent: float = setting(1.0, help="part of each head that is rotated", above=0, at_most=1)
    rotary_interleaved: bool = setting(False, help="rotate neighbouring pairs instead of halves")
    use_rope_scaling: bool = setting(False, help="stretch slow rotary frequencies for long sequences as Llama 3.1 does")
    rope_scaling_factor: float = setting(8.0, help="how far --use-rope-scaling stretches them", at_least=1)
    normalization: str = setting("LayerNorm", help="kind of normalisation", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = setting(
        1e-5, help="epsilon of the normalisation", aliases=("--layernorm-epsilon",), above=0, below=1
    )
    swiglu: bool = setting(False, help="gated SiLU feed-forward layers instead of GELU")
    bias_gelu_fusion: bool = setting(
        True,
        help="GELU by its tanh approximation, as Megatron's fused kernel computes it; then it is the exact erf form",
        off=("--no-bias-gelu-fusion",),
    )
    add_bias_linear: bool = setting(True, help="biases in the linear layers", off=("--disable-bias-linear",))
    add_qkv_bias: bool = setting(False, help="a bias on the query, key and value projection only")
    qk_layernorm: bool = setting(False, help="a norm of each query and key head, as in Qwen3")
    untie_embeddings_and_output_weights: bool = setting(False, help="an output layer of its own weights")
    hidden_dropout: float = setting(0.1, help="dropout of embeddings and residual branches", at_least=0, below=1)
    attention_dropout: float = setting(0.1, help="dropout of attention probabilities", at_least=0, below=1)
    attention_softmax_in_fp32: bool = setting(
        False, help="softmax of the unfused attention kernel in fp32 (the fused kernel always does so)"
    )
    init_method_std: float = setting(0.02, help="standard deviation of initial weights", at_least=0)
    use_cpu_initialization: bool = setting(False, help="draw the initial weights exactly as Megatron does on a CPU")
    make_vocab_size_divisible_by: int = setting(128, help="pad the vocabulary to a multiple of this", at_least=1)
    attention_backend: str = setting(
        "auto",
        help="attention kernel: torch SDPA (flash, fused) or step by step as Megatron's local kernel (unfused, local); "
        "auto is the latter under --transformer-impl local",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    transformer_impl: str = setting(
        "transformer_engine",
        help="whose arithmetic --attention-backend auto follows; there is one implementation of the layers",
        choices=("local", "transformer_engine"),
        later=("inference_optimized",),
        later_with="the serving work",
    )

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key and value heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layers by Megatron's rule."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def activation(self) -> str:
        """The activation of the feed-forward layers: swiglu, gelu_tanh or gelu_erf, by Megatron's rule."""
        if self.swiglu:
            return "swiglu"
        return "gelu_tanh" if self.bias_gelu_fusion and self.add_bias_linear else "gelu_erf"

    @property
    def fused_attention(self) -> bool:
        """Whether attention is torch SDPA instead of Megatron's local arithmetic step by step."""
        if self.attention_backend == "auto":
            return self.transformer_impl != "local"
        return self.attention_backend in ("flash", "fused")

    @property
    def rotary_size(self) -> int:
        """Rotated part of a head, 0 without rotary positions."""
        return int(self.head_size * self.rotary_percent) if self.position_embedding_type == "rope" else 0

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias
