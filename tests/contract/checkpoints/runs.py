"""The runs whose checkpoints are kept: one of each model family, optimizer and precision, in each layout and format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

HELD, LAST = 4, 6
"""Iterations whose checkpoints are kept: the one that a test resumes from, and the one that it must then reach."""

ARITHMETIC = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Environment under which every x86-64 processor computes the same bits: without the instruction sets that differ."""

_STEPS = (
    f"--train-iters {LAST} --save-interval {HELD} --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 "
    "--weight-decay 0.1 --micro-batch-size 1 --global-batch-size 4 --split 100,0,0 --eval-iters 0 --log-interval 1 "
    "--num-workers 0 --make-vocab-size-divisible-by 8 --device cpu --distributed-backend gloo"
)
_SIZE = "--hidden-size 8 --num-attention-heads 2"
_GPT = (
    f"{_STEPS} {_SIZE} --num-layers 4 --seq-length 8 --max-position-embeddings 8 --data-path data/text "
    "--data-cache-path cache --tokenizer-type NullTokenizer"
)
_MASKED = (
    f"{_STEPS} {_SIZE} --max-position-embeddings 24 --data-path data/sentences --vocab-file data/vocab.txt "
    "--tokenizer-type BertWordPieceLowerCase --data-cache-path cache"
)
_LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 16 "
    "--untie-embeddings-and-output-weights --vocab-size 47 --hidden-dropout 0 --attention-dropout 0"
)

FAMILIES: dict[str, tuple[str, str]] = {
    # One more token than TP=2 pads to: the padded vocabulary differs between the layouts.
    "dense": ("gpt", f"{_GPT} --vocab-size 39"),
    "moe": (
        "gpt",
        f"{_GPT} {_LLAMA} --bf16 --num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 "
        "--moe-layer-freq ([0]+[1]*3) --moe-shared-expert-intermediate-size 8",
    ),
    "mla": (
        "gpt",
        f"{_GPT} {_LLAMA} --multi-latent-attention --q-lora-rank 6 --kv-lora-rank 4 --qk-head-dim 4 "
        "--qk-pos-emb-head-dim 2 --v-head-dim 4 --rope-type rope",
    ),
    "muon": ("gpt", f"{_GPT} --vocab-size 47 --optimizer muon"),
    # Overflows at first, so that the loss scale and the schedule lag behind the iterations.
    "fp16": ("gpt", f"{_GPT} --vocab-size 47 --fp16 --initial-loss-scale 262144 --loss-scale-window 2"),
    "bert": ("bert", f"{_MASKED} --num-layers 4 --seq-length 24"),
    "t5": (
        "t5",
        f"{_MASKED} --encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 24 --decoder-seq-length 16 "
        "--vocab-extra-ids 10",
    ),
}
"""Name -> the model family and the flags of a run."""

_TP2, _PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS: dict[str, tuple[int, str]] = {
    "one": (1, ""),
    "tp2": (2, _TP2),
    "tp2-pp2": (4, f"{_TP2} {_PP2}"),
    "dp2": (2, ""),
    "zero1": (2, "--use-distributed-optimizer"),
    "zero1-ep2": (2, "--use-distributed-optimizer --expert-model-parallel-size 2"),
}
"""Name -> the number of processes and the flags of a layout."""

_USUAL = ("one", "tp2-pp2", "zero1")
_LAYOUTS_OF = {
    "moe": ("one", "tp2-pp2", "zero1-ep2"),
    "muon": ("one", "tp2-pp2", "dp2"),  # Muon sees whole matrices: no ZeRO-1, no per-rank files
    "t5": ("one", "tp2", "zero1"),  # as in Megatron, T5 has no pipeline
}


@dataclass(frozen=True)
class Run:
    """A run whose checkpoints are in the archive of its family.

    Attributes:
        family: a key of `FAMILIES`.
        layout: a key of `LAYOUTS`.
        format: torch_dist or torch.
    """

    family: str
    layout: str
    format: str

    @property
    def name(self) -> str:
        return f"{self.family}-{self.layout}-{self.format}"

    @property
    def folder(self) -> Path:
        """The save folder, relative to the one that the archives are unpacked in."""
        return Path(self.family, f"{self.layout}-{self.format}")

    @property
    def processes(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        flags = FAMILIES[self.family][1].split()
        return torch.bfloat16 if "--bf16" in flags else torch.float16 if "--fp16" in flags else torch.float32

    def in_layout(self, layout: str, format: str = "torch_dist") -> Run:
        """The same model in another layout and format."""
        return Run(self.family, layout, format)

    def flags(self, *more: object) -> list[str]:
        """The words of `megalith train` for it, without `--save` and `--load`."""
        kind, flags = FAMILIES[self.family]
        words = f"--model-family {kind} {flags} {LAYOUTS[self.layout][1]} --ckpt-format {self.format}"
        return [*words.split(), *map(str, more)]


def all_runs() -> Iterator[Run]:
    """Every run that is kept."""
    for family in FAMILIES:
        for layout in _LAYOUTS_OF.get(family, _USUAL):
            for format in ("torch_dist", "torch")[: 1 if family == "muon" else 2]:
                yield Run(family, layout, format)


def last_of(run: Run) -> Path:
    """The folder of the checkpoint that an uninterrupted run wrote at iteration `LAST`."""
    return Path(run.family, f"{run.layout}-{run.format}-{LAST}")


def iteration_of(save: Path, iteration: int = HELD) -> Path:
    """The folder of a checkpoint in a save folder."""
    return save / f"iter_{iteration:07d}"


GENERATED = {family: ["--prompt", "3 6 9 12", "--greedy", "--max-new-tokens", "4"] for family in FAMILIES}
GENERATED |= {
    "bert": ["--prompt", "ba be [MASK] bi bo [MASK]", "--num-samples", "1"],
    "t5": ["--prompt", "ba be <extra_id_0> bi bo", "--greedy", "--max-new-tokens", "4"],
}
"""Model family -> what `megalith generate` is asked."""
MEASURED = {
    "dense": ["--task", "text", "--data", "data/ids.txt"],
    "bert": ["--task", "masked", "--data", "data/sentences", "--samples", "20"],
    "t5": ["--task", "spans", "--data", "data/sentences", "--samples", "20"],
}
"""Model family -> what `megalith evaluate` measures."""
