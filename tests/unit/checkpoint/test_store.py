"""The promises of a store."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.formats.torch_dist import rng_object_key
from megalith.checkpoint.sources.source import StoredTensor
from megalith.checkpoint.store.store import SAVE_STAGES
from megalith.errors import CheckpointError

MakeContent = Callable[..., CheckpointContent]
Same = Callable[[CheckpointContent, CheckpointContent], bool]


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "save")


def one(key: str, tensor: torch.Tensor) -> Chunk:
    return Chunk(key, tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def test_a_load_restores_what_was_saved(store: DirectoryStore, make_content: MakeContent, same_tensors: Same) -> None:
    saved = make_content(3)
    report = store.save(3, saved, {"config": {"a": [1, 2]}}, files={"vocab.json": b"{}"})
    assert report.bytes > saved.nbytes and report.seconds > 0
    target = make_content(4)
    loaded = store.load(3, target)
    assert same_tensors(target, saved) and not same_tensors(target, make_content(4))
    args = Namespace(num_layers=2, lr=1e-3, moe_router_topk=2, params_dtype=torch.bfloat16, model_family="gpt")
    assert loaded.common["args"] == args
    assert loaded.common["optimizer"]["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)
    (states,) = loaded.objects[rng_object_key()]
    assert states["random_rng_state"] == (3, (3, 2, 3), None)
    np.testing.assert_array_equal(states["np_rng_state"][1], np.arange(3, 7, dtype=np.uint32))
    assert states["np_rng_state"][1].dtype == np.uint32
    manifest = store.manifest(3)
    assert manifest is not None and manifest["iteration"] == 3 and manifest["config"] == {"a": [1, 2]}
    assert (store.folder(3) / "vocab.json").read_bytes() == b"{}"
    assert loaded.unexpected == ()


def test_a_save_is_a_copy(store: DirectoryStore, make_content: MakeContent, same_tensors: Same) -> None:
    content = make_content(1)
    store.save(1, content, {})
    for chunk in content.chunks:
        chunk.tensor.zero_()
    content.common["args"].num_layers = 99
    target = make_content(2)
    loaded = store.load(1, target)
    assert same_tensors(target, make_content(1))
    assert loaded.common["args"].num_layers == 2
    loaded.common["args"].num_layers = 98
    assert store.common(1)["args"].num_layers == 2


def test_every_dtype_and_shape_comes_back(store: DirectoryStore) -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(3, 2).half(),
        "bfloat16": torch.randn(5).bfloat16(),
        "double": torch.randn(2, 2, 2, dtype=torch.float64),
        "int64": torch.arange(4),
        "uint8": torch.arange(4, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "transposed": torch.randn(4, 3).t(),
        "strided": torch.randn(8)[::2],
        "view": torch.randn(100)[10:13],
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    store.save(1, CheckpointContent([one(key, tensor) for key, tensor in tensors.items()]), {})
    targets = {key: torch.full_like(tensor, 1) for key, tensor in tensors.items()}
    targets["strided"] = torch.ones(8)[::2]
    store.load(1, CheckpointContent([one(key, tensor) for key, tensor in targets.items()]))
    for key, tensor in tensors.items():
        assert torch.equal(targets[key], tensor) or key == "nan", key
    assert targets["nan"].view(torch.int32).tolist() == tensors["nan"].view(torch.int32).tolist()


def test_a_load_may_cut_differently_from_the_save(store: DirectoryStore) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    store.save(
        1, CheckpointContent([Chunk("w", whole[:, :2], (0, 0), (4, 6)), Chunk("w", whole[:, 2:], (0, 2), (4, 6))]), {}
    )
    rows = [torch.zeros(1, 6), torch.zeros(3, 6)]
    store.load(1, CheckpointContent([Chunk("w", rows[0], (0, 0), (4, 6)), Chunk("w", rows[1], (1, 0), (4, 6))]))
    assert torch.equal(torch.cat(rows), whole)
    corner = torch.zeros(2, 3)
    store.load(1, CheckpointContent([Chunk("w", corner, (1, 1), (4, 6))]))
    assert torch.equal(corner, whole[1:3, 1:4])


def test_every_difference_is_listed_and_nothing_is_touched(store: DirectoryStore) -> None:
    saved = [
        one("same", torch.ones(2)),
        one("shape", torch.ones(2, 3)),
        one("dtype", torch.ones(2)),
        one("extra", torch.ones(2)),
    ]
    store.save(1, CheckpointContent(saved), {})
    tensors = [torch.zeros(2), torch.zeros(3, 2), torch.zeros(2, dtype=torch.int32), torch.zeros(2)]
    keys = ["same", "shape", "dtype", "absent"]
    asked = CheckpointContent([one(key, tensor) for key, tensor in zip(keys, tensors, strict=True)], {"thing": None})
    with pytest.raises(CheckpointError) as caught:
        store.load(1, asked)
    message = str(caught.value)
    for line in (
        "shape has shape [2, 3] in the checkpoint and [3, 2] here",
        "dtype is float32 in the checkpoint and int32 here",
        "absent is not in the checkpoint",
        "thing is not in the checkpoint",
        "not requested: extra",
    ):
        assert line in message
    assert "same" not in message
    assert all((tensor == 0).all() for tensor in tensors)


MAIN = "optimizer.state.fp32_param."


def test_a_run_in_half_precision_goes_on_from_one_in_fp32(store: DirectoryStore) -> None:
    """Its main parameters are the weights of the other, exactly, and its weights these rounded."""
    exact = torch.tensor([1.0 + 2**-20, -3.0])
    store.save(1, CheckpointContent([one("w", exact)]), {})
    weight, main = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    store.load(1, CheckpointContent([one("w", weight), one(f"{MAIN}w", main)]))
    assert torch.equal(main, exact) and torch.equal(weight, exact.bfloat16())


def test_a_run_in_fp32_goes_on_from_the_main_parameters(store: DirectoryStore) -> None:
    exact = torch.tensor([1.0 + 2**-20, -3.0])
    store.save(1, CheckpointContent([one("w", exact.bfloat16()), one(f"{MAIN}w", exact)]), {})
    weight = torch.zeros(2)
    store.load(1, CheckpointContent([one("w", weight)]))
    assert torch.equal(weight, exact)


def test_rounded_weights_are_no_main_parameters(store: DirectoryStore) -> None:
    store.save(1, CheckpointContent([one("w", torch.ones(2).bfloat16())]), {})
    weight, main = torch.zeros(2).half(), torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"optimizer\.state\.fp32_param\.w"):
        store.load(1, CheckpointContent([one("w", weight), one(f"{MAIN}w", main)]))
    store.load(1, CheckpointContent([one("w", weight)]))
    assert torch.equal(weight, torch.ones(2).half())


def test_what_is_not_asked_for_is_reported(store: DirectoryStore, make_content: MakeContent) -> None:
    content = make_content(1)
    store.save(1, content, {})
    model = [chunk for chunk in content.chunks if not chunk.key.startswith("optimizer.")]
    loaded = store.load(1, CheckpointContent(model))
    assert rng_object_key() in loaded.unexpected
    assert "optimizer.state.exp_avg.embedding.word_embeddings.weight" in loaded.unexpected
    assert not any("_extra_state" in key for key in loaded.unexpected)
    assert loaded.objects == {}


def test_an_incomplete_save_is_refused(store: DirectoryStore) -> None:
    with pytest.raises(CheckpointError, match="w: .*4 of 6"):
        store.save(1, CheckpointContent([Chunk("w", torch.ones(4), (0,), (6,))]), {})
    assert store.iterations() == [] and store.latest() is None


@pytest.mark.parametrize("place", ["common", "objects"])
def test_nothing_is_saved_that_a_load_would_refuse(store: DirectoryStore, place: str) -> None:
    content = CheckpointContent([], **{place: {"path": Path("x")}})
    with pytest.raises(CheckpointError, match="Path"):
        store.save(1, content, {})
    assert store.iterations() == []


def test_contents_without_loading(store: DirectoryStore, make_content: MakeContent) -> None:
    store.save(5, make_content(5), {})
    contents = store.contents(5)
    found = contents.tensors["decoder.layers.mlp.linear_fc1.weight"]
    assert (found.shape, found.dtype) == ((2, 12, 8), torch.bfloat16)
    assert isinstance(found, StoredTensor)
    assert rng_object_key() in contents.objects


def test_numbers_and_tracker(store: DirectoryStore, make_content: MakeContent) -> None:
    assert (store.iterations(), store.latest(), store.newest_verified()) == ([], None, (None, []))
    for iteration in (10, 2, 30):
        store.save(iteration, make_content(iteration), {})
    assert (store.iterations(), store.latest(), store.newest_verified()) == ([2, 10, 30], 30, (30, []))
    with pytest.raises(CheckpointError, match="2, 10, 30"):
        store.load(7, make_content(0))


def test_saving_the_same_iteration_replaces_it(
    store: DirectoryStore, make_content: MakeContent, same_tensors: Same
) -> None:
    store.save(1, make_content(1), {"mark": "old"}, files={"old.txt": b""})
    store.save(1, make_content(2), {"mark": "new"})
    target = make_content(0)
    store.load(1, target)
    assert same_tensors(target, make_content(2))
    manifest = store.manifest(1)
    assert manifest is not None and manifest["mark"] == "new"
    assert not (store.folder(1) / "old.txt").exists()


def test_the_points_of_a_save_come_in_order(store: DirectoryStore, make_content: MakeContent) -> None:
    seen: list[Any] = []
    store.save(1, make_content(1), {}, on_stage=lambda point: seen.append((point, store.iterations(), store.latest())))
    assert [point for point, _, _ in seen] == list(SAVE_STAGES)
    visible = {point: (there, latest) for point, there, latest in seen}
    assert visible["pre_commit"] == ([], None)
    assert visible["mid_commit"] == ([1], None)
    assert visible["post_commit"] == ([1], 1)


def test_an_error_in_a_save_leaves_nothing(store: DirectoryStore, make_content: MakeContent) -> None:
    def stop(point: str) -> None:
        if point == "pre_commit":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(1, make_content(1), {}, on_stage=stop)
    assert (store.iterations(), store.latest()) == ([], None)
    if isinstance(store, DirectoryStore):
        assert list(store.path.iterdir()) == []


def test_further_files_keep_to_their_names(store: DirectoryStore) -> None:
    for name in ("common.pt", "../x", ".metadata", "__0_0.distcp", "manifest.json"):
        with pytest.raises(AssertionError):
            store.save(1, CheckpointContent(), {}, files={name: b""})


def test_claim_is_a_context(store: DirectoryStore) -> None:
    with store.claim():
        pass
