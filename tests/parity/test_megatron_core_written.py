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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint import DirectoryStore
from megalith.checkpoint.formats.megatron_names import parse_name
from megalith.checkpoint.formats.torch_dist import LocalTensor, read_optimizer_common, weight_chunks
from megalith.checkpoint.global_parameters import GlobalParameters, parallel_layout
from megalith.config.build import load
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
MIXTURE_CONFIG = {
    **LLAMA_CONFIG,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_layer_freq": [0, 1, 1, 0],
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.01,
}
MIXTURE = (
    *LLAMA,
    *("--num-experts", 4, "--moe-ffn-hidden-size", 24, "--moe-router-topk", 2, "--moe-layer-freq", "[0,1,1,0]"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", 0.01),
)
LATENT = (*MIXTURE, "--moe-latent-size", 8)
LATENT_CONFIG = {**MIXTURE_CONFIG, "moe_latent_size": 8}
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
    with ThreadPoolExecutor(number) as pool:
        texts = list(pool.map(_text_of, running, [running] * number))
    assert [process.returncode for process in running] == [0] * number, "\n".join(texts)[-6000:]


def _text_of(process: subprocess.Popen[str], others: Sequence[subprocess.Popen[str]]) -> str:
    """What a process says; when it fails, or is not done in time, those that wait for it end too."""
    try:
        return process.communicate(timeout=300)[0]
    finally:
        if process.returncode != 0:
            for other in others:
                other.kill()


def expected_tensors(args: dict[str, Any], *, main: bool, states: bool) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in model space, put together from what each tensor-parallel rank had."""
    params, tp = GlobalParameters.from_args(args, "request"), int(args["tensor_model_parallel_size"])
    found: dict[str, torch.Tensor] = {}
    kinds = ["", *(["exp_avg", "exp_avg_sq"] if states else []), *(["fp32_param"] if main else [])]
    for name in params.shapes:
        size = tp if parse_name(name).expert is None else int(args.get("expert_tensor_parallel_size") or tp)
        for rank in range(size):
            local = params.local_shape(name, size, rank)
            whole = local == params.shapes[name]
            count = int(torch.Size(local).numel())
            drawn = values(name, 0 if whole else rank, 0, count).view(local)
            for kind in kinds:
                box = LocalTensor(name, drawn + SHIFTS.get(kind, 0.0))
                for chunk in weight_chunks([box], params.placements, params.stacking, rank=rank, size=size):
                    key = f"optimizer.state.{kind}.{chunk.key}" if kind else chunk.key
                    target = found.setdefault(key, torch.full(chunk.global_shape, -1.0))
                    place = tuple(slice(at, at + n) for at, n in zip(chunk.offset, chunk.tensor.shape, strict=True))
                    target[place] = chunk.tensor
    return found


@dataclass(frozen=True)
class Written:
    """A run of the real Megatron.

    Attributes:
        number: of ranks.
        tp, pp, vpp, ep, etp: of its layout; vpp 1 without virtual stages.
        model: "gpt2" tied, "llama" untied or "mixture" of experts in two of four layers, "mixture-latent" with
            projections around them.
        dtype: bf16, fp16 or fp32.
        sharding: how the optimizer is divided, "" not; "per_rank..." for files by rank.
        bucket_size: elements from which on a bucket is closed.
        fused: the parameters are in the order of TransformerEngine's modules.
    """

    number: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    model: str = "gpt2"
    dtype: str = "fp32"
    sharding: str = ""
    bucket_size: int | None = None
    fused: bool = False

    def __str__(self) -> str:
        said = [f"{name}{value}" for name, value in vars(self).items() if value != getattr(type(self), name, None)]
        return "-".join(said)

    @property
    def zero1(self) -> bool:
        return self.sharding not in ("", "per_rank")


def check(written: Written, core: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Have Megatron write, and compare every tensor; those that were found."""
    mixtures = {"mixture": (MIXTURE, MIXTURE_CONFIG), "mixture-latent": (LATENT, LATENT_CONFIG)}
    own = {"gpt2": ((), {}), "llama": (LLAMA, LLAMA_CONFIG), **mixtures}[written.model]
    flags = f"--tensor-model-parallel-size {written.tp} --pipeline-model-parallel-size {written.pp}"
    flags += f" --num-virtual-stages-per-pipeline-rank {written.vpp}" if written.vpp > 1 else ""
    flags += " --use-distributed-optimizer" if written.zero1 else ""
    flags += f" --{written.dtype}" if written.dtype != "fp32" else ""
    if written.ep > 1:
        flags += f" --expert-model-parallel-size {written.ep} --expert-tensor-parallel-size {written.etp}"
        flags += " --sequence-parallel" if written.tp > 1 else ""
    words = [*MODEL.split(), *flags.split(), *map(str, own[0])]
    run = load(words, {"WORLD_SIZE": str(written.number), "RANK": "0"}, files=False)
    args = {**megatron_args(run), "padded_vocab_size": ROWS, "consumed_train_samples": 12, "consumed_valid_samples": 0}
    args |= {"ddp_bucket_size": written.bucket_size, "overlap_grad_reduce": bool(written.bucket_size)}
    args |= {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True} if written.fused else {}
    store, tied = DirectoryStore(folder), written.model == "gpt2"
    parallel = {"expert_model_parallel_size": written.ep, "expert_tensor_parallel_size": written.etp}
    request = {
        "folder": str(store.folder(3)),
        "config": {
            **{"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4},
            **own[1],
            **(parallel if written.model in mixtures else {}),
        },
        "vocab_size": ROWS,
        "positions": 16,
        "tied": tied,
        "position_embedding_type": "learned_absolute" if tied else "rope",
        **{"bf16": written.dtype == "bf16", "fp16": written.dtype == "fp16"},
        **{name: getattr(written, name) for name in ("tp", "pp", "vpp", "ep", "etp", "sharding", "bucket_size")},
        **{"zero1": written.zero1, "fused": written.fused, "per_rank": written.sharding.startswith("per_rank")},
        "args": args,
        "scheduler": {"max_lr": 1e-3, "num_steps": 12},
    }
    write_by_megatron(core, request, written.number)
    assert store.verify(3) == []
    main = written.dtype != "fp32" or written.zero1
    found, wanted = whole_tensors(store, 3), expected_tensors(args, main=main, states=True)
    assert found.keys() == wanted.keys()
    wrong = [key for key in wanted if not torch.equal(found[key].float(), wanted[key])]
    assert wrong == []
    common = store.common(3)
    assert common["iteration"] == 3 and parallel_layout(vars(common["args"]), 4, "x").stages == run.stages
    state = read_optimizer_common(common["optimizer"])
    assert len(state.param_groups) == (3 if written.ep > 1 else 2)  # experts without biases: all have weight decay
    assert (state.scaler or {}).get("scale") == (4096.0 if written.dtype == "fp16" else None)
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(part) for part in case[:5] if part))
def test_what_megatron_writes_is_read(case: Any, core: Path, tmp_path: Path) -> None:
    layout, sharding, llama, bf16, bucket_size, old = case
    version = next(core.glob("megatron_core-*")).name.split("-")[1].removesuffix(".dist")
    if "0.12" in version and not old:
        pytest.skip(f"megatron-core {version} does not write this")
    number, tp, pp, vpp = LAYOUTS[layout]
    model, dtype = "llama" if llama else "gpt2", "bf16" if bf16 else "fp32"
    check(Written(number, tp, pp, vpp, 1, tp, model, dtype, sharding, bucket_size), core, tmp_path)


OF_EXPERTS = [
    Written(2, ep=2, sharding="dp_reshardable"),
    Written(2, ep=2, dtype="bf16", sharding="dp_reshardable", bucket_size=1000),
    Written(4, ep=2, dtype="bf16", sharding="dp_reshardable"),
    Written(4, ep=2, sharding="dp_reshardable", bucket_size=700),
    Written(4, tp=2, ep=2, etp=2, sharding="dp_reshardable"),
    Written(4, tp=2, ep=2, etp=1, dtype="bf16", sharding="dp_reshardable", bucket_size=500),
    Written(4, pp=2, ep=2, sharding="dp_reshardable", bucket_size=900),
    Written(4, pp=2, vpp=2, ep=2, dtype="bf16", sharding="dp_reshardable"),
    Written(2, ep=2, sharding="dp_zero_gather_scatter"),
    Written(4, tp=2, ep=2, etp=2, dtype="bf16", sharding="dp_zero_gather_scatter", bucket_size=500),
    Written(4, pp=2, ep=2, sharding="dp_zero_gather_scatter"),
    Written(2, ep=2, dtype="bf16", sharding="fully_reshardable"),
    Written(2, ep=2, sharding="per_rank_zero1"),
    Written(4, pp=2, ep=2, dtype="bf16", sharding="per_rank_zero1"),
    Written(2, ep=2),
    Written(2, dtype="fp16", sharding="dp_reshardable", bucket_size=900),
    Written(2, ep=2, dtype="fp16", sharding="dp_reshardable"),
    Written(2, ep=2, sharding="dp_reshardable", fused=True),
    Written(4, tp=2, ep=2, etp=2, dtype="bf16", sharding="dp_reshardable", bucket_size=500, fused=True),
    Written(4, pp=2, vpp=2, dtype="bf16", sharding="dp_reshardable", fused=True),
    Written(2, sharding="dp_zero_gather_scatter", fused=True),
]


@pytest.mark.full
@pytest.mark.parametrize("written", [replace(one, model="mixture") for one in OF_EXPERTS], ids=str)
def test_what_megatron_writes_of_experts_is_read(written: Written, core: Path, tmp_path: Path) -> None:
    check(written, core, tmp_path)


OF_LATENT = [
    Written(4, tp=2, ep=2, etp=1, dtype="bf16", sharding="dp_reshardable", bucket_size=500),
    Written(4, pp=2, ep=2, dtype="bf16", sharding="per_rank_zero1"),
    Written(2, ep=2, dtype="bf16", sharding="fully_reshardable"),
    Written(2, tp=2, etp=2, sharding="per_rank"),
    Written(2, ep=2, sharding="dp_reshardable", fused=True),
]


@pytest.mark.full
@pytest.mark.parametrize("written", [replace(one, model="mixture-latent") for one in OF_LATENT], ids=str)
def test_what_megatron_writes_of_experts_on_latent_vectors_is_read(
    written: Written, core: Path, tmp_path: Path
) -> None:
    check(written, core, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["dp_reshardable", "dp_zero_gather_scatter"])
def test_norms_within_linear_layers_are_read(sharding: str, core: Path, tmp_path: Path) -> None:
    written = Written(4, tp=2, pp=2, etp=2, dtype="bf16", sharding=sharding, fused=True)
    check(written, core, tmp_path / "gpt2")
    check(replace(written, model="llama", pp=1, bucket_size=1000), core, tmp_path / "llama")


@pytest.mark.full
def test_buckets_hold_what_the_reshardable_layout_holds(core: Path, tmp_path: Path) -> None:
    """Experts over ranks: the state of one run as Megatron saves it in buckets and as it saves it for any layout."""
    written = Written(4, ep=2, model="mixture", dtype="bf16", sharding="dp_reshardable")
    buckets = check(written, core, tmp_path / "buckets")
    whole = check(replace(written, sharding="fully_reshardable"), core, tmp_path / "whole")
    assert buckets.keys() == whole.keys() and all(torch.equal(buckets[key], whole[key]) for key in whole)
