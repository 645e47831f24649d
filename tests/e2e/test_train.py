"""`pretrain_gpt.py` as users start it: their launchers, what they see, what lies in the run folder afterwards."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.checkpoint import DirectoryStore
from megalith.tokenizers import train_byte_level_bpe
from megalith.train.metrics import read_metrics

from .small_run import on_text
from .test_resume import MODEL, command
from .warm import WarmProcess, free_port

SHORT = ["--train-iters", 3, "--save-interval", 3, "--eval-interval", 3]

LAUNCHERS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "1", "--nnodes", "1"],
    # It passes --local-rank on to the script.
    "torch.distributed.launch": ["-m", "torch.distributed.launch", "--nproc_per_node", "1"],
}


@pytest.mark.parametrize(
    "launcher",
    [
        "python",
        # test_signals and test_layouts start torchrun too, tests/unit/config read what torch.distributed.launch adds
        *(pytest.param(name, marks=pytest.mark.full) for name in LAUNCHERS if name != "python"),
    ],
)
def test_every_launcher(repository: Path, tmp_path: Path, launcher: str) -> None:
    save = tmp_path / "c"
    words = on_text(tmp_path, command(save, *SHORT, "--distributed-backend", "nccl", "--device", "cpu"))
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "PYTHONPATH")}
    port = ["--master_port", str(free_port())] if LAUNCHERS[launcher] else []
    finished = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], *port, str(repository / "pretrain_gpt.py"), *map(str, words)],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert "--distributed-backend nccl becomes gloo" in finished.stdout
    assert finished.stdout.count("number of nan iterations:   0 |") == 3
    assert DirectoryStore(save).latest() == 3
    if launcher == "python":
        assert finished.stderr == ""


def test_one_screen_of_start_up(warm: WarmProcess, tmp_path: Path) -> None:
    text = warm.run(command(tmp_path / "c", *SHORT), tmp_path).text
    start_up = text[: text.index("[before the start of training step]")].splitlines()
    assert len(start_up) <= 30
    order = (
        "using world size: 1, data-parallel size: 1",
        "using torch.float32 for parameters ...",
        "setting number of microbatches to constant 2",
        "> building NullTokenizer tokenizer ...",
        " > padded vocab (size: 100) with 4 dummy tokens (new size: 104)",
        "> setting random seeds to 1234 ...",
        "[after megatron is initialized] datetime: ",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): ",
        "> learning rate decay style: cosine",
        "WARNING: could not find the metadata file",
        "[after model, optimizer, and learning rate scheduler are built] datetime: ",
        " > datasets target sizes (minimum size):",
        "[after dataloaders are built] datetime: ",
    )
    places = [next(n for n, line in enumerate(start_up) if line.startswith(wanted)) for wanted in order]
    assert places == sorted(places)


def test_the_run_folder(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    text = warm.run(command(save, *SHORT, "--tensorboard-dir", tmp_path / "t"), tmp_path).text
    log = (save / "run/log.txt").read_text()
    assert all(record["max_resident_bytes"] > 1e7 for record in read_metrics(save / "run/metrics.jsonl")[2::2][:3])
    # The log has the command, the complete arguments and every line of the screen.
    assert "python pretrain_gpt.py --num-layers 2" in log
    assert "  num_layers ...................................... 2\n" in log
    assert all(line in log for line in text.splitlines())
    assert json.loads((save / "run/config.json").read_text())["model"]["hidden_size"] == 16
    records = read_metrics(save / "run/metrics.jsonl")
    assert [record["event"] for record in records] == [
        *("start", "step", "throughput", "step", "throughput", "step", "throughput"),
        *("evaluation", "save", "evaluation", "evaluation"),
    ]
    assert list((tmp_path / "t").glob("events.out.tfevents.*"))


def test_without_save_the_run_folder_is_under_runs(warm: WarmProcess, tmp_path: Path) -> None:
    finished = warm.run([*MODEL, *SHORT[:2], "--eval-interval", 3], tmp_path)
    assert finished.code == 0, finished.text
    (folder,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {"config.json", "log.txt", "metrics.jsonl"}


def test_without_save_a_working_folder_that_cannot_be_written_does_not_matter(
    warm: WarmProcess, tmp_path: Path
) -> None:
    (tmp_path / "runs").write_text("a file where the folder would be")
    finished = warm.run([*MODEL, *SHORT[:2], "--eval-interval", 3], tmp_path)
    assert finished.code == 0, finished.text
    folder = Path(finished.text.split("metrics and the full log are in ")[1].splitlines()[0])
    assert folder.name.startswith("megalith-run-") and (folder / "metrics.jsonl").exists()
    shutil.rmtree(folder)


def test_eval_iters_0_never_evaluates(warm: WarmProcess, tmp_path: Path) -> None:
    words = command(tmp_path / "c", *SHORT)
    words[words.index("--eval-iters") + 1] = 0
    finished = warm.run(words, tmp_path)
    assert finished.code == 0 and "validation" not in finished.text.split("training ...")[1]


def test_a_second_run_into_the_same_folder_is_refused(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    first = warm.start(command(save, "--train-iters", 100000, "--save-interval", 100000), tmp_path)
    first.wait_for("iteration        1/")
    second = warm.run(command(save, *SHORT), tmp_path)
    assert second.code == 4 and f"process {first.pid}" in second.text
    first.send(signal.SIGTERM)
    assert first.finish().code == 75


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir"])
def test_a_folder_that_cannot_be_written_is_named_with_its_flag(warm: WarmProcess, tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("")
    words = [*MODEL, *SHORT, "--save", tmp_path / "c"]
    refused = warm.run([*words, flag, tmp_path / "file" / "below"], tmp_path)
    assert refused.code == 2, refused.text
    assert f"{flag} {tmp_path}/file/below: " in refused.text and os.strerror(errno.ENOTDIR) in refused.text
    assert "Traceback" not in refused.text and "building" not in refused.text


@pytest.mark.parametrize(
    "words", [["--distributed-backend=nccl"], ["--distributed_backend", "nccl"], ["--config", "recipe.toml"], []]
)
def test_nccl_without_a_gpu_gives_one_line_where_it_was_asked_for(
    warm: WarmProcess, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "recipe.toml").write_text('[parallel]\ndistributed_backend = "nccl"\n')
    finished = warm.run([*MODEL, "--train-iters", 3, "--device", "cpu", *words], tmp_path)
    assert finished.text.count("--distributed-backend nccl becomes gloo") == (1 if words else 0)


def test_a_fault_that_is_set_is_said(warm: WarmProcess, tmp_path: Path) -> None:
    finished = warm.run([*MODEL, "--train-iters", 3], tmp_path, MEGALITH_FAULT="kill9@step=9,point=data")
    assert finished.code == 0 and re.search("(?m)^WARNING: .*MEGALITH_FAULT=kill9@step=9,point=data ", finished.text)


def test_a_fault_that_is_no_fault_is_refused(warm: WarmProcess, tmp_path: Path) -> None:
    refused = warm.run(command(tmp_path / "c", *SHORT), tmp_path, MEGALITH_FAULT="explode")
    assert refused.code == 2 and "MEGALITH_FAULT=explode " in refused.text


def test_missing_checkpoint_can_be_an_error(warm: WarmProcess, tmp_path: Path) -> None:
    refused = warm.run(command(tmp_path / "c", *SHORT, "--exit-on-missing-checkpoint"), tmp_path)
    assert refused.code == 4 and f"--load {tmp_path / 'c'} " in refused.text
    assert "--exit-on-missing-checkpoint" in refused.text


def test_missing_data_is_a_message(warm: WarmProcess, tmp_path: Path) -> None:
    words = [*MODEL, "--train-iters", 3]
    words[words.index("--mock-data")] = "--data-path=nowhere"
    refused = warm.run(words, tmp_path)
    assert refused.code == 2 and "nowhere" in refused.text and "Traceback" not in refused.text


def test_a_run_whose_steps_were_all_skipped_says_so(warm: WarmProcess, tmp_path: Path) -> None:
    """fp16 overflows in every step of the first run, long before its loss scale is small enough."""
    vocab, merges = train_byte_level_bpe(["the king and the queen"], 300, tmp_path)
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges]
    words = [*MODEL[: MODEL.index("--tokenizer-type")], *tokenizer, *SHORT, "--eval-iters", 0, "--num-workers", 0]
    scale = ["--fp16", "--initial-loss-scale", 2.0**40]
    in_vain = warm.run([*words, "--save", tmp_path / "c", *scale], tmp_path)
    assert in_vain.code == 0 and re.search(r"(?m)^WARNING: .*\b3 steps\b.*\bskipped\b", in_vain.text), in_vain.text
    assert "applied step" not in in_vain.text and "megalith generate" not in in_vain.text
    trained = warm.run([*words, "--save", tmp_path / "d"], tmp_path)
    steps = [record for record in read_metrics(tmp_path / "d" / "run" / "metrics.jsonl") if record["event"] == "step"]
    assert f"loss {steps[0]['loss']:.4g} -> {steps[-1]['loss']:.4g} in 3 applied steps\n" in trained.text
    assert "all 3 steps" not in trained.text and "megalith generate" in trained.text
