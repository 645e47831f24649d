"""The settings of the architecture: of every model, of multi-latent attention, muP and multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.families import FAMILIES, Family
from megalith.config.fields import setting
from megalith.config.groups.experts import ExpertSettings
from megalith.config.groups.lora import LoraSettings
from megalith.config.values import marked_layers, read_pattern, read_window
from megalith.registry import Registered


@dataclass(frozen=True, kw_only=True)
class MupSettings:
    """Weights, rates and factors by the width of the model, so that what was tuned on a narrow one suits a wide one.

    Source: Yang et al. 2022, arXiv:2203.03466; which factor acts where is Megatron's choice.
    """

    use_mup: bool = setting(
        False,
        help="maximal update parametrization (muP): scale initial weights, learning rates and factors by the width "
        "relative to --mup-base-hidden-size",
    )
    mup_base_hidden_size: int | None = setting(
        None, help="width for which learning rates and initial weights were tuned; --hidden-size by default", at_least=1
    )
    mup_width_mult: float | None = setting(
        None, help="--hidden-size / --mup-base-hidden-size; derived by default", above=0
    )
    mup_base_head_dim: float | None = setting(
        None, help="scale attention scores by sqrt(this) / head size; 1 / head size by default", above=0
    )
    mup_attn_scale_power: float = setting(1.0, help="power of the head size by which attention scores are divided")
    mup_embedding_mult: float = setting(1.0, help="factor of embeddings", above=0)
    mup_output_mult: float = setting(
        1.0, help="factor of logits; --mup-base-hidden-size / --hidden-size by default", above=0
    )


@dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """Attention whose queries, keys and values come from small latent vectors (DeepSeek-V2, arXiv:2405.04434)."""

    multi_latent_attention: bool = setting(
        False, help="multi-head latent attention (MLA) of DeepSeek-V2 and V3: compressed queries, keys and values"
    )
    q_lora_rank: int | None = setting(
        None, help="rank of the compressed queries; not compressed by default", at_least=1
    )
    kv_lora_rank: int = setting(32, help="rank of the compressed keys and values", at_least=1)
    qk_head_dim: int = setting(128, help="channels of a query or key head without rotary embedding (MLA)", at_least=1)
    qk_pos_emb_head_dim: int = setting(
        64, help="channels of a query or key head with rotary embedding (MLA); keys share them over heads", at_least=2
    )
    v_head_dim: int = setting(128, help="size of a value head (MLA)", at_least=1)
    rope_type: str | None = setting(None, help="rotary embedding of MLA; yarn by default", choices=("rope", "yarn"))

    @property
    def latent_query_size(self) -> int:
        """Size of a query or key head of multi-latent attention."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    """Multi-token prediction: layers that predict the tokens after the next (DeepSeek-V3, arXiv:2412.19437)."""

    mtp_num_layers: int | None = setting(
        None,
        help="number of multi-token prediction (MTP) layers, one per further token; none by default",
        unit="layers",
        at_least=0,
    )
    mtp_loss_scaling_factor: float = setting(0.1, help="factor of the mean MTP loss", at_least=0)

    @property
    def predictions(self) -> int:
        """Return the number of multi-token predictions after the next token in training."""
        return self.mtp_num_layers or 0


@dataclass(frozen=True)
class ModelConfig(MupSettings, LatentSettings, PredictionSettings, ExpertSettings, LoraSettings):
    """The architecture: enough to build a model as a library object."""

    num_layers: int = setting(
        help="number of transformer layers; for T5 those of the encoder",
        aliases=("--encoder-num-layers",),
        unit="layers",
        at_least=1,
    )
    hidden_size: int = setting(help="width of the model", at_least=1)
    num_attention_heads: int = setting(help="number of query heads", unit="heads", at_least=1)
    max_position_embeddings: int = setting(
        help="maximum sequence length, and rows of the learned position embedding", unit="tokens", at_least=1
    )
    model_family: str = setting(
        "gpt",
        help="model family; pretrain_bert.py and pretrain_t5.py set theirs",
        choices=tuple(FAMILIES),
        ours=True,
    )
    model: str | None = setting(
        None, help="registered model to use instead of --model-family", registers="model", ours=True
    )
    attention: str | None = setting(
        None, help="registered attention to use instead of the built-in one", registers="attention", ours=True
    )
    mlp: str | None = setting(
        None, help="registered MLP to use instead of the built-in one", registers="mlp", ours=True
    )
    loss: str | None = setting(
        None, help="registered loss to use instead of GPT's cross-entropy", registers="loss", ours=True
    )
    bert_binary_head: bool = setting(True, help="train BERT's next-sentence head", off=("--bert-no-binary-head",))
    bert_token_types: bool = setting(
        False,
        help="token-type embedding in BERT with --bert-no-binary-head, as in BertForMaskedLM",
        ours=True,
    )
    group_query_attention: bool = setting(
        False, help="grouped-query attention: several query heads share a key and value head"
    )
    num_query_groups: int = setting(
        1, help="number of key and value heads with --group-query-attention", unit="heads", at_least=1
    )
    ffn_hidden_size: int | None = setting(
        None,
        help="width of the MLP; 4 x hidden, or int(8/3 x hidden / 64) x 64 with --swiglu, by default",
        aliases=("--intermediate-size",),
        at_least=1,
    )
    kv_channels: int | None = setting(None, help="size of one attention head; hidden / heads by default", at_least=1)
    position_embedding_type: str = setting(
        "learned_absolute",
        help="position embedding",
        choices=("learned_absolute", "rope", "yarn", "relative", "none"),
        registers="position",
        shorthands={"--use-rotary-position-embeddings": "rope"},
        later=("mrope",),
        later_with="the work on more models",
    )
    decoder_num_layers: int | None = setting(
        None, help="layers of T5's decoder; as many as in its encoder by default", unit="layers", at_least=1
    )
    relative_attention_num_buckets: int = setting(
        32, help="number of distance buckets with --position-embedding-type relative", at_least=4
    )
    relative_attention_max_distance: int = setting(
        128, help="distance from which all keys share the last bucket", unit="tokens", at_least=2
    )
    t5_logits_bias: bool = setting(
        True,
        help="add a bias to T5's logits with tied embeddings; T5 as published has none",
        off=("--no-t5-logits-bias",),
        ours=True,
    )
    t5_scaled_logits: bool = setting(
        False, help="divide hidden states by sqrt(hidden size) before T5's logits, as T5 v1.0 does", ours=True
    )
    add_position_embedding: bool = setting(
        True,
        help="table of positions; obsolete, with rotary positions only",
        off=("--no-position-embedding",),
        nothing="--position-embedding-type says whether there is a table of positions",
    )
    rotary_base: int = setting(10000, help="base of the rotary frequencies", at_least=1)
    rotary_percent: float = setting(1.0, help="rotated fraction of each head", above=0, at_most=1)
    rotary_interleaved: bool = setting(False, help="rotate adjacent pairs instead of halves")
    rotary_seq_len_interpolation_factor: int | None = setting(
        None, help="divide positions by this before rotation (position interpolation)", at_least=1
    )
    no_rope_freq: str | None = setting(
        None,
        help='layers without rotary embedding: N for every N-th, or a list with 1 for each, such as "[0]*3+[1]"',
    )
    use_rope_scaling: bool = setting(False, help="scale low rotary frequencies for long sequences as Llama 3.1 does")
    rope_scaling_factor: float = setting(8.0, help="scaling factor of --use-rope-scaling", at_least=1)
    rotary_scaling_factor: float = setting(
        1.0, help="context extension factor of YaRN", aliases=("--yarn-rotary-scaling-factor",), at_least=1
    )
    yarn_original_max_position_embeddings: int | None = setting(
        None, help="maximum sequence length before YaRN's extension", unit="tokens", at_least=1
    )
    # Defaults of YaRN: Peng et al. 2023, arXiv:2309.00071, section 3.2.
    yarn_beta_fast: float | None = setting(
        None, help="rotations over the original length from which YaRN keeps a frequency; 32 by default", above=0
    )
    yarn_beta_slow: float | None = setting(
        None, help="rotations over the original length up to which YaRN interpolates fully; 1 by default", above=0
    )
    yarn_correction_range_round_to_int: bool = setting(True, help="round YaRN's correction range to integers")
    mscale: float = setting(
        1.0,
        help="attention temperature of YaRN: rotated heads are scaled by 0.1 x this x ln(factor) + 1",
        aliases=("--yarn-mscale",),
    )
    mscale_all_dim: float = setting(
        0.0, help="the same for the divisor of that scale", aliases=("--yarn-mscale-all-dim",)
    )
    normalization: str = setting("LayerNorm", help="normalization", choices=("LayerNorm", "RMSNorm"), registers="norm")
    norm_epsilon: float = setting(
        1e-5, help="epsilon of the normalization", aliases=("--layernorm-epsilon",), above=0, below=1
    )
    apply_layernorm_1p: bool = setting(False, help="store norm weights minus 1")
    apply_residual_connection_post_layernorm: bool = setting(
        False, help="take the residual connection after the norm, as in the original BERT"
    )
    final_layernorm: bool = setting(
        True,
        help="norm after the last layer; Megatron's BERT and T5 have none without TransformerEngine",
        off=("--no-final-layernorm",),
        ours=True,
    )
    fp32_residual_connection: bool = setting(
        False, help="keep hidden states between layers in fp32 with --fp16 and --bf16"
    )
    swiglu: bool = setting(False, help="gated SiLU MLP instead of GELU")
    geglu: bool = setting(False, help="gated GELU MLP", ours=True)
    quick_geglu: bool = setting(False, help="gated MLP with x sigmoid(1.702 x) in place of GELU")
    squared_relu: bool = setting(False, help="squared ReLU MLP instead of GELU")
    relu: bool = setting(False, help="ReLU MLP instead of GELU, as in T5 v1.0", ours=True)
    openai_gelu: bool = setting(False, help="tanh approximation of GELU")
    onnx_safe: str | None = setting(
        None,
        help="erf form of GELU with the constant of Megatron's ONNX export",
        choices=("True", "False", "true", "false", "1", "0"),
    )
    glu_linear_offset: float = setting(0.0, help="constant added to the linear half of gated MLPs")
    activation_func_clamp_value: float | None = setting(None, help="clamp both halves of gated MLPs to this", above=0)
    bias_gelu_fusion: bool = setting(
        True,
        help="tanh approximation of GELU, as in Megatron's fused kernel; otherwise the exact erf form",
        off=("--no-bias-gelu-fusion",),
    )
    add_bias_linear: bool = setting(True, help="biases in the linear layers", off=("--disable-bias-linear",))
    add_qkv_bias: bool = setting(False, help="bias in the query, key and value projection only")
    qk_layernorm: bool = setting(False, help="normalize each query and key head, as in Qwen3")
    qk_l2_norm: bool = setting(False, help="normalize each query and key head without weights, as in Llama 4")
    attention_output_gate: bool = setting(
        False, help="multiply the output of each head by the sigmoid of a gate from the same projection"
    )
    softmax_type: str = setting(
        "vanilla",
        help="attention sinks: one more key of score 0 (off-by-one), or of a learned score per head (learnable)",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    softmax_scale: float | None = setting(
        None, help="factor of attention scores; 1 / sqrt(head size) by default", above=0
    )
    window_size: str | None = setting(
        None, help="sliding window LEFT,0: attend to the own position and LEFT before it; -1 for all", unit=""
    )
    window_attn_skip_freq: str | None = setting(
        None,
        help='layers without sliding window: N for every N-th; or a list with 1 for each with it, such as "[1]*3+[0]"',
    )
    untie_embeddings_and_output_weights: bool = setting(False, help="separate weights for the output layer")
    hidden_dropout: float = setting(0.1, help="dropout of embeddings and residual branches", at_least=0, below=1)
    attention_dropout: float = setting(0.1, help="dropout of attention probabilities", at_least=0, below=1)
    attention_softmax_in_fp32: bool = setting(
        False, help="fp32 softmax in the unfused attention kernel (always so in the fused one)"
    )
    label_smoothing: float = setting(
        0.0,
        help="probability mass of the target distribution on other tokens, in training",
        at_least=0,
        below=1,
        ours=True,
    )
    calculate_per_token_loss: bool = setting(
        False, help="average gradients over all tokens of a global batch instead of over micro-batches"
    )
    apply_query_key_layer_scaling: bool = setting(
        False,
        help="divide attention scores by the layer number until they are in fp32, against fp16 overflow; implies "
        "--attention-softmax-in-fp32",
    )
    init_method_std: float = setting(0.02, help="standard deviation of initial weights", at_least=0)
    embedding_init_method_std: float | None = setting(
        None, help="standard deviation of initial embeddings; --init-method-std by default", at_least=0
    )
    init_method_xavier_uniform: bool = setting(False, help="Xavier-uniform instead of normal initial weights")
    use_cpu_initialization: bool = setting(False, help="draw initial weights exactly as Megatron does on a CPU")
    make_vocab_size_divisible_by: int = setting(
        128, help="pad the vocabulary to a multiple of this x --tensor-model-parallel-size", at_least=1
    )
    attention_backend: str = setting(
        "auto",
        help="attention kernel: torch SDPA (flash, fused: on GPUs its flash or cuDNN kernel) or Megatron's unfused "
        "arithmetic (unfused, local); auto is unfused with --transformer-impl local",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )
    transformer_impl: str = setting(
        "transformer_engine",
        help="implementation whose arithmetic --attention-backend auto follows; the layers are the same",
        choices=("local", "transformer_engine"),
        later=("inference_optimized",),
        later_with="the serving work",
    )

    @property
    def family(self) -> Family:
        """Return the facts about --model-family."""
        return FAMILIES[self.model_family]

    @property
    def title(self) -> str:
        """Return the model's name on the console."""
        return self.model or self.family.title

    @property
    def has_token_types(self) -> bool:
        """Return whether BERT's embedding has token types."""
        return self.bert_binary_head or self.bert_token_types

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def num_decoder_layers(self) -> int:
        """Return the number of layers of T5's decoder."""
        return self.num_layers if self.decoder_num_layers is None else self.decoder_num_layers

    @property
    def stacks(self) -> dict[str, int]:
        """Return the number of layers of each stack, by Megatron's name in each family."""
        return dict(zip(self.family.stacks, (self.num_layers, self.num_decoder_layers), strict=False))

    @property
    def query_groups(self) -> int:
        """Number of key and value heads."""
        return self.num_query_groups if self.group_query_attention else self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layers by Megatron's rule."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        # A gated layer has three matrices: 2/3 of the width keeps the parameters of two (arXiv:2002.05202).
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size

    @property
    def expert_size(self) -> int:
        """Width of one expert."""
        return self.ffn_size if self.moe_ffn_hidden_size is None else self.moe_ffn_hidden_size

    @property
    def experts(self) -> tuple[int, ...]:
        """Return the number of experts of each layer, 0 for dense ones."""
        return self.experts_of(self.num_layers)

    @property
    def gated(self) -> bool:
        """Return whether the MLP multiplies an activation by a linear half (GLU)."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def lora_projections(self) -> tuple[str, ...]:
        """Names of `PROJECTIONS` that have an adapter, those of this model."""
        return tuple(name for name in super().lora_projections if self.gated or name != "gate_proj")

    @property
    def activation(self) -> str:
        """Return the activation of the MLP by Megatron's rule: a name in `nn.feed_forward.ACTIVATIONS`."""
        if self.swiglu:
            return "silu"
        if self.quick_geglu:
            return "quick_gelu"
        if self.squared_relu:
            return "squared_relu"
        if self.relu:
            return "relu"
        if self.onnx_safe in ("True", "true", "1"):
            return "gelu_onnx"
        # Megatron turns its fused bias-GELU off where layers have no bias, and GELU is then the exact one.
        tanh = self.openai_gelu or (self.bias_gelu_fusion and self.add_bias_linear)
        return "gelu_tanh" if tanh else "gelu_erf"

    @property
    def qk_norm(self) -> str:
        """Return the norm of query and key heads, "" for none."""
        return "L2Norm" if self.qk_l2_norm else self.normalization if self.qk_layernorm else ""

    @property
    def softmax_in_fp32(self) -> bool:
        """Return whether the unfused attention kernel computes the softmax in fp32."""
        return self.attention_softmax_in_fp32 or self.apply_query_key_layer_scaling

    @property
    def width_multiplier(self) -> float:
        """Return the width relative to the muP base model; 1 without muP."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else 1.0

    @property
    def attention_scale(self) -> float | None:
        """Return the factor of attention scores; None for 1 / sqrt(head size)."""
        if self.softmax_scale is not None or not self.use_mup:
            return self.softmax_scale
        return float((self.mup_base_head_dim or 1.0) ** 0.5 / self.head_size**self.mup_attn_scale_power)

    @property
    def embedding_multiplier(self) -> float:
        """Return the factor of embeddings."""
        return self.mup_embedding_mult if self.use_mup else 1.0

    @property
    def logits_multiplier(self) -> float:
        """Return the factor of logits."""
        given = self.use_mup and self.mup_output_mult != 1.0
        return self.mup_output_mult if given else 1.0 / self.width_multiplier

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return for each layer the number of preceding positions that attention sees; None for all."""
        if self.window_size is None:
            return (None,) * self.num_layers
        left = read_window(self.window_size)[0]
        window = None if left < 0 else left
        if self.window_attn_skip_freq is None:
            return (window,) * self.num_layers
        marks = marked_layers(self.window_attn_skip_freq, self.num_layers)
        # Megatron's two forms say the opposite: an N marks layers without the window, a list layers with it.
        by_list = not isinstance(read_pattern(self.window_attn_skip_freq), int)
        return tuple(window if mark == by_list else None for mark in marks)

    @property
    def rotated_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it applies rotary position embedding."""
        skipped = marked_layers(self.no_rope_freq, self.num_layers)
        return tuple(self.rotary_size > 0 and not skip for skip in skipped)

    @property
    def fused_attention(self) -> bool:
        """Return whether attention uses torch SDPA instead of Megatron's unfused arithmetic."""
        if self.attention_backend == "auto":
            return self.transformer_impl != "local"
        return self.attention_backend in ("flash", "fused")

    @property
    def saves_attention_probabilities(self) -> bool:
        """Return whether training may save attention probabilities for the backward pass: unfused attention does, and
        on a CPU also encoders and a learned bias (`kernels.cpu.attention.whole_attention`)."""
        return not self.fused_attention or "encoder" in self.family.stacks

    @property
    def registered_layers(self) -> tuple[str, ...]:
        """Return the names of the settings that choose registered modules, whose forward passes are not known here."""
        names = ("model", "attention", "mlp", "normalization", "position_embedding_type")
        return tuple(name for name in names if isinstance(getattr(self, name), Registered))

    @property
    def adds_position_embeddings(self) -> bool:
        """Return whether position embeddings are added to token embeddings."""
        own = isinstance(self.position_embedding_type, Registered)
        return self.position_embedding_type == "learned_absolute" or (own and not self.rotary_kind)

    @property
    def rotary_kind(self) -> str:
        """Return the kind of rotary embedding: "rope", "yarn", "own" for a registered one, "" for none."""
        if self.multi_latent_attention:
            return self.rope_type or "yarn"  # Megatron's default under multi-latent attention
        if isinstance(self.position_embedding_type, Registered):
            return "own" if self.position_embedding_type.entry.options["rotary"] else ""
        return self.position_embedding_type if self.position_embedding_type in ("rope", "yarn") else ""

    @property
    def rotary_size(self) -> int:
        """Rotated part of a head, 0 without rotary positions; YaRN rotates whole what may be rotated."""
        whole = self.qk_pos_emb_head_dim if self.multi_latent_attention else self.head_size
        if self.rotary_kind in ("rope", "own"):
            return int(whole * self.rotary_percent)
        return whole if self.rotary_kind else 0

    @property
    def kernel_head_size(self) -> int:
        """Size of the heads that attention kernels and caches see."""
        return max(self.latent_query_size, self.v_head_dim) if self.multi_latent_attention else self.head_size

    @property
    def qkv_bias(self) -> bool:
        """Return whether the query, key and value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias
