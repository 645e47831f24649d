"""Saving a model in per-rank files through the store: whole or not at all, as in the other format."""

from __future__ import annotations

import errno
import os
import resource
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.files.safe_loading import load_tensors_and_plain_data
from megalith.checkpoint.formats.torch_dist import (
    LocalTensor,
    dense,
    optimizer_chunks,
    optimizer_common,
    rng_object_key,
    weight_chunks,
)
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.errors import CheckpointError

ARGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "seq_length": 4,
    "max_position_embeddings": 4,
    "padded_vocab_size": 16,
    "params_dtype": "float32",
}
GROUPS = [
    {"wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "weight_decay": 0.1 * wd}
    for wd in (1.0, 0.0)
]
SCALER = {"scale": 1024.0, "growth_tracker": 3, "hysteresis_tracker": 2}
MODEL = "mp_rank_00/model_optim_rng.pt"


def content_of(number: int, **args: Any) -> CheckpointContent:
    """A model whose every number is `number`, with its optimizer and random states."""
    known = {**ARGS, **args}
    params = GlobalParameters.from_args(known, "test")
    weights = [LocalTensor(name, torch.full(shape, float(number))) for name, shape in params.shapes.items()]
    kinds = ["exp_avg", "exp_avg_sq"] + (["fp32_param"] if known["params_dtype"] != "float32" else [])
    states = [
        LocalTensor(f"{kind}.{name}", torch.full(shape, number + 0.5))
        for kind in kinds
        for name, shape in params.shapes.items()
    ]
    dtype = getattr(torch, known["params_dtype"])
    weights = [LocalTensor(box.name, box.tensor.to(dtype)) for box in weights]
    return CheckpointContent(
        weight_chunks(weights, params.placements, dense(2)) + optimizer_chunks(states, params.placements, dense(2)),
        {rng_object_key(): [{"torch_rng_state": torch.arange(8, dtype=torch.uint8)}]},
        {
            "args": Namespace(**known),
            "iteration": number,
            "checkpoint_version": 3.0,
            "optimizer": optimizer_common(
                GROUPS, number, SCALER if known["params_dtype"] == "float16" else None, known["params_dtype"]
            ),
            "opt_param_scheduler": {"num_steps": 4 * number},
        },
    )


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path, save_format="torch")


def numbers(store: DirectoryStore, iteration: int) -> set[float]:
    """All the numbers in a checkpoint."""
    content = content_of(0)
    for chunk in content.chunks:
        chunk.tensor.zero_()
    store.load(iteration, CheckpointContent(content.chunks))
    return {value for chunk in content.chunks for value in chunk.tensor.flatten().tolist()}


def test_a_checkpoint_is_read_back_and_replaced_whole(store: DirectoryStore) -> None:
    assert store.save(3, content_of(3), {"note": "first"}, files={"vocab.json": b"{}"}).bytes > 10_000
    assert store.latest() == 3 and store.format(3) == "torch" and numbers(store, 3) == {3.0, 3.5}
    assert (store.folder(3) / "vocab.json").read_bytes() == b"{}"
    body = store.manifest(3)
    assert body is not None and set(body["files"]) == {MODEL, "vocab.json"} and body["note"] == "first"
    store.save(3, content_of(4), {})
    assert numbers(store, 3) == {4.0, 4.5}
    assert [path.name for path in store.path.iterdir() if path.name.startswith(".")] == []
    common = store.common(3)
    assert common["opt_param_scheduler"] == {"num_steps": 16}
    assert float(common["optimizer"]["state"]["common_step"]) == 4.0


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_has_main_parameters_and_counts_the_steps_of_groups(
    store: DirectoryStore, precision: str
) -> None:
    """By group too, since Apex and TransformerEngine look for the step there."""
    store.save(3, content_of(3, params_dtype=precision), {})
    body = load_tensors_and_plain_data(store.folder(3) / MODEL)
    state = body["optimizer"]
    scaler = ["grad_scaler"] if precision == "float16" else []
    assert list(state) == ["optimizer", *scaler, "fp32_from_fp16_params"]
    found = store.common(3)["optimizer"]
    assert {**found.get("grad_scaler", SCALER), "scale": float(found.get("grad_scaler", SCALER)["scale"])} == SCALER
    assert ("grad_scaler" in found) == bool(scaler) and not any("step" in g for g in found["optimizer"]["param_groups"])
    assert [len(group) for group in state["fp32_from_fp16_params"]] == [10, 18]
    assert {tensor.dtype for group in state["fp32_from_fp16_params"] for tensor in group} == {torch.float32}
    assert [group["step"] for group in state["optimizer"]["param_groups"]] == [3, 3]
    assert isinstance(body["model"], OrderedDict)
    assert {value.dtype for value in body["model"].values() if value is not None} == {getattr(torch, precision)}


def test_what_a_resume_needs_beside_megatrons_keys_is_kept(store: DirectoryStore) -> None:
    content = content_of(3)
    content.common["megalith_step_check"] = {"losses": [2.5], "norms": [0.5]}
    store.save(3, content, {})
    assert store.common(3)["megalith_step_check"] == {"losses": [2.5], "norms": [0.5]}


def test_a_changed_byte_is_found_and_the_checkpoint_before_taken(store: DirectoryStore) -> None:
    store.save(3, content_of(3), {})
    store.save(4, content_of(4), {})
    file = store.folder(4) / MODEL
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    (problem,) = store.verify(4)
    assert problem.startswith(f"{file} ")
    assert store.newest_verified()[0] == 3


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_leaves_what_was_there(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store.save(3, content_of(3), {})

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            store.save(4, content_of(4), {})
    assert store.iterations() == [3] and store.latest() == 3 and numbers(store, 3) == {3.0, 3.5}
    assert [path.name for path in store.path.iterdir() if path.name.startswith(".")] == []


def test_a_tensor_that_lacks_elements_or_is_not_there_is_refused(store: DirectoryStore) -> None:
    content = content_of(3)
    first = content.chunks[0]
    content.chunks[0] = Chunk(first.key, first.tensor[:-1], first.offset, first.global_shape)
    with pytest.raises(CheckpointError, match=r"embedding.word_embeddings.weight: .*120 of 128"):
        store.save(3, content, {})
    content = content_of(3)
    content.chunks = [chunk for chunk in content.chunks if "exp_avg_sq.decoder.final" not in chunk.key]
    with pytest.raises(CheckpointError, match=r"exp_avg_sq.decoder.final_layernorm.weight: .*0 of 8"):
        store.save(3, content, {})
    assert store.iterations() == []


class Strange:
    """A type that no checkpoint needs."""


def test_a_value_that_a_load_would_refuse_is_not_saved(store: DirectoryStore) -> None:
    content = content_of(3)
    content.objects[rng_object_key()] = [{"state": Strange()}]
    with pytest.raises(CheckpointError, match="Strange"):
        store.save(3, content, {})
    assert store.iterations() == []
    assert [path.name for path in store.path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("limit", [1000, 6000, 20000])
def test_a_file_that_may_not_grow_leaves_the_checkpoint_before(store: DirectoryStore, limit: int) -> None:
    store.save(1, content_of(1), {})
    size = (store.folder(1) / MODEL).stat().st_size
    assert size > 20000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(CheckpointError, match=f"{limit} bytes.*ulimit -f"):
            store.save(2, content_of(2), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (store.latest(), store.iterations()) == (1, [1]) and numbers(store, 1) == {1, 1.5}
    assert sorted(path.name for path in store.path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]
