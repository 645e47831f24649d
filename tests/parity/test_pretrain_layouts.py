"""Whole runs of Megatron's pretrain_gpt.py on two processes, from scratch, repeated line by line (golden `pretrain`).

Each runs the real command on two ranks in the environment that torchrun gives them. Not here: the runs that load a
checkpoint (the checkpoints issue) and those with experts (the models issue). Runs saved in the legacy `torch` format
are repeated in `torch_dist`: the curve does not depend on it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from megalith.checkpoint import DirectoryStore
from megalith.checkpoint.store.store import Contents

from ..e2e.warm import WarmProcess
from .goldens import Goldens
from .test_pretrain import (
    compare_counters,
    compare_iterations,
    compare_tensors,
    compare_validations,
    prepare_case,
    read_all,
    unknown_lines,
    unpack_checkpoint,
)

GPT2_LAYER, LLAMA_LAYER = 3280, 3104
PARAMETERS = {
    "gpt2_tp2_torch_dist": {(0, 0): 8016, (1, 0): 8016},
    "gpt2_tp2_torch": {(0, 0): 8016, (1, 0): 8016},
    "gpt2_pp2_torch": {(0, 0): 512 * 16 + 32 * 16 + GPT2_LAYER, (0, 1): GPT2_LAYER + 2 * 16 + 512 * 16},
    "gpt2_distopt_torch": {(0, 0): 15296},
    "llama_tp2_torch_dist": {(0, 0): 11344, (1, 0): 11344},
    "llama_pp2_torch_dist": {(0, 0): 512 * 16 + LLAMA_LAYER, (0, 1): LLAMA_LAYER + 16 + 512 * 16},
    "llama_dp2_distopt_torch_dist": {(0, 0): 22608},
    "llama_dp2_distopt_fullyreshardable": {(0, 0): 22608},
}
"""Case -> parameters by (tensor, pipeline) rank; what Megatron printed, where the golden has it, or counted by hand."""


def run_case(name: str, golden: Goldens, folder: Path, warm: WarmProcess) -> str:
    """Repeat a case on its ranks; returns what the first of them printed, which is all that is printed."""
    words = prepare_case(name, golden, folder)
    first, *others = warm.run_ranks(golden.case("pretrain", name)["nproc"], words, folder)
    assert [first.code, *(other.code for other in others)] == [0, 0], first.text
    assert [other.text for other in others] == [""]
    return first.text


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_line_and_number_is_repeated(name: str, golden: Goldens, tmp_path: Path, warm: WarmProcess) -> None:
    folder = golden.path(f"pretrain/{name}")
    log = json.loads((folder / "log.json").read_text())
    text = run_case(name, golden, tmp_path, warm)
    compare_iterations(name, log, text)
    compare_validations(name, log, text)
    compare_start_up(name, text)
    if (folder / "log_rank0.txt").exists():
        compare_lines(text, (folder / "log_rank0.txt").read_text())
    theirs = unpack_checkpoint(name, golden, tmp_path)
    compare_checkpoints(DirectoryStore(tmp_path / "c"), theirs)


def compare_start_up(name: str, text: str) -> None:
    """World size, padded vocabulary, parameters of each rank."""
    tensor, pipeline = 1 + ("tp2" in name), 1 + ("pp2" in name)
    assert text.startswith(
        f"using world size: 2, data-parallel size: {2 // tensor // pipeline}, context-parallel size: 1, hierarchical "
        f"context-parallel sizes: None, tensor-model-parallel size: {tensor}, "
        f"pipeline-model-parallel size: {pipeline}\n"
    )
    assert "\n > padded vocab (size: 512) with 0 dummy tokens (new size: 512)\n" in text
    pattern = r"^ > number of parameters on \(tensor, pipeline\) model parallel rank \((\d), (\d)\): (\d+)$"
    found = {(int(t), int(p)): int(number) for t, p, number in re.findall(pattern, text, re.MULTILINE)}
    assert found == PARAMETERS[name]


def compare_lines(text: str, printed: str) -> None:
    """The lines of the first rank are Megatron's, numbers of the layout included.

    Ours says what others say there, too: validation losses (the last rank), parameters (each rank).
    """
    elsewhere = re.compile(r"-+$| validation loss at | > number of parameters .*\((0, 1|1, 0)\)")
    own_rank = [line for line in text.splitlines() if not elsewhere.match(line)]
    assert unknown_lines("\n".join(own_rank), printed) == []
    for start in ("using world size", "setting number of microbatches", " > padded vocab", " > number of parameters"):
        (theirs,) = (line for line in printed.splitlines() if start in line)
        assert theirs[theirs.index(start) :] in own_rank
    assert re.findall(r"\[ t .* ]", text) == re.findall(r"\[ t .* ]", printed)


def compare_checkpoints(ours: DirectoryStore, theirs: DirectoryStore) -> None:
    """Same keys and numbers, whatever layout of the optimizer the original wrote.

    Its distributed optimizer saves main parameters beside weights in fp32 too, which are the same numbers.
    """
    contents, other = ours.contents(10), theirs.contents(10)
    shared = {key: held for key, held in other.tensors.items() if key in contents.tensors}
    assert shared.keys() == contents.tensors.keys()
    assert all(key.startswith("optimizer.state.fp32_param.") for key in other.tensors.keys() - shared.keys())
    for key, held in shared.items():
        assert (held.shape, held.dtype) == (contents.tensors[key].shape, contents.tensors[key].dtype), key
    compare_tensors(ours, theirs, Contents(shared, contents.objects))
    compare_counters(ours, theirs)
    for key in other.tensors.keys() - shared.keys():
        weight = key.removeprefix("optimizer.state.fp32_param.")
        main, stored = (read_all(theirs, Contents({name: other.tensors[name]}, frozenset())) for name in (key, weight))
        assert torch.equal(main[key], stored[weight]), key
