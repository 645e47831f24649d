"""The state of a run in every layout: what is saved is the whole, and a load in the same layout is byte for byte.

All values are drawn from the global name of what they belong to, so that one process can say what every rank must hold
and what every checkpoint must contain, without asking the code under test.
"""

from __future__ import annotations

import tarfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.nn import Parameter

from megalith.assemble.model import build_chunks, build_run_optimizer, draw_weights
from megalith.assemble.schedule import build_schedule
from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.files.safe_loading import read_metadata
from megalith.checkpoint.formats.torch_dist import rng_object_key, stacking_of
from megalith.checkpoint.sources.source import open_source
from megalith.config import RunConfig, load
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.layout import Layout
from megalith.models.initialise import generator_for
from megalith.models.language_model import named_placements
from megalith.models.saved import saved_tensors, whole_names
from megalith.nn.placement import global_shape, local_part
from megalith.train.checkpoint_fit import Identity, find_checkpoint
from megalith.train.checkpoint_restore import restore
from megalith.train.checkpoint_saver import AsyncSaver, CheckpointSaver
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.state import TrainState
from megalith.train.step import MicroBatch, train_step
from megalith.train.step_hooks import BeforeUpdate

BASE = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 50 --lr 1e-2 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 30"
)
LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --ffn-hidden-size 48 "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
ONE_GROUP = "--group-query-attention --num-query-groups 1 --position-embedding-type rope --add-qkv-bias"
PREDICTION = "--mtp-num-layers 2 --position-embedding-type rope"
MIXTURE = "--num-experts 4 --moe-ffn-hidden-size 12 --position-embedding-type rope --swiglu --ffn-hidden-size 48"
WHOLE_EXPERTS = "--sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2"
CUT_EXPERTS = "--expert-tensor-parallel-size 2 --expert-model-parallel-size 2"
TP2, PP2, CP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
ZERO, FSDP = "--use-distributed-optimizer", "--use-torch-fsdp2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
IDENTITY = Identity(tokenizer={"size": 30}, tokenizer_files={"vocab.json": b"{}"}, data={})


def config_of(flags: str, world_size: int, rank: int = 0) -> RunConfig:
    words = f"{BASE} {flags}".split()
    return load(words, {"WORLD_SIZE": str(world_size), "RANK": str(rank)}, files=False)


def build_state(run: RunConfig, vocab_size: int, *, draws: bool = False) -> TrainState:
    """A state whose weights are -7, or drawn."""
    context = ParallelContext.solo()
    if run.launch.world_size > 1:
        context = ParallelContext.create(run.layout, torch.device("cpu"))
    streams = RandomStreams(run.train.seed, context)
    chunks = build_chunks(run, vocab_size, context, streams.own)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(-7.0)
    if draws:
        draw_weights(run, chunks, streams, context)
    return TrainState(chunks, build_run_optimizer(run, chunks, context), streams, build_schedule(run), context=context)


def drawn(seed: int, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The global tensor of this kind (param, exp_avg, ...) that belongs to a parameter."""
    return torch.randn(shape, generator=generator_for(seed, f"{kind} {name}")).to(dtype)


def expected_here(state: TrainState, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """`<kind> <name>` [with the offset of a box] -> (live tensor, what it must hold)."""
    pairs = {}
    placed = {name: item for chunk in state.chunks for name, *item in named_placements(chunk)}
    copies = {chunk.copied_weight for chunk in state.chunks}
    everywhere = {name: whole for chunk in state.chunks for name, whole in whole_names(chunk).items()}

    def local(kind: str, name: str, dtype: torch.dtype) -> Tensor:
        parameter, placement = placed[name]
        axis = state.context.etp if ".mlp.experts." in name else state.context.tp
        shape = global_shape(parameter.shape, placement, axis.size)
        whole = drawn(seed, kind, WORD_EMBEDDINGS if name in copies else everywhere[name], shape, dtype)
        return local_part(whole, placement, axis.size, axis.index)

    weights = [replace(box, name=f"param.{box.name}") for box in state.optimizer.weight_boxes()]
    for box in [*weights, *state.optimizer.state_boxes()]:
        kind, _, name = box.name.partition(".")
        place = tuple(slice(start, start + size) for start, size in zip(box.offset, box.tensor.shape, strict=True))
        pairs[f"{kind} {name} {box.offset}"] = (box.tensor, local(kind, name, box.tensor.dtype)[place])
    for name, tensor, _ in (item for chunk in state.chunks for item in saved_tensors(chunk)):
        if not isinstance(tensor, Parameter):  # what no optimizer moves; every rank has all of it
            pairs[f"param {name} all"] = (tensor, drawn(seed, "param", name, tuple(tensor.shape), tensor.dtype))
    return pairs


def fill(state: TrainState, seed: int) -> None:
    with torch.no_grad():
        for live, value in expected_here(state, seed).values():
            live.copy_(value)
    state.optimizer.load_scalars({"step": seed, "grad_scaler": None})
    state.iteration, state.consumed_samples, state.consumed_valid_samples = seed, 8 * seed, 3 * seed
    state.lr_schedule_samples, state.flops = 8 * seed, 1e9 * seed
    for _ in range(seed + state.context.rank):
        draw(state)


def draw(state: TrainState) -> tuple[float, float]:
    """What dropout would draw next: of the stream shared by the tensor-parallel ranks, of this rank's own."""
    shared = torch.rand(()).item()
    with state.rng_streams.own.used():
        return shared, torch.rand(()).item()


def save(folder: str, flags: str, world_size: int, vocab_size: int, seed: int) -> tuple[float, float]:
    """Save a filled state; returns what the streams draw next."""
    run = config_of(flags, world_size, torch.distributed.get_rank() if world_size > 1 else 0)
    state = build_state(run, vocab_size)
    fill(state, seed)
    store = DirectoryStore(folder, state.context, save_format=run.checkpoint.ckpt_format)
    CheckpointSaver(store, run, IDENTITY).save(state)
    return draw(state)


def resume(folder: str, flags: str, world_size: int, vocab_size: int) -> dict[str, Any]:
    """Restore the newest checkpoint; says which tensors are wrong, the counters, and what the streams draw next."""
    run = config_of(flags, world_size, torch.distributed.get_rank() if world_size > 1 else 0)
    state = build_state(run, vocab_size)
    store = DirectoryStore(folder, state.context)
    found = find_checkpoint(store)
    assert found is not None and found.padded_vocab_size == vocab_size and found.manifest is not None
    resumed = restore(store, found, state, run)
    wrong = [
        key for key, (live, value) in expected_here(state, found.iteration).items() if not torch.equal(live, value)
    ]
    return {
        "wrong": wrong,
        "layout": found.manifest["layout"],
        "counters": (state.iteration, state.consumed_samples, state.consumed_valid_samples, state.lr_schedule_samples),
        "step": state.optimizer.step_count,
        "notes": (found.notes, resumed.notes),
        "draws": draw(state),
    }


def plain_tensors(folder: Path) -> dict[str, Tensor]:
    """The global tensors of a checkpoint, by torch's own reader; of per-rank files by ours, which is tested apart."""
    if (source := open_source(folder)).format == "torch":
        held = source.contents().tensors
        tensors = {key: torch.full(stored.shape, -9.0, dtype=stored.dtype) for key, stored in held.items()}
        chunks = [Chunk(key, tensor, (0,) * tensor.ndim, tuple(tensor.shape)) for key, tensor in tensors.items()]
        source.read(CheckpointContent(chunks))
        return tensors
    metadata = read_metadata(folder / ".metadata").state_dict_metadata
    tensors = {
        key: torch.full(tuple(stored.size), -9.0, dtype=stored.properties.dtype)
        for key, stored in metadata.items()
        if not isinstance(stored, BytesStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def check_content(folder: Path, flags: str, vocab_size: int, seed: int) -> None:
    """The checkpoint holds the whole of every tensor, and nothing else."""
    compare_content(plain_tensors(folder), build_state(config_of(flags, 1), vocab_size), seed)


def compare_content(stored: dict[str, Tensor], state: TrainState, seed: int) -> None:
    """These are all the tensors of the model of a state of one process."""
    seen = set()
    for key, (_, value) in expected_here(state, seed).items():
        kind, name = key.split(" ")[:2]
        stacking = stacking_of(state.chunks[0].config)
        slot = stacking.slot(name)
        full = slot.key if kind == "param" else f"optimizer.state.{kind}.{slot.key}"
        full = stacking.written_keys([full]).get(full, full)
        assert torch.equal(stored[full][slot.index], value), f"{full} {slot.index}"
        seen.add(full)
    assert set(stored) == seen


CASES = {
    "tp2": (2, TP2, "", 40),
    "pp2": (2, PP2, "", 40),
    "dp2": (2, "", "", 40),
    "cp2": (2, CP2, "", 40),
    "dp2-zero1": (2, ZERO, "", 40),
    "dp2-zero1-bf16": (2, ZERO, "--bf16", 40),
    "pp2-vpp2": (2, VPP2, "", 40),
    "tp2-pp2": (4, f"{TP2} {PP2}", "", 40),
    "tp2-dp2-zero1": (4, f"{TP2} {ZERO}", LLAMA, 40),
    "pp2-dp2-zero1": (4, f"{PP2} {ZERO}", LLAMA, 40),
    "tp2-llama-sp": (2, f"{TP2} --sequence-parallel", LLAMA, 40),
    "tp2-uneven-vocabulary": (2, TP2, "", 43),
    "tp4-one-group": (4, "--tensor-model-parallel-size 4", ONE_GROUP, 40),
    "cp2-dp2-zero1": (4, f"{CP2} {ZERO}", "", 40),
    "dp2-fsdp": (2, FSDP, "", 43),
    "dp2-fsdp-bf16": (2, FSDP, "--bf16", 40),
    "tp2-dp2-fsdp": (4, f"{TP2} {FSDP} --torch-fsdp2-no-reshard-after-forward", LLAMA, 40),
    "pp2-dp2-fsdp": (4, f"{VPP2} {FSDP}", "", 40),
    "tp2-pp2-prediction": (4, f"{TP2} {VPP2}", f"{LLAMA} --mtp-num-layers 1", 43),
    "tp2-dp2-experts-whole": (4, f"{TP2} {WHOLE_EXPERTS} {ZERO}", MIXTURE, 40),
    "dp4-experts-cut": (4, CUT_EXPERTS, MIXTURE, 40),
    "pp2-prediction-torch": (2, f"{PP2} --ckpt-format torch", PREDICTION, 40),
}
"""Name -> ranks, flags of the layout, flags of the model, rows of the vocabulary."""


SAMPLE = ("tp2", "pp2", "cp2", "dp2-zero1", "pp2-dp2-fsdp")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLE else pytest.mark.full) for case in CASES]
)
def test_a_resume_in_the_same_layout_is_byte_for_byte(ranks: Any, tmp_path: Path, case: str) -> None:
    world_size, layout, model, vocab_size = CASES[case]
    flags = f"{layout} {model}"
    draws = ranks.run(world_size, save, str(tmp_path), flags, world_size, vocab_size, 5)
    check_content(DirectoryStore(tmp_path).folder(5), model, vocab_size, 5)
    results = ranks.run(world_size, resume, str(tmp_path), flags, world_size, vocab_size)
    for rank, result in enumerate(results):
        assert result["wrong"] == []
        assert (result["counters"], result["step"], result["notes"]) == ((5, 40, 15, 40), 5, ((), ()))
        assert result["draws"] == draws[rank]
    own = [own for _, own in draws]
    assert len(set(own)) == world_size, "two ranks draw alike"


# --- training on ---------------------------------------------------------------------------------------------------

TRAINING = "--hidden-dropout 0.1 --attention-dropout 0.1 --clip-grad 0.5 --init-method-std 0.2"
STEPS = 4


def _batches(vocab_size: int, layout: Layout, replica: int, skip: int) -> Iterator[MicroBatch]:
    """The samples of a replica, one in a micro-batch, after the first `skip` of all."""
    generator = torch.Generator().manual_seed(5)
    for number in count():
        ids = torch.randint(0, vocab_size, (1, 33), generator=generator)
        if number >= skip and number % layout.dp == replica:
            yield {
                "tokens": ids[:, :-1],
                "labels": ids[:, 1:],
                "position_ids": torch.arange(32)[None],
                "loss_mask": torch.ones(1, 32),
            }


def train_on(folder: str, flags: str, world_size: int, vocab_size: int, until: int) -> list[tuple[Any, ...]]:
    """Start or resume, train until an iteration, save; what each step printed."""
    run = config_of(flags, world_size, torch.distributed.get_rank() if world_size > 1 else 0)
    state = build_state(run, vocab_size, draws=DirectoryStore(folder).latest() is None)
    context = state.context
    store = DirectoryStore(folder, context, save_format=run.checkpoint.ckpt_format)
    if (found := find_checkpoint(store)) is not None:
        assert restore(store, found, state, run).notes == ()
    consensus = RankConsensus(NeverStop(), context, contributes=state.contributes_losses)
    batches = _batches(vocab_size, context.layout, context.dp.index, state.consumed_samples)
    steps = []
    while state.iteration < until:
        result = train_step(
            state,
            batches,
            run.num_micro_batches,
            pipeline_schedule=run.pipeline_schedule,
            sum_over_ranks=consensus.sum_over_ranks,
        )
        steps.append((result.iteration, result.loss, result.grad_norm, result.learning_rate))
    CheckpointSaver(store, run, IDENTITY).save(state)
    return steps


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLE else pytest.mark.full) for case in CASES]
)
def test_a_resumed_run_is_the_uninterrupted_one(ranks: Any, tmp_path: Path, case: str) -> None:
    """F01: losses, norms, weights, moments and random states are the same bytes."""
    world_size, layout, model, vocab_size = CASES[case]
    flags = f"{layout} {model} {TRAINING}"
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    straight = ranks.run(world_size, train_on, str(whole), flags, world_size, vocab_size, STEPS)
    first = ranks.run(world_size, train_on, str(cut), flags, world_size, vocab_size, STEPS // 2)
    then = ranks.run(world_size, train_on, str(cut), flags, world_size, vocab_size, STEPS)
    for rank in range(world_size):
        assert [*first[rank], *then[rank]] == straight[rank]
        assert len({loss for _, loss, _, _ in straight[rank]}) == STEPS
    stores = DirectoryStore(whole), DirectoryStore(cut)
    for name in ("tensors", "objects"):
        a, b = (_held(store.folder(STEPS), name) for store in stores)
        assert a.keys() == b.keys() and len(a) > 0
        assert [key for key in a if a[key] != b[key]] == []


def save_beside(folder: str, flags: str, world_size: int, vocab_size: int, until: int) -> int:
    """Train until an iteration and save it beside two more steps; the steps that it took."""
    run = config_of(flags, world_size, torch.distributed.get_rank() if world_size > 1 else 0)
    state = build_state(run, vocab_size, draws=True)
    context = state.context
    saver = AsyncSaver(CheckpointSaver(DirectoryStore(folder, context), run, IDENTITY))
    consensus = RankConsensus(NeverStop(), context, contributes=state.contributes_losses, async_saver=saver)
    batches = _batches(vocab_size, context.layout, context.dp.index, 0)
    while saver.scheduled is not None or state.iteration < until + 2:
        train_step(
            state,
            batches,
            run.num_micro_batches,
            pipeline_schedule=run.pipeline_schedule,
            sum_over_ranks=consensus.sum_over_ranks,
            hooks=[BeforeUpdate(saver.wait_for_copies)],
        )
        if state.iteration == until:
            saver.schedule(state)
        elif saver.scheduled is not None and not consensus.save_in_progress:
            saver.advance()
    return state.iteration


@pytest.mark.parametrize(
    "case",
    [
        "dp2-zero1",
        "dp2-fsdp",
        *(pytest.param(case, marks=pytest.mark.full) for case in ("dp2", "tp2-pp2", "pp2-dp2-fsdp")),
    ],
)
def test_a_save_beside_the_training_holds_the_state_of_its_step(ranks: Any, tmp_path: Path, case: str) -> None:
    """Also where updated weights are still on their way from other ranks when it is scheduled."""
    world_size, layout, model, vocab_size = CASES[case]
    flags = f"{layout} {model} {TRAINING}"
    at_once, beside = tmp_path / "at_once", tmp_path / "beside"
    ranks.run(world_size, train_on, str(at_once), flags, world_size, vocab_size, 2)
    taken = ranks.run(world_size, save_beside, str(beside), flags, world_size, vocab_size, 2)
    assert len(set(taken)) == 1 and taken[0] >= 4
    stores = DirectoryStore(at_once), DirectoryStore(beside)
    for name in ("tensors", "objects"):
        a, b = (_held(store.folder(2), name) for store in stores)
        assert a.keys() == b.keys() and len(a) > 0
        assert [key for key in a if a[key] != b[key]] == []
    assert stores[1].newest_verified() == (2, [])


def _held(folder: Path, name: str) -> dict[str, bytes]:
    """The bytes of the global tensors, or of the objects as they stand in the files."""
    if name == "tensors":
        return {key: tensor.view(torch.uint8).numpy().tobytes() for key, tensor in plain_tensors(folder).items()}
    metadata = read_metadata(folder / ".metadata")
    objects = {}
    for index, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            objects[index.fqn] = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    return objects


# --- per-rank files -----------------------------------------------------------------------------------------------

PER_RANK = ("tp2", "dp2", "cp2", "dp2-zero1", "pp2-vpp2", "tp2-uneven-vocabulary", "dp2-fsdp-bf16")
FEWER = ("dp2-zero1-bf16", "tp2-dp2-zero1", "pp2-dp2-zero1", "tp4-one-group", "pp2-dp2-fsdp")


@pytest.mark.parametrize("case", [*PER_RANK, *(pytest.param(case, marks=pytest.mark.full) for case in FEWER)])
def test_per_rank_files_hold_the_same(ranks: Any, tmp_path: Path, case: str) -> None:
    """All ranks write into the files of each place: every replica its share, under ZeRO what it updates."""
    world_size, layout, model, vocab_size = CASES[case]
    flags = f"{layout} {model} --ckpt-format torch"
    draws = ranks.run(world_size, save, str(tmp_path), flags, world_size, vocab_size, 5)
    store = DirectoryStore(tmp_path)
    folder = store.folder(5)
    distributed = ZERO in layout
    stored = plain_tensors(folder)
    if distributed and "--bf16" not in model:  # the flat buffers have the weights once more
        assert all(torch.equal(stored.pop(f"optimizer.state.fp32_param.{key}"), stored[key]) for key in weights(stored))
    compare_content(stored, build_state(config_of(model, 1), vocab_size), 5)
    files = {path.name for path in folder.rglob("*.pt")}
    assert files == {"model_optim_rng.pt", "distrib_optim.pt"} if distributed else {"model_optim_rng.pt"}
    assert store.verify(5) == [] and open_source(folder).problems() == []
    recorded = (store.manifest(5) or {})["files"]
    assert set(recorded) == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {
        "manifest.json"
    }
    for rank, result in enumerate(ranks.run(world_size, resume, str(tmp_path), flags, world_size, vocab_size)):
        assert result["wrong"] == []
        assert (result["counters"], result["step"], result["notes"]) == ((5, 40, 15, 40), 5, ((), ()))
        assert result["draws"] == draws[rank]


def weights(stored: dict[str, Tensor]) -> list[str]:
    return [key for key in stored if not key.startswith("optimizer.")]


def test_a_run_goes_on_from_one_format_in_the_other(ranks: Any, tmp_path: Path) -> None:
    """Per-rank files, then torch_dist, in other layouts: the losses are those of one run in per-rank files."""
    model = "--clip-grad 0.5 --init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0"
    whole, mixed = str(tmp_path / "whole"), str(tmp_path / "mixed")
    straight = ranks.run(2, train_on, whole, f"{TP2} {model} --ckpt-format torch", 2, 40, 6)
    steps = ranks.run(2, train_on, mixed, f"{TP2} {model} --ckpt-format torch", 2, 40, 2)[0]
    steps += ranks.run(2, train_on, mixed, f"{PP2} {model}", 2, 40, 4)[0]
    steps += ranks.run(2, train_on, mixed, f"{TP2} {model} --ckpt-format torch", 2, 40, 6)[0]
    assert [step for step, *_ in steps] == [1, 2, 3, 4, 5, 6]
    for (_, loss, norm, rate), (_, expected, expected_norm, expected_rate) in zip(steps, straight[0], strict=True):
        assert loss == pytest.approx(expected, rel=1e-5) and norm == pytest.approx(expected_norm, rel=1e-4)
        assert rate == expected_rate
    assert [DirectoryStore(mixed).format(iteration) for iteration in (2, 4, 6)] == ["torch", "torch_dist", "torch"]


# --- other layouts ------------------------------------------------------------------------------------------------

CROSSINGS = [
    ("tp2", "pp2"),
    ("pp2", "dp2-zero1"),
    ("dp2-zero1", "tp2-pp2"),
    ("tp2-pp2", "pp2-vpp2"),
    ("pp2-vpp2", "cp2"),
    ("tp2-dp2-zero1", "tp2-llama-sp"),
    ("tp2-llama-sp", "pp2-dp2-zero1"),
    ("tp2-dp2-fsdp", "pp2-dp2-zero1"),
    ("dp2-zero1", "pp2-dp2-fsdp"),
    ("pp2-dp2-fsdp", "dp2"),
]


@pytest.mark.parametrize(("before", "after"), CROSSINGS)
def test_another_layout_takes_the_weights_and_says_that_the_streams_start_anew(
    ranks: Any, tmp_path: Path, before: str, after: str
) -> None:
    (size_before, flags_before, model, vocab_size), (size_after, flags_after, *same) = CASES[before], CASES[after]
    assert same == [model, vocab_size]
    ranks.run(size_before, save, str(tmp_path), f"{flags_before} {model}", size_before, vocab_size, 5)
    for result in ranks.run(size_after, resume, str(tmp_path), f"{flags_after} {model}", size_after, vocab_size):
        assert result["wrong"] == []
        assert (result["counters"], result["step"]) == ((5, 40, 15, 40), 5)
        found, resumed = result["notes"]
        assert found == () and len(resumed) == 1 and "another layout" in resumed[0] and "--seed 1234" in resumed[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [("tp2-dp2-zero1", "tp2-dp2-fsdp"), ("tp2-dp2-fsdp", "tp2-dp2-zero1"), ("dp2-zero1-bf16", "dp2-fsdp-bf16")],
)
def test_how_replicas_share_the_state_does_not_matter(ranks: Any, tmp_path: Path, before: str, after: str) -> None:
    (size, flags_before, model, vocab_size), (_, flags_after, *same) = CASES[before], CASES[after]
    assert same == [model, vocab_size]
    ranks.run(size, save, str(tmp_path), f"{flags_before} {model}", size, vocab_size, 5)
    for result in ranks.run(size, resume, str(tmp_path), f"{flags_after} {model}", size, vocab_size):
        assert (result["wrong"], result["notes"]) == ([], ((), ()))


def test_one_process_takes_what_ranks_wrote_and_the_other_way_round(ranks: Any, tmp_path: Path) -> None:
    ranks.run(4, save, str(tmp_path), f"{TP2} {PP2}", 4, 40, 5)
    assert resume(str(tmp_path), "", 1, 40)["wrong"] == []
    save(str(tmp_path), "", 1, 40, 6)
    for result in ranks.run(2, resume, str(tmp_path), f"{VPP2}", 2, 40):
        assert result["wrong"] == [] and result["counters"][0] == 6


@pytest.mark.parametrize("case", ["tp2-dp2-experts-whole", "dp4-experts-cut"])
def test_experts_come_from_and_go_to_ranks_of_their_own(ranks: Any, tmp_path: Path, case: str) -> None:
    """Whoever shares them: one process and another grid take what a grid has saved."""
    world_size, layout, model, vocab_size = CASES[case]
    ranks.run(world_size, save, str(tmp_path), f"{layout} {model}", world_size, vocab_size, 5)
    assert resume(str(tmp_path), model, 1, vocab_size)["wrong"] == []
    without = f"{model} --hidden-dropout 0 --attention-dropout 0"
    assert resume(str(tmp_path), without, 1, vocab_size)["notes"] == ((), ())
    (note,) = resume(str(tmp_path), f"{without} --moe-input-jitter-eps 0.01", 1, vocab_size)["notes"][1]
    assert "--moe-input-jitter-eps" in note and "dropout" not in note
    for result in ranks.run(2, resume, str(tmp_path), f"--expert-tensor-parallel-size 2 {model}", 2, vocab_size):
        assert result["wrong"] == []


@pytest.mark.parametrize("case", ["tp2-pp2-prediction", "pp2-prediction-torch"])
def test_one_process_takes_layers_of_prediction_from_the_last_stage(ranks: Any, tmp_path: Path, case: str) -> None:
    """Which has the embedding a second time, whether it is the output layer's weight too or not."""
    world_size, layout, model, vocab_size = CASES[case]
    ranks.run(world_size, save, str(tmp_path), f"{layout} {model}", world_size, vocab_size, 5)
    assert resume(str(tmp_path), model, 1, vocab_size)["wrong"] == []


# --- what Megatron wrote ------------------------------------------------------------------------------------------

GOLDEN = "--num-layers 2 --hidden-size 16 --num-attention-heads 4"
GOLDENS = {
    "llama_tp2_torch_dist": (f"{TP2} {LLAMA}", 512),
    "llama_pp2_torch_dist": (f"{PP2} {LLAMA}", 512),
    "gpt2_tp2_torch_dist": (TP2, 512),
}


def boxes_of(folder: Path) -> dict[str, Any]:
    """Everything of a `.metadata` that another reader depends on."""
    found: dict[str, Any] = {}
    for key, stored in read_metadata(folder / ".metadata").state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            found[key] = "object"
        else:
            boxes = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks)
            found[key] = (tuple(stored.size), repr(stored.properties), boxes)
    return found


def ranks_of(folder: Path) -> dict[str, set[str]]:
    """Key -> the ranks whose files hold a part of it."""
    held: dict[str, set[str]] = {}
    for index, info in read_metadata(folder / ".metadata").storage_data.items():
        held.setdefault(index.fqn, set()).add(info.relative_path.split("_")[2])
    return held


@pytest.mark.parametrize("case", GOLDENS)
def test_keys_offsets_and_writers_are_megatrons(ranks: Any, shared: Path, tmp_path: Path, case: str) -> None:
    flags, vocab_size = GOLDENS[case]
    with tarfile.open(shared / "golden" / "pretrain" / case / "ckpt.tar.xz") as archive:
        archive.extractall(tmp_path / "theirs", filter="data")
    theirs = tmp_path / "theirs" / "ckpt" / "iter_0000010"
    ranks.run(2, save, str(tmp_path / "ours"), f"{GOLDEN} {flags}", 2, vocab_size, 10)
    ours = DirectoryStore(tmp_path / "ours").folder(10)
    assert boxes_of(ours) == boxes_of(theirs)
    assert ranks_of(ours) == ranks_of(theirs)
    data = {path.name for path in theirs.iterdir()}
    assert {path.name for path in ours.iterdir()} == data | {"manifest.json", "vocab.json"}


@pytest.mark.parametrize("case", GOLDENS)
def test_a_checkpoint_of_megatron_fills_the_ranks_of_its_layout(
    ranks: Any, shared: Path, tmp_path: Path, case: str
) -> None:
    flags, vocab_size = GOLDENS[case]
    with tarfile.open(shared / "golden" / "pretrain" / case / "ckpt.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    whole = plain_tensors(tmp_path / "ckpt" / "iter_0000010")
    words = f"{GOLDEN} {flags} --use-checkpoint-opt-param-scheduler"
    for wrong, state_of_torch in ranks.run(2, _load_golden, str(tmp_path / "ckpt"), words, vocab_size, whole):
        assert wrong == []
        assert state_of_torch == "the checkpoint's"


def _load_golden(folder: str, flags: str, vocab_size: int, whole: dict[str, Tensor]) -> tuple[list[str], str]:
    """Names of what differs from the global tensors, and whose random state torch has."""
    run = config_of(flags, 2, torch.distributed.get_rank())
    state = build_state(run, vocab_size)
    store = DirectoryStore(folder, state.context)
    found = find_checkpoint(store)
    assert found is not None and found.iteration == 10
    assert restore(store, found, state, run).notes == ()
    tp, pp, wrong = state.context.tp, state.context.pp, list[str]()
    for chunk in state.chunks:
        for name, parameter, placement in named_placements(chunk):
            slot = stacking_of(chunk.config).slot(name)
            for kind, live in (
                ("", parameter),
                *((f"optimizer.state.{k}.", _moment(state, k, name)) for k in _MOMENTS),
            ):
                stored = whole[kind + slot.key][slot.index]
                if not torch.equal(live.detach(), local_part(stored, placement, tp.size, tp.index)):
                    wrong.append(kind + name)
    key = rng_object_key(tp.index, tp.size, pp.index, pp.size)
    (theirs,) = store.load(10, CheckpointContent(objects={key: None})).objects[key]
    same = torch.equal(torch.get_rng_state(), theirs["torch_rng_state"])
    return wrong, "the checkpoint's" if same else "another"


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _moment(state: TrainState, kind: str, name: str) -> Tensor:
    return state.optimizer.state_tensors()[f"{kind}.{name}"]
