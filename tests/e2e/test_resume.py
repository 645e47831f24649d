"""A resumed run is the same run: bit for bit, after a clean stop and after a kill at any point (F01, F02, F03, F06)."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
from pathlib import Path

import pytest
import torch

from megalith.checkpoint import DirectoryStore
from megalith.train.faults import POINTS
from megalith.train.metrics import read_metrics

from .checkpoints import assert_same, curve_of, state_of
from .small_run import on_text
from .warm import WarmProcess

MODEL = [
    *("--num-layers", 2, "--hidden-size", 16, "--num-attention-heads", 2, "--seq-length", 16),
    *("--max-position-embeddings", 16, "--micro-batch-size", 2, "--global-batch-size", 4),
    *("--lr", 1e-2, "--lr-decay-style", "cosine", "--min-lr", 1e-3, "--lr-warmup-iters", 2, "--weight-decay", 0.1),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--make-vocab-size-divisible-by", 8),
    *("--log-interval", 1, "--eval-iters", 1, "--num-workers", 1),
]


def command(save: Path, *more: object) -> list[object]:
    return [*MODEL, "--save", save, "--load", save, *more]


def validation_lines(text: str) -> list[str]:
    return re.findall(r"validation loss at iteration .*", text)


@pytest.mark.parametrize(
    "precision",
    [
        [],
        pytest.param(["--bf16"], marks=pytest.mark.full),
        # A scale that overflows at first: the second half begins with a scaler and a schedule that lag behind.
        ["--fp16", "--initial-loss-scale", 2.0**24, "--loss-scale-window", 3],
        pytest.param(
            ["--compile"],
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(shutil.which("g++") is None, reason="--compile needs a C++ compiler on a CPU"),
            ],
        ),
    ],
    ids=["fp32", "bf16", "fp16", "compiled"],
)
def test_forty_steps_are_twenty_and_twenty(warm: WarmProcess, tmp_path: Path, precision: list[object]) -> None:
    common = ["--train-iters", 40, "--eval-interval", 8, "--save-interval", 40, *precision]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    uninterrupted = warm.run(command(whole, *common), tmp_path)
    assert uninterrupted.code == 0, uninterrupted.text
    first = warm.run(command(halves, *common, "--exit-interval", 20), tmp_path)
    assert first.code == 0 and "[exiting program at iteration 20] datetime" in first.text, first.text
    second = warm.run(command(halves, *common), tmp_path)
    assert second.code == 0, second.text
    assert f" loading distributed checkpoint from {halves} at iteration 20" in second.text
    assert_same(state_of(whole, 40), state_of(halves, 40))
    assert len(curve_of(whole)) == 40 and curve_of(whole) == curve_of(halves)
    assert validation_lines(uninterrupted.text) == validation_lines(first.text) + validation_lines(second.text)
    if "--fp16" in precision:
        assert "number of skipped iterations:   1" in uninterrupted.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", [[], ["--bf16"], ["--fp16", "--initial-loss-scale", 2.0**16]])
def test_a_run_on_cuda_resumes_on_the_same_curve(warm: WarmProcess, tmp_path: Path, precision: list[object]) -> None:
    common = ["--train-iters", 40, "--eval-interval", 8, "--save-interval", 40, "--device", "cuda", *precision]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert warm.run(command(whole, *common), tmp_path).code == 0
    assert warm.run(command(halves, *common, "--exit-interval", 20), tmp_path).code == 0
    second = warm.run(command(halves, *common), tmp_path)
    assert second.code == 0 and "running on cuda:0 (" in second.text
    # Sums over a batch are atomic there, so that two runs differ in the last bits.
    for own, other in zip(curve_of(whole), curve_of(halves), strict=True):
        assert own[0] == other[0] and own[1] == pytest.approx(other[1], rel=1e-2)


KILLED_RUN = ["--train-iters", 8, "--eval-interval", 4, "--save-interval", 3]


@pytest.fixture(scope="module")
def uninterrupted(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert warm.run(command(folder / "c", *KILLED_RUN), folder).code == 0
    return folder / "c"


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_loses_only_the_steps_since_the_last_save(
    warm: WarmProcess, tmp_path: Path, uninterrupted: Path, point: str
) -> None:
    save = tmp_path / "c"
    # Saves are at 3, 6 and 8, the evaluation at 4; a load happens at the iteration that was saved.
    step = {"eval": 4, "load": 3}.get(point, 6 if "save" in point or "commit" in point else 5)
    if point == "load":
        assert warm.run(command(save, *KILLED_RUN, "--exit-interval", 3), tmp_path).code == 0
    killed = warm.run(command(save, *KILLED_RUN), tmp_path, MEGALITH_FAULT=f"kill9@step={step},point={point}")
    assert killed.code == -9, killed.text
    resumed = warm.run(command(save, *KILLED_RUN), tmp_path)
    assert resumed.code == 0, resumed.text
    last_saved = 6 if point == "post_commit" else 3  # until the tracker is replaced, the checkpoint before it counts
    assert f" loading distributed checkpoint from {save} at iteration {last_saved}" in resumed.text
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))
    assert curve_of(uninterrupted) == curve_of(save)
    left = {path.name for path in save.iterdir()}
    assert left == {"iter_0000003", "iter_0000006", "iter_0000008", "latest_checkpointed_iteration.txt", "run"}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("__0_0.distcp", damage) for damage in ("flip", "truncate")),
        *(pytest.param("__0_0.distcp", damage, marks=pytest.mark.full) for damage in ("empty", "remove")),
        *((name, "flip") for name in (".metadata", "manifest.json")),
        *(pytest.param(name, "flip", marks=pytest.mark.full) for name in ("common.pt", "metadata.json")),
    ],
)
def test_a_damaged_newest_checkpoint_is_passed_over_loudly(
    warm: WarmProcess, tmp_path: Path, uninterrupted: Path, name: str, damage: str
) -> None:
    save = tmp_path / "c"
    shutil.copytree(uninterrupted, save)
    path = save / "iter_0000008" / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "remove":
        path.write_bytes({"flip": bytes(data), "truncate": bytes(data[: len(data) // 2]), "empty": b""}[damage])
    again = warm.run(command(save, *KILLED_RUN), tmp_path)
    assert again.code == 0, again.text
    warnings = [line for line in again.text.splitlines() if line.startswith("WARNING: ")]
    assert any("iter_0000008" in line and (name in line or damage == "remove") for line in warnings), again.text
    assert f" loading distributed checkpoint from {save} at iteration 6" in again.text
    assert_same(state_of(uninterrupted, 8), state_of(save, 8))


def test_when_all_checkpoints_are_damaged_the_run_stops_instead_of_starting_anew(
    warm: WarmProcess, tmp_path: Path, uninterrupted: Path
) -> None:
    save = tmp_path / "c"
    shutil.copytree(uninterrupted, save)
    for path in save.glob("iter_*/common.pt"):
        path.write_bytes(b"nonsense")
    again = warm.run(command(save, *KILLED_RUN), tmp_path)
    assert again.code == 4
    assert all(name in again.text for name in ("iter_0000003", "iter_0000006", "iter_0000008"))
    assert "Traceback" not in again.text


def test_a_finished_run_only_evaluates_again(warm: WarmProcess, tmp_path: Path, uninterrupted: Path) -> None:
    save = tmp_path / "c"
    shutil.copytree(uninterrupted, save)
    before = state_of(save, 8)
    again = warm.run(command(save, *KILLED_RUN), tmp_path)
    assert again.code == 0
    assert "iteration 8 of 8 " in again.text
    assert len(validation_lines(again.text)) == 2
    assert_same(before, state_of(save, 8))


def test_the_first_start_says_that_there_is_no_checkpoint(warm: WarmProcess, tmp_path: Path) -> None:
    first = warm.run(command(tmp_path / "c", "--train-iters", 3, "--save-interval", 3), tmp_path)
    tracker = tmp_path / "c" / "latest_checkpointed_iteration.txt"
    assert (
        f"WARNING: could not find the metadata file {tracker}\n"
        "    will not load any checkpoints and will start from random\n"
    ) in first.text
    assert tracker.read_text() == "3"


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(
    warm: WarmProcess, tmp_path: Path, uninterrupted: Path
) -> None:
    words = [*MODEL, "--load", uninterrupted, *KILLED_RUN]
    for flag, value in (("--num-layers", 3), ("--hidden-size", 32), ("--vocab-size", 77), ("--seq-length", 8)):
        words[words.index(flag) + 1] = value
    refused = warm.run(words, tmp_path)
    assert refused.code == 4
    assert re.search(r"--num-layers: 2\b.*\b3\b", refused.text)
    assert re.search(r"--hidden-size: 16\b.*\b32\b", refused.text)
    assert "  the tokenizer " in refused.text and re.search(r"seq_length was 16 \w+ is 8\b", refused.text)
    assert "Traceback" not in refused.text


def test_another_schedule_needs_a_word_from_the_user(warm: WarmProcess, tmp_path: Path, uninterrupted: Path) -> None:
    save = tmp_path / "c"
    shutil.copytree(uninterrupted, save)
    longer = command(save, *KILLED_RUN)
    longer[longer.index("--train-iters") + 1] = 10
    config = save / "run/config.json"
    before = config.read_bytes()
    refused = warm.run(longer, tmp_path)
    assert refused.code == 4
    assert config.read_bytes() == before, "it is of the run that is there"
    assert "class input value 40 and checkpointvalue 32 for total number of iterations do not match" in refused.text
    assert "--train-iters 8 -> 10" in refused.text
    assert "--override-opt-param-scheduler" in refused.text and "--use-checkpoint-opt-param-scheduler" in refused.text
    overridden = warm.run([*longer, "--override-opt-param-scheduler"], tmp_path)
    assert overridden.code == 0, overridden.text
    assert " > overriding total number of iterations value to 40" in overridden.text
    assert DirectoryStore(save).latest() == 10
    assert json.loads(config.read_text())["train"]["train_iters"] == 10


def test_a_longer_run_with_the_decay_of_before_needs_none(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    finished = command(save, "--train-iters", 2, "--lr-decay-iters", 6, "--save-interval", 2)
    assert warm.run(finished, tmp_path).code == 0
    longer = command(save, "--train-iters", 3, "--lr-decay-iters", 6, "--save-interval", 3)
    continued = warm.run(longer, tmp_path)
    assert continued.code == 0, continued.text
    assert DirectoryStore(save).latest() == 3
    assert (DirectoryStore(save).manifest(3) or {})["threads"] == 1 and "OMP_NUM_THREADS" not in continued.text


def test_finetune_takes_the_weights_and_starts_anew(warm: WarmProcess, tmp_path: Path, uninterrupted: Path) -> None:
    tuned = warm.run(
        [
            *(*MODEL, "--load", uninterrupted, "--finetune"),
            *("--save", tmp_path / "tuned", "--save-interval", 3, "--train-iters", 3),
        ],
        tmp_path,
    )
    assert tuned.code == 0, tuned.text
    assert " iteration        1/       3 " in tuned.text
    first_losses = [
        json.loads(line)["loss"] for line in (tmp_path / "tuned/run/metrics.jsonl").open() if '"step"' in line
    ]
    fresh = curve_of(uninterrupted)[0][1]
    assert first_losses[0] < fresh - 0.1, "the loss starts where the old weights are, not at random"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--ckpt-step=3"], marks=pytest.mark.full),
        ["--finetune", "--ckpt-step", 3],
        ["--ckpt_step", 3, "--no-load-optim", "--no_load_rng"],
        ["--ckpt-step", 3, "--lr", 5e-3, "--override-opt-param-scheduler"],
        pytest.param(["--ckpt-step", 3, "--lr", 5e-3, "--use-checkpoint-opt-param-scheduler"], marks=pytest.mark.full),
        ["--ckpt-step", 3, "--no-save-optim", "--no-save-rng"],
        ["--ckpt-step", 3, "--config", "recipe.toml"],
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_the_printed_line_resumes_from_what_was_saved(
    warm: WarmProcess, tmp_path: Path, uninterrupted: Path, words: list[object]
) -> None:
    save = tmp_path / "new"
    (tmp_path / "recipe.toml").write_text("[checkpoint]\nfinetune = true\n")
    plan = ["--train-iters", 8, "--save-interval", 8, "--exit-interval", 7]
    stopped = warm.run([*MODEL, "--load", uninterrupted, "--save", save, *plan, *words], tmp_path)
    assert stopped.code == 0, stopped.text
    line = stopped.text.split("stopped at iteration 7; resume with:\n")[1].splitlines()[0]
    again = warm.run(shlex.split(line)[2:], tmp_path)
    assert again.code == 0, again.text
    assert f"loading distributed checkpoint from {save} at iteration 7" in again.text
    assert re.findall(r" iteration +(\d+)/ ", again.text) == ["8"], again.text


def test_a_second_finetune_warns_before_it_replaces(warm: WarmProcess, tmp_path: Path, uninterrupted: Path) -> None:
    save = tmp_path / "new"
    words = [*MODEL, "--load", uninterrupted, "--finetune", "--save", save, "--save-interval", 3, "--train-iters", 3]
    assert f"WARNING: {save}" not in warm.run(words, tmp_path).text
    again = warm.run(words, tmp_path)
    assert re.search(rf"WARNING: {re.escape(str(save))} .*iteration 3; .*iteration 0\b", again.text)


def test_without_optimizer_and_random_states(warm: WarmProcess, tmp_path: Path) -> None:
    save = tmp_path / "c"
    lean = command(
        save, "--train-iters", 4, "--save-interval", 2, "--no-save-optim", "--no-save-rng", "--exit-interval", 2
    )
    assert warm.run(lean, tmp_path).code == 0
    refused = warm.run(lean, tmp_path)
    assert refused.code == 4 and "--no-load-optim" in refused.text and "--no-load-rng" in refused.text
    resumed = warm.run([*lean, "--no-load-optim", "--no-load-rng"], tmp_path)
    assert resumed.code == 0, resumed.text
    assert DirectoryStore(save).latest() == 4


def test_states_of_another_optimizer_are_refused_with_the_remedy(
    warm: WarmProcess, tmp_path: Path, uninterrupted: Path
) -> None:
    words = [*MODEL, "--load", uninterrupted, "--ckpt-step", 3, "--train-iters", 8, "--optimizer", "sgd"]
    refused = warm.run(words, tmp_path)
    assert refused.code == 4, refused.text
    assert all(word in refused.text for word in ("--optimizer sgd", "--optimizer adam", "--no-load-optim"))
    assert warm.run([*words, "--no-load-optim", "--exit-interval", 4], tmp_path).code == 0


def test_save_without_load_warns_before_it_replaces(warm: WarmProcess, tmp_path: Path, uninterrupted: Path) -> None:
    save = tmp_path / "c"
    shutil.copytree(uninterrupted, save)
    anew = warm.run([*MODEL, "--save", save, "--save-interval", 3, "--train-iters", 3], tmp_path)
    assert re.search(rf"WARNING: {re.escape(str(save))} .*iteration 8; .*--load", anew.text)


def test_a_checkpoint_holds_what_generation_needs(uninterrupted: Path) -> None:
    manifest = DirectoryStore(uninterrupted).manifest(8)
    assert manifest is not None
    assert manifest["config"]["model"]["num_layers"] == 2
    assert manifest["tokenizer"] and manifest["data"]["digest"]
    assert manifest["tokenizer_files"] == []  # a NullTokenizer has none


def test_a_checkpoint_of_a_newer_version_stops_the_run(warm: WarmProcess, tmp_path: Path) -> None:
    """It was passed over, and replaced or pruned, as if it were damaged."""
    save = tmp_path / "C"
    run = command(save, "--train-iters", 9, "--save-interval", 3, "--keep-last", 1)
    assert warm.run([*run, "--exit-interval", 3], tmp_path).code == 0
    newer = save / "iter_0000006"
    shutil.copytree(save / "iter_0000003", newer)
    manifest = newer / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2').replace("blake2b", "blake3"))
    (save / "latest_checkpointed_iteration.txt").write_text("6")
    before = {path: path.read_bytes() for path in newer.iterdir()}
    for more in ([], ["--async-save"], ["--load", tmp_path / "nothing"]):
        stopped = warm.run([*run, *more], tmp_path)
        assert stopped.code == 4 and "format 2" in stopped.text, stopped.text
    assert {path: path.read_bytes() for path in newer.iterdir()} == before
    assert (save / "iter_0000003").is_dir()


def test_prompts_are_continued_at_each_evaluation_and_change_no_loss(warm: WarmProcess, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `track` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    common = ["--train-iters", 6, "--eval-interval", 2, "--save-interval", 3]
    plain, asked = (on_text(tmp_path, command(tmp_path / name, *common)) for name in ("plain", "asked"))
    asked += ["--sample-prompts", "5 6 7", "8", "--tracker", "tensorboard"]
    assert warm.run(plain, tmp_path).code == 0
    assert warm.run(asked, tmp_path, MEGALITH_FAULT="raise@step=6,point=fwd").code == 1
    for _ in range(2):  # from iteration 3 on, and with nothing left to train
        done = warm.run(asked, tmp_path)
        assert done.code == 0, done.text
    assert curve_of(tmp_path / "asked") == curve_of(tmp_path / "plain")
    run = tmp_path / "asked/run"
    found = [record for record in read_metrics(run / "metrics.jsonl") if record["event"] == "samples"]
    assert [record["iteration"] for record in found] == [2, 4, 6, 6] and found[-1]["samples"] == found[-2]["samples"]
    (first, second) = found[-1]["samples"]
    assert (first["prompt"], second["prompt"]) == ("5 6 7", "8") and first["answer"]
    texts = EventAccumulator(str(run / "tensorboard")).Reload().Tensors("samples/text_summary")
    assert [text.step for text in texts] == [2, 4, 6]
    assert first["answer"].encode() in texts[-1].tensor_proto.string_val[0]
    options = ["--prompt", "5 6 7", "--max-new-tokens", len(first["answer"].split()), "--greedy"]
    assert first["answer"] in warm.run(["asked", *options], tmp_path, command="generate").text
    refused = warm.run([*asked, "--sample-prompts", "5 once"], tmp_path)
    assert refused.code == 2 and "--sample-prompts '5 once'" in refused.text


WANDB = """
import json, os, types

class Error(Exception): ...

def setup():
    return types.SimpleNamespace(settings=types.SimpleNamespace(mode="online", base_url=os.environ["SERVER"]))

def Settings(**words):
    return words

def login(prompt=True, verify=True):
    return True

def init(**words):
    with open(os.environ["ASKED"], "a") as file:
        file.write(json.dumps({name: words[name] for name in ("id", "resume") if name in words}) + "\\n")
    return types.SimpleNamespace(id=words["id"], summary={}, log=lambda *_, **__: None, finish=lambda: None)
"""


@pytest.mark.parametrize("form", ["torch_dist", pytest.param("torch", marks=pytest.mark.full)])
def test_a_resume_continues_the_wandb_run(form: str, warm: WarmProcess, tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    words = [*on_text(tmp_path, command(tmp_path / "c")), "--ckpt-format", form, "--save-interval", 2]
    words += ["--wandb-project", "p", "--wandb-exp-name", "n"]
    branch = ["--load", tmp_path / "c", "--save", tmp_path / "d", "--ckpt-step", 2, "--wandb-exp-name", "another"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for target, more in ((2, []), (4, []), (4, branch)):
            flags = ["--train-iters", 4, "--lr-decay-iters", 4, "--exit-interval", target, *more]
            done = warm.run([*words, *flags], tmp_path, ASKED=str(tmp_path / "asked"), SERVER=address)
            assert done.code == 0, done.text
            assert "offline" not in done.text
    first, again, branched = (json.loads(line) for line in (tmp_path / "asked").read_text().splitlines())
    assert first == again == {"id": first["id"], "resume": "allow"}
    assert branched["id"] != first["id"], "another name begins another run"
