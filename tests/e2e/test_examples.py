"""The examples run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.tokenizers import train_byte_level_bpe

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def _train_loop(repository: Path, folder: Path, ranks: int, flags: str) -> list[str]:
    """What the train loop of the examples prints on so many processes, torchrun's own lines left out."""
    words = [str(repository / "examples/simple_train_loop.py"), *shlex.split(flags)]
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *words]
    done = subprocess.run([sys.executable, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_simple_train_loop_prints_the_same_losses_in_every_layout(repository: Path, tmp_path: Path) -> None:
    assert len((repository / "examples/simple_train_loop.py").read_text().splitlines()) < 80
    alone = _train_loop(repository, tmp_path, 1, "")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d{4}),", "\n".join(alone))]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert alone[5:] == ["saved and loaded: every weight is equal; the checkpoint is in checkpoints/simple"]
    saved = tmp_path / "checkpoints/simple/iter_0000005"
    assert {file.name[:4] for file in saved.glob("*.distcp")} == {"__0_"}
    for flags in ("--tp 2", "--pp 2"):
        assert _train_loop(repository, tmp_path, 2, flags) == alone
        assert {file.name[:4] for file in saved.glob("*.distcp")} == {"__0_", "__1_"}, "both ranks write their part"


def _run_script(repository: Path, folder: Path, name: str, smaller: str) -> str:
    """Run a script of the examples with its paths edited to a small corpus, and with smaller sizes; what it prints."""
    text = "to be or not to be that is the question\n\n" * 400
    (folder / "text.txt").write_text(text)
    vocab, merges = train_byte_level_bpe([text], 280, folder)
    preprocess = [sys.executable, str(repository / "tools/preprocess_data.py"), "--input", str(folder / "text.txt")]
    words = ["--output-prefix", str(folder / "data"), "--vocab-file", str(vocab), "--merge-file", str(merges)]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--workers", "1"]
    subprocess.run([*preprocess, *words], check=True, capture_output=True, env=ENVIRONMENT)
    script = (repository / "examples" / name).read_text()
    edits = {"DATA": "data_text_document", "VOCAB": vocab.name, "MERGES": merges.name, "CHECKPOINTS": "saved"}
    for variable, value in edits.items():
        script = re.sub(rf"^{variable}=\S+", f"{variable}={folder / value}", script, flags=re.MULTILINE)
    script = script.replace('HERE=$(cd "$(dirname "$0")/.." && pwd)', f"HERE={repository}")
    script = script.replace("torchrun", f"{sys.executable} -m torch.distributed.run --standalone")
    command = ["bash", "-c", script, "train", *shlex.split(smaller)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_llama_with_the_paths_edited(repository: Path, tmp_path: Path) -> None:
    smaller = "--num-layers 1 --hidden-size 48 --seq-length 32 --train-iters 2 --eval-iters 0 --log-interval 1"
    printed = _run_script(repository, tmp_path, "train_llama.sh", smaller)
    assert "iteration        2/" in printed
    assert (tmp_path / "saved/iter_0000002/manifest.json").exists()


@pytest.mark.parametrize("exchange", ["p2p", "a2a"])
def test_long_context_with_the_paths_edited(repository: Path, tmp_path: Path, exchange: str) -> None:
    smaller = "--num-layers 1 --hidden-size 48 --seq-length 64 --train-iters 2 --eval-iters 0 --log-interval 1"
    printed = _run_script(repository, tmp_path, "long_context.sh", f"{smaller} --cp-comm-type {exchange}")
    assert "context-parallel size: 2" in printed
    assert "iteration        2/" in printed
    assert (tmp_path / "saved/iter_0000002/manifest.json").exists()
