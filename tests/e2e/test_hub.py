"""`hf:ORG/NAME` and `megalith push`, against a small Hub on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from megalith.data.indexed import IndexedDataset

from ..unit.checkpoint.huggingface_folders import write_folder
from .fake_hub import FakeHub, running

RUN = """
import contextlib, io, json, sys
from megalith.cli.main import main
results = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def run(hub: FakeHub, home: Path, *commands: list[str], **environ: str) -> list[tuple[int, str, str]]:
    """Run command lines in one process that knows this hub; return exit code, stdout and stderr of each."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_test"}
    settings |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environ}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(commands), capture_output=True, text=True, env=settings
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder)
    words = {"</s>": 0, **{f"w{number}": number for number in range(1, 35)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


def test_names_of_the_hub_are_fetched(model: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    code = {"modeling_own.py": b"raise SystemExit", "pytorch_model.bin": b"a pickle", "original/a.safetensors": b"x"}
    data = {"README.md": b"about", "data/train.jsonl": b'{"text": "w1 w2"}\n', "data/test.jsonl": b'{"text": "w3"}\n'}
    hub = FakeHub(
        {
            "models/org/model": files | code,
            "models/org/pickles": {"config.json": files["config.json"], **code},
            "models/org/gated": (403, "GatedRepo"),
            "models/org/private": (401, "RepoNotFound"),
            "datasets/org/data": data,
        }
    )
    home, out = tmp_path / "home", str(tmp_path / "out")
    flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "hf:org/model"]
    prepare = ["preprocess", "--input", "hf:org/data@v1", "--output-prefix", out, *flags]
    one = ["preprocess", "--input", "hf:org/data/data/test.jsonl", "--output-prefix", out + "1", *flags]
    refused = {
        "hf:org/gated": "org/gated",
        "hf:org/private": "HF_TOKEN",
        "hf:org/missing": "org/missing",
        "hf:org/model@v9": "revision",
        "hf:org/pickles": "safetensors",
        "hf:a/b/c/d": "hf:ORG/NAME",
    }
    with running(hub):
        found = run(hub, home, prepare, one, *(["generate", name, "--prompt", "w5"] for name in refused))
        assert [code for code, *_ in found] == [0] * 2 + [2] * len(refused), found
        for (name, part), (_, _, err) in zip(refused.items(), found[2:], strict=True):
            assert name in err and part in err
        assert [ids.tolist() for ids in IndexedDataset(f"{out}_text_document")[:]] == [[1, 2]]
        assert [ids.tolist() for ids in IndexedDataset(f"{out}1_text_document")[:]] == [[3]]
        assert not [path for path in hub.asked if path.endswith((".py", ".bin", "README.md", "a.safetensors"))]
        hub.asked.clear()
        bare = ["preprocess", "--input", "org/data", "--output-prefix", out, *flags[:-1], "org/unknown"]
        absent = ["generate", "hf:org/absent", "--prompt", "w5"]
        saved = ["config", "--save", "hf:org/model"]
        offline = run(hub, home, [*prepare, "--restart"], absent, bare, saved, HF_HUB_OFFLINE="1")
        assert [code for code, *_ in offline] == [0, 2, 2, 2], offline
        assert "HF_HUB_OFFLINE" in offline[1][2] and "hf:org/data" in offline[2][2] and "--save" in offline[3][2]
        assert not hub.asked


@pytest.mark.full
def test_a_fetched_model_is_that_of_the_folder(model: Path, tmp_path: Path) -> None:
    say = ["--prompt", "w5", "--max-new-tokens", "2", "--device", "cpu"]
    hub = FakeHub({"models/org/model": {path.name: path.read_bytes() for path in model.iterdir()}})
    with running(hub):
        fetched, local = run(hub, tmp_path, ["generate", "hf:org/model@v1", *say], ["generate", str(model), *say])
    assert fetched[:2] == local[:2] and fetched[0] == 0 and fetched[1]


def test_push(model: Path, tmp_path: Path) -> None:
    hub, folder = FakeHub({"models/org/new": {}}), tmp_path / "exported"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "optimizer.pt").write_bytes(b"no model")
    with running(hub):
        pushed, refused = run(
            hub, tmp_path / "home", ["push", str(folder), "org/new"], ["push", str(tmp_path), "org/new"]
        )
    assert pushed[0] == 0 and "/org/new/commit/" in pushed[1], pushed
    assert "optimizer.pt" in pushed[2]
    assert hub.pushed == {path.name: path.read_bytes() for path in model.iterdir()}
    assert refused[0] == 2 and str(tmp_path) in refused[2]
