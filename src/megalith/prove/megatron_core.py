"""The real Megatron on a CPU, for a process of its own: its model of a miniature, of the weights and the batch here.

    python megatron_core.py REQUEST.json IN.safetensors OUT.safetensors

REQUEST is {"args": Megatron's arguments, "vocabulary", "length"} of a GPT; IN has the weights by name and the batch
(`batch.NAME`); OUT gets the outputs of layers, the logits, the losses of the tokens and every gradient, in fp64, and
in its metadata the version. Nothing else of Megalith is imported here: what computes is megatron-core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

ACTIVATIONS = {
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "quick_geglu": ("quick_gelu", True),
    "squared_relu": ("squared_relu", False),
    "relu": ("relu", False),
}


class InFp64(TorchFunctionMode):
    """Makes what a program computes in fp32, whatever its inputs are, fp64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        options = {name: _in_fp64(value) for name, value in (kwargs or {}).items()}
        return func(*map(_in_fp64, args), **options)


def _in_fp64(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def stub_cuda() -> None:
    """Replace what megatron.core calls without asking whether there is a GPU; nothing of it changes arithmetic."""
    stub_missing()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.set_device = lambda *_, **__: None
    cuda.synchronize = lambda *_, **__: None
    for name in ("tensor", "zeros", "ones", "empty", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    kind_of = tensor.type
    tensor.type = lambda self, *to, **options: (
        kind_of(self, *to, **options) if to or options else kind_of(self).replace("torch.", "torch.cuda.")
    )


def stub_missing() -> None:
    """Supply what newer megatron-core imports without asking: Python 3.12's `override`, and Triton."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    if importlib.util.find_spec("triton") is None:
        unused: Any = types.ModuleType("megatron.core.transformer.moe.paged_stash")
        names: tuple[str, ...] = ("paged_stash_reset", "paged_stash_init_chunk_handler", "paged_stash_group_start")
        names += ("paged_stash_group_commit", "paged_stash_set_last_layer", "get_paged_stash_context")
        vars(unused).update(dict.fromkeys(names))
        sys.modules[unused.__name__] = unused


def join_alone() -> None:
    """Megatron's groups of a single process, without a GPU."""
    stub_cuda()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1, 1)


def on_cpu(make: Any) -> Any:
    """Return a factory of tensors that takes the device "cuda" for "cpu"."""

    def made(*values: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return make(*values, **options)

    return made


class NoStream:
    """Streams and events of CUDA, on a machine without."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class DuplicatedLinear(torch.nn.Module):
    """What TransformerEngine's linear layer is where all tensor-parallel ranks have the same weights."""

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, bias: bool, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
        init_method(self.weight)
        for parameter in self.parameters():
            told: Any = parameter
            told.allreduce, told.sequence_parallel = True, config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(x, self.weight, self.bias), None


def stub_streams() -> None:
    """Replace what the dispatchers of experts ask of CUDA where there is none; nothing changes arithmetic."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = NoStream
    cuda.current_stream = NoStream
    cuda.stream = lambda *_: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda *_: None
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import moe_layer, moe_utils

    moe_layer.HAVE_TE, moe_layer.TELinear = True, DuplicatedLinear
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    # One rank: the conjugate pair is the identity. Its views refuse the biases that experts add in place.
    layers.copy_to_tensor_model_parallel_region = lambda x, *_, **__: x
    layers.reduce_from_tensor_model_parallel_region = lambda x, *_, **__: x.clone()


def activation(name: str) -> dict[str, Any]:
    """Return the fields of TransformerConfig for an activation."""
    from megatron.core import activations

    function, gated = ACTIVATIONS[name]
    known = {name: getattr(torch.nn.functional, name) for name in ("gelu", "silu", "relu")}
    known["gelu_tanh"] = partial(torch.nn.functional.gelu, approximate="tanh")
    return {"activation_func": known.get(function) or getattr(activations, function), "gated_linear_unit": gated}


def build(family: str, fields: Mapping[str, Any], options: Mapping[str, Any], vocabulary: int, length: int) -> Any:
    """Build a model of Megatron's local layers.

    Args:
        family: "gpt", "bert" or "t5".
        fields: Of TransformerConfig.
        options: Arguments of the model's constructor, and `activation`, `qk_l2_norm`, `decoder_layers`, `token_types`.
    """
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = dict(options)
    normed, decoder_layers = model.pop("qk_l2_norm", False), model.pop("decoder_layers", None)
    given = {"pipeline_dtype": torch.float32, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    given |= {"use_cpu_initialization": True, "gradient_accumulation_fusion": False}
    given |= activation(model.pop("activation")) | dict(fields)
    config = TransformerConfig(**given)
    if family == "bert":
        return BertModel(config, model.pop("token_types"), bert_layer_local_spec, vocabulary, length, **model)
    if family == "t5":
        of_encoder = t5_spec.get_t5_encoder_with_local_block_spec(config.num_layers)
        of_decoder = t5_spec.get_t5_decoder_with_local_block_spec(decoder_layers)
        encoder, config.num_layers = TransformerConfig(**vars_of(config)), decoder_layers
        return T5Model(config, encoder, of_encoder, of_decoder, vocabulary, length, **model)
    of_norms = {"normalization": config.normalization, "qk_l2_norm": normed}
    if config.num_moe_experts:
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, **of_norms)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, **of_norms)
    if config.mtp_num_layers:
        model["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(config, spec, vocabulary, length, **model)


def vars_of(config: Any) -> dict[str, Any]:
    """Return the fields as they were given, so that another of the same can be made."""
    return {name: value for name, value in vars(config).items() if name in type(config).__dataclass_fields__}


OTHER_NAMES = {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
"""Field of TransformerConfig -> Megatron's argument of another name."""
_OF_GPU = (
    "persist_layer_norm",
    "bias_activation_fusion",
    "apply_rope_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
)


def options_of(args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what Megatron's arguments make of its TransformerConfig, and of the model's constructor.

    Source: `core_transformer_config_from_args` and `gpt_builder` of Megatron-LM.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = [field.name for field in dataclasses.fields(TransformerConfig)]
    own = {name: args.get(OTHER_NAMES.get(name, name)) for name in names}
    fields = {name: value for name, value in own.items() if value is not None and name != "attention_backend"}
    if fields.get("window_size"):
        fields["window_size"] = tuple(fields["window_size"])
    fields["num_query_groups"] = args["num_query_groups"] if args["group_query_attention"] else None
    fields |= {name: False for name in _OF_GPU} | {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    fields |= {"params_dtype": torch.float64, "pipeline_dtype": torch.float64, "perform_initialization": False}
    fields |= {"recompute_granularity": None, "moe_token_dispatcher_type": "alltoall"}
    chosen = [name for name in ACTIVATIONS if args.get(name)]
    if args.get("openai_gelu") or (args["bias_gelu_fusion"] and args["add_bias_linear"]):
        chosen.append("gelu_tanh")  # in place of the fused kernel, which is compiled
    model: dict[str, Any] = {
        "activation": chosen[0] if chosen else "gelu",
        "position_embedding_type": args["position_embedding_type"],
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
    }
    if args["position_embedding_type"] in ("rope", "yarn"):
        model["rotary_percent"] = args["rotary_percent"]
    return fields, model | {
        "qk_l2_norm": args["qk_l2_norm"],
        "rotary_base": args["rotary_base"],
        "rope_scaling": args["use_rope_scaling"],
        "rope_scaling_factor": args["rope_scaling_factor"],
        "seq_len_interpolation_factor": args["rotary_seq_len_interpolation_factor"],
    }


def compute(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return outputs of layers, logits and losses of the tokens [B, S], and every gradient of their masked mean."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, _: object, __: object, output: Any) -> None:
        kept.setdefault(name, output[0].detach())

    ids, labels, mask = batch["ids"], batch["labels"], batch["mask"]
    length = ids.shape[1]
    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_hook(partial(keep, f"output decoder.layers.{number}"))
    positions = torch.arange(length).expand_as(ids)
    later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    losses = model(ids, positions, later, labels=labels, loss_mask=mask)
    with torch.no_grad():
        kept |= {} if model.mtp_process else {"output logits": model(ids, positions, later)}
    kept["output losses"] = losses.detach() * mask
    ((losses * mask).sum() / mask.sum()).backward()
    for name, parameter in model.named_parameters():
        kept[f"gradient {name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return kept


def main() -> None:
    from safetensors.torch import load_file, save_file

    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    given = load_file(sys.argv[2])
    join_alone()
    stub_streams()
    import megatron.core

    torch.set_default_dtype(torch.float64)
    batch = {name.removeprefix("batch."): given.pop(name) for name in list(given) if name.startswith("batch.")}
    with InFp64():
        options = options_of(request["args"])
        model = build("gpt", *options, request["vocabulary"], request["length"]).train()
        lacking = model.load_state_dict(given, strict=False)
        strange = [*lacking.unexpected_keys, *(name for name in lacking.missing_keys if "_extra_state" not in name)]
        if strange:
            raise SystemExit(f"the model of Megatron has other weights: {', '.join(strange)}")
        kept = compute(model, batch)
    save_file(
        {name: tensor.contiguous() for name, tensor in kept.items()},
        sys.argv[3],
        {"version": megatron.core.__version__},
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
