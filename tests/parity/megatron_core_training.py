"""Run by `test_megatron_core_training` in a process of its own: what the real Megatron makes of training settings.

    python megatron_core_training.py CASES.json FOLDER

CASES holds lists of "schedules", "batch_sizes", "scalers" and "optimizers". FOLDER/results.json gets what Megatron's
classes say to the first three, FOLDER/N.safetensors the weights and gradients of the optimizer case N and what became
of the weights, FOLDER/N.json its groups, norms and counts. No model of Megalith runs here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megalith.prove.megatron_core import join_alone

VOCABULARY, LENGTH = 48, 16


def schedule(case: dict[str, Any]) -> list[list[list[float]]] | str:
    """[learning rate, weight decay] of each group at each of the numbers of samples, or what is refused."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    groups = [dict(group) for group in case["groups"]]
    try:
        scheduler = OptimizerParamScheduler(SimpleNamespace(param_groups=groups), **case["config"])
        trace = []
        for samples in case["samples"]:
            scheduler.step(samples - scheduler.num_steps)
            trace.append([[group["lr"], group["weight_decay"]] for group in groups])
    except (AssertionError, ZeroDivisionError) as error:
        return f"refused: {error}"
    return trace


def batch_sizes(case: dict[str, Any]) -> list[list[int]] | str:
    """[micro-batches, size asked for, size taken] at each of the numbers of samples, or what is refused."""
    from megatron.core.num_microbatches_calculator import _build_num_microbatches_calculator

    try:
        calculator = _build_num_microbatches_calculator(0, **case["config"])
        trace = []
        for samples in case["samples"]:
            calculator.update(samples, True)
            trace.append(
                [
                    calculator.get(),
                    calculator.get_current_global_batch_size(),
                    calculator.get_current_running_global_batch_size(),
                ]
            )
    except (AssertionError, ZeroDivisionError) as error:
        return f"refused: {error}"
    return trace


def scaler(case: dict[str, Any]) -> list[list[float]]:
    """[scale, its inverse] after each step."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    made = DynamicGradScaler(growth_factor=2.0, backoff_factor=0.5, **case["config"])
    trace = []
    for overflow in case["overflows"]:
        made.update(overflow)
        trace.append([made.scale.item(), made.inv_scale.item()])
    return trace


def model_of(case: dict[str, Any]) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=getattr(torch, case["dtype"]),
        bf16=case["dtype"] == "bfloat16",
        fp16=case["dtype"] == "float16",
        **case["model"],
    )
    torch.manual_seed(case["seed"])
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    return GPTModel(config, spec, VOCABULARY, LENGTH, share_embeddings_and_output_weights=not case["untied"])


def optimizer(case: dict[str, Any], path: Path) -> None:
    """Steps of the real optimizer with gradients that are drawn here."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = model_of(case)
    model.ddp_config = DistributedDataParallelConfig()
    model = model.to(getattr(torch, case["dtype"]))
    config = OptimizerConfig(
        params_dtype=getattr(torch, case["dtype"]),
        bf16=case["dtype"] == "bfloat16",
        fp16=case["dtype"] == "float16",
        log_num_zeros_in_grad=True,
        **case["optimizer"],
    )
    made = get_megatron_optimizer(config, [model])
    named, kept, steps = dict(model.named_parameters()), {}, []
    kept |= {f"initial.{name}": parameter.detach().clone() for name, parameter in named.items()}
    generator = torch.Generator().manual_seed(case["seed"])
    groups = []
    for group in made.param_groups:
        mains = group["params"]
        groups.append({"wd_mult": group["wd_mult"], "max_lr": group["max_lr"], "size": sum(p.numel() for p in mains)})
    for number, told in enumerate(case["steps"]):
        for group in made.param_groups:
            own = "decoupled_lr" if group["max_lr"] != config.lr else "lr"
            group["lr"], group["weight_decay"] = told[own], told["weight_decay"] * group["wd_mult"]
        for name, parameter in named.items():
            grad = torch.randn(parameter.shape, generator=generator) * told["size"]
            grad[torch.rand(parameter.shape, generator=generator) < 0.1] = 0.0
            if told["bad"] and name.endswith("linear_fc1.weight"):
                grad.view(-1)[3] = told["bad"]
            kept[f"gradient.{number}.{name}"] = grad
            scale = made.get_loss_scale().item()
            parameter.main_grad = grad * scale
        applied, norm, zeros = made.step()
        steps.append({"applied": bool(applied), "norm": norm, "zeros": zeros, "scale": made.get_loss_scale().item()})
        kept |= {f"after.{number}.{name}": parameter.detach().clone() for name, parameter in named.items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in kept.items()}, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(json.dumps({"groups": groups, "steps": steps}))


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    join_alone()
    results = {
        "schedules": [schedule(case) for case in cases["schedules"]],
        "batch_sizes": [batch_sizes(case) for case in cases["batch_sizes"]],
        "scalers": [scaler(case) for case in cases["scalers"]],
    }
    (folder / "results.json").write_text(json.dumps(results))
    for number, case in enumerate(cases["optimizers"]):
        optimizer(case, folder / str(number))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
