"""From a text to answers with a tokenizer of characters, through the commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from megalith.checkpoint import DirectoryStore
from megalith.train.metrics import read_metrics

from .warm import WarmProcess

TEXT = "der könig sprach: zähle 中文 und schweig\n" * 60
MODEL = [
    *("--num-layers", 1, "--hidden-size", 32, "--num-attention-heads", 2, "--seq-length", 16),
    *("--max-position-embeddings", 16, "--micro-batch-size", 8, "--lr", 1e-2, "--lr-decay-style", "constant"),
    *("--train-data-path", "train_text_document", "--valid-data-path", "valid_text_document", "--full-validation"),
    *("--tokenizer-type", "CharacterTokenizer", "--vocab-file", "train_vocab.json"),
    *("--make-vocab-size-divisible-by", 1, "--hidden-dropout", 0, "--attention-dropout", 0, "--num-workers", 0),
]


@pytest.fixture(scope="module")
def data(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with training and validation text, preprocessed with the vocabulary of the former."""
    folder = tmp_path_factory.mktemp("characters")
    # The order of the validation text is another one, so that its loss rises as the training text is learnt by heart.
    for name, text in (("train", TEXT), ("valid", TEXT[:200][::-1])):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        words = ["--input", f"{name}.txt", "--one-document-per-file", "--output-prefix", name, "--workers", 1]
        vocabulary = ["--vocab-file", "train_vocab.json"] if name == "valid" else []
        done = warm.run([*words, "--tokenizer-type", "CharacterTokenizer", *vocabulary], folder, command="preprocess")
        assert done.code == 0, done.text
    return folder


def test_a_model_of_characters_answers_from_its_checkpoint_alone(warm: WarmProcess, data: Path, tmp_path: Path) -> None:
    words = [*MODEL, "--train-iters", 60, "--eval-interval", 60, "--save", tmp_path / "c", "--save-interval", 60]
    done = warm.run(words, data)
    assert done.code == 0, done.text
    assert f"padded vocab (size: {len(set(TEXT))}) with 0 dummy tokens" in done.text
    (proposed,) = re.findall(r"^try it: megalith generate (.*)$", done.text, re.MULTILINE)
    tried = warm.run([*shlex.split(proposed), "--max-new-tokens", 1], data, command="generate")
    assert tried.code == 0, tried.text
    alone = tmp_path / "moved"
    shutil.move(tmp_path / "c", alone)
    answer = warm.run([alone, "--prompt", "der kö", "--max-new-tokens", 3, "--greedy"], tmp_path, command="generate")
    assert answer.code == 0 and "der könig" in answer.text, answer.text
    unknown = warm.run([alone, "--prompt", "X"], tmp_path, command="generate")
    assert unknown.code != 0 and "U+0058" in unknown.text
    (tmp_path / "valid.txt").write_text(TEXT[:200], encoding="utf-8")
    words = [alone, "--task", "text", "--data", "valid.txt", "--overlapping-eval", 16, "--json", "result.json"]
    measured = warm.run(words, tmp_path, command="evaluate")
    assert measured.code == 0, measured.text


def test_early_stopping_keeps_the_best_checkpoint_and_is_resumed_alike(
    warm: WarmProcess, data: Path, tmp_path: Path
) -> None:
    common = ["--train-iters", 200, "--eval-interval", 5, "--save-interval", 50, "--keep-last", 1, "--keep-best"]
    outcomes = []
    for name, stops in (("whole", ()), ("parts", (12, 24))):
        save = tmp_path / name
        words = [*MODEL, *common, "--early-stopping-patience", 3, "--save", save, "--load", save]
        for stop in stops:
            assert warm.run([*words, "--exit-interval", stop], data).code == 0
        done = warm.run(words, data)
        assert done.code == 0, done.text
        (stopped,) = re.findall(r"early stopping at iteration (\d+): .* of iteration (\d+),", done.text)
        last, best = map(int, stopped)
        assert last == best + 15 and f"--iteration {best}" in done.text
        store = DirectoryStore(save)
        assert store.latest() == last and store.folder(best).is_dir()
        assert len([path for path in save.glob("iter_*") if path.is_dir()]) == 2
        losses = {
            r["iteration"]: r["loss"]
            for r in read_metrics(save / "run" / "metrics.jsonl")
            if r["event"] == "evaluation"
        }
        assert min(losses, key=losses.__getitem__) == best and max(losses) == last
        outcomes.append((last, best, losses))
        again = warm.run(words, data)
        assert again.code == 0 and f"early stopping at iteration {last}:" in again.text
        assert store.latest() == last
    assert outcomes[0] == outcomes[1]
    manifest = json.loads((store.folder(best) / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["tokenizer"]["class"] == "CharacterTokenizer"
