"""Run by `test_megatron_core_families` in a process of its own: the real Megatron writes checkpoints of BERT and T5.

    python megatron_core_families.py CASES.json FOLDER

A case is one of `megatron_core_models` with "args", the arguments of Megatron's programs to keep. FOLDER/N gets the
weights as torch_dist under iter_0000005, and FOLDER/N.safetensors the same by name. No model of Megalith runs here.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from megatron_core_models import LENGTH, VOCABULARY

from megalith.prove.megatron_core import build, join_alone, stub_streams


def write(case: dict[str, Any], folder: Path) -> None:
    from megatron.core import dist_checkpointing

    torch.manual_seed(case["seed"])
    model = build(case["family"], case["config"], case["model"], VOCABULARY, LENGTH)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        generator = torch.Generator().manual_seed(len(name))
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    save_file({name: parameter.data.clone() for name, parameter in named.items()}, f"{folder}.safetensors")
    place = folder / "iter_0000005"
    place.mkdir(parents=True)
    further = {"args": Namespace(**case["args"]), "checkpoint_version": 3.0, "iteration": 5}
    dist_checkpointing.save({"model": model.sharded_state_dict(), **further}, str(place))
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    join_alone()
    stub_streams()
    for number, case in enumerate(cases):
        write(case, folder / str(number))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
