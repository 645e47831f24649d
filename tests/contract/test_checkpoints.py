"""Checkpoints of today load and resume bit for bit, now and in every later version.

`checkpoints/<family>.tar.xz` holds for each run of `checkpoints/runs.py` its checkpoints of iterations 4 and 6. A load
restores the recorded bits on every machine. A resume reaches the recorded bits of iteration 6 under the recorded
arithmetic (one thread, instruction sets that every x86-64 processor has) and the recorded version of torch; under
another it comes close.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tarfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.warm import WarmProcess, other_warnings

from megalith.cli.main import main
from megalith.nn.precision import product_dtype

from .checkpoints.answers import generated, measured
from .checkpoints.contents import contents, differing, distance, leaves, tensors
from .checkpoints.runs import ARITHMETIC, GENERATED, HELD, LAST, MEASURED, Run, all_runs, iteration_of, last_of

HERE = Path(__file__).parent / "checkpoints"
RECORDED = json.loads((HERE / "recorded.json").read_text())
SAME_ARITHMETIC = (torch.__version__, platform.machine()) == (RECORDED["torch"], RECORDED["machine"])
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Largest difference of a weight or moment after two steps in other arithmetic, by the dtype of the model."""
RUNS = {run.name: run for run in all_runs()}
RESUMED = {
    *("dense-tp2-pp2-torch_dist", "dense-zero1-torch", "moe-zero1-ep2-torch_dist", "mla-one-torch"),
    *("muon-dp2-torch_dist", "fp16-zero1-torch_dist", "bert-tp2-pp2-torch", "t5-tp2-torch_dist"),
}
"""Runs that `make test` resumes; the others are left to `make test-full`."""
MOVED = {
    *(("dense-tp2-pp2-torch_dist", "one"), ("dense-one-torch", "tp2-pp2"), ("moe-tp2-pp2-torch", "zero1-ep2")),
    *(("mla-zero1-torch_dist", "one"), ("muon-tp2-pp2-torch_dist", "one"), ("fp16-one-torch_dist", "zero1")),
    *(("bert-zero1-torch", "one"), ("t5-one-torch", "tp2")),
}
"""Runs that `make test` loads in another layout, and which."""


def cases(names: list[str] | list[tuple[str, str]], always: set[Any]) -> list[Any]:
    """Mark what only `make test-full` tries."""
    return [
        pytest.param(*([name] if isinstance(name, str) else name), marks=() if name in always else pytest.mark.full)
        for name in names
    ]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archives, unpacked."""
    folder = tmp_path_factory.mktemp("held")
    for name in RECORDED["sha256"]:
        with tarfile.open(HERE / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", RECORDED["sha256"])
def test_an_archive_is_the_one_that_was_recorded(name: str) -> None:
    assert hashlib.sha256((HERE / f"{name}.tar.xz").read_bytes()).hexdigest() == RECORDED["sha256"][name]


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_verifies_and_converts_with_all_its_bits(
    name: str, held: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both formats of a run hold the same state, which has the same names and bits once it is whole."""
    run = RUNS[name]
    assert main(["checkpoint", "verify", str(held / run.folder)]) == 0
    converted = ["checkpoint", "convert", str(held / run.folder), str(tmp_path / "whole"), "--tp", "1", "--pp", "1"]
    assert main([*converted, "--format", "torch_dist"]) == 0
    whole = trimmed(tensors(iteration_of(tmp_path / "whole")))
    same = trimmed(tensors(iteration_of(held / run.in_layout(run.layout).folder)))
    assert len(whole) > 20 and differing(same, whole) == []


@pytest.mark.parametrize("family", ["dense", "bert", "t5"])
def test_a_conversion_pads_all_that_has_a_row_for_each_token(family: str, held: Path, tmp_path: Path) -> None:
    save = held / Run(family, "one", "torch_dist").folder
    assert main(["checkpoint", "convert", str(save), str(tmp_path / "more"), "--true-vocab-size", "50"]) == 0
    before, after = tensors(iteration_of(save)), tensors(iteration_of(tmp_path / "more"))
    rows = len(before["embedding.word_embeddings.weight"])
    assert {name for name in before if len(after[name]) == 56} == {name for name in before if len(before[name]) == rows}
    assert differing(before, {name: after[name][: len(value)] for name, value in before.items()}) == []


def trimmed(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut the rows that pad the vocabulary for tensor parallelism off."""
    return {
        name: value[:40] if "word_embeddings" in name or "output_layer" in name else value
        for name, value in held.items()
    }


def launch(warm: WarmProcess, run: Run, folder: Path, *more: object, **env: str) -> str:
    """Run it on its ranks; return what the first one printed."""
    ended = warm.run_ranks(run.processes, run.flags("--save", folder / "on", *more), folder, **env)
    assert [end.code for end in ended] == [0] * run.processes, "\n".join(end.text for end in ended)
    return ended[0].text


@pytest.fixture
def work(held: Path, tmp_path: Path) -> Path:
    """A folder to run in, beside the data."""
    (tmp_path / "data").symlink_to(held / "data")
    return tmp_path


@pytest.mark.parametrize("name", cases(list(RUNS), RESUMED))
def test_a_run_resumes_as_if_it_had_not_been_interrupted(name: str, held: Path, work: Path, warm: WarmProcess) -> None:
    run = RUNS[name]
    told = launch(warm, run, work, "--load", held / run.folder, **ARITHMETIC)
    assert f"at iteration {HELD}" in told and other_warnings(told) == []
    assert "--padded-vocab-size" not in told, "what concerns fresh runs only"
    expected, found = contents(held / last_of(run)), contents(iteration_of(work / "on", LAST))
    if SAME_ARITHMETIC and (run.dtype != torch.bfloat16 or product_dtype(torch.empty(0, dtype=run.dtype)) == run.dtype):
        assert differing(expected, found) == []
        return
    recorded = f"torch {RECORDED['torch']} on {RECORDED['machine']}"
    tolerance = TOLERANCES[run.dtype]
    warnings.warn(f"compared within {tolerance}, not bit for bit: recorded with {recorded}", stacklevel=1)
    assert expected.keys() == found.keys()
    assert distance(expected, found) < tolerance


OTHER_LAYOUTS = [
    (run.name, other.layout)
    for run in RUNS.values()
    for other in RUNS.values()
    if other.family == run.family and other.format == "torch_dist" and other.layout != run.layout
]


@pytest.mark.parametrize(("name", "layout"), cases(OTHER_LAYOUTS, MOVED))
def test_a_run_loads_in_another_layout(name: str, layout: str, held: Path, work: Path, warm: WarmProcess) -> None:
    """A step is skipped there, since a save follows steps only: weights and states are those that were loaded."""
    run = RUNS[name]
    other = run.in_layout(layout)
    skipping = ["--load", held / run.folder, "--exit-interval", HELD + 1, "--nan-policy", "skip"]
    told = launch(warm, other, work, *skipping, SPOIL=f"nan@step={HELD + 1},point=loss")
    assert f"at iteration {HELD}" in told
    expected = trimmed(tensors(iteration_of(held / run.in_layout(run.layout).folder)))
    assert differing(expected, trimmed(tensors(iteration_of(work / "on", HELD + 1)))) == []


@pytest.mark.parametrize("family", GENERATED)
@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_a_model_generates_the_recorded_tokens(family: str, format: str, held: Path) -> None:
    run = Run(family, "one", format)
    if run.name in RUNS:
        assert generated(held / run.folder, family) == RECORDED["generated"][family]


@pytest.mark.parametrize("family", MEASURED)
def test_a_model_measures_as_recorded(family: str, held: Path) -> None:
    result = measured(held / Run(family, "one", "torch").folder, family, held)
    assert numbers(result) == pytest.approx(numbers(RECORDED["measured"][family]), rel=1e-4)


def numbers(result: Any) -> dict[str, float]:
    """The figures of a result, however nested."""
    return {name: value for name, value in leaves(result) if value is not None}
