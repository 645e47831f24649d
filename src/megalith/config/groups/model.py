"""The settings of the architecture: of every model, of multi-latent attention, muP and multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.families import FAMILIES, Family
from megalith.config.fields import setting
from megalith.config.groups.experts import ExpertSettings
from megalith.config.values import of_layers, read_pattern, read_window
from megalith.registry import Registered


@dataclass(frozen=True, kw_only=True)
class MupSettings:
    """Weights, rates and factors by the width of the model, so that what was tuned on a narrow one suits a wide one.

    Source: Yang et al. 2022, arXiv:2203.03466; which factor acts where is Megatron's choice.
    """

    use_mup: bool = setting(
        False,
        help="maximal update parametrisation: initial weights, rates and factors that fit any width once they are "
        "tuned at --mup-base-hidden-size",
    )
    mup_base_hidden_size: int | None = setting(
        None, help="width that rates and initial weights are meant for; --hidden-size unless given", at_least=1
    )
    mup_width_mult: float | None = setting(
        None, help="--hidden-size / --mup-base-hidden-size, which it follows from by itself", above=0
    )
    mup_base_head_dim: float | None = setting(
        None, help="attention scores get the factor sqrt(this) / head size; 1 / head size unless given", above=0
    )
    mup_attn_scale_power: float = setting(1.0, help="power of the head size that attention scores are divided by")
    mup_embedding_mult: float = setting(1.0, help="factor of embeddings", above=0)
    mup_output_mult: float = setting(
        1.0, help="factor of logits; --mup-base-hidden-size / --hidden-size unless given", above=0
    )


@dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """Attention whose queries, keys and values come from small latent vectors (DeepSeek-V2, arXiv:2405.04434)."""

    multi_latent_attention: bool = setting(
        False, help="queries, keys and values of each head out of a small latent vector, as in DeepSeek-V2 and V3"
    )
    q_lora_rank: int | None = setting(
        None, help="size of the latent vector of queries; they are made directly unless given", at_least=1
    )
    kv_lora_rank: int = setting(32, help="size of the latent vector of keys and values", at_least=1)
    qk_head_dim: int = setting(128, help="channels of a query or key head that positions do not turn", at_least=1)
    qk_pos_emb_head_dim: int = setting(
        64, help="channels of it that they turn, of keys shared by all heads", at_least=2
    )
    v_head_dim: int = setting(128, help="size of a value head", at_least=1)
    rope_type: str | None = setting(
        None,
        help="how positions turn the heads of multi-latent attention; yarn unless given",
        choices=("rope", "yarn"),
    )

    @property
    def latent_query_size(self) -> int:
        """Size of a query or key head of multi-latent attention."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    """Layers behind the last one that predict the tokens after the next (DeepSeek-V3, arXiv:2412.19437)."""

    mtp_num_layers: int | None = setting(
        None,
        help="layers of multi-token prediction, one for each further token; none unless given",
        unit="layers",
        at_least=0,
    )
    mtp_loss_scaling_factor: float = setting(
        0.1, help="what the mean of the losses of these layers is multiplied by", at_least=0
    )

    @property
    def predictions(self) -> int:
        """Tokens after the next one that are predicted in training."""
        return self.mtp_num_layers or 0


@dataclass(frozen=True)
class ModelConfig(MupSettings, LatentSettings, PredictionSettings, ExpertSettings):
    """The architecture: enough to build a model as a library object."""

    num_layers: int = setting(
        help="number of transformer layers; those of the encoder of T5",
        aliases=("--encoder-num-layers",),
        unit="layers",
        at_least=1,
    )
    hidden_size: int = setting(help="width of the model", at_least=1)
    num_attention_heads: int = setting(help="number of query heads", unit="heads", at_least=1)
    max_position_embeddings: int = setting(
        help="longest sequence, and rows of the learned position table", unit="tokens", at_least=1
    )
    model_family: str = setting(
        "gpt",
        help="kind of model; pretrain_bert.py and pretrain_t5.py give theirs",
        choices=tuple(FAMILIES),
        ours=True,
    )
    model: str | None = setting(
        None, help="registered model, in place of that of --model-family", registers="model", ours=True
    )
    attention: str | None = setting(
        None, help="registered attention, in place of the layers' own", registers="attention", ours=True
    )
    mlp: str | None = setting(
        None, help="registered feed-forward layer, in place of the layers' own", registers="mlp", ours=True
    )
    loss: str | None = setting(
        None, help="registered loss, in place of the cross-entropy of GPT", registers="loss", ours=True
    )
    bert_binary_head: bool = setting(
        True,
        help="BERT learns which of two runs of sentences is the first one",
        off=("--bert-no-binary-head",),
    )
    bert_token_types: bool = setting(
        False,
        help="BERT with --bert-no-binary-head still knows which of two texts a token is of, as BertForMaskedLM does",
        ours=True,
    )
    group_query_attention: bool = setting(False, help="share each key and value head between several query heads")
    num_query_groups: int = setting(
        1, help="key and value heads under --group-query-attention", unit="heads", at_least=1
    )
    ffn_hidden_size: int | None = setting(
        None,
        help="width of the feed-forward layers; 4 x hidden, or int(8/3 x hidden / 64) x 64 with --swiglu",
        aliases=("--intermediate-size",),
        at_least=1,
    )
    kv_channels: int | None = setting(None, help="size of one head; hidden / heads unless given", at_least=1)
    position_embedding_type: str = setting(
        "learned_absolute",
        help="how positions enter the model",
        choices=("learned_absolute", "rope", "yarn", "relative", "none"),
        registers="position",
        shorthands={"--use-rotary-position-embeddings": "rope"},
        later=("mrope",),
        later_with="the work on more models",
    )
    decoder_num_layers: int | None = setting(
        None, help="layers of the decoder of T5; as many as of its encoder unless given", unit="layers", at_least=1
    )
    relative_attention_num_buckets: int = setting(
        32, help="kinds of distances that --position-embedding-type relative tells apart", at_least=4
    )
    relative_attention_max_distance: int = setting(
        128, help="distance from which on they are all alike to it", unit="tokens", at_least=2
    )
    t5_logits_bias: bool = setting(
        True,
        help="a bias of the logits of T5 where the output weight is the embedding's; T5 as published has none",
        off=("--no-t5-logits-bias",),
        ours=True,
    )
    t5_scaled_logits: bool = setting(
        False, help="divide what the logits of T5 are made of by sqrt(hidden size), as T5 v1.0 does", ours=True
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
    rotary_seq_len_interpolation_factor: int | None = setting(
        None, help="divide positions by this before they turn heads", at_least=1
    )
    no_rope_freq: str | None = setting(
        None,
        help='layers without rotary positions: N for every N-th, or a list with a 1 for each such as "[0]*3+[1]"',
    )
    use_rope_scaling: bool = setting(False, help="stretch slow rotary frequencies for long sequences as Llama 3.1 does")
    rope_scaling_factor: float = setting(8.0, help="how far --use-rope-scaling stretches them", at_least=1)
    rotary_scaling_factor: float = setting(
        1.0, help="how far YaRN stretches positions", aliases=("--yarn-rotary-scaling-factor",), at_least=1
    )
    yarn_original_max_position_embeddings: int | None = setting(
        None, help="longest sequence before YaRN stretched positions", unit="tokens", at_least=1
    )
    # Defaults of YaRN: Peng et al. 2023, arXiv:2309.00071, section 3.2.
    yarn_beta_fast: float | None = setting(
        None, help="turns over that length from which YaRN leaves a frequency alone; 32 unless given", above=0
    )
    yarn_beta_slow: float | None = setting(
        None, help="turns over that length up to which YaRN stretches it whole; 1 unless given", above=0
    )
    yarn_correction_range_round_to_int: bool = setting(True, help="round the bounds of YaRN's mixture of both")
    mscale: float = setting(
        1.0, help="how YaRN makes rotated heads longer: 0.1 x this x ln(factor) + 1", aliases=("--yarn-mscale",)
    )
    mscale_all_dim: float = setting(
        0.0, help="the same of what their length is divided by", aliases=("--yarn-mscale-all-dim",)
    )
    normalization: str = setting(
        "LayerNorm", help="kind of normalisation", choices=("LayerNorm", "RMSNorm"), registers="norm"
    )
    norm_epsilon: float = setting(
        1e-5, help="epsilon of the normalisation", aliases=("--layernorm-epsilon",), above=0, below=1
    )
    apply_layernorm_1p: bool = setting(False, help="keep the weights of norms minus 1")
    apply_residual_connection_post_layernorm: bool = setting(
        False, help="residual branches start behind the norm, as in the original BERT"
    )
    final_layernorm: bool = setting(
        True,
        help="a norm behind the last layer; Megatron's BERT and T5 have none where TransformerEngine is not installed",
        off=("--no-final-layernorm",),
        ours=True,
    )
    fp32_residual_connection: bool = setting(False, help="hidden states between layers in fp32 under --fp16 and --bf16")
    swiglu: bool = setting(False, help="gated SiLU feed-forward layers instead of GELU")
    geglu: bool = setting(False, help="gated GELU feed-forward layers", ours=True)
    quick_geglu: bool = setting(False, help="gated feed-forward layers with x sigmoid(1.702 x) for GELU")
    squared_relu: bool = setting(False, help="squared ReLU feed-forward layers instead of GELU")
    relu: bool = setting(False, help="ReLU feed-forward layers instead of GELU, as in T5 v1.0", ours=True)
    openai_gelu: bool = setting(False, help="GELU by its tanh approximation, whatever is fused")
    onnx_safe: str | None = setting(
        None,
        help="GELU in its erf form with the constant of Megatron's ONNX export",
        choices=("True", "False", "true", "false", "1", "0"),
    )
    glu_linear_offset: float = setting(0.0, help="added to the linear half of gated feed-forward layers")
    activation_func_clamp_value: float | None = setting(
        None, help="bound of both halves of gated feed-forward layers", above=0
    )
    bias_gelu_fusion: bool = setting(
        True,
        help="GELU by its tanh approximation, as Megatron's fused kernel computes it; then it is the exact erf form",
        off=("--no-bias-gelu-fusion",),
    )
    add_bias_linear: bool = setting(True, help="biases in the linear layers", off=("--disable-bias-linear",))
    add_qkv_bias: bool = setting(False, help="a bias on the query, key and value projection only")
    qk_layernorm: bool = setting(False, help="a norm of each query and key head, as in Qwen3")
    qk_l2_norm: bool = setting(False, help="a norm without weights of each query and key head, as in Llama 4")
    attention_output_gate: bool = setting(
        False, help="multiply the output of each head by the sigmoid of a gate, another output of its projection"
    )
    softmax_type: str = setting(
        "vanilla",
        help="attention sinks: weights that add up to less than 1, as if there were one more key of score 0 "
        "(off-by-one), or of a learned score for each head (learnable)",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    softmax_scale: float | None = setting(
        None, help="factor of attention scores; 1 / sqrt(head size) unless given", above=0
    )
    window_size: str | None = setting(
        None, help="sliding window LEFT,0: attention sees its own position and LEFT before it; -1 for all", unit=""
    )
    window_attn_skip_freq: str | None = setting(
        None,
        help='layers without the window: N for every N-th; or a list with a 1 for each with it such as "[1]*3+[0]"',
    )
    untie_embeddings_and_output_weights: bool = setting(False, help="an output layer of its own weights")
    hidden_dropout: float = setting(0.1, help="dropout of embeddings and residual branches", at_least=0, below=1)
    attention_dropout: float = setting(0.1, help="dropout of attention probabilities", at_least=0, below=1)
    attention_softmax_in_fp32: bool = setting(
        False, help="softmax of the unfused attention kernel in fp32 (the fused kernel always does so)"
    )
    label_smoothing: float = setting(
        0.0,
        help="part of the target distribution that goes to the other tokens, in training",
        at_least=0,
        below=1,
        ours=True,
    )
    calculate_per_token_loss: bool = setting(
        False, help="the gradient weighs all tokens of a global batch alike, not all micro-batches"
    )
    apply_query_key_layer_scaling: bool = setting(
        False,
        help="divide attention scores by the number of the layer until they are in fp32, against overflow in fp16 "
        "(the fused kernel never rounds them); implies --attention-softmax-in-fp32",
    )
    init_method_std: float = setting(0.02, help="standard deviation of initial weights", at_least=0)
    embedding_init_method_std: float | None = setting(
        None, help="standard deviation of initial embeddings; --init-method-std unless given", at_least=0
    )
    init_method_xavier_uniform: bool = setting(
        False, help="initial weights uniform up to sqrt(6 / (inputs + outputs)) instead of normal"
    )
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
    def family(self) -> Family:
        """What is known of --model-family."""
        return FAMILIES[self.model_family]

    @property
    def title(self) -> str:
        """What the model is called on the console."""
        return self.model or self.family.title

    @property
    def has_token_types(self) -> bool:
        """Whether BERT's embedding knows which of two texts a token is of."""
        return self.bert_binary_head or self.bert_token_types

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def num_decoder_layers(self) -> int:
        """Layers of the decoder of T5."""
        return self.num_layers if self.decoder_num_layers is None else self.decoder_num_layers

    @property
    def stacks(self) -> dict[str, int]:
        """Layers of each stack, by the name that Megatron gives it in each family."""
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
        """Experts of each layer, 0 where it is dense."""
        return self.experts_of(self.num_layers)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layers multiply an activation with a linear half."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def activation(self) -> str:
        """The function of the feed-forward layers, by Megatron's rule: a name of `nn.feed_forward.ACTIVATIONS`."""
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
    def head_norm(self) -> str:
        """The norm of query and key heads, "" for none."""
        return "L2Norm" if self.qk_l2_norm else self.normalization if self.qk_layernorm else ""

    @property
    def softmax_in_fp32(self) -> bool:
        """Whether the unfused attention kernel computes the softmax in fp32."""
        return self.attention_softmax_in_fp32 or self.apply_query_key_layer_scaling

    @property
    def width_multiplier(self) -> float:
        """How much wider the model is than the one that its rates and initial weights are meant for; 1 without muP."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else 1.0

    @property
    def attention_scale(self) -> float | None:
        """The factor of attention scores, None for 1 / sqrt(head size)."""
        if self.softmax_scale is not None or not self.use_mup:
            return self.softmax_scale
        return float((self.mup_base_head_dim or 1.0) ** 0.5 / self.head_size**self.mup_attn_scale_power)

    @property
    def embedding_multiplier(self) -> float:
        """The factor of embeddings."""
        return self.mup_embedding_mult if self.use_mup else 1.0

    @property
    def logits_multiplier(self) -> float:
        """The factor of logits."""
        given = self.use_mup and self.mup_output_mult != 1.0
        return self.mup_output_mult if given else 1.0 / self.width_multiplier

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer how many positions before its own attention sees, None for all."""
        if self.window_size is None:
            return (None,) * self.num_layers
        left = read_window(self.window_size)[0]
        window = None if left < 0 else left
        if self.window_attn_skip_freq is None:
            return (window,) * self.num_layers
        marks = of_layers(self.window_attn_skip_freq, self.num_layers)
        # Megatron's two forms say the opposite: an N marks layers without the window, a list layers with it.
        by_list = not isinstance(read_pattern(self.window_attn_skip_freq), int)
        return tuple(window if mark == by_list else None for mark in marks)

    @property
    def rotated_layers(self) -> tuple[bool, ...]:
        """For each layer whether its heads are turned by their positions."""
        skipped = of_layers(self.no_rope_freq, self.num_layers)
        return tuple(self.rotary_size > 0 and not skip for skip in skipped)

    @property
    def fused_attention(self) -> bool:
        """Whether attention is torch SDPA instead of Megatron's local arithmetic step by step."""
        if self.attention_backend == "auto":
            return self.transformer_impl != "local"
        return self.attention_backend in ("flash", "fused")

    @property
    def keeps_weights_of_attention(self) -> bool:
        """Whether training may keep them for the backward pass: unfused attention does, and on a CPU what sees later
        keys or has a bias that learns (`kernels.whole_attention`)."""
        return not self.fused_attention or "encoder" in self.family.stacks

    @property
    def registered_layers(self) -> tuple[str, ...]:
        """Names of the settings that choose registered modules, whose forward passes are not known here."""
        names = ("model", "attention", "mlp", "normalization", "position_embedding_type")
        return tuple(name for name in names if isinstance(getattr(self, name), Registered))

    @property
    def adds_positions(self) -> bool:
        """Whether embeddings of the positions are added to those of the tokens."""
        own = isinstance(self.position_embedding_type, Registered)
        return self.position_embedding_type == "learned_absolute" or (own and not self.rotary_kind)

    @property
    def rotary_kind(self) -> str:
        """How positions turn heads: rope, yarn, or own where a registered function does, "" where they do not."""
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
        """Whether the query, key and value projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias
