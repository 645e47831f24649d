"""As typed: Megatron's converters merge and split a checkpoint, and what comes out is trained on and resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megalith.cli.main import main
from megalith.train.metrics import read_metrics

from .small_run import write_text
from .warm import Finished, WarmProcess

TRAIN = [
    *("--num-layers", 4, "--hidden-size", 16, "--num-attention-heads", 4, "--seq-length", 8, "--eval-iters", 0),
    *(
        "--max-position-embeddings",
        8,
        "--micro-batch-size",
        1,
        "--global-batch-size",
        4,
        "--lr",
        1e-2,
        "--lr-decay-iters",
        20,
    ),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--make-vocab-size-divisible-by", 8),
    *("--log-interval", 1, "--num-workers", 0, "--hidden-dropout", 0, "--attention-dropout", 0, "--split", "100,0,0"),
]
UTIL, TODAY = "tools/checkpoint_util.py", "tools/checkpoint/convert.py"


def typed(warm: WarmProcess, cwd: Path, tool: str, line: str) -> Finished:
    """A command line as a user types it in the checkout, as the script of the tool passes it on."""
    return warm.run([Path(tool).name, *line.split()], cwd, command="checkpoint")


@pytest.fixture(scope="module")
def trained(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    """A folder with A, a checkpoint of two tensor-parallel times two pipeline ranks, and the words that train it."""
    folder = tmp_path_factory.mktemp("tools")
    words = [*TRAIN, "--data-path", write_text(folder)]
    done = warm.run([*words, "--train-iters", 5, "--save", "one", "--save-interval", 5], folder)
    assert done.code == 0, done.text
    split = ["--format", "torch", "--tp", "2", "--pp", "2", "--true-vocab-size", "100"]
    assert main(["checkpoint", "convert", str(folder / "one"), str(folder / "A"), *split]) == 0
    return folder, words


def tree(save: Path) -> list[str]:
    return sorted(str(path.relative_to(save)) for path in save.rglob("*") if path.is_file())


def test_merging_with_the_tool_of_2023(
    trained: tuple[Path, list[object]], warm: WarmProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained
    done = typed(
        warm,
        folder,
        UTIL,
        "--model-type GPT --load-dir A --save-dir B --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1",
    )
    assert done.code == 0, done.text
    assert tree(folder / "B") == [
        "iter_0000005/manifest.json",
        "iter_0000005/mp_rank_00/model_optim_rng.pt",
        "latest_checkpointed_iteration.txt",
    ]
    assert (folder / "B/latest_checkpointed_iteration.txt").read_bytes() == b"5"
    lines = done.text.splitlines()
    assert lines[:2] == [
        "Loaded checkpoint_loader_megatron as the loader.",
        "Loaded checkpoint_saver_megatron as the saver.",
    ]
    parts = ["embeddings", *(f"transformer layer {layer}" for layer in range(4)), "final layernorm"]
    moved = [line for line in lines if line.startswith(("sending", "received"))]
    assert moved == [f"{verb} {part}" for part in parts for verb in ("sending", "received")]
    assert "Setting num_layers to 4 from checkpoint" in lines
    told = [line for line in lines if line.startswith("Overwriting default ")]
    assert "Overwriting default save_interval value None with value from checkpoint 5." in told
    assert not [line for line in told if "num_layers" in line or "moe_" in line]  # inherited above, or as by default
    assert "Setting consumed_train_samples to 20 and consumed_valid_samples to 0" in lines
    assert [line for line in lines if "104 rows" in line and "112" in line]
    assert [line for line in lines if "weights only" in line and "megalith checkpoint convert A DIR" in line]
    assert lines[-1] == "Done!"
    assert main(["checkpoint", "diff", str(folder / "one"), str(folder / "B"), "--weights"]) == 0
    capfd.readouterr()


def test_splitting_with_the_tool_of_today(trained: tuple[Path, list[object]], warm: WarmProcess) -> None:
    folder, _ = trained
    done = typed(
        warm,
        folder,
        TODAY,
        "--model-type GPT --loader core --saver core --load-dir A --save-dir C "
        "--target-tensor-parallel-size 1 --target-pipeline-parallel-size 4 --megatron-path /nowhere",
    )
    assert done.code == 0, done.text
    names = [f"mp_rank_00_00{stage}" for stage in range(4)]
    assert sorted(path.name for path in (folder / "C/iter_0000005").iterdir() if path.is_dir()) == names
    assert "--megatron-path" in done.text
    assert re.search(r"successfully saved checkpoint from iteration       5 to C \[ t 1/1, p 1/4 \]", done.text)
    sizes = [(folder / "C/iter_0000005" / name / "model_optim_rng.pt").stat().st_size for name in names]
    assert sizes[1] < sizes[3] and sizes[2] < sizes[0], "both ends hold the embedding"


@pytest.mark.parametrize(("tool", "norm"), [(UTIL, "input_layernorm"), (TODAY, "input_norm")])
def test_names_from_before_megatron_core(
    tool: str, norm: str, trained: tuple[Path, list[object]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained
    save = folder / f"L-{norm}"
    places = ["--load-dir", str(folder / "A"), "--save-dir", str(save), "--loader", "megatron", "--saver", "legacy"]
    sizes = ["--target-tensor-parallel-size", "1", "--target-pipeline-parallel-size", "2"]
    assert main(["checkpoint", Path(tool).name, "--model-type", "GPT", *places, *sizes]) == 0
    body = torch.load(save / "iter_0000005/mp_rank_00_001/model_optim_rng.pt", weights_only=False)
    assert body["model"].keys() == {"language_model", "word_embeddings_for_head"}
    assert f"layers.0.{norm}.weight" in body["model"]["language_model"]["encoder"]
    assert body["args"].use_legacy_models is True
    back = ["--format", "torch", "--tp", "1", "--pp", "2", "--no-optim"]
    assert main(["checkpoint", "convert", str(save), str(folder / f"core-{norm}"), *back]) == 0
    body = torch.load(folder / f"core-{norm}/iter_0000005/mp_rank_00_001/model_optim_rng.pt", weights_only=False)
    assert body["args"].use_legacy_models is False and "output_layer.weight" in body["model"]
    assert main(["checkpoint", "diff", str(folder / "one"), str(folder / f"core-{norm}"), "--weights"]) == 0
    capfd.readouterr()


@pytest.mark.parametrize("target", ["1 1", "2 1", "1 4"])
def test_what_the_tools_write_is_trained_on_with_the_same_losses(
    target: str, trained: tuple[Path, list[object]], warm: WarmProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rows that pad the vocabulary take part in the loss: 104 as in `one`, and 112 for two ranks."""
    folder, words = trained
    tp, pp = target.split()
    save = f"D-{tp}-{pp}"
    sizes = ["--target-tensor-parallel-size", tp, "--target-pipeline-parallel-size", pp]
    places = ["--load-dir", str(folder / "A"), "--save-dir", str(folder / save), "--vocab-file"]
    (folder / "vocab.json").write_text("{" + ", ".join(f'"{number}": {number}' for number in range(100)) + "}")
    assert main(["checkpoint", "convert.py", "--model-type", "GPT", *places, str(folder / "vocab.json"), *sizes]) == 0
    capfd.readouterr()
    losses, reference = {}, "one" if tp == "1" else "A"
    for load in (reference, save):
        begin = [*words, "--finetune", "--load", load, "--train-iters", 2, "--save", f"E{target}{load}"]
        done = warm.run([*begin, "--save-interval", 9], folder)
        assert done.code == 0, done.text
        records = read_metrics(folder / f"E{target}{load}" / "run/metrics.jsonl")
        losses[load] = [record["loss"] for record in records if record["event"] == "step"]
    assert len(losses[save]) == 2 and losses[save] == losses[reference]


def test_with_the_optimizer_a_run_goes_on_as_if_nothing_had_happened(
    trained: tuple[Path, list[object]], warm: WarmProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """What Megatron's tools cannot: split and merged again with its optimizer, the run continues exactly."""
    folder, words = trained
    back = ["--format", "torch_dist", "--tp", "1", "--pp", "1", "--true-vocab-size", "100"]
    assert main(["checkpoint", "convert", str(folder / "A"), str(folder / "whole"), *back]) == 0
    assert main(["checkpoint", "diff", str(folder / "one"), str(folder / "whole")]) == 0
    assert "bit-identical" in capfd.readouterr().out
    goes_on = ["--load", "whole", "--use-checkpoint-opt-param-scheduler", "--save", "whole", "--save-interval", 9]
    done = warm.run([*words, *goes_on, "--train-iters", 7], folder)
    assert done.code == 0, done.text
    straight = warm.run([*words, "--train-iters", 7, "--save", "straight", "--save-interval", 9], folder)
    assert straight.code == 0, straight.text

    def steps(save: str) -> list[tuple[int, float]]:
        records = read_metrics(folder / save / "run/metrics.jsonl")
        return [(record["iteration"], record["loss"]) for record in records if record["event"] == "step"]

    assert steps("whole") == steps("straight")[5:]


def test_an_in_run_conversion(
    trained: tuple[Path, list[object]], warm: WarmProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, words = trained
    place = ["--load", "one", "--ckpt-convert-format", "torch", "--ckpt-convert-save", "F"]
    done = warm.run([*words, "--train-iters", 9, *place], folder)
    assert done.code == 0, done.text
    assert "> converted checkpoint: torch_dist -> torch." in done.text and "training ..." not in done.text
    assert main(["checkpoint", "diff", str(folder / "one"), str(folder / "F/torch")]) == 0
    capfd.readouterr()
    wrong = warm.run([*words, "--train-iters", 9, *place, "--hidden-size", 32], folder)
    assert wrong.code == 4 and re.search(r"--hidden-size: 16 .* 32", wrong.text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model-type T5", "--model-type T5 is not converted by this version; it converts GPT and BERT"),
        ("--model-type BERT", "--model-type BERT: the model in {A} is GPT"),
        ("--model-type GPT --loader gpt5", "--loader gpt5 is not known; use core, mcore, megatron, legacy"),
        ("--model-type GPT --loader llama_mistral --checkpoint-type meta", "--checkpoint-type meta cannot be read"),
        ("--model-type GPT --loader llama_mistral --checkpoint-type hf", "is of format torch; use --loader core"),
        ("--model-type GPT --target-expert-parallel-size 2", "has no experts; leave --ep out"),
        ("--model-type GPT --vocab-file none.json", "--vocab-file none.json does not exist"),
        ("--model-type GPT --position-embedding-type rope", "the model in {A} has learned_absolute"),
        ("--model-type GPT --target-tensor-parallel-size 3", "--tp 3; use 1, 2, 4"),
    ],
)
def test_what_is_not_here_is_refused(
    flags: str, said: str, trained: tuple[Path, list[object]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _ = trained
    place = ["--load-dir", str(folder / "A"), "--save-dir", str(tmp_path / "no")]
    assert main(["checkpoint", "convert.py", *flags.split(), *place]) in (2, 4, 5)
    assert said.format(A=folder / "A") in capfd.readouterr().err
    assert not (tmp_path / "no").exists() or not tree(tmp_path / "no")
