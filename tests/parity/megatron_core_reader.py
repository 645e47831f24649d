"""Run by `test_megatron_core` in processes of their own: the real Megatron reads a checkpoint of ours.

    python megatron_core_reader.py '<json of the request>'

Builds the model with `megatron.core` (no code of Megalith), asks `dist_checkpointing.load` for the sharded state of the
model and, with the version's own optimizer, for the optimizer's, and writes what each rank then holds.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from megalith.prove.megatron_core import stub_cuda, stub_streams

UNSET = -7.0


def dtype_of(request: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if request["bf16"] else torch.float16 if request.get("fp16") else torch.float32


def layers_of_spec(config: Any, virtual_stage: int | None) -> Any:
    """How the layers are made, of Megatron's own modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    normalization = {"normalization": config.normalization}
    if config.num_moe_experts:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual_stage, **normalization)
    known = inspect.signature(get_gpt_layer_local_spec).parameters
    return get_gpt_layer_local_spec(**{key: value for key, value in normalization.items() if key in known})


def build(request: dict[str, Any], virtual_stage: int | None = None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = dict(request["config"])
    if options.pop("swiglu", False):
        options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if request.get("vpp", 1) > 1:
        options["virtual_pipeline_model_parallel_size"] = request["vpp"]
    config = TransformerConfig(
        use_cpu_initialization=True,
        tensor_model_parallel_size=request["tp"],
        pipeline_model_parallel_size=request["pp"],
        pipeline_dtype=dtype_of(request),
        params_dtype=dtype_of(request),
        bf16=request["bf16"],
        fp16=request.get("fp16", False),
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        **options,
    )
    spec = layers_of_spec(config, virtual_stage)
    where = {} if virtual_stage is None else {"vp_stage": virtual_stage}
    if virtual_stage is not None and "vp_stage" not in inspect.signature(GPTModel).parameters:
        where = {}
    at = dict(where, ignore_virtual=False) if where else {}
    model = GPTModel(
        config,
        spec,
        request["vocab_size"],
        request["positions"],
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        share_embeddings_and_output_weights=request["tied"],
        position_embedding_type=request["position_embedding_type"],
        **where,
    )
    model = model.to(dtype_of(request))
    for parameter in model.parameters():
        parameter.data.fill_(UNSET)
    return config, model


def build_optimizer(request: dict[str, Any], config: Any, model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    divided = request.get("distributed", False)
    reducing = DistributedDataParallelConfig(use_distributed_optimizer=divided, grad_reduce_in_fp32=request["bf16"])
    wrapped = DistributedDataParallel(config, reducing, model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=0.0,
        decoupled_lr=request.get("decoupled_lr"),
        weight_decay=0.1,
        bf16=request["bf16"],
        params_dtype=torch.bfloat16 if request["bf16"] else torch.float32,
        use_distributed_optimizer=divided,
    )
    return get_megatron_optimizer(settings, [wrapped])


def main() -> None:
    request = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    stub_cuda()
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    from megatron.core import dist_checkpointing, parallel_state

    parallel_state.initialize_model_parallel(request["tp"], request["pp"])
    if request["config"].get("num_moe_experts"):
        stub_streams()
    config, model = build(request)
    optimizer = build_optimizer(request, config, model) if request["optimizer"] else None
    if request.get("per_rank"):
        loaded = load_per_rank(request, model, optimizer)
    else:
        sharded = {"model": model.sharded_state_dict()}
        if optimizer is not None:
            sharded["optimizer"] = optimizer.sharded_state_dict(sharded["model"], is_loading=True)
        loaded = dist_checkpointing.load(sharded, request["folder"])
        model.load_state_dict(loaded["model"], strict=False)
        if optimizer is not None:
            optimizer.load_state_dict(loaded["optimizer"])
    held: dict[str, torch.Tensor] = {name: parameter.data for name, parameter in model.named_parameters()}
    if optimizer is not None:
        held |= states_of(optimizer, model)
    common = {key: loaded[key] for key in ("iteration", "checkpoint_version") if key in loaded}
    torch.save({"held": held, "common": common, "layers": layers_of(model)}, f"{request['out']}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def load_per_rank(request: dict[str, Any], model: Any, optimizer: Any) -> Any:
    """What Megatron's own loading does with the files of this rank, strictly."""
    from megatron.core import parallel_state

    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    name = f"mp_rank_{tp:02d}_{pp:03d}" if request["pp"] > 1 else f"mp_rank_{tp:02d}"
    body = torch.load(f"{request['folder']}/{name}/model_optim_rng.pt", weights_only=False)
    model.load_state_dict(body["model"], strict=True)
    optimizer.load_state_dict(body["optimizer"])
    if request["distributed"]:
        for chained in optimizer.chained_optimizers:
            for state in chained.optimizer.state.values():
                state.pop("step")  # Apex has none here, and 0.16.1 fails on that of torch with its own files too
        optimizer.load_parameter_state(f"{request['folder']}/{name}/distrib_optim.pt")
    return body


def layers_of(model: Any) -> list[int]:
    """Global numbers of the layers of this stage, from 0."""
    return [layer.layer_number - 1 for layer in model.decoder.layers]


def states_of(optimizer: Any, model: Any) -> dict[str, torch.Tensor]:
    """`exp_avg.<name>` and so on of every parameter that the optimizer has a state of."""
    while hasattr(optimizer, "chained_optimizers") and len(optimizer.chained_optimizers) == 1:
        (optimizer,) = optimizer.chained_optimizers
    if hasattr(optimizer, "gbuf_ranges"):  # the distributed one; alone it has all of each parameter
        states = [
            (name, parameter, optimizer._get_main_param_and_optimizer_states(parameter))
            for name, parameter in model.named_parameters()
        ]
        kinds = {"fp32_param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        return {
            f"{kind}.{name}": state[label].data.view(parameter.shape)
            for name, parameter, state in states
            for kind, label in kinds.items()
        }
    main_of = {}
    if hasattr(optimizer, "float16_groups"):
        for group, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            main_of |= {id(parameter): main for parameter, main in zip(group, mains, strict=True)}
    found = {}
    for name, parameter in model.named_parameters():
        main = main_of.get(id(parameter), parameter)
        if main is not parameter:
            found[f"fp32_param.{name}"] = main.data
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind}.{name}"] = optimizer.optimizer.state[main][kind]
    return found


if __name__ == "__main__":
    main()
