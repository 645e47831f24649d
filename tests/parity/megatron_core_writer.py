"""Run by `test_megatron_core_written` in processes of their own: the real Megatron writes a checkpoint.

    python megatron_core_writer.py '<json of the request>'

Every tensor gets values that follow from its name and the place of its elements in the tensor of its rank, so that a
reader can say what it must find: `parameter_value` for weights and main parameters, the same and a constant for the
moments. No code of Megalith runs here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from megatron_core_reader import build, dtype_of

from megalith.prove.megatron_core import stub_cuda, stub_streams

SHIFTS = {"param": 0.0, "fp32_param": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}


def values(name: str, place: int, start: int, count: int) -> torch.Tensor:
    """Exact in fp32 and, without a shift, in bf16: whole numbers below 128 of the elements [start, start + count)."""
    origin = zlib.crc32(name.encode()) % 97 + 13 * place
    return ((torch.arange(start, start + count) * 7 + origin) % 127).float()


EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


def as_in_transformer_engine(model: Any) -> None:
    """Name the parameters in the order that TransformerEngine's modules have (its version 2), which need a GPU.

    `LayerNormLinear` registers the norm before the linear layer, which here it stands before anyway but for what is
    between the two; `GroupedLinear` weight and bias of one expert after the other, for each of the two linear layers.
    """
    named = dict(model.named_parameters())
    order = list(named)
    for norm, linear in (("input_layernorm", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "mlp.linear_fc1")):
        for name in [name for name in named if f".{norm}." in name]:
            behind = f"{name.partition(norm)[0]}{linear}.weight"
            if behind in named:
                order.remove(name)
                order.insert(order.index(behind), name)
    for prefix in {match[1] for name in named if (match := EXPERT.fullmatch(name))}:
        group = [name for name in order if name.startswith(prefix)]
        first = order.index(group[0])
        linears = [[name for name in group if f".linear_fc{number}." in name] for number in (1, 2)]
        order[first : first + len(group)] = [*linears[0], *linears[1]]
    assert sorted(order) == sorted(named)
    model.named_parameters = lambda *_, **__: [(name, named[name]) for name in order]


def global_names(model: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by the names that they have in the whole model."""
    from megatron.core import parallel_state

    named = {}
    for name, parameter in model.named_parameters():
        parts = name.removeprefix("module.").split(".")
        if parts[:2] == ["decoder", "layers"]:
            inner = getattr(model, "module", model)
            parts[2] = str(inner.decoder.layers[int(parts[2])].layer_number - 1)
        whole = ".".join(parts)
        if (match := EXPERT.fullmatch(whole)) is not None:
            here = inner_experts(model) // parallel_state.get_expert_model_parallel_world_size()
            whole = f"{match[1]}{int(match[2]) + here * parallel_state.get_expert_model_parallel_rank()}{match[3]}"
        named[whole] = parameter
    return named


def inner_experts(model: Any) -> int:
    experts: int = getattr(model, "module", model).config.num_moe_experts
    return experts


def main() -> None:
    request = json.loads(sys.argv[1])
    stub_cuda()
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    virtual = request["vpp"]
    parallel_state.initialize_model_parallel(
        request["tp"],
        request["pp"],
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        expert_model_parallel_size=request["ep"],
        expert_tensor_parallel_size=request["etp"],
    )
    if request["config"].get("num_moe_experts"):
        stub_streams()
    chunks, wrapped = [], []
    for number in range(virtual):
        if virtual > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        config, model = build(request, number if virtual > 1 else None)
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=request["zero1"],
            overlap_grad_reduce=bool(request["bucket_size"]),
            bucket_size=request["bucket_size"],
            grad_reduce_in_fp32=request["bf16"],
        )
        if request["fused"]:
            as_in_transformer_engine(model)
        chunks.append(model)
        wrapped.append(DistributedDataParallel(config, settings, model))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=0.0,
            weight_decay=0.1,
            bf16=request["bf16"],
            fp16=request["fp16"],
            initial_loss_scale=4096.0,
            params_dtype=dtype_of(request),
            use_distributed_optimizer=request["zero1"],
        ),
        wrapped,
    )
    place = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank())
    named = {name: parameter for model in wrapped for name, parameter in global_names(model).items()}
    for name, parameter in named.items():
        stored = "embedding.word_embeddings.weight" if request["tied"] and name == "output_layer.weight" else name
        parameter.data.view(-1).copy_(values(stored, part_of(name, parameter, place), 0, parameter.numel()))
    fill_optimizer(optimizer, named, place, tied=request["tied"])
    keys = [""] if virtual == 1 else [str(number) for number in range(virtual)]
    if request["per_rank"]:
        save_per_rank(request, dict(zip(keys, chunks, strict=True)), optimizer)
        dist.barrier()
        dist.destroy_process_group()
        return
    metadata = {
        "distrib_optim_sharding_type": request["sharding"],
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    sharded: dict[str, Any] = {
        f"model{key}": model.sharded_state_dict() for key, model in zip(keys, chunks, strict=True)
    }
    models = dict(sharded)
    if "metadata" in optimizer.sharded_state_dict.__code__.co_varnames:
        sharded["optimizer"] = optimizer.sharded_state_dict(models, metadata=metadata)
    else:
        sharded["optimizer"] = optimizer.sharded_state_dict(models, sharding_type=request["sharding"])
    sharded |= {
        "args": argparse.Namespace(**request["args"]),
        "checkpoint_version": 3.0,
        "iteration": 3,
        "opt_param_scheduler": request["scheduler"],
        "content_metadata": metadata,
    }
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(sharded, str(folder))
    dist.barrier()
    dist.destroy_process_group()


def save_per_rank(request: dict[str, Any], models: dict[str, Any], optimizer: Any) -> None:
    """What Megatron's `save_checkpoint` does for `--ckpt-format torch`."""
    from megatron.core import parallel_state

    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    ep = parallel_state.get_expert_model_parallel_rank()
    parts = [f"mp_rank_{tp:02d}", *[f"{pp:03d}"] * (request["pp"] > 1), *[f"{ep:03d}"] * (request["ep"] > 1)]
    folder = Path(request["folder"]) / "_".join(parts)
    folder.mkdir(parents=True, exist_ok=True)
    if request["zero1"]:
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        body = {"args": argparse.Namespace(**request["args"]), "checkpoint_version": 3.0, "iteration": 3}
        body |= {f"model{key}": model.state_dict_for_save_checkpoint() for key, model in models.items()}
        body |= {"optimizer": optimizer.state_dict(), "opt_param_scheduler": request["scheduler"]}
        torch.save(body, folder / "model_optim_rng.pt")


def part_of(name: str, parameter: torch.nn.Parameter, place: tuple[int, int]) -> int:
    """Of which rank's values a parameter is: where every tensor-parallel rank has the same, of the first's."""
    return place[EXPERT.fullmatch(name) is not None] if getattr(parameter, "tensor_model_parallel", False) else 0


def fill_optimizer(optimizer: Any, named: dict[str, torch.nn.Parameter], place: tuple[int, int], *, tied: bool) -> None:
    if hasattr(optimizer, "chained_optimizers"):
        for one in optimizer.chained_optimizers:
            fill_optimizer(one, named, place, tied=tied)
        return
    name_of = {id(parameter): name for name, parameter in named.items()}
    if hasattr(optimizer, "model_param_group_index_map"):
        optimizer._init_optimizer_states_with_dummy_values()
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            main = optimizer.optimizer.param_groups[group]["params"][order]
            part = optimizer._get_model_param_range_map(parameter)["param"]
            fill_one(optimizer, main, name_of[id(parameter)], parameter, place, part.start, tied=tied)
        return
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    mains = {}
    if hasattr(optimizer, "float16_groups"):
        for group, copies in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            mains |= {id(parameter): main for parameter, main in zip(group, copies, strict=True)}
    for name, parameter in named.items():
        main = mains.get(id(parameter), parameter)
        if main in optimizer.optimizer.state:
            fill_one(optimizer, main, name, parameter, place, 0, tied=tied)


def fill_one(
    optimizer: Any,
    main: torch.Tensor,
    name: str,
    parameter: torch.nn.Parameter,
    place: tuple[int, int],
    start: int,
    *,
    tied: bool,
) -> None:
    stored = "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name
    drawn = values(stored, part_of(name, parameter, place), start, main.numel())
    main.data.view(-1).copy_(drawn)
    state = optimizer.optimizer.state[main]
    for kind in ("exp_avg", "exp_avg_sq"):
        state[kind].view(-1).copy_(drawn + SHIFTS[kind])
    if "step" in state:
        state["step"] = torch.tensor(3.0) if isinstance(state["step"], torch.Tensor) else 3
    for group in optimizer.optimizer.param_groups:
        if "step" in group:
            group["step"] = 3


if __name__ == "__main__":
    main()
