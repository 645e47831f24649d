"""Megatron's lines to the letter, from examples of its goldens and of its users' logs."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from megalith.compat.megatron import console_lines
from megalith.train.results import Evaluation, WindowReport

NOW = datetime(2026, 11, 21, 11, 4, 26, 853322)

WINDOW = WindowReport(
    iteration=10,
    train_iterations=1000,
    consumed_samples=160,
    seconds_per_step=1.2345,
    teraflops=12.34,
    tokens_per_second=1.0,
    mfu_measured=0.5,
    mfu_datasheet=None,
    learning_rate=8.305704e-4,
    global_batch_size=16,
    loss=6.232785,
    loss_scale=1.0,
    grad_norm=1.0861,
    num_zeros=2.0,
    params_norm=9.2361,
    num_skipped=0,
    num_nan=0,
)


def test_an_iteration_line_with_every_field() -> None:
    assert console_lines.iteration_line(WINDOW, NOW, throughput=True) == (
        " [2026-11-21 11:04:26.853322] iteration       10/    1000 | consumed samples:          160 | "
        "elapsed time per iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 12.3 | "
        "learning rate: 8.305704E-04 | global batch size:    16 | lm loss: 6.232785E+00 | loss scale: 1.0 | "
        "grad norm: 1.086 | num zeros: 2.0 | params norm: 9.236 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )


def test_a_window_of_skipped_steps_has_no_loss_and_no_norm() -> None:
    nothing = {"loss": None, "grad_norm": None, "num_zeros": None, "params_norm": None}
    skipped = replace(WINDOW, **nothing, learning_rate=0.0, num_skipped=10, loss_scale=8388608.0)
    assert console_lines.iteration_line(skipped, NOW) == (
        " [2026-11-21 11:04:26.853322] iteration       10/    1000 | consumed samples:          160 | "
        "elapsed time per iteration (ms): 1234.5 | learning rate: 0.000000E+00 | global batch size:    16 | "
        "loss scale: 8388608.0 | number of skipped iterations:  10 | number of nan iterations:   0 |"
    )


def test_the_rate_is_rounded_to_single_precision() -> None:
    assert console_lines.as_float32(0.1) == 0.10000000149011612
    assert "learning rate: 1.000000E-01 |" in console_lines.iteration_line(replace(WINDOW, learning_rate=0.1), NOW)


def test_evaluation_lines() -> None:
    evaluation = Evaluation(5, 20, "validation", 6.202026, 8, 0.1, final=False)
    line = " validation loss at iteration 5 | lm loss value: 6.202026E+00 | lm loss PPL: 4.937484E+02 | "
    dashes = "-" * 93
    assert console_lines.evaluation_lines(evaluation).splitlines() == [dashes, line, dashes]
    final = console_lines.evaluation_lines(replace(evaluation, split="test", final=True)).splitlines()[1]
    assert final.startswith(" validation loss at iteration 5 on test set | lm loss value: ")


def test_the_perplexity_of_a_hopeless_model_is_capped() -> None:
    assert console_lines.perplexity(1000.0) == console_lines.perplexity(20.0)


def test_the_argument_dump_is_sorted_and_dotted() -> None:
    lines = console_lines.argument_dump({"b": 1, "A" * 50: None, "adam_beta1": 0.9}).splitlines()
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[1] == f"  {'A' * 50}  None"
    assert lines[2] == "  adam_beta1 ...................................... 0.9"
    assert lines[4] == "-------------------- end of arguments ---------------------"


def test_checkpoint_lines() -> None:
    assert console_lines.saving_line(5, "C", "torch_dist", NOW) == (
        "[2026-11-21 11:04:26.853322] saving checkpoint at iteration       5 to C in torch_dist format"
    )
    assert console_lines.saved_line(5, "C", NOW) == (
        "  [2026-11-21 11:04:26.853322] successfully saved checkpoint from iteration       5 to C [ t 1/1, p 1/1 ]"
    )
    assert console_lines.loading_line("C", 3, distributed=False) == " loading checkpoint from C at iteration 3"
    assert console_lines.saved_line(5, "C", NOW, tensor=2, pipeline=4).endswith(" to C [ t 1/2, p 1/4 ]")
    assert console_lines.loaded_line("C", 3, tensor=2).endswith("from C [ t 1/2, p 1/1 ] at iteration 3")
    assert (
        console_lines.loaded_line("C", 3) == "  successfully loaded checkpoint from C [ t 1/1, p 1/1 ] at iteration 3"
    )
    values = [("warmup iterations", 25600.0), ("learning rate decay style", "cosine")]
    assert console_lines.schedule_lines(values, overridden=False) == [
        " > using checkpoint value 25600.0 for warmup iterations",
        " > using checkpoint value cosine for learning rate decay style",
    ]
    assert console_lines.schedule_lines(values[:1], overridden=True) == [
        " > overriding warmup iterations value to 25600.0"
    ]


@pytest.mark.parametrize(
    ("folder", "printed"),
    [("C", "./C"), ("runs/passing", "runs/passing/"), ("elsewhere", "elsewhere"), ("", "")],
)
def test_a_folder_is_printed_as_it_was_typed(folder: str, printed: str) -> None:
    assert console_lines.as_typed(folder, "./C", None, "runs/passing/") == printed


def test_exit_lines() -> None:
    assert console_lines.exit_on_signal_line("SIGTERM", NOW) == (
        "[exiting program after receiving SIGTERM.] datetime: 2026-11-21 11:04:26.853322 "
    )
    assert console_lines.exit_at_iteration_line(20, NOW).startswith("[exiting program at iteration 20] datetime: ")
