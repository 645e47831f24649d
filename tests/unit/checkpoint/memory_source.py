"""A source in memory: crafted tensors in model space, or a whole small model with its optimizer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint import CheckpointContent
from megalith.checkpoint.content import Chunk, check_filled, fill
from megalith.checkpoint.formats.torch_dist import LocalTensor, optimizer_chunks, optimizer_common, weight_chunks
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.source import Contents, StoredTensor
from megalith.registry import EMPTY, Registry

ARGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "max_position_embeddings": 8,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "padded_vocab_size": 48,
    "make_vocab_size_divisible_by": 8,
    "params_dtype": "float32",
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "consumed_train_samples": 12,
    "consumed_valid_samples": 0,
}
"""A Llama of four layers."""

GPT2 = {
    **ARGS,
    "group_query_attention": False,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
}


class MemorySource:
    """Tensors by key, as files would hold them."""

    format = "memory"

    def __init__(self, tensors: Mapping[str, Tensor], common: Mapping[str, Any]) -> None:
        self.tensors, self._common = dict(tensors), dict(common)
        self.largest_read = 0

    def contents(self) -> Contents:
        held = {key: StoredTensor(tuple(tensor.shape), tensor.dtype) for key, tensor in self.tensors.items()}
        return Contents(held, frozenset())

    def common(self) -> dict[str, Any]:
        return {**self._common, "args": Namespace(**vars(self._common["args"]))}

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        self.largest_read = max(self.largest_read, content.nbytes)
        stored = {
            key: [Chunk(key, tensor, (0,) * tensor.ndim, tuple(tensor.shape))] for key, tensor in self.tensors.items()
        }
        for chunk in content.chunks:
            check_filled("memory", chunk, fill(chunk, stored.get(chunk.key, ())))
        return {}

    def problems(self) -> list[str]:
        return []


def model_source(
    args: Mapping[str, Any] = ARGS, *, seed: int = 0, states: bool = True, registry: Registry = EMPTY
) -> MemorySource:
    """A model of random numbers with Adam's state, in the dtype that its args say."""
    generator = torch.Generator().manual_seed(seed)
    params = GlobalParameters.from_args(args, "the test", registry)
    dtype = getattr(torch, args["params_dtype"])

    def boxes(prefix: str) -> list[LocalTensor]:
        return [
            LocalTensor(prefix + name, torch.randn(shape, generator=generator)) for name, shape in params.shapes.items()
        ]

    chunks = weight_chunks(boxes(""), params.placements, params.stacking)
    for state in (["exp_avg", "exp_avg_sq"] + ["fp32_param"] * (dtype != torch.float32)) if states else []:
        chunks += optimizer_chunks(boxes(f"{state}."), params.placements, params.stacking)
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        whole = tensors.setdefault(chunk.key, torch.empty(chunk.global_shape))
        whole[tuple(slice(at, at + n) for at, n in zip(chunk.offset, chunk.tensor.shape, strict=True))] = chunk.tensor
    main = "optimizer.state.fp32_param."
    for key in list(tensors):
        if not key.startswith("optimizer.") and dtype != torch.float32:
            tensors[key] = (tensors[main + key] if states else tensors[key]).to(dtype)
    common = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 7}
    if states:
        groups = [{"wd_mult": decayed, "lr": 1e-3, "weight_decay": decayed * 0.1} for decayed in (1.0, 0.0)]
        common["optimizer"] = optimizer_common(groups, 7, None, args["params_dtype"])
        common["opt_param_scheduler"] = {"max_lr": 1e-3, "num_steps": 28}
    return MemorySource(tensors, common)
