"""The optimizer's state in the buffers of Megatron's distributed optimizer, where experts have buffers of their own.

What the real Megatron writes so is read in `tests/parity/test_megatron_core_written.py`, where the package is there.
"""

from __future__ import annotations

from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.formats.megatron_names import parse_name
from megalith.checkpoint.formats.torch_dist import LocalTensor, model_chunks, read_optimizer_common, weight_chunks
from megalith.checkpoint.global_parameters import GlobalParameters, parallel_layout
from megalith.checkpoint.sources.bucket_space import registration_order
from megalith.errors import CheckpointError
from megalith.nn.placement import local_part

ARGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "seq_length": 4,
    "max_position_embeddings": 4,
    "padded_vocab_size": 16,
    "num_experts": 4,
    "untie_embeddings_and_output_weights": True,
    "params_dtype": "float32",
    "use_distributed_optimizer": True,
}
KINDS = ("param", "exp_avg", "exp_avg_sq")


def state_of(params: GlobalParameters) -> dict[str, torch.Tensor]:
    """Every parameter's state, each element with a value of its own."""
    found, first = {}, 0
    for name, shape in params.shapes.items():
        count = int(torch.Size(shape).numel())
        found[name] = torch.arange(first, first + count, dtype=torch.float32).view(shape)
        first += count
    return found


def packed(parts: list[torch.Tensor]) -> torch.Tensor:
    """A buffer of one bucket: the last part first, each from a multiple of 64; nothing sensible in the gaps."""
    flat = torch.empty(0)
    for part in reversed(parts):
        gap = -len(flat) % 64
        flat = torch.cat([flat, torch.full((gap,), float("nan")), part.flatten()])
    return flat


def save(folder: Path, *, tp: int, pp: int, ep: int, etp: int, scale: float | None = None, **args: Any) -> None:
    """What Megatron writes of that layout; without `expert_tensor_parallel_size` among `args` as before core 0.10."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    args = {**ARGS, **sizes, **args}
    params = GlobalParameters.from_args(args, "test")
    layout, state = parallel_layout(args, params.num_layers, "test"), state_of(params)
    weights = [(name, tensor, params.placements[name]) for name, tensor in state.items()]
    chunks, objects = model_chunks(weights, params.stacking), dict[str, Any]()

    def moved(stage: int, ep_rank: int) -> list[str]:
        return [name for name in params.names_of(layout, stage, ep_rank)[0] if name not in params.buffers]

    def write(prefix: str, names: list[str], size: int, rank: int) -> None:
        order = registration_order(
            names,
            fused=args.get("transformer_impl") == "transformer_engine",
            grouped=bool(args.get("moe_grouped_gemm")),
            keys=(),
        )
        flat = packed([local_part(state[name], params.placements[name], size, rank) for name in order])
        for number, kind in enumerate(KINDS):
            key = f"{prefix}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.{kind}"
            chunks.append(Chunk(key, flat + 1000 * number, (0,), (len(flat),)))
        objects[f"{prefix}.per_bucket_numel_unpadded/shard_0_1"] = [{(torch.float32, torch.float32): [len(flat)]}]
        expert = prefix.startswith("chained_1")
        group = {"lr": 0.1, "step": 7.0, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": expert}
        objects[f"{prefix}.optimizer/shard_0_1"] = {"param_groups": [{**group, "is_decoupled_lr": False}]}
        if scale:
            tracked = {"growth_tracker": 1, "hysteresis_tracker": 2}
            objects[f"{prefix}.grad_scaler/shard_0_1"] = {"scale": torch.tensor([scale]), **tracked}

    chained = "chained_0." if ep > 1 else ""
    for stage, rank in product(range(pp), range(tp)):
        names = [name for name in moved(stage, 0) if ep == 1 or parse_name(name).expert is None]
        write(f"{chained}optimizer.distributed.dp_group_idx_{rank + tp * stage}", names, tp, rank)
    for stage, expert, rank in product(range(pp), range(ep if ep > 1 else 0), range(etp)):
        names = moved(stage, expert)
        later = rank + etp * (expert + ep * stage)
        index = later if "expert_tensor_parallel_size" in args else rank + etp * (stage + pp * expert)
        experts = [name for name in names if parse_name(name).expert is not None]
        write(f"chained_1.optimizer.distributed.dp_group_idx_{index}", experts, etp, rank)
    parts: Any = {"param_state_sharding_type": "dp_reshardable"}
    common = {"args": Namespace(**args), "iteration": 1, "optimizer": {0: parts, 1: parts} if ep > 1 else parts}
    DirectoryStore(folder).save(1, CheckpointContent(chunks, objects, common), {})


def check(folder: Path, *, verify: bool = True, **args: Any) -> DirectoryStore:
    store, params = DirectoryStore(folder), GlobalParameters.from_args({**ARGS, **args}, "test")
    wanted, found = [], []
    for name, tensor in state_of(params).items():
        for number, kind in enumerate(("fp32_param", "exp_avg", "exp_avg_sq")):
            (like,) = weight_chunks([LocalTensor(name, tensor)], params.placements, params.stacking)
            key = f"optimizer.state.{kind}.{like.key}"
            found.append(Chunk(key, torch.full_like(like.tensor, -1.0), like.offset, like.global_shape))
            wanted.append(like.tensor + 1000 * number)
    store.load(1, CheckpointContent(found), verify=verify)
    wrong = [chunk.key for chunk, tensor in zip(found, wanted, strict=True) if not torch.equal(chunk.tensor, tensor)]
    assert wrong == []
    return store


LATER = {"expert_tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp", "args"),
    [
        (1, 1, 1, 1, {}),
        (1, 1, 2, 1, LATER),
        (1, 2, 2, 1, LATER),
        (1, 2, 2, 1, {}),
        (2, 2, 2, 2, {"expert_tensor_parallel_size": 2}),
        (2, 1, 4, 1, LATER),
        (2, 2, 2, 2, {}),
        (1, 2, 2, 1, {**LATER, "transformer_impl": "transformer_engine"}),
        (1, 2, 2, 1, {**LATER, "transformer_impl": "transformer_engine", "moe_grouped_gemm": True}),
    ],
)
def test_buffers_of_experts_and_of_all_else(
    tmp_path: Path, tp: int, pp: int, ep: int, etp: int, args: dict[str, Any]
) -> None:
    save(tmp_path, tp=tp, pp=pp, ep=ep, etp=etp, **args)
    found = read_optimizer_common(check(tmp_path, **args).common(1)["optimizer"])
    assert found.step == 7 and found.scaler is None
    assert [group["is_expert_parallel"] for group in found.param_groups] == ([False, True] if ep > 1 else [False])


def test_the_scale_of_the_loss_is_found(tmp_path: Path) -> None:
    save(tmp_path, tp=1, pp=1, ep=2, etp=1, scale=512.0, **LATER)
    found = read_optimizer_common(check(tmp_path).common(1)["optimizer"])
    assert found.scaler == {"scale": 512.0, "growth_tracker": 1, "hysteresis_tracker": 2}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"moe_grouped_gemm": True}, "all experts of a layer in one parameter"),
        (
            {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True},
            "--moe-use-legacy-grouped-gemm",
        ),
        ({"pipeline_model_parallel_size": 2}, "2 stages|buckets of the distributed optimizer"),
        ({"expert_model_parallel_size": 1}, "has other parts than one"),
    ],
)
def test_what_cannot_be_placed_is_refused_and_the_weights_load(tmp_path: Path, args: dict[str, Any], said: str) -> None:
    save(tmp_path / "whole", tp=1, pp=1, ep=2, etp=1, **LATER)
    store = DirectoryStore(tmp_path / "whole")
    common = torch.load(store.folder(1) / "common.pt", weights_only=False)
    vars(common["args"]).update(args)
    torch.save(common, store.folder(1) / "common.pt")
    held = store.contents(1)
    assert len(held.unreadable) == 1 and "--no-load-optim" in held.unreadable[0]
    assert not any(key.startswith("optimizer.state.") for key in held.tensors)
    with pytest.raises(CheckpointError, match=said):
        check(tmp_path / "whole", verify=False)
    key = "decoder.layers.self_attention.linear_qkv.weight"
    target = torch.zeros(held.tensors[key].shape)
    store.load(1, CheckpointContent([Chunk(key, target, (0, 0, 0), tuple(target.shape))]), verify=False)
    assert target.any()


def test_latent_attention_of_transformer_engine_has_norms_where_the_files_say() -> None:
    names = [
        f"decoder.layers.0.{name}"
        for name in (
            *("input_layernorm.weight", "self_attention.linear_kv_up_proj.weight"),
            *("self_attention.kv_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.router.weight"),
        )
    ]
    keys = ["decoder.layers.self_attention.linear_kv_up_proj.layer_norm_weight"]
    within = registration_order(names, fused=True, grouped=True, keys=keys)
    assert within == [names[0], names[2], names[1], *names[3:]]
    assert registration_order(names, fused=True, grouped=True, keys=()) == names
    assert registration_order(names, fused=False, grouped=False, keys=keys) == names
