"""Initial weights, gradients and curves of the real Megatron (golden `train`): TP, PP, DP and kin on two ranks.

One case is of one rank: recomputation, which here goes through the flags as the others do.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.assemble.model import build_chunks, build_run_optimizer, defer_weight_gradients, draw_weights
from megalith.config import RunConfig, load
from megalith.data.gpt_dataset import GPTDataset, GPTDatasetOptions
from megalith.data.indexed import IndexedDataset
from megalith.data.loader import BatchLoader
from megalith.data.samples import SplitRatios, SplitSpec
from megalith.distributed.context import ParallelContext
from megalith.distributed.rng import RandomStreams
from megalith.schedules.parameters import ParameterSchedule
from megalith.tokenizers.null import NullTokenizer
from megalith.train.consensus import NeverStop, RankConsensus
from megalith.train.state import TrainState
from megalith.train.step import train_step

CASES = (
    "gpt2_tp2",
    "llama_tp2",
    "llama_tp2_sp",
    "gpt2_pp2",
    "llama_pp2",
    "llama_pp2_vpp2",
    "gpt2_dp2",
    "gpt2_dp2_distopt",
    "llama_bf16_distopt",
    "var_recompute_full",
)


@dataclass(frozen=True)
class _Rates:
    """The learning rates and weight decays that the golden run used, by step."""

    values: tuple[float, ...]
    batch: int

    def lr(self, num_samples: int) -> float:
        return self.values[min(num_samples // self.batch, len(self.values) - 1)]

    weight_decay = lr


def _flags(case: dict[str, Any]) -> str:
    model, fields, train = case["model"], case["model"]["config"], case["train"]
    sizes = case.get("parallel", {})
    over = case.get("config_over", {})
    flags = [
        f"--num-layers {fields['num_layers']} --hidden-size {fields['hidden_size']}",
        f"--num-attention-heads {fields['num_attention_heads']} --max-position-embeddings {model['seq']}",
        f"--seq-length {model['seq']} --position-embedding-type {model['pos']}",
        f"--normalization {fields['normalization']}",
        f"--micro-batch-size {train['mbs']} --global-batch-size {train['gbs']} --train-iters {train['steps']}",
        f"--lr {train['lr']} --adam-beta1 {train['b1']} --adam-beta2 {train['b2']} --clip-grad {train['clip']}",
        "--hidden-dropout 0 --attention-dropout 0 --attention-softmax-in-fp32 --no-bias-gelu-fusion --mock-data",
        "--tokenizer-type NullTokenizer --vocab-size 500 --transformer-impl local --use-cpu-initialization",
        f"--seed {train['seed']} --log-num-zeros-in-grad",
        f"--tensor-model-parallel-size {sizes.get('tp', 1)} --pipeline-model-parallel-size {sizes.get('pp', 1)}",
        f"--num-virtual-stages-per-pipeline-rank {sizes['vpp']}" if "vpp" in sizes else "",
        "" if model["tied"] else "--untie-embeddings-and-output-weights",
        "--swiglu" if fields.get("gated_linear_unit") else "",
        "" if fields["add_bias_linear"] else "--disable-bias-linear",
        f"--ffn-hidden-size {fields['ffn_hidden_size']}" if "ffn_hidden_size" in fields else "",
        f"--group-query-attention --num-query-groups {fields['num_query_groups']}"
        if "num_query_groups" in fields
        else "",
        "--sequence-parallel" if over.get("sequence_parallel") else "",
        "--bf16" if over.get("bf16") else "",
        "--use-distributed-optimizer" if case.get("distopt") else "",
        *(f"--{name.replace('_', '-')} {fields[name]}" for name in fields if name.startswith("recompute_")),
    ]
    return " ".join(flags)


def _loader(case: dict[str, Any], data: str, cache: str, context: ParallelContext) -> BatchLoader:
    settings = case["train"]
    dataset = GPTDataset(
        IndexedDataset(data),
        SplitSpec(0, settings["steps"] * settings["gbs"], SplitRatios.parse("100,0,0"), data, cache_folder=Path(cache)),
        options=GPTDatasetOptions(
            sequence_length=case["model"]["seq"],
            seed=settings["seed"],
            eod_mask_loss=False,
        ),
        tokenizer=NullTokenizer(511),
        class_name="GPTDataset",
    )
    return BatchLoader(dataset, settings["mbs"], 0, rank=context.dp.index, num_ranks=context.dp.size)


def _named(state: TrainState, tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of the chunks under the names of the golden: layers counted from 0 in each chunk."""
    found = {}
    for number, (chunk, values) in enumerate(zip(state.chunks, tensors, strict=True)):
        prefix = f"vp{number}." if len(state.chunks) > 1 else ""
        for name, value in values.items():
            for local, layer in enumerate(chunk.stage.layers):
                name = name.replace(f"decoder.layers.{layer}.", f"decoder.layers.#{local}.")
            found[prefix + name.replace("#", "")] = value.detach().clone()
    return found


def _run(case: dict[str, Any], log: list[dict[str, Any]], data: str, cache: str) -> dict[str, Any]:
    sizes = case.get("parallel", {})
    world = math.prod(sizes.get(axis, 1) for axis in ("tp", "pp", "dp"))
    words = [word for word in _flags(case).split(" ") if word]
    config: RunConfig = load(words, {"WORLD_SIZE": str(world), "RANK": "0"}, files=False)
    context = ParallelContext.create(config.layout, torch.device("cpu")) if world > 1 else ParallelContext.solo()
    streams = RandomStreams(case["train"]["seed"], context)
    chunks = build_chunks(config, case["model"]["vocab_size"], context)
    draw_weights(config, chunks, streams, context)
    optimizer = build_run_optimizer(config, chunks, context)
    gbs = case["train"]["gbs"]
    rates = _Rates(tuple(entry["lr"] for entry in log), gbs)
    decays = _Rates(tuple(entry["wd"][0] for entry in log), gbs)
    schedule = ParameterSchedule(rates, decays)  # type: ignore[arg-type]
    deferred = defer_weight_gradients(config, chunks, optimizer)
    state = TrainState(chunks, optimizer, streams, schedule, context=context, deferred=deferred)
    weights = _named(state, [dict(chunk.named_parameters()) for chunk in chunks])
    loader = _loader(case, data, cache, context)
    sum_over_ranks = RankConsensus(NeverStop(), context, contributes=state.contributes_losses).sum_over_ranks
    steps, gradients = [], None
    for _ in log:
        result = train_step(
            state,
            loader,
            config.num_micro_batches,
            pipeline_schedule=config.pipeline_schedule,
            sum_over_ranks=sum_over_ranks,
        )
        gradients = gradients or _named(
            state, [{name: optimizer.gradients.grads[name] for name in chunk.placements()} for chunk in chunks]
        )
        steps.append((result.loss, result.grad_norm, result.num_zeros))
    tag = f"tp{context.tp.index}_pp{context.pp.index}"
    return {"tag": tag, "weights": weights, "gradients": gradients, "steps": steps}


def _golden_file(folder: Path, stem: str) -> dict[str, Tensor] | None:
    """A file of a case; byte-identical ones are kept once, and this one may be elsewhere then."""
    path = folder / f"{stem}.safetensors"
    return load_file(path) if path.exists() else None


def _check_gradients(mine: dict[str, Tensor], wanted: dict[str, Tensor], clipping: float) -> None:
    """`clipping` is what the golden gradients, which are not clipped, are larger by."""
    mine = {name: value.double() * clipping for name, value in mine.items()}
    names = {name.partition("#")[0] for name in wanted}
    assert set(mine) == names
    for key, value in wanted.items():
        name, _, part = key.partition("#")
        own = mine[name]
        own = own.sum(-1) if part == "row_sums_fp64" else own[: len(value)] if part else own
        scale = mine[name].abs().max() * (mine[name].shape[-1] ** 0.5 if part == "row_sums_fp64" else 1.0)
        assert (own - value.double()).abs().max() <= 1e-5 * scale, key


@pytest.mark.parametrize("name", CASES)
def test_the_ranks_repeat_the_golden(name: str, shared: Path, ranks: Any, tmp_path: Path) -> None:
    root = shared / "golden" / "train"
    cases = {case["name"]: case for case in json.loads((root / "manifest.json").read_text())["cases"]}
    case = cases[name]
    log = json.loads(next(iter(sorted((root / name).glob("log_*.json")))).read_text())["log"]
    world = math.prod(case.get("parallel", {}).get(axis, 1) for axis in ("tp", "pp", "dp"))
    results = ranks.run(world, _run, case, log, str(root / "data" / "shakes_text_document"), str(tmp_path))
    # The gradient of a key bias is zero but for rounding, so that its exact zeros are noise; so are those of bf16.
    allowed = 8 if case["model"]["config"]["add_qkv_bias"] else 50 if case.get("config_over", {}).get("bf16") else 1
    for result in results:
        initial = _golden_file(root / name, f"weights_init_{result['tag']}")
        for key, value in (initial or {}).items():
            assert torch.equal(result["weights"][key], value), key
        gradients = _golden_file(root / name, f"grads_step0_{result['tag']}")
        if gradients is not None and not case.get("distopt"):
            clipping = max(1.0, (log[0]["grad_norm"] + 1e-6) / case["train"]["clip"])
            _check_gradients(result["gradients"], gradients, clipping)
        for entry, (loss, norm, zeros) in zip(log, result["steps"], strict=True):
            assert math.isclose(loss, entry["lm_loss"], rel_tol=1e-4), entry["step"]
            assert math.isclose(norm, entry["grad_norm"], rel_tol=1e-3), entry["step"]
            assert zeros is not None and abs(zeros - entry["num_zeros"]) <= allowed + 0.02 * entry["num_zeros"], entry
