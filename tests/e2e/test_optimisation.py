"""Options of the optimisation on the command line: a run that stops and resumes is the run that does not (F01)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.train.metrics import read_metrics

from .checkpoints import assert_same, curve_of, state_of
from .small_run import MODEL, write_text
from .warm import WarmProcess

OPTIONS: dict[str, tuple[list[object], int]] = {
    "sgd, growing batches, rates of their own": (
        ["--optimizer", "sgd", "--rampup-batch-size", 2, 2, 8, "--decoupled-lr", 1e-3, "--train-samples", 40],
        12,
    ),
    "muon, skipped iterations": (
        ["--optimizer", "muon", "--bf16", "--iterations-to-skip", 3, 7, "--train-iters", 10, "--lr-warmup-iters", 3],
        8,
    ),
    "rounded states, sizes by tokens": (
        ["--bf16", "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
        + ["--step-batch-size-schedule", "0:2 64:4", "--train-iters", 10, "--lr-decay-style", "cosine"],
        10,
    ),
    "experts with biases of their own, lion, dropout": (
        ["--num-experts", 4, "--moe-router-topk", 2, "--moe-router-score-function", "sigmoid"]
        + ["--moe-router-enable-expert-bias", "--moe-router-load-balancing-type", "seq_aux_loss"]
        + ["--moe-aux-loss-coeff", 1e-2, "--optimizer", "lion", "--hidden-dropout", 0.1, "--train-iters", 8],
        8,
    ),
    "offloaded states, cyclic order, decays that change": (
        ["--optimizer-cpu-offload", "--bf16", "--dataloader-type", "cyclic", "--weight-decay-incr-style", "linear"]
        + ["--start-weight-decay", 0.01, "--end-weight-decay", 0.1, "--lr-decay-style", "WSD"]
        + ["--lr-wsd-decay-iters", 4, "--attention-dropout", 0.1, "--train-iters", 9],
        9,
    ),
    "soap between two bases, inverse square root": (
        ["--optimizer", "soap", "--soap-precondition-frequency", 3, "--hidden-dropout", 0.1, "--train-iters", 8]
        + ["--lr-decay-style", "inverse-square-root", "--lr-warmup-iters", 6, "--lr-warmup-init", 1e-3]
        + ["--log-gradient-noise-scale"],
        8,
    ),
    "adaptive muon with lion, a scale that moves": (
        ["--optimizer", "adaptive_muon", "--muon-scalar-optimizer", "lion", "--fp16", "--loss-scale-window", 3]
        + ["--initial-loss-scale", 2.0**18, "--hysteresis", 3, "--train-iters", 9],
        9,
    ),
    "fp16 main parameters, bf16 gradients": (
        ["--bf16", "--use-precision-aware-optimizer", "--main-params-dtype", "fp16", "--main-grads-dtype", "bf16"]
        + ["--exp-avg-dtype", "bf16", "--train-iters", 8, "--calculate-per-token-loss", "--label-smoothing", 0.1],
        8,
    ),
    "prediction of more tokens, recomputed with dropout": (
        ["--mtp-num-layers", 1, "--position-embedding-type", "rope", "--recompute-granularity", "full"]
        + ["--recompute-method", "uniform", "--recompute-num-layers", 1, "--hidden-dropout", 0.1]
        + ["--train-iters", 8],
        8,
    ),
}


def noise_of(save: Path) -> list[dict[str, object]]:
    """What `--log-gradient-noise-scale` reported, and when."""
    records = [record for record in read_metrics(save / "run/metrics.jsonl") if record["event"] == "gradient noise"]
    return [{name: value for name, value in record.items() if name != "time"} for record in records]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(warm: WarmProcess, tmp_path: Path, name: str) -> None:
    options, steps = OPTIONS[name]
    model, place = list(MODEL), MODEL.index("--global-batch-size")
    if "--step-batch-size-schedule" in options:
        del model[place : place + 2]
    words = [*model, "--data-path", write_text(tmp_path), "--device", "cpu", "--save-interval", 100, *options]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder, more in ((straight, []), (stopped, ["--exit-interval", 5]), (stopped, [])):
        finished = warm.run([*words, "--save", folder, "--load", folder, *more], tmp_path)
        assert finished.code == 0, finished.text
    assert curve_of(straight) == curve_of(stopped)
    assert len(curve_of(straight)) == steps
    assert noise_of(straight) == noise_of(stopped)
    assert len(noise_of(straight)) == steps * ("--log-gradient-noise-scale" in options)
    last = max(int(path.name[-7:]) for path in straight.glob("iter_*"))
    assert_same(state_of(straight, last), state_of(stopped, last))


def test_a_phase_that_is_stopped_goes_on_where_it_was(warm: WarmProcess, tmp_path: Path) -> None:
    """Each phase begins its data anew; a stop inside one does not."""
    words = [*MODEL, "--data-path", write_text(tmp_path), "--device", "cpu", "--save-interval", 100]
    words += ["--train-iters", 9, "--phase-transition-iterations", "5"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder, more in ((straight, []), (straight, []), *[(stopped, ["--exit-interval", 3])] * 4):
        finished = warm.run([*words, "--save", folder, "--load", folder, *more], tmp_path)
        assert finished.code == 0, finished.text
    assert curve_of(straight) == curve_of(stopped)
    assert len(curve_of(straight)) == 9
    assert_same(state_of(straight, 9), state_of(stopped, 9))


def test_a_bad_step_stops_the_run_and_the_message_says_where(warm: WarmProcess, tmp_path: Path) -> None:
    words = [*MODEL, "--data-path", write_text(tmp_path), "--train-iters", 4, "--device", "cpu"]
    spoil = "nan@step=3,point=activation,module=decoder.layers.1.mlp,micro_batch=2"
    stopped = warm.run([*words, "--save", tmp_path / "a", "--save-interval", 1], tmp_path, SPOIL=spoil)
    assert stopped.code == 1, stopped.text
    for text in ("the loss is nan at iteration 3", "the output of decoder.layers.1.mlp", "micro-batch 2", "10 to 10"):
        assert text in stopped.text
    skipping = [*words, "--save", tmp_path / "b", "--save-interval", 4, "--nan-policy", "skip"]
    skipped = warm.run(skipping, tmp_path, SPOIL=spoil)
    assert skipped.code == 0, skipped.text
    assert "number of nan iterations:   1" in skipped.text
    (bad,) = (record for record in read_metrics(tmp_path / "b/run/metrics.jsonl") if record["event"] == "bad step")
    assert (bad["action"], bad["first"]["rank"], bad["number"]) == ("skip", 0, 1)


def test_a_resumed_run_skips_the_same_spike(warm: WarmProcess, tmp_path: Path) -> None:
    """F33: after a resume there are too few steps to compare with, but for those that the checkpoint remembers."""
    words = [*MODEL, "--data-path", write_text(tmp_path), "--train-iters", 16, "--device", "cpu", "--save-interval", 99]
    words += ["--check-for-spiky-loss", "--nan-policy", "skip"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder, more in ((straight, []), (stopped, ["--exit-interval", 12]), (stopped, [])):
        spike = "spike@step=14,point=loss,micro_batch=3"
        finished = warm.run([*words, "--save", folder, "--load", folder, *more], tmp_path, SPOIL=spike)
        assert finished.code == 0, finished.text
    assert "samples 55 to 55" in finished.text
    assert curve_of(straight) == curve_of(stopped)
    assert_same(state_of(straight, 16), state_of(stopped, 16))
