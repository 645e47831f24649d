"""Conversions of small models: any form into any other, what the args say after it, and what is refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megalith.checkpoint import CheckpointContent, Chunk, DirectoryStore
from megalith.checkpoint.convert import ConversionOptions, convert, divided_args
from megalith.checkpoint.diff import compared, tensor_differences
from megalith.checkpoint.files.folder import CheckpointFolder
from megalith.checkpoint.files.safe_loading import load_tensors_and_plain_data, read_metadata
from megalith.checkpoint.sources.adapters import args_of
from megalith.checkpoint.sources.source import Source, open_source
from megalith.checkpoint.store.store import locate
from megalith.checkpoint.writers.huggingface import ExportOptions, export
from megalith.checkpoint.writers.torch_dist import write_torch_dist
from megalith.cli.main import main
from megalith.errors import CheckpointError, ConfigError, LayoutError
from megalith.layout import Layout
from megalith.registry import Entry, Import, Registry

from .memory_source import ARGS, GPT2, MemorySource, model_source

MODELS: dict[str, Mapping[str, Any]] = {
    "llama": ARGS,
    "gpt2": GPT2,
    "llama-bf16": {**ARGS, "params_dtype": "bfloat16"},
}


def written(source: Source, save: Path) -> Path:
    """A source as a save folder of format torch_dist."""
    facts = {"megalith_version": "0", "created": ""}
    write_torch_dist(source, save / "iter_0000007", manifest_fields=facts, files={}, update_tracker=lambda: None)
    (save / "latest_checkpointed_iteration.txt").write_text("7")
    return save


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> its save folder."""
    folder = tmp_path_factory.mktemp("models")
    return {name: written(model_source(args), folder / name) for name, args in MODELS.items()}


def differences(one: Path, other: Path, *, weights: bool = False) -> list[str]:
    sources = [compared(open_source(locate(path)), weights=weights) for path in (one, other)]
    return [str(item) for item in tensor_differences(*sources) if not item.is_none]


def whole(source: Source, key: str) -> torch.Tensor:
    stored = source.contents().tensors[key]
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    source.read(CheckpointContent([Chunk(key, tensor, (0,) * tensor.ndim, stored.shape)]))
    return tensor


@dataclass(frozen=True)
class Form:
    """A format and a layout."""

    format: str
    tp: int
    pp: int

    def __str__(self) -> str:
        return f"{self.format}-tp{self.tp}pp{self.pp}"

    @property
    def wanted(self) -> ConversionOptions:
        return ConversionOptions(format=self.format, tp=self.tp, pp=self.pp)


FORMS = [Form(*form) for form in product(("torch_dist", "torch"), (1, 2, 4), (1, 2, 4))]
SAMPLE = [
    (Form("torch_dist", 1, 1), Form("torch", 2, 2)),
    (Form("torch_dist", 4, 1), Form("torch_dist", 1, 4)),
    (Form("torch", 2, 1), Form("torch_dist", 2, 4)),
    (Form("torch", 1, 2), Form("torch", 4, 2)),
]


def pairs() -> Iterator[Any]:
    for name, one, other in product(MODELS, FORMS, FORMS):
        sampled = (one, other) in (SAMPLE[:1] if name == "llama-bf16" else SAMPLE)
        marks = () if sampled else (pytest.mark.full,)
        yield pytest.param(name, one, other, marks=marks, id=f"{name}-{one}-{other}")


@pytest.fixture(scope="module")
def in_form(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Form], Path]:
    """A model in a format and layout, which is made once."""
    made: dict[tuple[str, Form], Path] = {}

    def make(name: str, form: Form) -> Path:
        if (name, form) not in made:
            made[name, form] = tmp_path_factory.mktemp("form")
            convert(models[name], made[name, form], form.wanted)
        return made[name, form]

    return make


@pytest.mark.parametrize(("name", "one", "other"), list(pairs()))
def test_every_form_becomes_every_other(
    name: str, one: Form, other: Form, models: dict[str, Path], in_form: Callable[[str, Form], Path], tmp_path: Path
) -> None:
    """The law of resharding: over any two conversions the tensors are those of the model."""
    made = convert(in_form(name, one), tmp_path, other.wanted).path
    assert differences(models[name], made) == []
    assert CheckpointFolder(made).problems() == []
    args = args_of(open_source(made).common())
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (other.tp, other.pp)


MIXTURE = {**ARGS, "num_experts": 4, "moe_router_topk": 2, "params_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(model_source(MIXTURE), tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_experts_are_divided_over_ranks_and_put_together_again(form: str, mixture: Path, tmp_path: Path) -> None:
    """With the second optimizer that Megatron has for experts that are spread."""
    spread = convert(mixture, tmp_path / "spread", ConversionOptions(format=form, tp=2, pp=2, ep=2)).path
    assert differences(mixture, spread) == []
    common = open_source(spread).common()
    assert (args_of(common)["expert_model_parallel_size"], set(common["optimizer"])) == (2, {0, 1})
    assert [group["is_expert_parallel"] for group in common["optimizer"][1]["optimizer"]["param_groups"]] == [True]
    again = convert(spread, tmp_path / "again", ConversionOptions(format=form, tp=1, pp=1)).path
    assert args_of(open_source(again).common())["expert_model_parallel_size"] == 2, "by default that of the source"
    together = convert(again, tmp_path / "together", ConversionOptions(ep=1)).path
    assert differences(mixture, together) == []
    assert set(open_source(together).common()["optimizer"]) == {"optimizer"}


@pytest.mark.parametrize("modules", ["local", "transformer_engine"])
def test_norms_have_the_keys_of_the_modules_that_megatron_has(modules: str, tmp_path: Path) -> None:
    """TransformerEngine's layers keep the norm before experts apart; either is read as the other."""
    args = {**MIXTURE, "transformer_impl": modules}
    save = written(model_source(args), tmp_path)
    stored = read_metadata(save / "iter_0000007" / ".metadata").state_dict_metadata
    apart, fused = "decoder.layers.pre_mlp_layernorm.weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.fp32_param."):
        assert (prefix + apart in stored, prefix + fused in stored) == (modules != "local", modules == "local")
    both = (compared(source, weights=False) for source in (model_source(args), open_source(locate(save))))
    assert [str(item) for item in tensor_differences(*both) if not item.is_none] == []


def test_each_expert_rank_has_files_with_its_own_experts(mixture: Path, tmp_path: Path) -> None:
    made = convert(mixture, tmp_path / "a", ConversionOptions(format="torch", ep=4)).path
    folders = [f"mp_rank_00_{rank:03d}" for rank in range(4)]
    assert sorted(path.name for path in made.iterdir() if path.is_dir()) == folders
    experts = whole(open_source(locate(mixture)), "decoder.layers.mlp.experts.experts.linear_fc2.weight")
    for rank, folder in enumerate(folders):
        model = torch.load(made / folder / "model_optim_rng.pt", weights_only=False)["model"]
        own = [name for name in model if ".layers.1." in name and name.endswith("linear_fc2.weight")]
        assert own == ["decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"]
        assert torch.equal(model[own[0]], experts[1, rank])
    written_files = convert(mixture, tmp_path / "b", ConversionOptions(ep=4)).path
    assert len(list(written_files.glob("__*_0.distcp"))) == 4


@pytest.mark.parametrize(
    ("model", "ep", "said"),
    [
        ("llama", 2, "has no experts; leave --ep out"),
        ("mixture", 3, "4 experts of .*--ep 3; use 1, 2"),
    ],
)
def test_experts_that_cannot_be_divided(
    model: str, ep: int, said: str, models: dict[str, Path], mixture: Path, tmp_path: Path
) -> None:
    with pytest.raises(LayoutError, match=said):
        convert({**models, "mixture": mixture}[model], tmp_path, ConversionOptions(ep=ep))


def test_layers_that_cannot_be_divided(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="4 layers.*--pp 3.* 1, 2, 4"):
        convert(models["llama"], tmp_path, ConversionOptions(pp=3))


def test_tokens_are_not_left_out(tmp_path: Path) -> None:
    facts = {"megalith_version": "0", "created": "", "tokenizer": {"vocab_size": 45}}
    write_torch_dist(
        model_source(), tmp_path / "a" / "iter_0000007", manifest_fields=facts, files={}, update_tracker=lambda: None
    )
    with pytest.raises(CheckpointError, match="--true-vocab-size 44 .*45"):
        convert(tmp_path / "a", tmp_path / "b", ConversionOptions(true_vocab_size=44))


PADDED: dict[str, Any] = {**ARGS, "make_vocab_size_divisible_by": 8}


def padded_for_one_rank(save: Path, **facts: Any) -> MemorySource:
    """Write a checkpoint of 48 rows, that is 42 tokens padded to a multiple of 8, and return its content."""
    source = model_source(PADDED)
    facts = {"megalith_version": "0", "created": "", **facts}
    write_torch_dist(source, save / "iter_0000007", manifest_fields=facts, files={}, update_tracker=lambda: None)
    return source


def test_the_tokens_of_the_tokenizer_are_padded_for_the_target(tmp_path: Path) -> None:
    source = padded_for_one_rank(tmp_path / "a", tokenizer={"vocab_size": 42})
    made = convert(tmp_path / "a", tmp_path / "b", ConversionOptions(tp=4, format="torch"))
    found = open_source(made.path)
    assert args_of(found.common())["padded_vocab_size"] == 64
    assert any("64" in note and "48" in note for note in made.notes)
    for key in ("embedding.word_embeddings.weight", "optimizer.state.exp_avg.output_layer.weight"):
        whole = torch.empty(64, 16)
        found.read(CheckpointContent([Chunk(key, whole, (0, 0), (64, 16))]))
        assert torch.equal(whole[:48], source.tensors[key])
        assert torch.equal(whole[48:], source.tensors[key][-1:].expand(16, 16))  # as the padding that was trained
    convert(tmp_path / "b", tmp_path / "c", ConversionOptions(tp=1))
    assert args_of(open_source(locate(tmp_path / "c")).common())["padded_vocab_size"] == 48
    assert differences(tmp_path / "a", tmp_path / "c") == []


@pytest.mark.parametrize(
    ("facts", "hinted"),
    [
        ({}, True),
        ({"tokenizer": {"vocab_size": 42}, "huggingface": {"config": {}}}, True),
        ({"tokenizer": {"vocab_size": 42}, "config": {"data": {"padded_vocab_size": 48}}}, True),
        ({"tokenizer": {"vocab_size": 30}}, True),  # from a model of Hugging Face: 8, 16, 32 or 64 would pad to others
        ({"tokenizer": {"vocab_size": 50}}, False),  # more tokens than rows: nothing is padding
    ],
)
def test_rows_that_are_not_known_to_be_padding_are_kept(facts: dict[str, Any], hinted: bool, tmp_path: Path) -> None:
    padded_for_one_rank(tmp_path / "a", **facts)
    made = convert(tmp_path / "a", tmp_path / "b", ConversionOptions(tp=4))
    assert args_of(open_source(made.path).common())["padded_vocab_size"] == 48
    assert any("--true-vocab-size" in note for note in made.notes) == hinted


def test_the_chunks_of_a_layout_are_those_that_its_ranks_hold(models: dict[str, Path], tmp_path: Path) -> None:
    made = convert(models["gpt2"], tmp_path, ConversionOptions(tp=2, pp=2)).path
    tensors = open_source(made).contents().tensors
    assert tensors["embedding.word_embeddings.weight"].chunks == 2
    assert tensors["decoder.layers.mlp.linear_fc1.weight"].chunks == 8
    assert tensors["decoder.layers.mlp.linear_fc2.bias"].chunks == 4
    assert len(list(made.glob("__*_0.distcp"))) == 4


def test_the_tracker_and_the_manifest_tell_of_the_result(models: dict[str, Path], tmp_path: Path) -> None:
    convert(models["gpt2"], tmp_path, ConversionOptions(tp=2))
    store = DirectoryStore(tmp_path)
    assert store.latest() == 7 and store.verify(7) == []
    manifest = store.manifest(7)
    assert manifest is not None and manifest["layout"] == {"tp": 2, "cp": 1, "dp": 1, "pp": 1, "ep": 1, "etp": None}
    assert manifest["converted_from"] == {"path": str(models["gpt2"] / "iter_0000007"), "format": "torch_dist"}


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_without_the_optimizer(form: str, models: dict[str, Path], tmp_path: Path) -> None:
    made = convert(models["llama-bf16"], tmp_path, ConversionOptions(format=form, optimizer=False)).path
    source = open_source(made)
    assert not [key for key in source.contents().tensors if key.startswith("optimizer.")]
    assert "optimizer" not in source.common() and "opt_param_scheduler" not in source.common()
    assert differences(models["llama-bf16"], tmp_path, weights=True) == []


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_another_dtype(form: str, models: dict[str, Path], tmp_path: Path) -> None:
    convert(models["llama-bf16"], tmp_path / "fp32", ConversionOptions(format=form, dtype="float32"))
    source = open_source(locate(tmp_path / "fp32"))
    main = whole(open_source(locate(models["llama-bf16"])), "optimizer.state.fp32_param.output_layer.weight")
    assert torch.equal(whole(source, "output_layer.weight"), main)
    convert(tmp_path / "fp32", tmp_path / "back", ConversionOptions(format=form, dtype="bfloat16"))
    assert differences(models["llama-bf16"], tmp_path / "back") == []


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_vocabulary_is_padded_anew_and_back(form: str, models: dict[str, Path], tmp_path: Path) -> None:
    """43 tokens: 48 rows in multiples of 8 on one rank, 64 on four."""
    made = convert(models["llama"], tmp_path / "four", ConversionOptions(format=form, tp=4, true_vocab_size=43))
    (note,) = made.notes
    assert "64" in note and "48" in note
    rows = whole(open_source(made.path), "output_layer.weight")
    assert rows.shape == (64, 16) and not rows[48:].any()
    convert(tmp_path / "four", tmp_path / "back", ConversionOptions(tp=1, true_vocab_size=43))
    assert differences(models["llama"], tmp_path / "back") == []


def test_a_checkpoint_without_optimizer_is_converted_and_said_to_have_none(tmp_path: Path) -> None:
    save = written(model_source(states=False), tmp_path / "a")
    made = convert(save, tmp_path / "b", ConversionOptions())
    (note,) = made.notes
    assert "optimizer" in note


def test_release(models: dict[str, Path], tmp_path: Path) -> None:
    made = convert(models["llama"], tmp_path, ConversionOptions(format="torch", optimizer=False, release=True))
    assert made.path == tmp_path / "release"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert locate(tmp_path) == tmp_path / "release"
    again = convert(tmp_path, tmp_path / "again", ConversionOptions(tp=2))
    assert again.path == tmp_path / "again" / "release"


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_tokenizer_and_what_a_resume_compares_go_along(form: str, tmp_path: Path) -> None:
    kept = {"tokenizer": {"kind": "GPT2BPE"}, "data": {"digest": "x"}, "config": {}, "tokenizer_files": ["vocab.json"]}
    kept |= {"threads": 3, "matrix_products": "bfloat16"}
    facts = {"megalith_version": "0", "created": "", **kept}
    final = tmp_path / "a" / "iter_0000007"
    write_torch_dist(
        model_source(), final, manifest_fields=facts, files={"vocab.json": b"{}"}, update_tracker=lambda: None
    )
    folder = CheckpointFolder(convert(tmp_path / "a", tmp_path / "b", ConversionOptions(format=form, tp=2)).path)
    manifest = folder.manifest()
    assert manifest is not None and {name: manifest[name] for name in kept} == kept
    assert folder.read_file("vocab.json") == b"{}" and "vocab.json" in manifest["files"]


@pytest.mark.parametrize("forms", [("torch_dist",), ("torch", "torch_dist")])
def test_the_state_of_a_run_that_megatron_does_not_know_goes_along(forms: Sequence[str], tmp_path: Path) -> None:
    own = {"megalith_lr_scale": 0.5, "megalith_best_evaluation": {"loss": 2.0, "iteration": 4, "later": 1}}
    source = model_source()
    place = written(MemorySource(source.tensors, {**source.common(), **own}), tmp_path / "a")
    for form in forms:
        place = convert(place, tmp_path / form, ConversionOptions(format=form, tp=2)).path
    common = open_source(place).common()
    assert {name: common.get(name) for name in own} == own


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    source = model_source(GPT2)
    written(source, tmp_path)
    assert source.largest_read == max(
        tensor.nbytes if "layers" not in key else tensor[0].nbytes for key, tensor in source.tensors.items()
    )


def test_a_pipeline_layout_is_kept_where_the_number_of_stages_is() -> None:
    """With layers of multi-token prediction beside the loss, where they are written."""
    before = {**ARGS, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|t|m|tL"}
    before |= {"virtual_pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": None}
    kept, dropped = (divided_args(before, Layout(tp=1, pp=stages), "torch") for stages in (2, 1))
    names = ("pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size")
    assert [kept[name] for name in names] == ["Ett|t||mtL", 2]
    assert [dropped[name] for name in names] == [None, None]


def test_the_args_of_another_layout() -> None:
    before = {
        **ARGS,
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "decoder_first_pipeline_num_layers": 1,
        "sequence_parallel": True,
        "data_parallel_size": 3,
        "world_size": 24,
        "lr": 0.5,
    }
    kept = divided_args(before, Layout(tp=1, pp=2), "torch")
    assert kept["decoder_first_pipeline_num_layers"] == 1
    after = divided_args(before, Layout(tp=1, pp=4), "torch")
    assert after["decoder_first_pipeline_num_layers"] is None
    for args in (kept, after):
        assert args["virtual_pipeline_model_parallel_size"] is None
        assert args["num_layers_per_virtual_pipeline_stage"] is None
        assert (args["tensor_model_parallel_size"], args["sequence_parallel"]) == (1, False)
        assert (args["ckpt_format"], args["use_dist_ckpt"], args["lr"]) == ("torch", False, 0.5)
    assert (after["pipeline_model_parallel_size"], after["world_size"], after["data_parallel_size"]) == (4, 4, 1)


# --- what is refused: named, with what was found, what was expected and what to do ------------------------------------


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        convert(tmp_path / "nowhere", tmp_path / "b", ConversionOptions())


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"iter_0000000.*notes\.txt"):
        convert(tmp_path, tmp_path / "b", ConversionOptions())


def test_an_iteration_that_is_not_there(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="iteration 8.* 7"):
        convert(models["llama"], tmp_path, ConversionOptions(), iteration=8)


@pytest.mark.parametrize(("form", "lost"), [("torch_dist", "__1_0.distcp"), ("torch", "mp_rank_01/model_optim_rng.pt")])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_folder_that_was_copied_in_part(
    form: str, lost: str, with_manifest: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    made = convert(models["gpt2"], tmp_path / "a", ConversionOptions(format=form, tp=2)).path
    (made / lost).unlink()
    if not with_manifest:
        (made / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=f"{lost} is missing"):
        convert(tmp_path / "a", tmp_path / "b", ConversionOptions())
    assert not list((tmp_path / "b").glob("*"))


def test_a_missing_rank_folder_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    made = convert(models["gpt2"], tmp_path / "a", ConversionOptions(format="torch", tp=2, pp=2)).path
    shutil.rmtree(made / "mp_rank_01_000")
    (made / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="(?s)2.*mp_rank_01_000/"):
        convert(tmp_path / "a", tmp_path / "b", ConversionOptions())


def test_a_changed_byte_is_found_before_anything_is_written(models: dict[str, Path], tmp_path: Path) -> None:
    save = tmp_path / "a"
    shutil.copytree(models["gpt2"], save)
    file = save / "iter_0000007" / "__0_1.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_1\.distcp"):
        convert(save, tmp_path / "b", ConversionOptions())


def test_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    save = written(model_source({**ARGS, "padded_vocab_size": 45}), tmp_path / "a")
    with pytest.raises(CheckpointError, match="45.*--tp 2.*--true-vocab-size"):
        convert(save, tmp_path / "b", ConversionOptions(tp=2))


@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (1, 3)])
def test_a_layout_that_does_not_divide(tp: int, pp: int, models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=f"--{'tp' if tp > 1 else 'pp'} 3; use 1, 2"):
        convert(models["gpt2"], tmp_path / "b", ConversionOptions(tp=tp, pp=pp))
    assert not list(tmp_path.glob("b/*"))


def test_nonsense_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path, tmp_path, ConversionOptions(format="zarr", tp=0, dtype="fp8", true_vocab_size=0))
    assert [text.split()[0] for text in caught.value.violations] == ["--format", "--dtype", "--tp", "--true-vocab-size"]


def test_the_source_is_never_replaced(models: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=str(models["gpt2"])):
        convert(models["gpt2"], models["gpt2"], ConversionOptions(tp=2, replace=True))


def test_what_is_there_is_replaced_only_when_that_is_said(models: dict[str, Path], tmp_path: Path) -> None:
    convert(models["gpt2"], tmp_path, ConversionOptions())
    with pytest.raises(CheckpointError, match="--replace"):
        convert(models["llama"], tmp_path, ConversionOptions())
    convert(models["llama"], tmp_path, ConversionOptions(replace=True))
    assert differences(models["llama"], tmp_path) == []


def test_checkpoints_of_another_model_are_not_added_to(models: dict[str, Path], tmp_path: Path) -> None:
    convert(models["gpt2"], tmp_path, ConversionOptions(release=True))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "release"))):
        convert(models["llama"], tmp_path, ConversionOptions())
    assert DirectoryStore(tmp_path).iterations() == [0] and not (tmp_path / "iter_0000007").exists()
    convert(models["gpt2"], tmp_path, ConversionOptions(tp=2, true_vocab_size=100))  # padded to more rows
    assert DirectoryStore(tmp_path).iterations() == [7]


def test_a_tracker_that_names_an_earlier_iteration_than_before_is_a_note(
    models: dict[str, Path], tmp_path: Path
) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for before, noted in (("7", 0), ("6", 0), ("8", 1)):
        tracker.write_text(before)
        notes = convert(models["gpt2"], tmp_path, ConversionOptions(replace=True)).notes
        assert sum(str(tracker) in note and before in note for note in notes) == noted
        assert tracker.read_text() == "7"
    assert str(tracker) in convert(models["gpt2"], tmp_path, ConversionOptions(release=True)).notes[-1]


def test_an_exported_model_is_not_named_as_a_checkpoint_of_a_run(models: dict[str, Path], tmp_path: Path) -> None:
    place = tmp_path / "iter_0000010"
    with pytest.raises(CheckpointError, match=re.escape(str(place))):
        export(models["gpt2"], place, ExportOptions())
    assert not place.exists()


@pytest.mark.parametrize("place", ["new/iter_0000010", "save/iter_0000007", "copy"])
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_the_folder_of_one_checkpoint_is_no_place_for_others(
    form: str, place: str, models: dict[str, Path], tmp_path: Path
) -> None:
    made = convert(models["gpt2"], tmp_path / "save", ConversionOptions(format=form)).path
    shutil.copytree(made, tmp_path / "copy")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / place))):
        convert(models["gpt2"], tmp_path / place, ConversionOptions())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_folder_may_be_called_release(models: dict[str, Path], tmp_path: Path) -> None:
    made = convert(models["gpt2"], tmp_path / "release", ConversionOptions()).path
    assert locate(tmp_path / "release") == made


def test_tensors_that_the_args_do_not_speak_of_are_not_lost(tmp_path: Path) -> None:
    source = model_source()
    more = MemorySource({**source.tensors, "decoder.adapter.weight": torch.ones(2)}, source.common())
    with pytest.raises(CheckpointError, match=r"decoder\.adapter\.weight"):
        written(more, tmp_path)


def test_optimizer_state_that_no_group_has_is_not_lost(tmp_path: Path) -> None:
    source = model_source()
    common = source.common()
    del common["optimizer"]["param_groups"][1]
    save = written(MemorySource(source.tensors, common), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"decoder\.final_layernorm\.weight"):
        convert(save, tmp_path / "b", ConversionOptions(format="torch"))


def test_groups_of_older_checkpoints_are_converted_to_those_that_megatron_looks_for(tmp_path: Path) -> None:
    source = model_source({**GPT2, "decoupled_lr": 5e-4})
    common = source.common()
    common["opt_param_scheduler"] |= {"min_lr": 1e-5}
    plain, without = common["optimizer"]["param_groups"]
    old = [{**plain, "is_decoupled_lr": False}, {**without, "lr_mult": 0.5}, {**plain, "is_decoupled_lr": True}]
    common["optimizer"]["param_groups"] = old
    made = convert(written(MemorySource(source.tensors, common), tmp_path / "a"), tmp_path / "b", ConversionOptions())
    groups = open_source(made.path).common()["optimizer"]["param_groups"]
    keys = ("wd_mult", "max_lr", "min_lr", "lr_mult", "is_decoupled_lr", "default_config")
    assert [tuple(group[key] for key in keys) for group in groups] == [
        (1.0, 1e-3, 1e-5, 1.0, False, True),
        (0.0, 5e-4, 5e-6, 1.0, False, False),
        (1.0, 5e-4, 1e-5, 1.0, False, False),
    ]


def test_files_by_rank_keep_the_groups_of_a_decoupled_rate(tmp_path: Path) -> None:
    """In megatron-core 0.16 and newer only max_lr tells them from the rest; back and forth nothing is lost."""
    source = model_source({**GPT2, "decoupled_lr": 5e-4})
    common = source.common()
    plain, without = common["optimizer"]["param_groups"]
    apart = {**plain, "max_lr": 5e-4, "default_config": False}
    common["optimizer"]["param_groups"] = [{**plain, "max_lr": 1e-3}, without, apart]
    save = written(MemorySource(source.tensors, common), tmp_path / "a")
    made = convert(save, tmp_path / "b", ConversionOptions(format="torch"))
    groups = load_tensors_and_plain_data(made.path / "mp_rank_00/model_optim_rng.pt")["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group.get("max_lr")) for group in groups] == [(1.0, 1e-3), (1.0, 5e-4), (0.0, 1e-3)]
    assert len(groups[1]["params"]) == 1  # the tied embedding
    convert(tmp_path / "b", tmp_path / "c", ConversionOptions(format="torch_dist"))
    assert differences(save, tmp_path / "c") == []


def test_groups_that_files_by_rank_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    """As muP's, of two rates: their parameters would be written twice, and could not be read again."""
    source = model_source()
    common = source.common()
    groups = common["optimizer"]["param_groups"]
    groups.insert(1, {**groups[0], "lr_mult": 0.5})
    save = written(MemorySource(source.tensors, common), tmp_path / "a")
    with pytest.raises(CheckpointError, match="--use-mup.*--format torch_dist"):
        convert(save, tmp_path / "b", ConversionOptions(format="torch"))
    assert not any((tmp_path / "b").glob("iter_*"))


def test_an_interrupted_conversion_leaves_nothing(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def stop(chunk: Chunk) -> None:
        seen.append(chunk)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(models["gpt2"], tmp_path, ConversionOptions(), on_read=stop)
    assert not list(tmp_path.glob("*")) and not list(tmp_path.glob(".*"))


class Scale(nn.Module):
    def __init__(self, size: int, epsilon: float, *, dtype: Any, device: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size, dtype=dtype, device=device))


class Plain(nn.Module):
    def __init__(self, config: Any, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, config.hidden_size)


REGISTRY = Registry(
    (Entry("norm", "own-norm", Scale), Entry("model", "plain", Plain)), (Import("own_module", "sha256"),)
)


def registered(save: Path, **choices: str) -> Path:
    """A save folder of a model of registered parts."""
    about = {"names": list(choices.values()), "settings": {}, "imports": {"own_module": "sha256"}}
    args = {**ARGS, **choices, "megalith_registered": about}
    source = model_source(args, registry=REGISTRY)
    facts = {"megalith_version": "0", "created": ""}
    folder = save / "iter_0000007"
    write_torch_dist(source, folder, manifest_fields=facts, files={}, update_tracker=lambda: None, registry=REGISTRY)
    (save / "latest_checkpointed_iteration.txt").write_text("7")
    return save


def test_a_checkpoint_of_registered_parts_converts_with_their_module(tmp_path: Path) -> None:
    save = registered(tmp_path / "own", normalization="own-norm")
    with pytest.raises(CheckpointError, match=r"--normalization own-norm.*--import own_module"):
        convert(save, tmp_path / "without", ConversionOptions(tp=2))
    convert(save, tmp_path / "made", ConversionOptions(tp=2, pp=2, registry=REGISTRY))
    assert differences(save, tmp_path / "made") == []
    args = args_of(open_source(locate(tmp_path / "made")).common())
    assert type(args["normalization"]) is str and args["tensor_model_parallel_size"] == 2
    with pytest.raises(CheckpointError, match=r"--normalization own-norm.*torch_dist"):
        convert(save, tmp_path / "torch", ConversionOptions(format="torch", registry=REGISTRY))
    with pytest.raises(CheckpointError, match="--normalization own-norm"):
        export(save, tmp_path / "hf", ExportOptions())
    assert main(["checkpoint", "diff", str(save), str(tmp_path / "made")]) == 0


def test_the_table_of_a_plain_module_is_not_padded_anew(tmp_path: Path) -> None:
    save = registered(tmp_path / "plain", model="plain")
    with pytest.raises(CheckpointError, match="--true-vocab-size"):
        convert(save, tmp_path / "padded", ConversionOptions(true_vocab_size=60, registry=REGISTRY))
    convert(save, tmp_path / "half", ConversionOptions(dtype="bfloat16", optimizer=False, registry=REGISTRY))
    (stored,) = open_source(locate(tmp_path / "half")).contents().tensors.values()
    assert stored.shape == (48, 16) and stored.dtype == torch.bfloat16


def test_states_of_a_registered_optimizer_are_not_lost_in_format_torch(tmp_path: Path) -> None:
    save = registered(tmp_path / "own", optimizer="own-rule")
    with pytest.raises(CheckpointError, match=r"--optimizer own-rule.*--no-optim"):
        convert(save, tmp_path / "torch", ConversionOptions(format="torch"))
    convert(save, tmp_path / "torch", ConversionOptions(format="torch", optimizer=False))
    assert differences(save, tmp_path / "torch", weights=True) == []
