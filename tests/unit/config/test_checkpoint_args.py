"""`--use-checkpoint-args`: what the checkpoint decides, what the command line does, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megalith.config import ModelConfig, PrecisionConfig, RunConfig, TokenizerConfig, load
from megalith.config.saved_args import weights_args
from megalith.errors import ConfigError

RUN = "--seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --load there --use-checkpoint-args"
LEFT = "--no-use-tokenizer-model-from-checkpoint-args"


def run_from(folder: Path, flags: str, tokenizer: TokenizerConfig | None = None) -> RunConfig:
    """A run that loads a model whose tokenizer is in a folder."""
    model = ModelConfig(
        2, 16, 4, 32, position_embedding_type="rope", num_query_groups=None, hidden_dropout=0.0, attention_dropout=0.25
    )
    tokenizer = tokenizer or TokenizerConfig("HuggingFaceTokenizer", tokenizer_model=str(folder))
    args = weights_args(model, PrecisionConfig(), tokenizer)

    def saved_args(where: str, step: int | None) -> dict[str, Any]:
        assert (where, step) == ("there", None)
        return args

    return load([*RUN.split(), *flags.split()], {}, files=False, saved_args=saved_args)


def test_model_and_tokenizer_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    run = run_from(tmp_path, "--hidden-size 24")
    assert (run.model.hidden_size, run.model.num_layers) == (16, 2)
    assert (run.tokenizer.tokenizer_type, run.tokenizer.tokenizer_model) == ("HuggingFaceTokenizer", str(tmp_path))
    said = [note.text for note in run.notes if "Setting hidden_size to 16 from checkpoint" in note.text]
    assert len(said) == 1 and "24" in said[0]


@pytest.mark.parametrize("said_twice", [True, False])
@pytest.mark.parametrize(
    ("flags", "kind", "model"),
    [
        ("--tokenizer-type NullTokenizer --vocab-size 9", "NullTokenizer", None),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model elsewhere", "HuggingFaceTokenizer", "elsewhere"),
        ("--tokenizer-model elsewhere", "HuggingFaceTokenizer", "elsewhere"),
    ],
)
def test_a_tokenizer_of_the_flags_is_kept(
    tmp_path: Path, flags: str, kind: str, model: str | None, said_twice: bool
) -> None:
    run = run_from(tmp_path, f"{flags} {LEFT}" if said_twice else flags)
    assert (run.tokenizer.tokenizer_type, run.tokenizer.tokenizer_model) == (kind, model)
    assert run.model.hidden_size == 16
    told = [str(note) for note in run.notes if "kept" in str(note) and flags.split()[0] in str(note)]
    assert bool(told) is not (said_twice or "HuggingFaceTokenizer" in flags)


def test_a_tokenizer_that_is_typed_as_the_checkpoint_has_it_needs_no_word(tmp_path: Path) -> None:
    run = run_from(tmp_path, "--tokenizer-type HuggingFaceTokenizer")
    assert run.tokenizer.tokenizer_model == str(tmp_path)
    assert not any("kept" in str(note) for note in run.notes)


def test_files_of_the_tokenizer_are_those_of_the_checkpoint_unless_some_are_given(tmp_path: Path) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    for path in (vocab, merges):
        path.write_text("{}")
    tokenizer = TokenizerConfig("GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    run = run_from(tmp_path, "", tokenizer)
    assert (run.tokenizer.vocab_file, run.tokenizer.merge_file) == (str(vocab), str(merges))
    run = run_from(tmp_path, "--vocab-file other.json --merge-file other.txt", tokenizer)
    assert (run.tokenizer.vocab_file, run.tokenizer.merge_file) == ("other.json", "other.txt")
    merges.unlink()
    vocab.unlink()
    with pytest.raises(ConfigError) as refused:
        run_from(tmp_path, "", tokenizer)
    assert "--vocab-file" in str(refused.value) and "--merge-file" in str(refused.value)


def test_dropout_is_that_of_the_checkpoint_unless_it_is_given(tmp_path: Path) -> None:
    run = run_from(tmp_path, "")
    assert (run.model.hidden_dropout, run.model.attention_dropout) == (0.0, 0.25)
    run = run_from(tmp_path, "--hidden-dropout 0.1 --attention-dropout 0.25")
    assert (run.model.hidden_dropout, run.model.attention_dropout) == (0.1, 0.25)
    (kept,) = [str(note) for note in run.notes if "kept" in str(note)]
    assert "--hidden-dropout 0.1" in kept and "0.0" in kept


def test_the_dtype_of_routers_is_that_of_the_checkpoint_unless_it_is_given() -> None:
    """In half precision logits without it are rounded, and tokens go to other experts than those of the model."""
    model = ModelConfig(2, 16, 4, 32, num_experts=4, moe_router_score_function="sigmoid", moe_router_dtype="fp32")
    args = weights_args(model, PrecisionConfig(), TokenizerConfig("NullTokenizer", vocab_size=9))
    words = f"{RUN} --tokenizer-type NullTokenizer --vocab-size 9 --bf16".split()

    def dtype(*flags: str) -> str | None:
        return load([*words, *flags], {}, files=False, saved_args=lambda where, step: args).model.moe_router_dtype

    assert dtype() == "fp32"
    assert dtype("--moe-router-dtype", "fp64") == "fp64"


def test_settings_of_adapters_are_those_of_the_checkpoint_unless_they_are_given() -> None:
    model = ModelConfig(2, 16, 4, 32, lora_rank=4, lora_alpha=8.0, lora_dropout=0.25)
    args = weights_args(model, PrecisionConfig(), TokenizerConfig("NullTokenizer", vocab_size=9))

    def settings(flags: str) -> tuple[int | None, float, float]:
        words = f"{RUN} --tokenizer-type NullTokenizer --vocab-size 9 {flags}".split()
        run = load(words, {}, files=False, saved_args=lambda where, step: args)
        told = {str(note).split()[0] for note in run.notes if "kept" in str(note)}
        assert told == {word for word in flags.split() if word.startswith("--")}
        return run.model.lora_rank, run.model.lora_alpha, run.model.lora_dropout

    assert settings("") == (4, 8.0, 0.25)
    assert settings("--lora-rank 6 --lora-alpha 80") == (6, 80.0, 0.25)
    assert settings("--lora-dropout 0") == (4, 8.0, 0.0)


@pytest.mark.parametrize("flags", ["--load typo", "--load new --pretrained-checkpoint typo"])
def test_a_missing_checkpoint_is_named_instead_of_what_it_would_say(flags: str) -> None:
    words = [*RUN.split(), *flags.split(), "--tensor-model-parallel-size", "3"]
    with pytest.raises(ConfigError) as refused:
        load(words, {}, files=False, saved_args=lambda where, step: None)
    first, *others = refused.value.violations
    assert "typo" in first and "--pretrained-checkpoint" in first
    assert not any("--num-layers" in other or "--vocab-file" in other for other in others)
    assert any("--tensor-model-parallel-size 3" in other for other in others)


def test_what_only_the_checkpoint_says_is_not_held_against_the_user(tmp_path: Path) -> None:
    quiet = run_from(tmp_path, "")
    assert [note.text for note in quiet.notes if "--moe-router-topk" in note.text] == []
    said = [note.text for note in run_from(tmp_path, "--moe-router-topk 2").notes]
    assert any(text.startswith("--moe-router-topk 2 ") for text in said)


def test_the_layout_too_where_it_is_asked_for() -> None:
    model = ModelConfig(2, 16, 4, 32)
    args = {
        **weights_args(model, PrecisionConfig(), TokenizerConfig("NullTokenizer", vocab_size=9)),
        **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    }
    sizes = []
    for flags in ("", "--use-mp-args-from-checkpoint-args"):
        words = f"{RUN} --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 9 {flags}".split()
        run = load(words, {"WORLD_SIZE": "4", "RANK": "0"}, files=False, saved_args=lambda where, step: args)
        sizes.append((run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size))
    assert sizes == [(1, 1), (2, 2)]


@pytest.mark.parametrize(("kind", "taken"), [("quantile_balancing", "quantile_balancing"), ("aux_loss", "none")])
def test_offsets_of_experts_are_taken_and_losses_are_not(kind: str, taken: str) -> None:
    model = ModelConfig(2, 16, 4, 32, num_experts=4, moe_latent_size=8, moe_router_load_balancing_type=(kind,))
    args = weights_args(model, PrecisionConfig(), TokenizerConfig("NullTokenizer", vocab_size=9))
    words = f"{RUN} --tokenizer-type NullTokenizer --vocab-size 9 --moe-router-load-balancing-type none".split()
    run = load(words, {}, files=False, saved_args=lambda where, step: args)
    assert run.model.moe_router_load_balancing_type == (taken,) and run.model.moe_latent_size == 8
