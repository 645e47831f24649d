"""Random accepted command lines of all families and layouts of up to eight ranks, each proven in miniature, in fp64.

A seed and a number name a configuration. `configurations.jsonl` is the record of all that were proven so far.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

from megalith.config import RunConfig, load
from megalith.distributed.forked import run_forked
from megalith.errors import ConfigError, PeerError
from megalith.prove.compare import compare
from megalith.prove.miniature import miniatures, write_data
from megalith.prove.proof import prove, warm, write_base
from megalith.prove.record import record

RECORD = Path(__file__).with_name("configurations.jsonl")
BATCH = 10  # configurations of a seed
_AT_ONCE = 2  # seeds; the ranks of one configuration often wait for each other
_SECONDS = 120.0
_BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 32 --train-iters 100 --lr 1e-3 --eval-interval 10 "
    "--eval-iters 2 --data-path d --save s --save-interval 10 "
)
_SHARED = (
    ("", "--micro-batch-size 2"),
    ("", "--sequence-parallel"),
    (
        "",
        "--use-distributed-optimizer",
        "--use-torch-fsdp2",
        "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    ),
    ("", "--overlap-grad-reduce"),
    ("", "--overlap-param-gather"),
    ("", "--normalization RMSNorm", "--apply-layernorm-1p"),
    ("", "--disable-bias-linear", "--add-qkv-bias"),
    ("", "--recompute-activations", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ("", "--recompute-granularity full --recompute-method block --recompute-num-layers 1"),
    ("", "--recompute-granularity selective --recompute-modules layernorm mlp"),
    (
        "",
        "--num-layers-per-virtual-pipeline-stage 1",
        "--num-layers-per-virtual-pipeline-stage 2",
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    ("", "--decoder-first-pipeline-num-layers 1", "--decoder-last-pipeline-num-layers 3"),
    ("", "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"),
    ("", "--pipeline-schedule zb-h1"),
    ("", "--defer-embedding-wgrad-compute"),
    ("", "--optimizer sgd", "--optimizer muon", "--optimizer lion", "--optimizer soap", "--optimizer adaptive_muon"),
    ("", "--lr-decay-style cosine --lr-warmup-iters 5", "--lr-decay-style WSD --lr-wsd-decay-iters 10"),
    ("", "--clip-grad 0", "--weight-decay 0.1"),
    ("", "--decoupled-lr 1e-2"),
    ("", "--hidden-dropout 0"),
    ("", "--label-smoothing 0.1"),
    ("", "--apply-residual-connection-post-layernorm", "--no-final-layernorm"),
    ("", "--bf16", "--fp16"),
    ("", "--untie-embeddings-and-output-weights"),
    ("", "--init-method-xavier-uniform"),
    ("", "--rampup-batch-size 16 16 160"),
    ("", "--ckpt-format torch"),
)
_CAUSAL = (
    ("", "--position-embedding-type rope", "--position-embedding-type yarn", "--position-embedding-type none"),
    ("", "--rotary-percent 0.5", "--rotary-interleaved", "--no-rope-freq 2"),
    ("", "--swiglu", "--squared-relu", "--quick-geglu", "--openai-gelu"),
    ("", "--group-query-attention --num-query-groups 2", "--group-query-attention --num-query-groups 4"),
    ("", "--qk-layernorm", "--qk-l2-norm", "--attention-output-gate"),
    ("", "--softmax-type off-by-one", "--softmax-type learnable"),
    ("", "--window-size 16,0", "--window-size 16,0 --window-attn-skip-freq 2"),
    ("", "--multi-latent-attention", "--multi-latent-attention --q-lora-rank 32"),
    ("", "--mtp-num-layers 1", "--mtp-num-layers 2"),
    ("", "--cp-comm-type a2a"),
    ("", "--calculate-per-token-loss"),
    ("", "--reset-attention-mask", "--reset-position-ids"),
    ("", "--use-mup"),
    ("", "--sft", "--sft --no-sft-packing"),
    (
        "",
        "--lora-rank 4 --pretrained-checkpoint base",
        "--lora-rank 4 --pretrained-checkpoint base --lora-targets q_proj,v_proj",
    ),
)
_EXPERTS = (
    ("", "--moe-router-topk 1", "--moe-router-topk 2"),
    (
        "",
        *(
            f"--moe-router-load-balancing-type {kind}"
            for kind in ("seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
        ),
    ),
    ("", "--moe-aux-loss-coeff 1e-2"),
    ("", "--moe-z-loss-coeff 1e-3"),
    ("", "--moe-token-dispatcher-type alltoall"),
    ("", "--moe-grouped-gemm"),
    ("", "--moe-layer-freq 2", "--moe-layer-freq [0]*4+[1]*4"),
    (
        "",
        "--moe-shared-expert-intermediate-size 32",
        "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
    ),
    ("", "--moe-ffn-hidden-size 48"),
    ("", "--moe-router-pre-softmax", "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"),
    ("", "--moe-router-num-groups 2 --moe-router-group-topk 1"),
    ("", "--moe-expert-capacity-factor 1.0", "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"),
    ("", "--moe-token-drop-policy position"),
    ("", "--moe-latent-size 32"),
    ("", "--moe-router-topk-scaling-factor 2.5"),
)
_FAMILIES = {
    "gpt": "--tokenizer-type NullTokenizer --vocab-size 1000",
    "bert": "--model-family bert --tokenizer-type BertWordPieceLowerCase --vocab-file v",
    "t5": "--model-family t5 --decoder-seq-length 32 --vocab-extra-ids 10 --tokenizer-type BertWordPieceLowerCase "
    "--vocab-file v",
}


@dataclass(frozen=True)
class Configuration:
    """A command line that is accepted."""

    flags: str
    gpus: int

    def run(self) -> RunConfig:
        """Return its configuration; raises ConfigError if it is refused."""
        return load((_BASE + self.flags).split(), {"RANK": "0", "WORLD_SIZE": str(self.gpus)}, files=False)

    @property
    def is_accepted(self) -> bool:
        try:
            self.run()
        except ConfigError:
            return False
        return True


def _some(options: Sequence[str]) -> st.SearchStrategy[str]:
    """Draw the first option as often as all others together."""
    return st.booleans().flatmap(lambda first: st.just(options[0]) if first else st.sampled_from(options))


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    """Draw a layout and options; an option with which those before are refused is left out."""
    family = draw(st.sampled_from(["gpt", "gpt", "gpt", "moe", "moe", "bert", "t5"]))
    sizes = {axis: draw(st.sampled_from([1, 2, 2, 4])) for axis in ("tp", "pp", "dp")}
    sizes["cp"] = draw(st.sampled_from([1, 1, 2, 4]))
    while prod(sizes.values()) > 8:
        sizes[max(sizes, key=lambda axis: (sizes[axis], axis))] //= 2
    groups = [_SHARED, *([_CAUSAL] if family in ("gpt", "moe") else []), *([_EXPERTS] if family == "moe" else [])]
    options = [draw(_some(options)) for group in groups for options in group]
    ranks = [f"--tensor-model-parallel-size {sizes['tp']}", f"--pipeline-model-parallel-size {sizes['pp']}"]
    ranks += [f"--context-parallel-size {sizes['cp']}"]
    if family == "moe":
        ranks += ["--num-experts 8", f"--expert-model-parallel-size {draw(st.sampled_from([1, 2, 2, 4]))}"]
        ranks += [draw(_some(["", "--expert-tensor-parallel-size 1", "--expert-tensor-parallel-size 2"]))]
    found = Configuration(_FAMILIES.get(family, _FAMILIES["gpt"]), prod(sizes.values()))
    assume(found.gpus > 1 and found.is_accepted)
    for option in filter(None, [*ranks, *draw(st.permutations(options))]):
        longer = Configuration(f"{found.flags} {option}", found.gpus)
        found = longer if longer.is_accepted else found
    return found


@cache
def drawn(seed: int, number: int) -> Sequence[Configuration]:
    """Return that many configurations of a seed."""
    found: dict[Configuration, None] = {}

    @with_seed(seed)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configurations())
    def collect(one: Configuration) -> None:
        found[one] = None

    collect()
    return list(found)


def proven_whole(configuration: Configuration) -> dict[str, Any]:
    """Prove a configuration with resumes, exports and its own precision; return what was compared."""
    run = configuration.run()
    try:
        proof = prove(run, (_BASE + configuration.flags).split())
    except (PeerError, ConfigError) as error:
        return {"miniatures": [], "compared": 0, "worst": 0.0, "differences": [str(error)[-800:]], "whole": True}
    wrong = [f"{one.miniature}: {one.cause or one.failure[-800:]}" for one in proof.results if not one.holds]
    return {
        "miniatures": [str(result.miniature) for result in proof.results],
        "compared": sum(proof.compared.counts.values()),
        "worst": proof.compared.largest(rounded=False),
        "differences": wrong,
        "whole": True,
    }


def proven(configuration: Configuration) -> dict[str, Any]:
    """Train the miniatures of a configuration in their layouts and in one process; return what was compared."""
    run, differences, worst, compared, names = configuration.run(), list[str](), 0.0, 0, list[str]()
    warm(run, checkpoints=run.model.lora_rank is not None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(run, folder)
        for miniature in miniatures(run, folder):
            names.append(str(miniature))
            try:
                write_base(miniature)
                (alone,) = run_forked(1, record, miniature.alone(), seconds=_SECONDS)
                ranks = run_forked(miniature.world_size, record, miniature, seconds=_SECONDS)
            except (PeerError, ConfigError) as error:
                differences.append(f"{miniature}: {str(error)[-800:]}")
                continue
            found = compare(alone, ranks)
            differences += [f"{miniature}: {one}" for one in found.differences[:2]]
            worst = max([worst, *(error for error, _ in found.worst.values())])
            compared += sum(found.counts.values())
    return {"miniatures": names, "compared": compared, "worst": worst, "differences": differences}


_FEATURES = {
    "TP": "tensor-model-parallel-size [24]",
    "SP": "sequence-parallel",
    "PP": "pipeline-model-parallel-size [24]",
    "VPP": "num-layers-per-virtual|num-virtual-stages",
    "uneven stages": "decoder-(first|last)-pipeline|account-for-",
    "ZB-H1": "pipeline-schedule zb-h1",
    "CP, ring": r"context-parallel-size [24](?!.*cp-comm-type)",
    "CP, all-to-all": r"context-parallel-size [24].*cp-comm-type a2a",
    "EP": "expert-model-parallel-size [24]",
    "ETP": "expert-tensor-parallel-size",
    "experts": "num-experts",
    "ZeRO-1": "use-distributed-optimizer|strategy optim(?!_)",
    "ZeRO-2": "no-reshard-after-forward|strategy optim_grads(?!_)",
    "ZeRO-3": r"use-torch-fsdp2(?! --torch-fsdp2-no)",
    "recomputation": "recompute-",
    "GQA": "group-query-attention",
    "MLA": "multi-latent-attention",
    "MTP": "mtp-num-layers",
    "window": "window-size",
    "losses": "calculate-per-token-loss|label-smoothing|aux-loss-coeff|z-loss-coeff",
    "fine-tuning": "sft",
    "LoRA": "lora-rank",
    "files of format torch": "ckpt-format torch",
    "Muon": "optimizer (adaptive_)?muon",
    "SOAP": "optimizer soap",
    "Lion, SGD": "optimizer (lion|sgd)",
    "schedules": "lr-decay-style",
    "batch ramp-up": "rampup-batch-size",
    "dropout": r"^(?!.*hidden-dropout 0)",
    "muP": "use-mup",
    "bf16, fp16": "--(bf16|fp16)",
    "BERT": "model-family bert",
    "T5": "model-family t5",
}


def coverage(lines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a table of how many configurations have each feature, and how many of them came with which layouts."""
    rows = [["feature", "configurations", "with 8 ranks", "compared"]]
    for name, pattern in _FEATURES.items():
        having = [line for line in lines if re.search(pattern, line["flags"])]
        eight = sum(line["gpus"] == 8 for line in having)
        rows.append([name, str(len(having)), str(eight), str(sum(line["compared"] for line in having))])
    whole = [line for line in lines if line.get("whole")]
    eight = sum(line["gpus"] == 8 for line in whole)
    rows.append(["resumes and exports", str(len(whole)), str(eight), str(sum(line["compared"] for line in whole))])
    return rows


def line_of(seed: int, number: int, configuration: Configuration, *, whole: bool = True) -> dict[str, Any]:
    """Prove a configuration and return its line of the record."""
    torch.set_num_threads(1)
    try:
        outcome = (proven_whole if whole else proven)(configuration)
    except ConfigError as error:
        outcome = {"miniatures": [], "compared": 0, "worst": 0.0, "differences": [f"no miniature: {error}"]}
    return {"seed": seed, "number": number, "gpus": configuration.gpus, "flags": configuration.flags, **outcome}


def batch(seed: int) -> list[dict[str, Any]]:
    """Prove the configurations of a seed; return their lines of the record."""
    return [line_of(seed, number, one) for number, one in enumerate(drawn(seed, BATCH))]


def again(line: dict[str, Any]) -> dict[str, Any]:
    """Prove a configuration of the record again; return its new line."""
    return line_of(
        line["seed"], line["number"], Configuration(line["flags"], line["gpus"]), whole=line.get("whole", False)
    )


def known() -> list[dict[str, Any]]:
    """Return the record."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def run(number: int) -> tuple[list[list[str]], list[str]]:
    """Prove what differed before again, and that many configurations of seeds that the record lacks.

    Returns:
        The table of what the record covers, and the findings.
    """
    lines = known()
    seed = max((line["seed"] for line in lines), default=-1) + 1
    with ProcessPoolExecutor(_AT_ONCE, multiprocessing.get_context("fork")) as pool:
        repeated = list(pool.map(again, [line for line in lines if line["differences"]]))
        lines = [line for line in lines if not line["differences"]] + repeated
        RECORD.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for future in as_completed([pool.submit(batch, seed + one) for one in range(-(-number // BATCH))]):
            lines += future.result()
            with RECORD.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in future.result())
            print(f"{len(lines)} configurations, {sum(bool(line['differences']) for line in lines)} differ", flush=True)
    found = [(line, one) for line in lines for one in line["differences"]]
    findings = [f"seed {line['seed']}, {line['number']}: {one}: {line['flags']}" for line, one in found]
    compared, worst = sum(line["compared"] for line in lines), max(line["worst"] for line in lines)
    rows = [*coverage(lines), [f"all; worst {worst:.1e}", str(len(lines)), "", str(compared)]]
    return rows, findings
