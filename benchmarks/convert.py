"""Converting a checkpoint from TP2 PP2 to TP1 PP1: seconds, and the peak of memory beside that of the largest layer.

The source is a GPT with Adam's state, written by the streaming writer from numbers that are drawn as they are asked
for, so that no model is ever in memory. The conversion runs in a process of its own; of its peak what it had after
the imports is taken off.

python benchmarks/convert.py --size 350m --out benchmarks/results/convert-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megalith.checkpoint import CheckpointContent
from megalith.checkpoint.convert import ConversionOptions, convert
from megalith.checkpoint.formats.torch_dist import OPTIMIZER_PREFIX, LocalTensor, optimizer_common, weight_chunks
from megalith.checkpoint.global_parameters import GlobalParameters
from megalith.checkpoint.sources.source import Contents, StoredTensor
from megalith.checkpoint.writers.torch_dist import write_torch_dist

SIZES = {"17m": (6, 256, 16384), "124m": (12, 768, 50304), "350m": (24, 1024, 50432)}
"""Name -> layers, width, rows of the vocabulary."""


def gpt_args(size: str, tp: int, pp: int) -> dict[str, Any]:
    """Megatron's arguments of a GPT-2 like model."""
    layers, hidden, vocabulary = SIZES[size]
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 64,
        "max_position_embeddings": 1024,
        "padded_vocab_size": vocabulary,
        "params_dtype": "float32",
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
    }


class Drawn:
    """A model with Adam's state whose numbers are drawn when they are read: a source of any size without a file."""

    format = "drawn"

    def __init__(self, args: dict[str, Any]) -> None:
        self._args, params = args, GlobalParameters.from_args(args, "the benchmark")
        boxes = [LocalTensor(name, torch.empty(shape, device="meta")) for name, shape in params.shapes.items()]
        self.weights = {
            chunk.key: StoredTensor(chunk.global_shape, torch.float32)
            for chunk in weight_chunks(boxes, params.placements, params.stacking)
        }

    def contents(self) -> Contents:
        prefixes = ["", *(f"{OPTIMIZER_PREFIX}{state}." for state in ("exp_avg", "exp_avg_sq"))]
        return Contents({prefix + key: held for prefix in prefixes for key, held in self.weights.items()}, frozenset())

    def common(self) -> dict[str, Any]:
        groups = [{"wd_mult": decayed, "weight_decay": 0.1 * decayed, "lr": 1e-4} for decayed in (1.0, 0.0)]
        return {
            "args": Namespace(**self._args),
            "checkpoint_version": 3.0,
            "iteration": 1,
            "optimizer": optimizer_common(groups, 1, None, "float32"),
        }

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        for chunk in content.chunks:
            chunk.tensor.uniform_()
        return {}

    def problems(self) -> list[str]:
        return []

    def largest_layer(self) -> int:
        """Bytes of the largest of the layers, the embedding and the output layer, with their moments."""
        stacked = [held for key, held in self.weights.items() if key.startswith("decoder.layers.")]
        layer = sum(held.numel // held.shape[0] for held in stacked)
        return 3 * 4 * max(layer, *(held.numel for key, held in self.weights.items() if "embeddings" in key))


def write_source(size: str, folder: Path, tp: int = 2, pp: int = 2, form: str = "torch_dist") -> Path:
    """Write a checkpoint of random numbers into a save folder, without the model in memory."""
    final = folder / "iter_0000001"
    source = Drawn(gpt_args(size, tp, pp))
    write_torch_dist(
        source, final, manifest_fields={"megalith_version": "benchmark", "created": ""}, files={}, update_tracker=str
    )
    if form == "torch":
        convert(final, folder.with_name(folder.name + "-torch"), ConversionOptions(format="torch"), verify=False)
        shutil.rmtree(folder)
        final = folder.with_name(folder.name + "-torch") / final.name
    return final


def measure(size: str, folder: Path, form: str = "torch_dist", to: str = "torch_dist") -> dict[str, Any]:
    """Convert in a process of its own.

    Args:
        size: a key of `SIZES`.
        folder: room for two checkpoints.
        form: format of the source.
        to: format of the result.

    Returns:
        Sizes, seconds and peak in bytes, and the peak over that of the largest layer.
    """
    source = write_source(size, folder / "source", form=form)
    words = [sys.executable, __file__, "--child", str(source), str(folder / "result"), to]
    run = subprocess.run(words, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = json.loads(run.stdout.splitlines()[-1])
    largest = Drawn(gpt_args(size, 2, 2)).largest_layer()
    return {
        "model": size,
        "from": f"{form} TP2 PP2",
        "to": f"{to} TP1 PP1",
        **found,
        "largest_layer_bytes": largest,
        "peak_over_largest_layer": round(found["peak_bytes"] / largest, 2),
    }


def _child(source: Path, result: Path, to: str) -> None:
    """One conversion; prints what it took."""
    before = _reset_peak()
    made = convert(source, result, ConversionOptions(format=to, tp=1, pp=1))
    peak = _peak() - before
    print(
        json.dumps({"bytes": made.bytes, "seconds": round(made.seconds, 2), "base_bytes": before, "peak_bytes": peak})
    )


def _peak() -> int:
    """The peak of resident memory; `ru_maxrss` would count what the parent had before it started this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


def _reset_peak() -> int:
    """Forget what the imports took at most; returns what they still take."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--formats", nargs="+", default=["torch_dist:torch_dist", "torch:torch"], metavar="FROM:TO")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    if options.child:
        _child(Path(options.child[0]), Path(options.child[1]), options.child[2])
        return
    result: dict[str, Any] = {"what": __doc__, "torch": torch.__version__, "runs": []}
    for pair in options.formats:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            result["runs"].append(measure(options.size, Path(folder), *pair.split(":")))
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
