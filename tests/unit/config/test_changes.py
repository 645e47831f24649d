"""What changed since a checkpoint, and what each change means."""

from __future__ import annotations

from dataclasses import replace

from megalith.config import RunConfig, from_values, megatron_args
from megalith.config.changes import (
    ANOTHER_WAY,
    ARCHITECTURE,
    HARMLESS,
    LENGTH,
    ORDER,
    REPLACED,
    ROUNDING,
    change_lines,
    changes_since,
)

VALUES = {
    **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 8, "seq_length": 8},
    **{"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 10, "lr": 1e-3, "mock_data": True},
    **{"tokenizer_type": "NullTokenizer", "vocab_size": 99},
}


def run(**changes: object) -> RunConfig:
    """A configuration with some settings changed."""
    return from_values({**VALUES, **changes})


def test_nothing_changed() -> None:
    assert changes_since(run().to_dict(), run()) == []
    assert changes_since(megatron_args(run()), run()) == []
    assert change_lines([], 5) == []


def test_each_change_is_told_with_its_meaning() -> None:
    now = run(lr=5e-4, train_iters=20, log_interval=1, micro_batch_size=2, split="90,5,5", hidden_dropout=0.0)
    expected = {
        "--lr 0.001 -> 0.0005": ANOTHER_WAY,
        "--train-iters 10 -> 20": LENGTH,
        "--log-interval 100 -> 1": HARMLESS,
        "--micro-batch-size 1 -> 2": ROUNDING,
        "--split 969, 30, 1 -> 90,5,5": ORDER,
        "--hidden-dropout 0.1 -> 0": ANOTHER_WAY,
    }
    for saved in (run().to_dict(), megatron_args(run())):
        assert {str(change): change.effect for change in changes_since(saved, now)} == expected


def test_settings_of_routers_and_losses_do_not_make_another_model() -> None:
    before = run(num_experts=4)
    now = run(num_experts=4, moe_aux_loss_coeff=0.1, moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall")
    effects = [change.effect for change in changes_since(before.to_dict(), now)]
    assert effects == [ANOTHER_WAY, ANOTHER_WAY, ROUNDING]


def test_a_flag_that_switches_off_is_shown_as_typed() -> None:
    (change,) = changes_since(run().to_dict(), run(bias_gelu_fusion=False))
    assert str(change) == "--no-bias-gelu-fusion off -> on"


def test_what_only_concerns_this_start_is_no_change() -> None:
    assert changes_since(run().to_dict(), run(load="elsewhere", finetune=True, ckpt_step=3)) == []


def test_a_start_without_saved_states_goes_another_way_each_time() -> None:
    fresh = run(no_load_optim=True, no_load_rng=True)
    for before in (run(), fresh):
        changes = {str(change): change.effect for change in changes_since(before.to_dict(), fresh)}
        assert changes == {"--no-load-optim off -> on": ANOTHER_WAY, "--no-load-rng off -> on": ANOTHER_WAY}
    assert changes_since(fresh.to_dict(), run()) == []


def test_the_schedule_of_the_checkpoint_replaces_that_of_the_flags() -> None:
    now = run(lr=0.1, weight_decay=0.5, use_checkpoint_opt_param_scheduler=True, lr_warmup_init=1e-9)
    effects = {change.flag: change.effect for change in changes_since(run().to_dict(), now)}
    assert effects["--lr"] == effects["--weight-decay"] == REPLACED
    assert effects["--lr-warmup-init"] == ANOTHER_WAY, "the state of the schedule does not hold it"


def test_an_older_version_knew_fewer_settings() -> None:
    saved = run().to_dict()
    del saved["log"], saved["train"]["eval_iters"]
    assert changes_since(saved, run(log_interval=1, eval_iters=3)) == []


def test_harmless_changes_share_a_line() -> None:
    changes = changes_since(run().to_dict(), run(log_interval=1, save="c", save_interval=5, lr=0.1))
    assert change_lines(changes, 7) == [
        "changed since the checkpoint of iteration 7:",
        f"    --lr 0.001 -> 0.1: {ANOTHER_WAY}",
        "    harmless: --save - -> c, --save-interval - -> 5, --log-interval 100 -> 1",
    ]


def test_another_world_and_another_model_are_told() -> None:
    wider = run()
    wider = replace(wider, launch=replace(wider.launch, world_size=2), model=replace(wider.model, num_layers=3))
    told = {change.flag: (change.was, change.now, change.effect) for change in changes_since(run().to_dict(), wider)}
    assert told == {"--num-layers": ("2", "3", ARCHITECTURE), "--world-size": ("1", "2", ROUNDING)}
