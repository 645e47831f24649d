"""The real Megatron opens what is saved here: `dist_checkpointing.load` of the megatron-core package.

Never a dependency: the tests run where MEGALITH_MEGATRON_CORE names a folder that holds it, made for example by

    pip install --no-deps --target /tmp/core megatron-core==0.19.2 psutil typing_extensions

(with --ignore-requires-python on Python 3.11 and older). Verified with 0.12.3, 0.16.1, 0.17.1, 0.18.2 and 0.19.2.
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

from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.nn.placement import local_part

from ..e2e.warm import WarmProcess, free_port

MODEL = (
    *("--num-layers", 4, "--hidden-size", 16, "--num-attention-heads", 4, "--seq-length", 16),
    *("--max-position-embeddings", 16, "--micro-batch-size", 1, "--global-batch-size", 4, "--train-iters", 3),
    *("--lr", 1e-3, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", 100, "--eval-iters", 0),
    *("--save-interval", 3, "--device", "cpu", "--transformer-impl", "local"),
)
LLAMA = (
    *("--position-embedding-type", "rope", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--ffn-hidden-size", 48, "--untie-embeddings-and-output-weights", "--group-query-attention"),
    *("--num-query-groups", 2),
)
LLAMA_CONFIG = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "ffn_hidden_size": 48,
    "num_query_groups": 2,
}
MIXTURE = (
    *(*LLAMA, "--num-experts", 4, "--moe-ffn-hidden-size", 24, "--moe-layer-freq", "[0,1,1,0]"),
    *("--moe-router-topk", 2, "--moe-token-dispatcher-type", "alltoall"),
)
MIXTURE_CONFIG = {
    **LLAMA_CONFIG,
    **{"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1, 1, 0], "moe_router_topk": 2},
    "moe_token_dispatcher_type": "alltoall",
}
LATENT = (
    *(*LLAMA, "--num-experts", 4, "--moe-ffn-hidden-size", 24, "--moe-layer-freq", "[0,1,1,0]", "--moe-latent-size", 8),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
)
LATENT_CONFIG = {
    **LLAMA_CONFIG,
    **{"num_moe_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": [0, 1, 1, 0], "moe_latent_size": 8},
    **{"moe_router_topk": 2, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "moe_token_dispatcher_type": "alltoall",
}
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
CASES: dict[str, tuple[int, tuple[Any, ...], bool]] = {
    "gpt2": (1, (), False),
    "gpt2-tp2": (2, TP2, False),
    "gpt2-dp2-zero1-bf16": (2, ("--use-distributed-optimizer", "--bf16"), False),
    "llama-pp2": (2, (*PP2, *LLAMA), True),
    "llama-bf16": (1, ("--bf16", *LLAMA), True),
    "gpt2-tp2-pp2-bf16": (4, (*TP2, *PP2, "--bf16"), False),
    "gpt2-decoupled": (1, ("--decoupled-lr", 5e-4), False),
    "experts-tp2-pp2": (4, (*TP2, *PP2, "--sequence-parallel", *MIXTURE), True),
    "latent-experts-tp2-bf16": (2, (*TP2, "--sequence-parallel", "--bf16", *LATENT), True),
}
READERS = {"one": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}


@pytest.fixture(scope="module")
def core() -> Path:
    """The folder that holds megatron-core."""
    named = os.environ.get("MEGALITH_MEGATRON_CORE")
    if not named:
        pytest.skip("MEGALITH_MEGATRON_CORE names no folder with megatron-core; how to make one: test_megatron_core.py")
    return Path(named)


def version_of(core: Path) -> tuple[int, int]:
    """The version of megatron-core, as (0, 19)."""
    major, minor, *_ = next(core.glob("megatron_core-*")).name.split("-")[1].split(".")
    return int(major), int(minor)


def skip_if_unreadable(case: str, core: Path) -> None:
    if "decoupled" in case and version_of(core) < (0, 19):
        pytest.skip("megatron-core 0.16 to 0.18 cannot load its own checkpoints with --decoupled-lr either")


def read_by_megatron(core: Path, out: Path, layout: tuple[int, int], request: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank of the real Megatron holds after it has loaded a checkpoint."""
    tp, pp = layout
    script = Path(__file__).with_name("megatron_core_reader.py")
    environ = {**os.environ, "PYTHONPATH": str(core), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [sys.executable, str(script), json.dumps({**request, "tp": tp, "pp": pp, "out": str(out)})]
    running = [
        subprocess.Popen(
            words,
            env={**environ, "RANK": str(rank), "WORLD_SIZE": str(tp * pp), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(tp * pp)
    ]
    texts = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(texts)
    return [torch.load(f"{out}.{rank}") for rank in range(len(running))]


def whole_tensors(store: DirectoryStore, iteration: int) -> dict[str, torch.Tensor]:
    held = store.contents(iteration).tensors
    tensors = {key: torch.empty(stored.shape, dtype=stored.dtype) for key, stored in held.items()}
    chunks = [Chunk(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for key, tensor in tensors.items()]
    store.load(iteration, CheckpointContent(chunks))
    return tensors


def expected(params: GlobalParameters, whole: dict[str, torch.Tensor], name: str, layers: list[int], place: Any) -> Any:
    """Our part of what a rank calls `name`, its layers counted from 0 in its stage."""
    kind, _, rest = name.partition(".")
    prefix = f"optimizer.state.{kind}." if kind in ("exp_avg", "exp_avg_sq", "fp32_param") else ""
    parts = (rest if prefix else name).split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(layers[int(parts[2])])
    ours = ".".join(parts)
    if ours not in params.shapes:  # the second copy of a tied embedding
        assert ours == "output_layer.weight" and params.tied
        ours = "embedding.word_embeddings.weight"
    slot = params.stacking.slot(ours)
    tensor = whole[prefix + slot.key][slot.index]
    return local_part(tensor, params.placements[ours], *place)


def config_of(flags: tuple[Any, ...], *, llama: bool) -> dict[str, Any]:
    """Megatron's names of what the flags say of the model."""
    of_llama = LATENT_CONFIG if "--moe-latent-size" in flags else LLAMA_CONFIG
    of_llama = MIXTURE_CONFIG if flags[-len(MIXTURE) :] == MIXTURE else of_llama
    return of_llama if llama else {}


@pytest.mark.full
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", CASES)
def test_megatron_loads_what_is_saved_here(
    case: str, reader: str, core: Path, tmp_path: Path, warm: WarmProcess
) -> None:
    skip_if_unreadable(case, core)
    number, flags, llama = CASES[case]
    words = [*MODEL, *flags, "--save", tmp_path / "c"]
    ended = warm.run_ranks(number, words, tmp_path) if number > 1 else [warm.run(words, tmp_path)]
    assert all(end.code == 0 for end in ended), ended[0].text
    store = DirectoryStore(tmp_path / "c")
    whole, args = whole_tensors(store, 3), vars(store.common(3)["args"])
    params = GlobalParameters.from_args(args, "ours")
    tp, pp = READERS[reader]
    request = {
        "folder": str(store.folder(3)),
        "config": {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, **config_of(flags, llama=llama)},
        "vocab_size": args["padded_vocab_size"],
        "positions": 16,
        "tied": not llama,
        "position_embedding_type": "rope" if llama else "learned_absolute",
        "bf16": "--bf16" in flags,
        "optimizer": True,
        "decoupled_lr": 5e-4 if "--decoupled-lr" in flags else None,
    }
    compared = set()
    for rank, result in enumerate(read_by_megatron(core, tmp_path / "read", READERS[reader], request)):
        assert result["common"] in ({}, {"iteration": 3, "checkpoint_version": 3.0})
        for name, tensor in result["held"].items():
            wanted = expected(params, whole, name, result["layers"], (tp, rank % tp))
            assert torch.equal(tensor, wanted), f"rank {rank}: {name}"
            compared.add(name.partition(".")[0])
    assert {"embedding", "decoder", "exp_avg", "exp_avg_sq"} <= compared
    assert ("fp32_param" in compared) == request["bf16"]
    assert pp * tp == len(list(tmp_path.glob("read.*")))


ZERO1 = ("--use-distributed-optimizer",)
PER_RANK: dict[str, tuple[int, tuple[int, int], tuple[Any, ...], bool]] = {
    "gpt2": (1, (1, 1), (), False),
    "gpt2-tp2-bf16": (2, (2, 1), (*TP2, "--bf16"), False),
    "gpt2-dp2-zero1": (2, (1, 1), ZERO1, False),
    "gpt2-pp2-zero1-bf16": (2, (1, 2), (*PP2, *ZERO1, "--bf16"), False),
    "llama-pp2": (2, (1, 2), (*PP2, *LLAMA), True),
    "llama-tp2-zero1-bf16": (2, (2, 1), (*TP2, *ZERO1, "--bf16", *LLAMA), True),
    "gpt2-decoupled": (1, (1, 1), ("--decoupled-lr", 5e-4), False),
    "latent-experts-pp2": (2, (1, 2), (*PP2, *LATENT), True),
}
"""Name -> ranks, (tensor, pipeline) sizes, flags, whether it is a Llama."""


@pytest.mark.full
@pytest.mark.parametrize("case", PER_RANK)
def test_megatron_loads_per_rank_files(case: str, core: Path, tmp_path: Path, warm: WarmProcess) -> None:
    """Model and optimizer of the real Megatron take the dicts in the files, strictly."""
    skip_if_unreadable(case, core)
    number, (tp, pp), flags, llama = PER_RANK[case]
    words = [*MODEL, *flags, "--save", tmp_path / "c", "--ckpt-format", "torch"]
    ended = warm.run_ranks(number, words, tmp_path) if number > 1 else [warm.run(words, tmp_path)]
    assert all(end.code == 0 for end in ended), ended[0].text
    store = DirectoryStore(tmp_path / "c")
    assert store.format(3) == "torch"
    whole, args = whole_tensors(store, 3), vars(store.common(3)["args"])
    params = GlobalParameters.from_args(args, "ours")
    request = {
        "folder": str(store.folder(3)),
        "config": {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, **config_of(flags, llama=llama)},
        "vocab_size": args["padded_vocab_size"],
        "positions": 16,
        "tied": not llama,
        "position_embedding_type": "rope" if llama else "learned_absolute",
        "bf16": "--bf16" in flags,
        "optimizer": True,
        "decoupled_lr": 5e-4 if "--decoupled-lr" in flags else None,
        "per_rank": True,
        "distributed": "--use-distributed-optimizer" in flags,
    }
    compared = set()
    for rank, result in enumerate(read_by_megatron(core, tmp_path / "read", (tp, pp), request)):
        assert result["common"] == {"iteration": 3, "checkpoint_version": 3.0}
        for name, tensor in result["held"].items():
            wanted = expected(params, whole, name, result["layers"], (tp, rank % tp))
            assert torch.equal(tensor, wanted), f"rank {rank}: {name}"
            compared.add(name.partition(".")[0])
    assert {"embedding", "decoder", "exp_avg", "exp_avg_sq"} <= compared
    assert ("fp32_param" in compared) == (request["bf16"] or request["distributed"])
