"""Random accepted command lines of all families and layouts of up to eight ranks, each proven in miniature, in fp64.

A seed and a number name a configuration. `configurations.jsonl` is the record of all that were proven so far.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
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
from megalith.prove.record import record

RECORD = Path(__file__).with_name("configurations.jsonl")
BATCH = 10  # configurations of a seed
_SECONDS = 120.0
_BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 32 --train-iters 100 --lr 1e-3 --eval-interval 10 "
    "--eval-iters 2 --data-path d "
)
_SHARED = (
    ("", "--micro-batch-size 2"),
    ("", "--sequence-parallel"),
    ("", "--use-distributed-optimizer", "--use-torch-fsdp2"),
    ("", "--overlap-grad-reduce"),
    ("", "--overlap-param-gather"),
    ("", "--normalization RMSNorm", "--apply-layernorm-1p"),
    ("", "--disable-bias-linear", "--add-qkv-bias"),
    ("", "--recompute-activations", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ("", "--recompute-granularity full --recompute-method block --recompute-num-layers 1"),
    ("", "--recompute-granularity selective --recompute-modules layernorm mlp"),
    ("", "--num-layers-per-virtual-pipeline-stage 1", "--num-layers-per-virtual-pipeline-stage 2"),
    ("", "--decoder-first-pipeline-num-layers 1", "--decoder-last-pipeline-num-layers 3"),
    ("", "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"),
    ("", "--pipeline-schedule zb-h1"),
    ("", "--defer-embedding-wgrad-compute"),
    ("", "--optimizer sgd", "--optimizer muon", "--optimizer lion", "--optimizer soap", "--optimizer adaptive_muon"),
    ("", "--lr-decay-style cosine --lr-warmup-iters 5", "--lr-decay-style WSD --lr-wsd-decay-iters 10"),
    ("", "--clip-grad 0", "--weight-decay 0.1"),
    ("", "--decoupled-lr 1e-2"),
    ("", "--hidden-dropout 0"),
    ("", "--bf16", "--fp16"),
    ("", "--untie-embeddings-and-output-weights"),
    ("", "--init-method-xavier-uniform"),
    ("", "--rampup-batch-size 16 16 160"),
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


def proven(configuration: Configuration) -> dict[str, Any]:
    """Train the miniatures of a configuration in their layouts and in one process; return what was compared."""
    run, differences, worst, compared, names = configuration.run(), list[str](), 0.0, 0, list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(run, folder)
        for miniature in miniatures(run, folder):
            names.append(str(miniature))
            try:
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


def batch(seed: int) -> Iterator[dict[str, Any]]:
    """Prove the configurations of a seed, and yield their lines of the record."""
    torch.set_num_threads(1)
    for number, configuration in enumerate(drawn(seed, BATCH)):
        try:
            outcome = proven(configuration)
        except ConfigError as error:
            outcome = {"miniatures": [], "compared": 0, "worst": 0.0, "differences": [f"no miniature: {error}"]}
        yield {"seed": seed, "number": number, "gpus": configuration.gpus, "flags": configuration.flags, **outcome}


def known() -> list[dict[str, Any]]:
    """Return the record."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def run(number: int) -> tuple[list[list[str]], list[str]]:
    """Prove that many configurations of seeds that the record lacks; returns the table and the findings."""
    lines, findings, done = known(), list[str](), 0
    seed = max((line["seed"] for line in lines), default=-1) + 1
    while done < number:
        for line in batch(seed):
            done += 1
            lines.append(line)
            findings += [f"seed {seed}, {line['number']}: {one}: {line['flags']}" for one in line["differences"]]
            with RECORD.open("a") as file:
                file.write(json.dumps(line) + "\n")
        seed += 1
    compared, worst = sum(line["compared"] for line in lines), max(line["worst"] for line in lines)
    rows = [["configurations", "compared", "worst"], [str(len(lines)), str(compared), f"{worst:.1e}"]]
    return rows, findings
