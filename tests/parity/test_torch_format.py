"""Megatron's per-rank files against what it wrote itself (F35; goldens `pretrain/*_torch`).

The reference side takes tensors out of the files' own dicts by hand, or from the `torch_dist` golden of the same run.
Files of before Megatron core are made here from a golden: other names, nesting, order and rows, the same numbers.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.content import CheckpointContent, Chunk
from megalith.checkpoint.files.folder import CheckpointFolder
from megalith.checkpoint.files.safe_loading import ForeignEnum, load_tensors_and_plain_data
from megalith.checkpoint.formats.megatron_names import flattened
from megalith.checkpoint.formats.per_rank_layout import target_of
from megalith.checkpoint.sources.adapters import Adapter, WeightsOnly
from megalith.checkpoint.sources.per_rank import PerRankSource
from megalith.checkpoint.sources.source import Source, open_source
from megalith.checkpoint.writers.per_rank import write_per_rank
from megalith.cli.main import main
from megalith.errors import CheckpointError

from .goldens import Goldens
from .test_pretrain import LAST_DIGIT, NORM, parse_iterations

WRITTEN_BY_MEGATRON = ["gpt2_torch", "gpt2_tp2_torch", "gpt2_pp2_torch", "gpt2_distopt_torch", "llama_torch"]
OF_THE_PROCESS = ("rank", "local_rank")
HEADS, HEAD_SIZE = 4, 4
MODEL = "model_optim_rng.pt"


@pytest.fixture
def unpack(golden: Goldens, tmp_path: Path) -> Callable[..., Path]:
    """Lays the checkpoint of a golden run into a folder of its own; returns the folder of its last iteration."""

    def lay(name: str, iteration: int = 10) -> Path:
        golden.case("pretrain", name)
        with tarfile.open(golden.path(f"pretrain/{name}/ckpt.tar.xz")) as archive:
            archive.extractall(tmp_path / name, filter="data")
        return tmp_path / name / f"ckpt/iter_{iteration:07d}"

    return lay


def read_all(source: Source) -> dict[str, Tensor]:
    """Every tensor of a source, whole."""
    found = {}
    for key, stored in source.contents().tensors.items():
        tensor = torch.full(stored.shape, -7, dtype=stored.dtype)
        source.read(CheckpointContent([Chunk(key, tensor, (0,) * tensor.ndim, stored.shape)]))
        found[key] = tensor
    return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_torch", "gpt2_tp2_torch"])
def test_it_holds_what_the_other_format_of_the_same_run_holds(unpack: Callable[..., Path], name: str) -> None:
    source, other = open_source(unpack(name)), open_source(unpack(f"{name}_dist"))
    assert source.format == "torch"
    assert_same(read_all(source), read_all(other))
    ours, theirs = source.common(), other.common()
    assert {**ours, "args": 0, "optimizer": 0} == {
        key: value for key, value in {**theirs, "args": 0, "optimizer": 0}.items() if key != "content_metadata"
    }
    assert ours["optimizer"] == theirs["optimizer"]
    assert {key for key in other.contents().objects if "rng_state" in key} == source.contents().objects


@pytest.mark.parametrize("name", ["gpt2_torch", "gpt2_pp2_torch"])
def test_every_tensor_of_the_file_is_where_its_name_says(unpack: Callable[..., Path], name: str) -> None:
    path = unpack(name)
    found = read_all(open_source(path))
    norms = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    compared = 0
    for stage, file in enumerate(sorted(path.glob(f"*/{MODEL}"))):
        body = load_tensors_and_plain_data(file)
        weights = {key: value for key, value in body["model"].items() if value is not None}
        wide = [key for key, value in weights.items() if value.ndim == 2]
        flat = [key for key, value in weights.items() if value.ndim == 1]
        states = {key: body["optimizer"]["state"][number] for number, key in enumerate([*wide, *flat])}
        for key, weight in weights.items():
            stored, here = key, slice(None)
            if match := re.fullmatch(r"decoder\.layers\.(\d)\.(.+)", key):
                stored, here = f"decoder.layers.{match[2]}", slice(int(match[1]) + stage, int(match[1]) + stage + 1)
                for module, fused in norms.items():
                    stored = stored.replace(module, fused)
            if key == "output_layer.weight":
                assert stage == 1 and torch.equal(weight, found["embedding.word_embeddings.weight"])
                continue
            assert torch.equal(found[stored][here].view(weight.shape), weight), key
            for kind in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(
                    found[f"optimizer.state.{kind}.{stored}"][here].view(weight.shape), states[key][kind]
                )
            compared += 1
    assert compared == 28


def test_the_buffers_of_the_distributed_optimizer_are_cut_up(unpack: Callable[..., Path]) -> None:
    """Two replicas add gradients in another order than one: equal but for the last digits."""
    ours, theirs = read_all(open_source(unpack("gpt2_distopt_torch"))), read_all(open_source(unpack("gpt2_torch")))
    assert len(theirs) == 3 * 16
    for key, expected in theirs.items():
        torch.testing.assert_close(ours[key], expected, rtol=1e-4, atol=1e-6)
    for key in (key for key in theirs if not key.startswith("optimizer.")):
        assert torch.equal(ours[f"optimizer.state.fp32_param.{key}"], ours[key])


def test_a_file_that_changed_by_one_byte_is_found_without_a_manifest(unpack: Callable[..., Path]) -> None:
    path = unpack("gpt2_torch")
    assert CheckpointFolder(path).problems() == []
    file = path / "mp_rank_00" / MODEL
    data = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        start = archive.getinfo("model_optim_rng/data/0").header_offset
    data[start + 2000] ^= 1
    file.write_bytes(data)
    (problem,) = CheckpointFolder(path).problems()
    assert str(file) in problem and "model_optim_rng/data/0" in problem
    assert [CheckpointFolder(path).problems(part, 2) for part in (0, 1)] == [[problem], []]


# --- writing ------------------------------------------------------------------------------------------------------


class WithArgs(Adapter):
    """A source with other saved args, and without those values that only Megatron can write."""

    def __init__(self, source: Source, **changes: Any) -> None:
        super().__init__(source)
        self._changes = changes

    def common(self) -> dict[str, Any]:
        common = self.source.common()
        args = {key: value for key, value in vars(common["args"]).items() if not isinstance(value, ForeignEnum)}
        return {**common, "args": Namespace(**{**args, **self._changes})}


def rewritten(source: Source, folder: Path, **changes: Any) -> tuple[PerRankSource, list[str]]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    names = write_per_rank(WithArgs(source, **changes), folder)
    return PerRankSource(folder), names


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two files differ: in types, keys, their order, or a value."""
    if isinstance(theirs, Namespace):
        known = {key: value for key, value in vars(theirs).items() if not isinstance(value, ForeignEnum)}
        return [key for key in known if key not in OF_THE_PROCESS and known[key] != vars(ours)[key]]
    if type(ours) is not type(theirs):
        return [f"{where}: {type(ours)} and {type(theirs)}"]
    if isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return [f"{where}: {list(ours)} and {list(theirs)}"]
        return [line for key in theirs for line in differences(ours[key], theirs[key], f"{where}.{key}")]
    if isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            return [f"{where}: lengths"]
        return [line for a, b in zip(ours, theirs, strict=True) for line in differences(a, b, f"{where}[]")]
    if isinstance(theirs, Tensor):
        equal = ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)
    else:
        equal = bool((ours == theirs).all()) if hasattr(theirs, "shape") else ours == theirs
    return [] if equal else [f"{where}: values"]


@pytest.mark.parametrize("name", WRITTEN_BY_MEGATRON)
def test_what_megatron_wrote_is_written_again(unpack: Callable[..., Path], tmp_path: Path, name: str) -> None:
    path = unpack(name)
    _, files = rewritten(open_source(path), tmp_path / "out")
    assert sorted(files) == sorted(str(file.relative_to(path)) for file in path.rglob("*.pt"))
    for file in files:
        ours, theirs = (load_tensors_and_plain_data(folder / file) for folder in (tmp_path / "out", path))
        assert differences(ours, theirs) == [], file
        with zipfile.ZipFile(tmp_path / "out" / file) as archive:
            assert archive.testzip() is None


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp4_more_ranks_than_groups": {"tensor_model_parallel_size": 4},
    "pp2": {"pipeline_model_parallel_size": 2},
    "tp2_pp2_distributed": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
    },
    "distributed": {"use_distributed_optimizer": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2_torch", "llama_torch", "llama_bf16_torch_dist"])
def test_every_layout_holds_the_same(unpack: Callable[..., Path], tmp_path: Path, name: str, layout: str) -> None:
    source = open_source(unpack(name))
    changes = LAYOUTS[layout]
    written, files = rewritten(source, tmp_path / "out", **changes)
    places = changes.get("tensor_model_parallel_size", 1) * changes.get("pipeline_model_parallel_size", 1)
    assert len(files) == places * (2 if changes.get("use_distributed_optimizer") else 1)
    expected = read_all(source)
    if changes.get("use_distributed_optimizer") and name != "llama_bf16_torch_dist":
        weights = {key: value for key, value in expected.items() if not key.startswith("optimizer.")}
        expected |= {f"optimizer.state.fp32_param.{key}": value for key, value in weights.items()}
    assert_same(read_all(written), expected)
    assert written.common()["optimizer"] == source.common()["optimizer"]
    assert written.problems() == []
    again, _ = rewritten(written, tmp_path / "back", **dict.fromkeys(changes, 1) | {"use_distributed_optimizer": False})
    assert {key: value.tolist() for key, value in read_all(again).items()}.items() >= {
        key: value.tolist() for key, value in read_all(source).items()
    }.items()


def test_virtual_stages(unpack: Callable[..., Path], tmp_path: Path) -> None:
    """Four stages of one layer each, two of them on each rank: chunk c of rank r is stage 2c + r."""
    source = open_source(unpack("gpt2_torch"))
    four = Repeated(source)
    changes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_layers": 4}
    for distributed in (False, True):
        written, _ = rewritten(four, tmp_path / "out", **changes, use_distributed_optimizer=distributed)
        found = read_all(written)
        for key, value in read_all(source).items():
            expected = torch.cat([value, value + 1]) if "decoder.layers" in key else value
            assert torch.equal(found[key], expected), key
        body = load_tensors_and_plain_data(tmp_path / "out/mp_rank_00_001" / MODEL)
        assert [key for key in body if key.startswith("model")] == ["model0", "model1"]
        assert list(body["model0"])[-1] == "decoder.layers.0.mlp.linear_fc2._extra_state"
        assert list(body["model1"])[-2:] == ["output_layer.weight", "output_layer._extra_state"]
        name = "decoder.layers.0.mlp.linear_fc2.weight"
        stored = found["decoder.layers.mlp.linear_fc2.weight"]
        assert torch.equal(body["model0"][name], stored[1]) and torch.equal(body["model1"][name], stored[3])


class Repeated(Adapter):
    """A source with each layer twice, the second time with one added to its numbers."""

    def contents(self) -> Any:
        held = self.source.contents()
        for key, stored in held.tensors.items():
            if "decoder.layers" in key:
                object.__setattr__(stored, "shape", (2 * stored.shape[0], *stored.shape[1:]))
        return held

    def read(self, content: CheckpointContent) -> dict[str, Any]:
        for chunk in content.chunks:
            rows = 2 if "decoder.layers" in chunk.key else chunk.global_shape[0]
            layer = chunk.offset[0] % rows
            shape = (rows, *chunk.global_shape[1:])
            moved = Chunk(chunk.key, chunk.tensor, (layer, *chunk.offset[1:]), shape)
            self.source.read(CheckpointContent([moved]))
            chunk.tensor.add_(1 if chunk.offset[0] != layer else 0)
        return self.source.read(CheckpointContent(objects=content.objects))


def test_without_an_optimizer_nothing_of_it_is_written(unpack: Callable[..., Path], tmp_path: Path) -> None:
    class Weights(WithArgs):
        def common(self) -> dict[str, Any]:
            return {key: value for key, value in super().common().items() if key != "optimizer"}

    (tmp_path / "out").mkdir()
    write_per_rank(Weights(open_source(unpack("gpt2_distopt_torch"))), tmp_path / "out")
    body = load_tensors_and_plain_data(tmp_path / "out/mp_rank_00" / MODEL)
    assert not {"optimizer", "opt_param_scheduler"} & body.keys()
    assert not (tmp_path / "out/mp_rank_00/distrib_optim.pt").exists()
    assert PerRankSource(tmp_path / "out").contents().tensors.keys() == {
        key for key in open_source(unpack("gpt2_torch")).contents().tensors if not key.startswith("optimizer.")
    }


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_of_megatron_goes_on_here_and_is_saved_as_it_would_be_there(
    unpack: Callable[..., Path],
    golden: Goldens,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From its iteration 5 the losses, norms and rates are Megatron's, and so is the checkpoint of iteration 10."""
    name, theirs = "gpt2_resume_torch", unpack("gpt2_torch")
    words = [word.replace("@gpt2_torch", str(theirs.parent)) for word in golden.case("pretrain", name)["args"]]
    words = [*words, "--save", str(tmp_path / "c"), "--save-interval", "10", "--device", "cpu"]
    shutil.copytree(golden.path("train/data"), tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 0
    text = capsys.readouterr().out
    compare_continued(json.loads(golden.path(f"pretrain/{name}/log.json").read_text()), text)
    assert f" loading checkpoint from {theirs.parent} at iteration 5\n" in text
    assert re.search(r"saving checkpoint at iteration      10 to \S+ in torch format\n", text)
    ours, expected = read_all(open_source(tmp_path / "c/iter_0000010")), read_all(open_source(theirs))
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-4, atol=2e-6)
    bodies = [
        load_tensors_and_plain_data(folder / "mp_rank_00" / MODEL) for folder in (tmp_path / "c/iter_0000010", theirs)
    ]
    of_megatron = [key for key in bodies[0] if not key.startswith("megalith_")]  # Megatron passes over ours
    assert of_megatron == list(bodies[1]) and list(bodies[0]["model"]) == list(bodies[1]["model"])
    assert bodies[0]["opt_param_scheduler"] == bodies[1]["opt_param_scheduler"]
    groups, known = (body["optimizer"]["param_groups"] for body in bodies)
    for key in ("params", "wd_mult", "lr_mult", "weight_decay", "betas", "eps"):
        assert [group[key] for group in groups] == [group[key] for group in known], key


def compare_continued(log: dict[str, Any], text: str) -> None:
    ours = parse_iterations(text)
    assert [line["iteration"] for line in ours] == [line["iteration"] for line in log["iterations"]]
    for number, (own, expected) in enumerate(zip(ours, log["iterations"], strict=True)):
        # The original does not reset its sums after the first line of a process: its second is of both steps.
        loss = (ours[0]["lm loss"] + own["lm loss"]) / 2 if number == 1 else own["lm loss"]
        assert loss == pytest.approx(expected["lm loss"], abs=LAST_DIGIT), expected["iteration"]
        for key in ("grad norm", "params norm"):
            assert own[key] == pytest.approx(expected[key], abs=NORM), (key, expected["iteration"])
        assert own["learning rate"] == pytest.approx(expected["learning rate"], rel=1e-6)
        assert own["consumed samples"] == expected["consumed samples"]


# --- files of before Megatron core, and of TransformerEngine ------------------------------------------------------

LEGACY = {
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
}
ORDER = ("input_", "self_attention.q", "self_attention.d", "attention.q", "attention.d", "post_", "mlp.dense_h", "mlp.")
FAMILIES: dict[str, dict[str, str]] = {
    "2023-06": {},
    "2023-12": {"input_layernorm.": "input_norm.", "post_attention_layernorm.": "post_attention_norm."},
    "2021": {"self_attention.": "attention."},
}


def old_rows(tensor: Tensor, version: int) -> Tensor:
    """[heads, 3, size] rows in the order of an earlier version."""
    rows = tensor.unflatten(0, (-1, 3, HEAD_SIZE))
    return rows.movedim(1, 0).flatten(0, 2) if version == 0 else rows.movedim(1, 2).flatten(0, 2)


def legacy(body: dict[str, Any], version: int, family: str) -> dict[str, Any]:
    """A file of Megatron core as an earlier one would have been written."""
    weights = {key: value for key, value in body["model"].items() if value is not None}
    wide = [key for key, value in weights.items() if value.ndim == 2]
    flat = [key for key, value in weights.items() if value.ndim == 1]
    states = {key: body["optimizer"]["state"][number] for number, key in enumerate([*wide, *flat])}

    def renamed(key: str) -> str:
        for ours, theirs in {**LEGACY, **FAMILIES[family]}.items():
            key = key.replace(ours, theirs)
        return key.removeprefix("decoder.")

    def place(key: str) -> tuple[Any, ...]:
        match = re.fullmatch(r"layers\.(\d)\.(.+)", renamed(key))
        if match is None:
            return (9,)
        return (int(match[1]), next(n for n, head in enumerate(ORDER) if match[2].startswith(head)))

    if version < 2:
        for key in weights:
            if "linear_qkv" in key:
                weights[key] = old_rows(weights[key], version)
                states[key] = {kind: old_rows(states[key][kind], version) for kind in ("exp_avg", "exp_avg_sq")}
    layers = sorted((key for key in weights if key.startswith("decoder.")), key=place)
    encoder = {renamed(key): weights[key] for key in layers}
    if family == "2023-12":
        encoder = {key.replace("final_layernorm", "final_norm"): value for key, value in encoder.items()}
    language = {"embedding": {}, "transformer" if family == "2021" else "encoder": encoder}
    for key in ("word_embeddings", "position_embeddings"):
        if f"embedding.{key}.weight" in weights:
            language["embedding"][key] = {"weight": weights[f"embedding.{key}.weight"]}
    order = [key for key in weights if key.startswith("embedding.")] + layers
    if "output_layer.weight" in weights:
        order.append("output_layer.weight")
    groups = [[key for key in order if weights[key].ndim == ndim] for ndim in (2, 1)]
    numbered = [key for group in groups for key in group]
    old = {
        **{key: value for key, value in body.items() if key not in ("model", "optimizer")},
        "checkpoint_version": float(version),
        "model": {"language_model": language},
        "optimizer": {
            "state": {number: states[key] for number, key in enumerate(numbered)},
            "param_groups": [
                {**group, "params": [numbered.index(key) for key in names]}
                for group, names in zip(body["optimizer"]["param_groups"], groups, strict=True)
            ],
        },
    }
    if "output_layer.weight" in weights:
        old["model"]["word_embeddings_for_head"] = {"weight": weights["output_layer.weight"]}
    if version == 0:
        del old["checkpoint_version"]
    if family == "2021":
        schedule = old.pop("opt_param_scheduler")
        names = {"max_lr": "start_lr", "lr_warmup_steps": "warmup_steps", "lr_decay_steps": "decay_steps"}
        names |= {"lr_decay_style": "decay_style"}
        old["lr_scheduler"] = {
            names.get(key, key): value for key, value in schedule.items() if not key.startswith(("start", "end", "wd"))
        }
        vars(old["args"])["model_parallel_size"] = vars(old["args"]).pop("tensor_model_parallel_size")
    return old


@pytest.mark.parametrize(
    ("name", "version", "family"),
    [
        *(("gpt2_torch", version, family) for version in (0, 1, 2, 3) for family in FAMILIES),
        *(("gpt2_tp2_torch", version, "2023-06") for version in (0, 1, 3)),
        *(("gpt2_pp2_torch", 3, family) for family in FAMILIES),
    ],
)
def test_files_of_before_megatron_core(unpack: Callable[..., Path], name: str, version: int, family: str) -> None:
    path = unpack(name)
    expected, common = read_all(open_source(path)), open_source(path).common()
    for file in path.rglob(MODEL):
        body = load_tensors_and_plain_data(file)
        args = {key: value for key, value in vars(body["args"]).items() if not isinstance(value, ForeignEnum)}
        torch.save(legacy({**body, "args": Namespace(**args)}, version, family), file)
    source = open_source(path)
    assert_same(read_all(source), expected)
    assert source.problems() == []
    found = source.common()
    assert found["checkpoint_version"] == version
    schedule = common["opt_param_scheduler"]
    assert found["opt_param_scheduler"].items() <= schedule.items()
    assert {"max_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps"} <= found[
        "opt_param_scheduler"
    ].keys()
    if version >= 2:  # before, the moments of the projection carry no step here
        assert found["optimizer"] == common["optimizer"]


@pytest.mark.parametrize(("generation", "family"), [("2023", "2023-06"), ("0.12", "2023-12")])
@pytest.mark.parametrize("name", ["gpt2_torch", "gpt2_tp2_torch", "gpt2_pp2_torch", "llama_torch"])
def test_names_of_before_megatron_core_are_written(
    unpack: Callable[..., Path], tmp_path: Path, name: str, generation: str, family: str
) -> None:
    """`--saver legacy`: the dicts are those of a file of that time, and hold the same."""
    source = open_source(unpack(name))
    (tmp_path / "out").mkdir()
    files = write_per_rank(WeightsOnly(WithArgs(source)), tmp_path / "out", generation)
    for file in files:
        core = load_tensors_and_plain_data(source.path / file)
        if name != "llama_torch":
            expected = legacy(core, 3, family)["model"]
        else:
            untied = legacy({**core, "optimizer": core["optimizer"]}, 3, family)["model"]
            expected = {"language_model": {**untied["language_model"]}}
            expected["language_model"]["output_layer"] = untied["word_embeddings_for_head"]
        found = dict(flattened(load_tensors_and_plain_data(tmp_path / "out" / file)["model"]))
        wanted = dict(flattened(expected))
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(found[key], value), key
    weights = {key: value for key, value in read_all(source).items() if not key.startswith("optimizer.")}
    assert_same(read_all(open_source(tmp_path / "out")), weights)


def test_what_had_no_name_before_megatron_core_is_refused(unpack: Callable[..., Path], tmp_path: Path) -> None:
    common = open_source(unpack("llama_torch")).common()
    vars(common["args"])["qk_layernorm"] = True
    with pytest.raises(CheckpointError, match=r"--saver legacy(.|\n)*self_attention.q_layernorm.weight"):
        target_of(common, {}, torch.float32, "here", "0.12")


def test_names_of_transformer_engine_and_its_states_of_fp8(unpack: Callable[..., Path]) -> None:
    path = unpack("llama_torch")
    expected, file = read_all(open_source(path)), path / "mp_rank_00" / MODEL
    body = load_tensors_and_plain_data(file)
    args = {key: value for key, value in vars(body["args"]).items() if not isinstance(value, ForeignEnum)}
    model = {}
    for key, value in body["model"].items():
        key = key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        model[f"module.{key.replace('pre_mlp_layernorm.', 'mlp.linear_fc1.layer_norm_')}"] = (
            io.BytesIO(b"fp8") if value is None else value
        )
    torch.save({**body, "args": Namespace(**args), "model": model}, file)
    assert_same(read_all(open_source(path)), expected)


@pytest.mark.parametrize("names", [("optimizer", "fp32_from_fp16_params"), ("optimizer_state_dict", "fp32_from_fp16")])
@pytest.mark.parametrize("counted", [False, True], ids=["steps by parameter", "steps by group"])
def test_half_precision(unpack: Callable[..., Path], names: tuple[str, str], counted: bool) -> None:
    """The state of fp16 and bf16 has the main parameters in lists by group; Apex counts the steps of a group."""
    path = unpack("gpt2_torch")
    expected, file = read_all(open_source(path)), path / "mp_rank_00" / MODEL
    body = load_tensors_and_plain_data(file)
    args = {key: value for key, value in vars(body["args"]).items() if not isinstance(value, ForeignEnum)}
    weights = {key: value for key, value in body["model"].items() if value is not None}
    state = body["optimizer"]
    if counted:
        for entry in state["state"].values():
            del entry["step"]
        state["param_groups"] = [{**group, "step": 10} for group in state["param_groups"]]
    main = [[value for value in weights.values() if value.ndim == ndim] for ndim in (2, 1)]
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    body |= {
        "args": Namespace(**{**args, "params_dtype": torch.float16, "fp16": True}),
        "model": {key: value.half() for key, value in weights.items()},
        "optimizer": {names[0]: state, names[1]: main, "grad_scaler": scaler},
    }
    torch.save(body, file)
    source = open_source(path)
    found = read_all(source)
    for key, value in expected.items():
        if key.startswith("optimizer."):
            assert torch.equal(found[key], value)
        else:
            assert torch.equal(found[key], value.half()) and torch.equal(
                found[f"optimizer.state.fp32_param.{key}"], value
            )
    common = source.common()["optimizer"]
    assert float(common["optimizer"]["state"]["common_step"]) == 10.0
    assert common["grad_scaler"] == scaler
    assert not any("step" in group for group in common["optimizer"]["param_groups"])


# --- what is wrong is said ----------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    (problem,) = CheckpointFolder(path).problems()
    with pytest.raises(CheckpointError) as caught:
        source = open_source(path)
        source.contents()
        source.common()
    assert str(caught.value) == problem
    return problem


def test_a_folder_that_was_copied_in_part(unpack: Callable[..., Path]) -> None:
    path = unpack("gpt2_tp2_torch")
    (path / "mp_rank_01" / MODEL).unlink()
    message = refused(path)
    assert "args say tensor-parallel 2 x pipeline 1" in message and "2 folders mp_rank_00 to mp_rank_01" in message
    assert "mp_rank_01/model_optim_rng.pt is missing\n" in message
    shutil.rmtree(path / "mp_rank_01")
    assert "mp_rank_01/model_optim_rng.pt is missing " in refused(path)
    (path / "mp_rank_00" / MODEL).unlink()
    assert "model_optim_rng.pt" in refused(path)


def test_a_folder_of_another_layout_beside(unpack: Callable[..., Path]) -> None:
    path = unpack("gpt2_torch")
    shutil.copytree(path / "mp_rank_00", path / "mp_rank_01")
    assert "not expected: mp_rank_01" in refused(path)


def test_files_that_are_cut_off_empty_or_of_another_kind(unpack: Callable[..., Path]) -> None:
    path = unpack("gpt2_torch")
    file = path / "mp_rank_00" / MODEL
    data = file.read_bytes()
    for damaged in (data[: len(data) // 2], data[:3], b"", b"no archive at all" * 100):
        file.write_bytes(damaged)
        assert f"{file} is damaged" in refused(path)
    torch.save([1, 2], file)
    assert "holds a list" in refused(path)


def test_another_model_than_the_args_say(unpack: Callable[..., Path]) -> None:
    path = unpack("gpt2_torch")
    file = path / "mp_rank_00" / MODEL
    body = load_tensors_and_plain_data(file)
    args = {key: value for key, value in vars(body["args"]).items() if not isinstance(value, ForeignEnum)}

    def with_args(**changes: Any) -> str:
        torch.save({**body, "args": Namespace(**{**args, **changes})}, file)
        return refused(path)

    message = with_args(num_layers=3)
    assert "decoder.layers.2.input_layernorm.weight is missing" in message
    assert "decoder.layers.1.input_layernorm.weight is not expected" in with_args(num_layers=1)
    message = with_args(ffn_hidden_size=32)
    assert "decoder.layers.0.mlp.linear_fc1.weight has shape [64, 16] instead of [32, 16]" in message
    assert "mtp.layers.1.eh_proj.weight is missing" in with_args(mtp_num_layers=2)
    assert "--hybrid-override-pattern" in with_args(hybrid_override_pattern="M*")
    del args["padded_vocab_size"]
    assert "lack 'padded_vocab_size'" in with_args()
    torch.save({key: value for key, value in body.items() if key != "args"}, file)
    assert "holds no args" in refused(path)


def test_an_optimizer_that_is_not_of_this_model(unpack: Callable[..., Path]) -> None:
    path = unpack("gpt2_torch")
    file = path / "mp_rank_00" / MODEL
    body = load_tensors_and_plain_data(file)
    args = {key: value for key, value in vars(body["args"]).items() if not isinstance(value, ForeignEnum)}
    body["args"] = Namespace(**args)
    groups = body["optimizer"]["param_groups"]
    groups[0]["params"], groups[1]["params"] = groups[0]["params"][:-1], [9, *groups[1]["params"]]
    torch.save(body, file)
    message = unreadable(path)
    assert "[9, 19]" in message and "[10, 18]" in message
    groups[0]["params"], groups[1]["params"] = list(range(10)), list(range(10, 28))
    states = body["optimizer"]["state"]
    states[0], states[1] = states[1], states[0]
    torch.save(body, file)
    message = unreadable(path)
    assert "exp_avg of parameter 0 has shape [32, 16]" in message and "embedding.word_embeddings.weight" in message
    body["optimizer"] = [body["optimizer"], body["optimizer"]]
    torch.save(body, file)
    assert "2 optimizers" in unreadable(path)


def unreadable(path: Path) -> str:
    """Why the optimizer's state cannot be read; the weights can, as is said."""
    source = open_source(path)
    contents = source.contents()
    (message,) = contents.unreadable
    assert message.endswith("load with --no-load-optim to continue from the weights alone")
    assert len(contents.tensors) == 16 and not any(key.startswith("optimizer.") for key in contents.tensors)
    assert CheckpointFolder(path).problems() == []
    assert ("optimizer" in source.common()) == ("holds the state of 2 optimizers" not in message)
    asked = CheckpointContent([Chunk("optimizer.state.exp_avg.x", torch.zeros(1), (0,), (1,))])
    with pytest.raises(CheckpointError) as caught:
        CheckpointFolder(path).open(asked, {"optimizer.state.exp_avg.x"})
    assert message in str(caught.value)
    return message


@pytest.mark.parametrize("change", ["apart", "short", "two"])
def test_buffers_in_another_form(unpack: Callable[..., Path], change: str) -> None:
    path = unpack("gpt2_distopt_torch")
    file = path / "mp_rank_00/distrib_optim.pt"
    body = load_tensors_and_plain_data(file)
    (kind,) = body[0]
    if change == "apart":
        del body["buckets_coalesced"]
    elif change == "short":
        for label in ("param", "exp_avg", "exp_avg_sq"):
            body[0][kind][label] = body[0][kind][label][:-1].clone()
        body[0][kind]["numel_unpadded"] -= 1
    else:
        body[0][torch.bfloat16, torch.float32] = body[0][kind]
    torch.save(body, file)
    words = {
        "apart": "core 0.7",
        "short": "does not fit",
        "two": "buffers for parameters in torch.float32, ",
    }
    assert words[change] in unreadable(path)


def test_buffers_of_parameters_in_two_dtypes(unpack: Callable[..., Path]) -> None:
    """Megatron has one for each dtype: the same numbers, divided by the dtypes of the weights beside them."""
    path = unpack("gpt2_distopt_torch")
    before = read_all(open_source(path))
    place = path / "mp_rank_00"
    model, body = (load_tensors_and_plain_data(place / name) for name in (MODEL, "distrib_optim.pt"))
    model["args"] = Namespace(**{k: v for k, v in vars(model["args"]).items() if not isinstance(v, ForeignEnum)})
    (whole,) = body[0].values()
    parts: dict[torch.dtype, dict[str, list[Tensor]]] = {torch.float32: {}, torch.bfloat16: {}}
    end = 0
    for name, value in reversed([pair for pair in model["model"].items() if isinstance(pair[1], Tensor)]):
        dtype = torch.bfloat16 if "linear_fc" in name else torch.float32
        start = -(-end // 64) * 64
        end = start + value.numel()
        for label in ("param", "exp_avg", "exp_avg_sq"):
            pieces = parts[dtype].setdefault(label, [])
            filled = sum(map(len, pieces))
            pieces += [torch.full((-filled % 64,), torch.nan), whole[label][start:end]]
        model["model"][name] = value.to(dtype)
    body[0] = {}
    for dtype, labels in parts.items():
        buffers: dict[str, Any] = {label: torch.cat(pieces) for label, pieces in labels.items()}
        body[0][dtype, torch.float32] = {**buffers, "numel_unpadded": len(buffers["param"])}
    assert len(body[0]) == 2 and end == len(whole["param"])
    torch.save(model, place / MODEL)
    torch.save(body, place / "distrib_optim.pt")
    after = read_all(open_source(path))
    assert after.keys() == before.keys()
    for key in (key for key in before if key.startswith("optimizer.")):
        assert torch.equal(after[key], before[key]), key


def test_files_of_two_checkpoints(unpack: Callable[..., Path]) -> None:
    path = unpack("gpt2_tp2_torch")
    file = path / "mp_rank_01" / MODEL
    body = load_tensors_and_plain_data(file)
    args = {key: value for key, value in vars(body["args"]).items() if not isinstance(value, ForeignEnum)}
    torch.save({**body, "args": Namespace(**args), "iteration": 5}, file)
    message = refused(path)
    assert re.search(r"mp_rank_01 .*\biteration 5\b", message)


def test_a_distributed_optimizer_with_buffers_in_some_folders_only(unpack: Callable[..., Path], tmp_path: Path) -> None:
    source, _ = rewritten(open_source(unpack("gpt2_torch")), tmp_path / "out", **LAYOUTS["tp2_pp2_distributed"])
    (source.path / "mp_rank_01_000/distrib_optim.pt").unlink()
    assert "mp_rank_01_000/distrib_optim.pt is missing" in refused(source.path)
    for file in source.path.rglob("distrib_optim.pt"):
        file.unlink()
    kept = open_source(source.path).contents().tensors  # weights, to be taken with --no-load-optim or --finetune
    assert len(kept) == 16 and not any(key.startswith("optimizer.") for key in kept)


class Canary:
    """Unpickled without care it leaves a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_a_file_cannot_run_code(unpack: Callable[..., Path], tmp_path: Path) -> None:
    path = unpack("gpt2_torch")
    torch.save({"args": Canary(tmp_path / "canary")}, path / "mp_rank_00" / MODEL)
    assert re.search(r"mp_rank_00.*refused", refused(path), re.DOTALL)
    assert not (tmp_path / "canary").exists()
