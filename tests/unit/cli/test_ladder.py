"""`megalith ladder` with a trainer whose losses follow a planted law: family, sweep, resume, prediction, violations."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.cli import ladder
from megalith.cli.ladder_plan import make_plan
from megalith.cli.main import main
from megalith.config import load
from megalith.distributed.board import process_state
from megalith.errors import ConfigError, DataError
from megalith.models.gpt import GPT
from megalith.report import scaling_law
from megalith.report.ladder import Ladder, Result, sentences, to_dict

from .ladder_trainer import LAW

TRAINER = Path(__file__).with_name("ladder_trainer.py")
TRAINING = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--max-position-embeddings", "8"),
    *("--disable-bias-linear", "--micro-batch-size", "2", "--seq-length", "8", "--lr", "0.01", "--min-lr", "0.001"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "30", "--device", "cpu"),
]
SIZES = ["--widths", "16", "24", "32", "64"]
RATIOS = ["--tokens-per-parameter", "4", "8", "--check", "2"]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_TRAIN", (sys.executable, str(TRAINER)))
    monkeypatch.setattr(scaling_law, "_SAMPLES", 20)


def climb(folder: Path, *words: str) -> int:
    return main(["ladder", "--folder", str(folder), *words])


def stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ladder.json").read_text())
    return found


def started(folder: Path) -> list[str]:
    return (folder / "started").read_text().split()


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def plan_of(*words: str) -> Any:
    return make_plan(*ladder.make_parser().parse_known_args(["--folder", "unused", *TRAINING, *words]))


@pytest.mark.parametrize(
    ("sizes", "shapes"),
    [
        (["--widths", "64", "16", "32"], [(2, 16, 2), (2, 32, 4), (2, 64, 8)]),
        (["--depths", "2", "4", "8"], [(2, 16, 2), (4, 32, 4), (8, 64, 8)]),
        (["--widths", "16", "16", "32", "--depths", "1", "3", "2"], [(1, 16, 2), (3, 16, 2), (2, 32, 4)]),
    ],
)
def test_a_family_has_the_shapes_and_counts_it_promises(sizes: list[str], shapes: list[tuple[int, ...]]) -> None:
    plan = plan_of(*sizes, *RATIOS[:3], "--group-query-attention", "--num-query-groups", "1", "--ffn-hidden-size", "48")
    assert len(plan.sizes) == 3
    for size, (layers, width, heads) in zip(plan.sizes, shapes, strict=True):
        rung = next(rung for rung in plan.rungs() if rung.size == size)
        model = load(plan.arguments(rung, Path("unused"))).model
        assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (layers, width, heads)
        assert (model.query_groups, model.head_size, model.ffn_size) == (heads // 2, 8, 3 * width)
        built = GPT(model, 31, device=torch.device("meta"))
        everything = sum(parameter.numel() for parameter in built.parameters())
        assert size.parameters == everything - (31 + 8) * width
        assert rung.tokens == pytest.approx(4 * size.parameters, abs=16)


def test_the_width_of_the_smallest_size_is_the_base_of_mup() -> None:
    plan = plan_of(*SIZES, *RATIOS, "--use-mup", "--sweep-lr", "0.1")
    models = [load(plan.arguments(rung, Path("unused"))).model for rung in plan.rungs()]
    assert {model.width_multiplier for model in models} == {1.0, 1.5, 2.0, 4.0}


def test_the_rate_of_longer_runs_is_lower_by_the_exponent() -> None:
    swept = ["--sweep-lr", "0.1", "--sweep-iters", "100"]
    plan = plan_of(*SIZES, *RATIOS, *swept, "--lr-horizon-exponent", "0.32")
    assert [rung.lr for rung in plan.sweep()] == [0.1]
    runs = [*plan.fitted(0.1), *plan.checked(0.1)]
    assert len({rung.iterations for rung in runs}) == 7
    for rung in runs:
        assert rung.lr == pytest.approx(0.1 * (rung.iterations / 100) ** -0.32, rel=5e-3)
        schedule = load(plan.arguments(rung, Path("unused"))).schedule
        assert schedule.lr == rung.lr and schedule.min_lr == pytest.approx(rung.lr / 10, rel=1e-3)
    alone = plan_of(*SIZES, *RATIOS, "--lr-horizon-exponent", "0.5")
    first, second, *_ = alone.fitted(0.01)
    assert first.lr == 0.01 and second.lr == pytest.approx(0.01 / 2**0.5, rel=5e-3)
    assert {rung.lr for rung in plan_of(*SIZES, *RATIOS, *swept).fitted(0.1)} == {0.1}


@pytest.mark.parametrize("words", [[*RATIOS, "--lr-horizon-exponent", "-0.1"], [*RATIOS, "--lr-horizon-exponent=nan"]])
def test_an_exponent_out_of_range_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--lr-horizon-exponent"):
        plan_of(*SIZES, *words)
    with pytest.raises(ConfigError, match=r"--lr-horizon-exponent 0\.3 .*--tokens-per-parameter"):
        plan_of(*SIZES, "--sweep-lr", "0.1", "--sweep-iters", "5", "--lr-horizon-exponent", "0.3")


def test_the_best_rate_is_used_and_a_larger_size_predicted_and_checked(
    trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ladder"
    assert climb(folder, *TRAINING, *SIZES, *RATIOS, "--sweep-lr", "1", "0.1", "0.01", "0.001") == 0
    found = stored(folder)
    kept = [run for run in found["runs"] if run["purpose"] != "sweep"]
    assert {run["lr"] for run in kept} == {0.01}
    assert [run["loss"] is None for run in found["runs"] if run["lr"] == 1] == [True]
    assert len(started(folder)) == len(set(started(folder))) == 4 + 6 + 1 - 1  # one of the sweep is one of the fit
    (checked,) = found["predictions"]
    (run,) = [run for run in kept if run["purpose"] == "check"]
    exact = float(LAW.loss(run["parameters"], run["tokens"]))
    assert checked["measured"] == pytest.approx(exact)
    assert checked["loss"]["value"] == pytest.approx(exact, rel=1e-3)
    assert checked["relative_error"] == pytest.approx(checked["loss"]["value"] / exact - 1)
    assert run["name"] not in {run["name"] for run in kept if run["purpose"] == "fit"}
    text = capsys.readouterr().out
    assert f"{checked['relative_error']:+.2%}" in text
    assert text.index("predicted") < text.index("check 2x64")  # the prediction is made before the run
    assert (folder / "ladder.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_ladder_trains_nothing_and_needs_its_folder_alone(
    trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert climb(tmp_path, *TRAINING, *SIZES, *RATIOS) == 0
    runs, first = started(tmp_path), stored(tmp_path)
    capsys.readouterr()
    assert climb(tmp_path) == 0
    assert started(tmp_path) == runs and stored(tmp_path) == first
    assert "alpha" in capsys.readouterr().out


@pytest.mark.full  # the same with `megalith train` itself: tests/e2e/test_ladder.py
def test_a_signal_reaches_the_run_and_the_ladder_continues(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    code = f"import sys; from megalith.cli import ladder, main\nladder._TRAIN = (sys.executable, {str(TRAINER)!r})\n"
    words = [sys.executable, "-c", code + "sys.exit(main.main(sys.argv[1:]))", "ladder", "--folder", str(tmp_path)]
    command = [*words, *TRAINING, *SIZES, *RATIOS]
    with subprocess.Popen(command, text=True, stderr=subprocess.PIPE, preexec_fn=os.setpgrp) as process:
        wait_until(lambda: (tmp_path / "waits").exists() and (tmp_path / "waits").read_text())
        pids = [process.pid, int((tmp_path / "waits").read_text())]
        for number, stopped in ((signal.SIGTSTP, True), (signal.SIGCONT, False)):
            process.send_signal(number)
            wait_until(lambda stopped=stopped: all((process_state(pid) == "T") is stopped for pid in pids))
        os.kill(process.pid, signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 75, said
    assert f"--folder {tmp_path}" in said
    assert started(tmp_path) == ["2x16-iters1576-lr0.01"]
    again = subprocess.run([*words], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert len(started(tmp_path)) == 1 + 7  # the first one twice


def test_a_run_that_fails_ends_the_ladder_with_its_exit_code(
    trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert climb(tmp_path, *TRAINING, *SIZES, *RATIOS, "--lr", "1") == 1
    assert "2x16-iters1576-lr1" in capsys.readouterr().err
    assert len(started(tmp_path)) == 1


@pytest.mark.parametrize("rate", ["2", "3", "4", "5"])
def test_a_rate_whose_run_fails_otherwise_is_not_left_out(
    rate: str, trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["--sweep-lr", "0.01", rate, "--sweep-iters", "5"]
    for times in (1, 2):
        assert climb(tmp_path, *TRAINING, *SIZES[:2], *sweep) == 1
        assert f"2x16-iters5-lr{rate}.log" in capsys.readouterr().err
        assert stored(tmp_path)["failed"] == []
        assert len(started(tmp_path)) == 1 + times, "the failed run is started again"


def test_a_run_whose_records_are_lost_is_no_stopped_one(
    trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TRAINING, *SIZES[:2], "--sweep-iters", "5", "--sweep-lr"]
    assert climb(tmp_path / "lost", *words, "6") == DataError.exit_code
    assert str(tmp_path / "lost" / "2x16-iters5-lr6") in capsys.readouterr().err
    assert climb(tmp_path / "over", *words, "7") == 75


def test_rates_that_all_diverged_are_not_trained_again(trainer: None, tmp_path: Path) -> None:
    words = [*TRAINING, *SIZES[:2], "--sweep-iters", "5", "--sweep-lr", "1"]
    assert [climb(tmp_path, *words), climb(tmp_path, *words)] == [1, 1]
    assert len(started(tmp_path)) == len(stored(tmp_path)["failed"]) == 1
    assert climb(tmp_path, *words, "0.01") == 0, "lower rates help in the same folder"


def test_another_seed_or_base_of_mup_needs_another_folder(
    trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TRAINING, "--use-mup", "--sweep-iters", "5", "--sweep-lr", "0.01", "--sweep-sizes", "2", "--widths"]
    assert climb(tmp_path, *words, "24", "32") == 0
    for more, flag in ((["24", "32", "--seed", "7"], "--seed"), (["16", "24", "32"], "--mup-base-hidden-size")):
        assert climb(tmp_path, *words, *more) == 2
        assert flag in capsys.readouterr().err
    assert climb(tmp_path, *words, "16", "24", "32", "--mup-base-hidden-size", "24") == 0


def test_each_run_has_its_own_folders() -> None:
    words = ["--tensorboard-dir", "tb", "--non-persistent-global-ckpt-dir", "np", "--non-persistent-save-interval", "2"]
    plan = plan_of(*SIZES, *RATIOS, *words, "--non-persistent-ckpt-type", "global")
    runs = [load(plan.arguments(rung, Path("unused")), files=False) for rung in plan.rungs()]
    assert len({run.log.tensorboard_dir for run in runs}) == len(runs)
    assert len({run.checkpoint.non_persistent_global_ckpt_dir for run in runs}) == len(runs)
    assert all(Path(str(run.log.tensorboard_dir)).parent == Path("tb") for run in runs)


def test_a_law_waits_for_the_sweep_and_a_diverged_check_has_no_error() -> None:
    runs = [Result(f"{n}-{d}", "fit", "1x1", n, d, 0.1, float(LAW.loss(n, d))) for n in (9, 99, 999) for d in (99, 999)]
    check = Result("check", "check", "2x2", 9999, 999, 0.1, math.inf)
    ladder = Ladder([*runs, check], [1.0])
    law = ladder.fit()
    assert law is not None
    assert to_dict(ladder, law)["predictions"][0]["relative_error"] is None
    assert "diverged" in " ".join(sentences(ladder, law))
    assert Ladder([Result("s", "sweep", "1x1", 9, 9, 0.1), *runs], [1.0]).fit() is None


def test_other_settings_need_another_folder(trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert climb(tmp_path, *TRAINING, *SIZES, *RATIOS) == 0
    runs = started(tmp_path)
    assert climb(tmp_path, *TRAINING, *SIZES, *RATIOS, "--weight-decay", "0.3") == 2
    assert "--weight-decay" in capsys.readouterr().err
    assert climb(tmp_path, *TRAINING, *SIZES, "--tokens-per-parameter", "4", "8", "16", "--check", "2") == 0
    assert len(started(tmp_path)) == len(runs) + 3, "more ratios are more runs"


def test_a_damaged_file_is_named(trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert climb(tmp_path, *TRAINING, *SIZES, *RATIOS) == 0
    for file in (tmp_path / "config.json", tmp_path / "ladder.json"):
        whole = file.read_text()
        for text in (whole[:40], "[]"):
            file.write_text(text)
            assert climb(tmp_path, *TRAINING, *SIZES, *RATIOS) == DataError.exit_code
            assert str(file) in capsys.readouterr().err
        file.write_text(whole)


@pytest.mark.parametrize("text", ['{"architectures": ["GPT2LMHeadModel"]}', '{"model": [1]}', '{"a": {"b": 1}}', "{}"])
def test_a_folder_of_another_tool_is_refused_and_left_as_it_is(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert climb(tmp_path, *TRAINING, *SIZES, *RATIOS) == DataError.exit_code
    assert f"--folder {tmp_path}:" in capsys.readouterr().err
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("config.json", text)]


@pytest.mark.parametrize("text", ['{"arguments": 1, "failed": []}', '{"arguments": [], "failed": [2]}', "{}"])
def test_a_file_of_another_tool_is_not_continued(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ladder.json").write_text(text)
    assert climb(tmp_path) == DataError.exit_code
    assert f"--folder {tmp_path}:" in capsys.readouterr().err


def test_a_ladder_killed_before_its_first_file_begins_again(trainer: None, tmp_path: Path) -> None:
    words = [*TRAINING, *SIZES[:2], "--sweep-lr", "0.01", "--sweep-iters", "5"]
    assert climb(tmp_path, *words) == 0
    (tmp_path / "ladder.json").unlink()
    assert climb(tmp_path, *words) == 0
    assert stored(tmp_path)["failed"] == [] and len(started(tmp_path)) == 1
    (tmp_path / "ladder.json").unlink()
    assert climb(tmp_path, *words, "--weight-decay", "0.3") == 2
    assert climb(tmp_path) == DataError.exit_code, "there are no stored arguments"


def test_the_plan_of_a_ladder_needs_its_folder_alone(
    trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*TRAINING, *SIZES[:2], "--sweep-lr", "0.01", "--sweep-iters", "5"]
    assert climb(tmp_path, *words) == 0
    before = (tmp_path / "ladder.json").read_text()
    capsys.readouterr()
    assert climb(tmp_path, "--plan", *words) == 0
    planned = capsys.readouterr().out
    assert climb(tmp_path, "--plan") == 0
    assert capsys.readouterr().out == planned and "2x16" in planned
    assert main(["ladder", "--plan", f"--folder={tmp_path}"]) == 0
    assert (tmp_path / "ladder.json").read_text() == before and len(started(tmp_path)) == 1
    assert climb(tmp_path / "missing", "--plan") == DataError.exit_code


def test_what_the_ladder_sets_itself_is_refused_all_at_once() -> None:
    flags = {"--train-iters": "77", "--eval-interval": "5", "--save": "foo", "--load": "bar", "--train-samples": "9"}
    with pytest.raises(ConfigError) as caught:
        plan_of(*SIZES, *RATIOS, *(word for pair in flags.items() for word in pair))
    for flag, value in flags.items():
        (text,) = [text for text in caught.value.violations if text.startswith(f"{flag}")]
        assert flag == "--train-samples" or value in text
    assert len(caught.value.violations) == len(flags)


def test_a_recipe_may_have_what_the_ladder_sets_itself(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[train]\ntrain_iters = 77\neval_interval = 5\n[checkpoint]\nsave = 'foo'\nload = 'bar'\nsave_interval = 7\n"
    )
    plan = plan_of(*SIZES, *RATIOS, "--config", str(recipe))
    rung = plan.rungs()[0]
    config = load(plan.arguments(rung, tmp_path))
    assert (config.train_iters, config.train.eval_interval) == (rung.iterations, rung.iterations + 1)
    assert config.checkpoint.save == config.checkpoint.load == str(tmp_path / rung.name)


def test_the_length_of_a_recipe_in_samples_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[train]\ntrain_samples = 77\n")
    with pytest.raises(ConfigError) as caught:
        plan_of(*SIZES, *RATIOS, "--config", str(recipe))
    (text,) = caught.value.violations
    assert text.startswith("--train-samples") and "1000000000" not in text


def test_a_sweep_without_rates_or_sizes_is_refused() -> None:
    for words in (["--sweep-sizes", "1", "--sweep-iters", "5"], ["--sweep-sizes=4", "--sweep-iters", "5"]):
        with pytest.raises(ConfigError) as caught:
            plan_of(*SIZES, *RATIOS, *words)
        assert [text.split()[0] for text in caught.value.violations] == ["--sweep-sizes", "--sweep-iters"]
    with pytest.raises(ConfigError, match="--sweep-sizes 5 .*4"):
        plan_of(*SIZES, *RATIOS, "--sweep-lr", "0.1", "--sweep-sizes", "5")
    assert len(plan_of(*SIZES, *RATIOS, "--sweep-lr", "0.1", "--sweep-sizes", "4").sweep()) == 4


def test_copies_of_a_size_are_no_further_sizes() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of("--widths", "16", "16", "24", "--depths", "2", "2", "2", *RATIOS[:3])
    copies, few = caught.value.violations
    assert "--depths 2" in copies and "--widths 16" in copies
    assert "sizes to fit: 2" in few


def test_all_violations_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(
            *("--widths", "0", "20", "32", "--depths", "1", "2", "--tokens-per-parameter", "4", "4", "--check", "-1"),
            *("--sweep-sizes", "0", "--eval-iters", "0", "--lr-decay-iters", "9", "--train-samples", "9"),
        )
    flags = ("--widths 0", "--depths has", "--tokens-per-parameter 4", "--check -1", "--sweep-sizes", "--eval-iters")
    for flag in (*flags, "--num-attention-heads", "--train-samples", "--lr-decay-iters"):
        assert any(flag in text for text in caught.value.violations), flag


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--widths", "16", "24", "32", "--tokens-per-parameter", "4"], "--tokens-per-parameter"),
        ([*SIZES[:4], "--tokens-per-parameter", "4", "8", "--check", "4"], "--check"),
        ([*SIZES, "--sweep-lr", "0.1"], "--tokens-per-parameter"),
        ([*RATIOS], "--widths"),
        (["--depths", "1", "2", "3", *RATIOS[:3], "--num-layers", "3"], "--depths"),
        (["--depths", "2", "2", "2", "2", *RATIOS[:3], "--widths", "16", "16", "24", "32"], "2.*16.*2 times"),
        ([*SIZES, "--tokens-per-parameter", "0.0001", "0.0002", "8"], "--tokens-per-parameter 0.0001 0.0002: .*2x16"),
        ([*SIZES, *RATIOS[:3], "--check", "0.0001", "0.0002"], "--check 0.0001 0.0002: .*2x64"),
        ([*SIZES, *RATIOS, "--sweep-lr", "0.01", "0.01000000001"], "--sweep-lr 0.01 0.01000000001: .*2x16"),
        ([*SIZES, *RATIOS, "--lr-warmup-iters", "2000"], "--lr-warmup-iters"),
        ([*SIZES, *RATIOS, "--num-experts", "2"], "--num-experts"),
        ([*SIZES, *RATIOS, "--finetune"], "--finetune"),
        ([*SIZES, *RATIOS, "--skip-train"], "--skip-train"),
        ([*SIZES, *RATIOS, "--no-save-optim"], "--no-save-optim"),
        ([*SIZES, *RATIOS, "--early-stopping-patience", "2"], "--early-stopping-patience"),
        ([*SIZES, *RATIOS, "--lr", "0", "--min-lr", "0"], "--lr 0"),
        ([*SIZES[:4], "--tokens-per-parameter", "4", "1e300"], "--tokens-per-parameter 1e.300"),
    ],
)
def test_a_violation_names_its_flag(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        plan_of(*words)
