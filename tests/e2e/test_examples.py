"""The examples run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from megalith.tokenizers import train_byte_level_bpe

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_simple_train_loop(repository: Path, tmp_path: Path) -> None:
    path = repository / "examples/simple_train_loop.py"
    assert len(path.read_text().splitlines()) < 80
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert "every weight is equal" in done.stdout


def test_train_llama_with_the_paths_edited(repository: Path, tmp_path: Path) -> None:
    text = "to be or not to be that is the question\n\n" * 400
    (tmp_path / "text.txt").write_text(text)
    vocab, merges = train_byte_level_bpe([text], 280, tmp_path)
    preprocess = [sys.executable, str(repository / "tools/preprocess_data.py"), "--input", str(tmp_path / "text.txt")]
    words = ["--output-prefix", str(tmp_path / "data"), "--vocab-file", str(vocab), "--merge-file", str(merges)]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--workers", "1"]
    subprocess.run([*preprocess, *words], check=True, capture_output=True, env=ENVIRONMENT)
    script = (repository / "examples/train_llama.sh").read_text()
    edits = {"DATA": "data_text_document", "VOCAB": vocab.name, "MERGES": merges.name, "CHECKPOINTS": "saved"}
    for name, value in edits.items():
        script = re.sub(rf"^{name}=.*$", f"{name}={tmp_path / value}", script, flags=re.MULTILINE)
    script = script.replace('HERE=$(cd "$(dirname "$0")/.." && pwd)', f"HERE={repository}")
    script = script.replace("torchrun", f"{sys.executable} -m torch.distributed.run --master_port 0")
    smaller = shlex.split(
        "--num-layers 1 --hidden-size 48 --seq-length 32 --train-iters 2 --eval-iters 0 --log-interval 1"
    )
    done = subprocess.run(["bash", "-c", script, "train", *smaller], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        2/" in done.stdout
    assert (tmp_path / "saved/iter_0000002/manifest.json").exists()
