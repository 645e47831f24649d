"""Run by `test_megatron_core_models` in a process of its own: what models of the real Megatron compute.

    python megatron_core_models.py CASES.json FOLDER

A case is {"family", "seed", "config": fields of TransformerConfig, "model": arguments of the model's constructor}. For
each, FOLDER/N.safetensors gets the initial weights (`initial.NAME`), those that it computes with (`weight.NAME`: the
initial ones and noise, so that biases and norms count), the inputs, the losses of the tokens, the logits of a GPT and
the scores of BERT's order of texts, and every gradient (`gradient.NAME`) of their sum. Of relative positions only the
initial weights: Megatron's local layers do not compute with them. No model of Megalith runs here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megalith.prove.megatron_core import build, join_alone, stub_streams

VOCABULARY, LENGTH, DECODED, ROWS, PADDED = 96, 32, 12, 2, 3


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
    torch.manual_seed(case["seed"])
    model = build(case["family"], case["config"], case["model"], VOCABULARY, LENGTH).train()
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
