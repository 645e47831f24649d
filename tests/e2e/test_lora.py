"""LoRA as typed: trained beside a checkpoint, resumed, continued in another layout, written as PEFT's and merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalith.api import load
from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.base import BASE
from megalith.checkpoint.files.commit import claimed
from megalith.cli.main import main

from .small_run import MODEL, write_text
from .test_serve import started
from .warm import WarmProcess

PLAIN = ["--swiglu", "--ffn-hidden-size", 24, "--normalization", "RMSNorm", "--position-embedding-type", "rope"]
LLAMA = [*MODEL, *PLAIN, "--disable-bias-linear", "--group-query-attention", "--num-query-groups", 2]
LORA = ["--lora-rank", 2, "--lora-dropout", 0.1]


def tensors(save: Path, iteration: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    store = DirectoryStore(save)
    held = store.contents(iteration).tensors
    found = {key: torch.empty(one.shape, dtype=one.dtype) for key, one in held.items()}
    store.load(
        iteration, CheckpointContent([Chunk(key, one, (0,) * one.ndim, one.shape) for key, one in found.items()])
    )
    return found


@pytest.fixture(scope="module")
def folder(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint `base` and the adapters of four steps in one go, `whole`."""
    folder = tmp_path_factory.mktemp("lora")
    write_text(folder)
    base = [*LLAMA, "--data-path", "text", "--train-iters", 2, "--save", "base", "--save-interval", 2]
    done = warm.run(base, folder)
    assert done.code == 0, done.text
    done = warm.run(command("whole", "--pretrained-checkpoint", "base"), folder)
    assert done.code == 0, done.text
    return folder


def command(save: str, *more: object) -> list[object]:
    of_run = ["--data-path", "text", "--train-iters", 4, "--load", save, "--save", save, "--save-interval", 2]
    return [*LLAMA, *LORA, *of_run, *more]


def test_a_checkpoint_holds_adapters_alone_and_resumes_bit_for_bit(warm: WarmProcess, folder: Path) -> None:
    before = {path: path.read_bytes() for path in (folder / "base").rglob("*.distcp")}
    done = warm.run(command("halves", "--pretrained-checkpoint", "base", "--exit-interval", 2), folder)
    assert done.code == 0, done.text
    done = warm.run(command("halves"), folder)  # the checkpoint says where its base is
    assert done.code == 0, done.text
    whole, halves = tensors(folder / "whole", 4), tensors(folder / "halves", 4)
    assert whole.keys() == halves.keys() and all(".adapter.lora_" in key for key in whole)
    assert all(torch.equal(whole[key], halves[key]) for key in whole)
    moved = [key for key, tensor in whole.items() if key.startswith("decoder") and tensor.any()]
    assert len(moved) == 8, "A and B of four linear layers"
    assert before == {path: path.read_bytes() for path in before}
    record = json.loads((folder / "whole/iter_0000004/manifest.json").read_text())[BASE]
    assert record["path"] == str(folder / "base/iter_0000002") and record["hash"]


def test_any_layout_continues_the_adapters(warm: WarmProcess, folder: Path) -> None:
    shutil.copytree(folder / "whole", folder / "other")
    for layout in (["--tensor-model-parallel-size", 2, "--sequence-parallel"], ["--pipeline-model-parallel-size", 2]):
        words = command("other", *layout, "--skip-train", "--eval-iters", 1)
        for done in warm.run_ranks(2, words, folder):
            assert done.code == 0, done.text


def test_a_run_from_adapters_resumes_by_the_same_command(warm: WarmProcess, folder: Path) -> None:
    words = command("later", "--pretrained-checkpoint", "whole", "--exit-interval", 2)
    first, second = warm.run(words, folder), warm.run(words, folder)
    assert first.code == second.code == 0, second.text
    assert "at iteration 2" in second.text
    record = json.loads((folder / "later/iter_0000004/manifest.json").read_text())[BASE]
    assert record == json.loads((folder / "whole/iter_0000004/manifest.json").read_text())[BASE]


def test_another_base_is_refused(warm: WarmProcess, folder: Path) -> None:
    done = warm.run(
        [*LLAMA, "--data-path", "text", "--train-iters", 3, "--save", "second", "--save-interval", 3], folder
    )
    assert done.code == 0, done.text
    done = warm.run(command("whole", "--pretrained-checkpoint", "second"), folder)
    assert done.code == 4 and "second" in done.text and "hash" in done.text
    (folder / "base").rename(folder / "moved")
    done = warm.run(command("whole"), folder)
    assert done.code == 4 and str(folder / "base") in done.text and "--pretrained-checkpoint" in done.text
    done = warm.run(command("whole", "--pretrained-checkpoint", "moved"), folder)
    assert done.code == 0, done.text
    (folder / "moved").rename(folder / "base")
    done = warm.run(command("base"), folder)
    assert done.code == 4 and "--pretrained-checkpoint" in done.text
    done = warm.run(command("whole", "--lora-alpha", 7), folder)
    assert done.code == 4 and "--lora-alpha: 32.0" in done.text and "7.0 here" in done.text
    done = warm.run([*LLAMA, "--data-path", "text", "--train-iters", 4, "--load", "whole"], folder)
    assert done.code == 4 and "--lora-rank 2" in done.text and "merge-lora" in done.text


def test_a_server_has_them_beside_their_model(
    warm: WarmProcess, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {name: load(str(folder / name)).generate("3 5 7", max_new_tokens=4, temperature=0).token_ids
              for name in ("base", "whole")}  # fmt: skip
    shutil.copytree(folder / "whole", folder / "spoken")
    for iteration in (folder / "spoken").glob("iter_*"):
        (iteration / "chat_template.jinja").write_text("{{ messages[0].content }}")
    flags = ["--lora", f"tuned={folder / 'whole'}", f"spoken={folder / 'spoken'}", "--lora-dir", folder]
    with started(warm, [folder / "base", "--port", 0, *flags]) as server:
        loaded = {"lora_name": "again", "lora_path": "whole"}
        assert server.ask("POST", "/v1/load_lora_adapter", loaded)[0] == 200
        for name, model in (("base", "base"), ("whole", "base:tuned"), ("whole", "base:again")):
            body = {"model": model, "prompt": [3, 5, 7], "max_tokens": 4, "temperature": 0}
            status, answer = server.ask("POST", "/v1/completions", body)
            assert status == 200, answer
            found = json.loads(answer)
            ids = [int(text) for text in found["choices"][0]["text"].split()]
            assert ids == [one for one in wanted[name] if one < 99], model
        assert "adapter tuned: " in server.text
        models = json.loads(server.ask("GET", "/v1/models")[1])["data"]
        assert [one["id"] for one in models if one["chat_template"]] == ["base:spoken"]
        said = {"model": "base:spoken", "messages": [{"role": "user", "content": "3 5 7"}], "max_tokens": 4}
        assert server.ask("POST", "/v1/chat/completions", said)[0] == 200
    assert main(["serve", str(folder / "whole"), "--port", "0", "--lora", f"a={folder / 'whole'}"]) == 2
    assert "--lora" in capsys.readouterr().err
    other = ["serve", str(folder / "second"), "--port", "0", "--lora", f"a={folder / 'whole'}"]
    assert main(other) == 4, "not the model that they were trained with"
    assert "hash" in capsys.readouterr().err


def test_merged_exported_and_beside_write_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters, hf, peft = folder / "whole", tmp_path / "hf", tmp_path / "peft"
    assert main(["checkpoint", "merge-lora", str(adapters), str(tmp_path / "merged")]) == 0
    assert main(["checkpoint", "export", str(folder / "base"), str(hf), "--no-compare"]) == 0
    spoken = shutil.copytree(adapters / "iter_0000004", tmp_path / "spoken/iter_0000004") / "chat_template.jinja"
    spoken.write_text("{{ messages[0].content }}")  # that of the fine-tuning, as the model has none
    assert main(["checkpoint", "export", str(spoken.parent), str(peft), "--to", "peft"]) == 0
    assert (peft / spoken.name).read_bytes() == spoken.read_bytes()
    config = json.loads((peft / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 32, 0.1)
    assert len(load_file(peft / "adapter_model.safetensors")) == 2 * 7 * 2
    config["base_model_name_or_path"] = str(hf)
    (peft / "adapter_config.json").write_text(json.dumps(config))
    ids = torch.arange(8)[None]
    beside, merged = (load(str(path)).trained.model(ids) for path in (adapters, tmp_path / "merged"))
    base = load(str(folder / "base")).trained.model(ids)
    assert torch.equal(beside, merged)
    assert (beside - base).abs().max() > 1e-3
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": " ".join(str(3 * n % 99) for n in range(60))}))
    losses = []
    for path in (adapters, tmp_path / "merged", folder / "base"):
        words = ["--task", "text", "--data", str(tmp_path / "text.jsonl"), "--json", str(tmp_path / "found.json")]
        assert main(["evaluate", str(path), *words]) == 0
        losses.append(json.loads((tmp_path / "found.json").read_text())["result"]["mean"])
    assert losses[0] == losses[1] != losses[2]
    store, read_back = tensors(adapters, 4), tensors(peft, 0)
    assert all(torch.equal(store[key], read_back[key]) for key in read_back) and len(read_back) == 8
    for path, model in ((adapters, folder / "base/iter_0000002"), (peft, hf)):
        capsys.readouterr()
        assert main(["checkpoint", "inspect", str(path)]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert {("lora_rank", "2"), ("lora_alpha", "32.0")} <= {tuple(row) for row in rows}
        assert any(row[:2] == ["adapters", "of"] and "".join(row[2:]) in str(model) for row in rows)
    for form in ("hf", "gguf"):
        assert main(["checkpoint", "export", str(adapters), str(tmp_path / "x"), "--to", form]) == 4
        assert "merge-lora" in capsys.readouterr().err
    assert main(["checkpoint", "merge-lora", str(folder / "base"), str(tmp_path / "y")]) == 4


def test_a_merge_is_refused_while_a_run_saves_into_its_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with claimed(tmp_path):
        assert main(["checkpoint", "merge-lora", str(folder / "whole"), str(tmp_path)]) == 4
        assert str(tmp_path) in capsys.readouterr().err and not list(tmp_path.glob("iter_*"))
    assert main(["checkpoint", "merge-lora", str(folder / "whole"), str(tmp_path)]) == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["iter_0000004", "latest_checkpointed_iteration.txt"]


def test_a_merge_leaves_adapters_and_model_as_they_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for name in ("whole", "base") for path in (folder / name).rglob("*.*")}
    (tmp_path / "link").symlink_to(folder / "base")
    for place in (folder / "whole", folder / "base", tmp_path / "link"):
        assert main(["checkpoint", "merge-lora", str(folder / "whole"), str(place), "--replace"]) == 4
        assert str(place) in capsys.readouterr().err
    assert before == {path: path.read_bytes() for name in ("whole", "base") for path in (folder / name).rglob("*.*")}


@pytest.mark.parametrize("file", ["__0_0.distcp", "common.pt", "manifest.json"])
def test_a_merge_takes_no_older_adapters_for_damaged_ones(
    file: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = shutil.copytree(folder / "whole", tmp_path / "save")
    path = save / "iter_0000004" / file
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)
    out = tmp_path / "out"
    assert main(["checkpoint", "merge-lora", str(save), str(out)]) == 4
    assert file in capsys.readouterr().err and not out.exists()
    assert main(["checkpoint", "merge-lora", str(save), str(out), "--iteration", "2"]) == 0
