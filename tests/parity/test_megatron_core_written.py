"""What the real Megatron writes is read: every layout of its optimizer, over layouts that no golden has.

The megatron-core package saves a model and its optimizer with known values (`megatron_core_writer`), and every tensor
is found here under its name, in model space. Tied embeddings over a pipeline, virtual stages, several buckets,
parameters that lie across data-parallel ranks; torch_dist and per-rank files. Not here, since core 0.12 cannot write
its distributed optimizer with torch's Adam: flattened ranges, which `tests/unit/checkpoint/test_torch_dist.py` builds.
See `test_megatron_core` for where the package comes from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint import DirectoryStore
from megalith.checkpoint.formats.torch_dist import Whole, read_optimizer_common, weight_chunks
from megalith.checkpoint.model_space import model_space_of, stages_of
from megalith.config.load import load
from megalith.config.saved_args import megatron_args

from ..e2e.warm import free_port
from .megatron_core_writer import SHIFTS, values
from .test_megatron_core import LLAMA, LLAMA_CONFIG, core, whole_tensors

__all__ = ["core"]

ROWS = 128
MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --transformer-impl local"
)
LAYOUTS = {
    "one": (1, 1, 1, 1),
    "tp2": (2, 2, 1, 1),
    "pp2": (2, 1, 2, 1),
    "pp2-vpp2": (2, 1, 2, 2),
    "dp2": (2, 1, 1, 1),
    "tp2-pp2": (4, 2, 2, 1),
    "tp2-dp2": (4, 2, 1, 1),
    "pp2-dp2": (4, 1, 2, 1),
}
"""Name -> ranks, tensor, pipeline, virtual stages."""
CASES: list[tuple[str, str, bool, bool, int | None, bool]] = [
    # layout, how the optimizer is divided ("" not) or per-rank files, llama, bf16, bucket size, written by 0.12 too
    ("pp2", "", False, False, None, True),
    ("tp2-pp2", "", False, True, None, True),
    ("pp2-vpp2", "", False, False, None, False),
    ("dp2", "dp_reshardable", False, False, None, False),
    ("dp2", "dp_reshardable", True, True, 3000, False),
    ("tp2-pp2", "dp_reshardable", False, True, None, False),
    ("pp2-dp2", "dp_reshardable", False, False, 2000, False),
    ("pp2-vpp2", "dp_reshardable", False, False, None, False),
    ("tp2-dp2", "dp_reshardable", True, False, 1000, False),
    ("tp2-dp2", "fully_reshardable", True, True, None, False),
    # With several buckets core 0.16.1 writes moments that are displaced by the padding of buckets; no file says so.
    ("pp2-dp2", "fully_reshardable", False, False, None, False),
    ("dp2", "dp_zero_gather_scatter", False, False, None, True),
    ("tp2-dp2", "dp_zero_gather_scatter", True, True, 2000, True),
    ("pp2", "dp_zero_gather_scatter", False, False, None, True),
    ("pp2", "per_rank", False, False, None, True),
    ("tp2-pp2", "per_rank", False, True, None, True),
    ("pp2-vpp2", "per_rank", False, True, None, False),
    ("dp2", "per_rank_zero1", True, True, 3000, False),
    ("tp2-dp2", "per_rank_zero1", True, False, 1000, False),
    ("pp2-dp2", "per_rank_zero1", False, False, 2000, False),
    ("pp2-vpp2", "per_rank_zero1", False, False, None, False),
]


def write_by_megatron(core: Path, request: dict[str, Any], number: int) -> None:
    script = Path(__file__).with_name("megatron_core_writer.py")
    environ = {**os.environ, "PYTHONPATH": str(core), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(request)],
            env={**environ, "RANK": str(rank), "WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(number)
    ]
    texts = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * number, "\n".join(texts)[-6000:]


def expected_tensors(args: dict[str, Any], *, main: bool, states: bool) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in model space, put together from what each tensor-parallel rank had."""
    space, tp = model_space_of(args, "request"), int(args["tensor_model_parallel_size"])
    found: dict[str, torch.Tensor] = {}
    kinds = ["", *(["exp_avg", "exp_avg_sq"] if states else []), *(["fp32_param"] if main else [])]
    for name in space.shapes:
        for rank in range(tp):
            local = space.local_shape(name, tp, rank)
            whole = local == space.shapes[name]
            count = int(torch.Size(local).numel())
            drawn = values(name, 0 if whole else rank, 0, count).view(local)
            for kind in kinds:
                box = Whole(name, drawn + SHIFTS.get(kind, 0.0))
                for chunk in weight_chunks([box], space.placements, space.stacking, rank=rank, size=tp):
                    key = f"optimizer.state.{kind}.{chunk.key}" if kind else chunk.key
                    target = found.setdefault(key, torch.full(chunk.global_shape, -1.0))
                    place = tuple(slice(at, at + n) for at, n in zip(chunk.offset, chunk.tensor.shape, strict=True))
                    target[place] = chunk.tensor
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case[:5] if part))
def test_what_megatron_writes_is_read(case: Any, core: Path, tmp_path: Path) -> None:
    layout, sharding, llama, bf16, bucket_size, old = case
    number, tp, pp, vpp = LAYOUTS[layout]
    version = next(core.glob("megatron_core-*")).name.split("-")[1].removesuffix(".dist")
    if "0.12" in version and not old:
        pytest.skip(f"megatron-core {version} does not write this")
    flags = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp}"
    flags += f" --num-virtual-stages-per-pipeline-rank {vpp}" if vpp > 1 else ""
    zero1 = sharding not in ("", "per_rank")
    flags += " --use-distributed-optimizer" if zero1 else ""
    flags += " --bf16" if bf16 else ""
    words = [*MODEL.split(), *flags.split(), *(map(str, LLAMA) if llama else ())]
    run = load(words, {"WORLD_SIZE": str(number), "RANK": "0"}, files=False)
    args = {**megatron_args(run), "padded_vocab_size": ROWS, "consumed_train_samples": 12, "consumed_valid_samples": 0}
    args |= {"ddp_bucket_size": bucket_size, "overlap_grad_reduce": bool(bucket_size)}
    store = DirectoryStore(tmp_path)
    request = {
        "folder": str(store.folder(3)),
        "config": {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, **(LLAMA_CONFIG if llama else {})},
        "vocab_size": ROWS,
        "positions": 16,
        "tied": not llama,
        "position_embedding_type": "rope" if llama else "learned_absolute",
        "bf16": bf16,
        **{"tp": tp, "pp": pp, "vpp": vpp, "zero1": zero1, "sharding": sharding, "bucket_size": bucket_size},
        "per_rank": sharding.startswith("per_rank"),
        "args": args,
        "scheduler": {"max_lr": 1e-3, "num_steps": 12},
    }
    write_by_megatron(core, request, number)
    assert store.verify(3) == []
    found, wanted = whole_tensors(store, 3), expected_tensors(args, main=bf16 or zero1, states=True)
    assert found.keys() == wanted.keys()
    wrong = [key for key in wanted if not torch.equal(found[key].float(), wanted[key])]
    assert wrong == []
    common = store.common(3)
    assert common["iteration"] == 3 and stages_of(vars(common["args"]), 4, "x") == run.stages
    assert len(read_optimizer_common(common["optimizer"]).param_groups) == 2
