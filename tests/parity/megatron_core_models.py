"""Run by `test_megatron_core_models` in a process of its own: what models of the real Megatron compute.

    python megatron_core_models.py CASES.json FOLDER

A case is {"family", "seed", "config": fields of TransformerConfig, "model": arguments of the model's constructor}. For
each, FOLDER/N.safetensors gets the initial weights (`initial.NAME`), those that it computes with (`weight.NAME`: the
initial ones and noise, so that biases and norms count), the inputs, the losses of the tokens, the logits of a GPT and
the scores of BERT's order of texts, and every gradient (`gradient.NAME`) of their sum. Of relative positions only the
initial weights: Megatron's local layers do not compute with them. No code of Megalith runs here.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from megatron_core_reader import join_alone

VOCABULARY, LENGTH, DECODED, ROWS, PADDED = 96, 32, 12, 2, 3
ACTIVATIONS = {
    "gelu": ("gelu", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "quick_geglu": ("quick_gelu", True),
    "squared_relu": ("squared_relu", False),
}


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
    """What the dispatchers of experts ask of CUDA without asking whether it is there; nothing changes arithmetic."""
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
    from megatron.core import activations

    function, gated = ACTIVATIONS[name]
    known = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
    return {"activation_func": known.get(function) or getattr(activations, function), "gated_linear_unit": gated}


def build(case: dict[str, Any]) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields, model = dict(case["config"]), dict(case["model"])
    fields |= activation(model.pop("activation"))
    normed, decoder_layers = model.pop("qk_l2_norm", False), model.pop("decoder_layers", None)
    config = TransformerConfig(
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        **fields,
    )
    torch.manual_seed(case["seed"])
    if case["family"] == "bert":
        return BertModel(config, model.pop("token_types"), bert_layer_local_spec, VOCABULARY, LENGTH, **model)
    if case["family"] == "t5":
        of_encoder = t5_spec.get_t5_encoder_with_local_block_spec(config.num_layers)
        of_decoder = t5_spec.get_t5_decoder_with_local_block_spec(decoder_layers)
        encoder, config.num_layers = TransformerConfig(**vars_of(config)), decoder_layers
        return T5Model(config, encoder, of_encoder, of_decoder, VOCABULARY, LENGTH, **model)
    of_norms = {"normalization": config.normalization, "qk_l2_norm": normed}
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **of_norms)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, **of_norms)
    return GPTModel(config, spec, VOCABULARY, LENGTH, **model)


def vars_of(config: Any) -> dict[str, Any]:
    """The fields as they were given, so that another of the same can be made."""
    return {name: value for name, value in vars(config).items() if name in type(config).__dataclass_fields__}


def padding(length: int) -> Tensor:
    """[ROWS, length]: True at the end of the first row."""
    there = torch.zeros(ROWS, length, dtype=torch.bool)
    there[0, length - PADDED :] = True
    return there


def compute(case: dict[str, Any], model: Any, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """What is differentiated, and the inputs and results to keep."""
    ids, labels = (torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))
    if case["family"] == "gpt":
        positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
        later = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        losses = model(ids, positions, later, labels=labels)
        with torch.no_grad():
            logits = model(ids, positions, later)
        return losses.mean(), {"ids": ids, "labels": labels, "losses": losses, "logits": logits}
    absent = padding(LENGTH)
    if case["family"] == "bert":
        types = torch.randint(2, (ROWS, LENGTH), generator=generator)
        told = types if case["model"]["token_types"] else None
        losses, order = model(ids, (~absent).long(), tokentype_ids=told, lm_labels=labels)
        kept = {"ids": ids, "labels": labels, "types": types, "losses": losses * ~absent}
        kept |= {"order": order.float()} if order is not None else {}
        return (losses * ~absent).mean() + (0.0 if order is None else order.float().square().mean()), kept
    answer, labels = (torch.randint(VOCABULARY, (ROWS, DECODED), generator=generator) for _ in range(2))
    behind = padding(DECODED)
    of_encoder = (absent[:, :, None] | absent[:, None, :])[:, None]
    of_decoder = (behind[:, :, None] | behind[:, None, :] | torch.ones(DECODED, DECODED).triu(1).bool())[:, None]
    across = (behind[:, :, None] | absent[:, None, :])[:, None]
    losses = model(ids, answer, of_encoder, of_decoder, across, lm_labels=labels) * ~behind
    return losses.mean(), {"ids": ids, "answer": answer, "labels": labels, "losses": losses}


def forget_losses() -> None:
    """Megatron records the balancing losses of a process by layer, for as many as its first model had."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    parallel_state._MOE_LAYER_WISE_LOGGING_TRACKER = {}
    for name, value in vars(moe_utils).items():
        if name.endswith("TRACKER") and isinstance(value, dict):
            value.clear()


def run(case: dict[str, Any], path: Path) -> None:
    forget_losses()
    model = build(case).train()
    named = dict(model.named_parameters())
    kept = {f"initial.{name}": parameter.detach().clone() for name, parameter in named.items()}
    if case["model"]["position_embedding_type"] == "relative":
        return save_file(kept, path)
    generator = torch.Generator().manual_seed(case["seed"])
    for name, parameter in named.items():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        kept[f"weight.{name}"] = parameter.detach().clone()
    result, more = compute(case, model, generator)
    result.backward()
    kept |= {name: tensor.detach() for name, tensor in more.items()}
    kept |= {f"gradient.{name}": parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    save_file({name: tensor.contiguous().clone() for name, tensor in kept.items()}, path)


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    join_alone()
    stub_streams()
    for number, case in enumerate(cases):
        run(case, folder / f"{number}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
