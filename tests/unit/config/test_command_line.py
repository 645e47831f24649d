"""Reading a Megatron command line: spellings, precedence over the launcher's environment, and the notes about it."""

from __future__ import annotations

import re

import pytest

from megalith.config import RunConfig, all_settings, load
from megalith.config.command_line import given_settings, read_command_line, without_settings
from megalith.config.known import known_flags
from megalith.config.render import note_lines
from megalith.errors import ConfigError
from megalith.layout import Layout

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 "
    "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def read(*words: str, environ: dict[str, str] | None = None) -> RunConfig:
    return load([*BASE.split(), *words], environ or {})


def test_defaults_are_those_of_megatron() -> None:
    run = read()
    assert (run.optimizer.adam_beta2, run.model.init_method_std, run.model.hidden_dropout) == (0.999, 0.02, 0.1)
    assert (run.data.split, run.train.eval_interval, run.train.eval_iters) == ("969, 30, 1", 1000, 100)
    assert (run.log.log_interval, run.schedule.lr_decay_style, run.train.seed) == (100, "linear", 1234)
    assert (run.optimizer.weight_decay, run.precision.initial_loss_scale, run.precision.hysteresis) == (0.01, 2**32, 2)
    assert run.global_batch_size == 2 and run.num_micro_batches == 1


@pytest.mark.parametrize(
    ("words", "group", "name", "value"),
    [
        ("--layernorm-epsilon 1e-6", "model", "norm_epsilon", 1e-6),
        ("--norm-epsilon=1e-6", "model", "norm_epsilon", 1e-6),
        ("--disable-bias-linear", "model", "add_bias_linear", False),
        ("--no-add-bias-linear", "model", "add_bias_linear", False),
        ("--use-rotary-position-embeddings", "model", "position_embedding_type", "rope"),
        ("--rotary-base 500000 --use-rotary-position-embeddings", "model", "rotary_base", 500000),
        ("--no-check-for-nan-in-loss-and-grad", "precision", "check_for_nan_in_loss_and_grad", False),
        ("--no-mmap-bin-files", "data", "mmap_bin_files", False),
        ("--no-load-optim --load .", "checkpoint", "no_load_optim", True),
        ("--no-load-optim --load-optim", "checkpoint", "no_load_optim", False),
        ("--fp16 --no-fp16", "precision", "fp16", False),
        ("--save . --persistent-save-interval 5", "checkpoint", "save_interval", 5),
        ("--override-opt_param-scheduler", "schedule", "override_opt_param_scheduler", True),
        ("--hidden_dropout 0", "model", "hidden_dropout", 0.0),
        ("--lr-warmup-fraction .01", "schedule", "lr_warmup_fraction", 0.01),
        ("--clip-grad 0", "optimizer", "clip_grad", 0.0),
        ("--local-rank 0", "launch", "local_rank", 0),
        ("--local_rank=0", "launch", "local_rank", 0),
    ],
)
def test_spellings(words: str, group: str, name: str, value: object) -> None:
    assert getattr(getattr(read(*words.split()), group), name) == value


def test_every_boolean_can_be_switched_both_ways() -> None:
    for setting in all_settings().values():
        if setting.kind is bool:
            assert setting.spellings and setting.off_spellings, setting.name


def test_no_spelling_means_two_things() -> None:
    spellings = [
        flag
        for setting in all_settings().values()
        for flag in (*setting.spellings, *setting.off_spellings, *setting.about.shorthands)
    ]
    assert len(spellings) == len(set(spellings))
    assert not set(spellings) & set(known_flags())


def test_negative_numbers_are_values() -> None:
    with pytest.raises(ConfigError, match="--min-lr -1e-05"):
        read("--min-lr", "-1e-5")
    with pytest.raises(ConfigError, match="--weight-decay -0.5"):
        read("--weight-decay", "-.5")


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(ConfigError, match="--init-method .*--init-method-std"):
        read("--init-method", "0.1")


def test_underscores_are_noted() -> None:
    run = read("--transformer_impl", "local")
    assert run.model.transformer_impl == "local"
    (note,) = map(str, run.notes)
    assert "--transformer_impl" in note and "--transformer-impl" in note


def test_the_last_value_holds_and_is_noted() -> None:
    run = read("--seed", "1", "--seed", "2")
    assert run.train.seed == 2
    (note,) = map(str, run.notes)
    assert note.startswith("--seed ")
    assert read("--seed", "2", "--seed", "2").notes == ()


def test_trackers_of_several_flags_add_up() -> None:
    run = read("--tracker", "trackio", "wandb", "--tracker=mlflow", "--tracker", "wandb")
    assert run.log.trackers == ("trackio", "wandb", "mlflow")
    assert not any("more than once" in line for line in note_lines(run))


def test_a_flag_that_needs_nothing_is_noted_with_its_reason() -> None:
    run = read("--no-rope-fusion", "--no-masked-softmax-fusion")
    (note,) = run.notes
    assert note.needs_nothing == ("--no-rope-fusion", "--no-masked-softmax-fusion") and note.text
    (line,) = note_lines(run)
    assert line.endswith("--no-rope-fusion --no-masked-softmax-fusion")


def test_a_refused_flag_with_megatrons_default_asks_for_nothing() -> None:
    run = read("--moe-upcycling-granularity", "1", "--moe-paged-stash-page-size", "64")
    (note,) = run.notes
    assert note.needs_nothing == ("--moe-upcycling-granularity", "--moe-paged-stash-page-size") and note.text


def test_settings_of_experts_say_where_they_have_no_effect() -> None:
    run = read("--num-experts", "0", "--moe-router-topk", "4", "--moe-grouped-gemm")
    assert not run.model.mixture
    idle, needless = run.notes
    assert "--moe-router-topk 4" in idle.text and "--num-experts" in idle.text
    assert needless.needs_nothing == ("--moe-grouped-gemm",)
    alone = read("--expert-tensor-parallel-size", "3")
    assert alone.layout == Layout() and "--expert-tensor-parallel-size 3" in note_lines(alone)[0]
    spread = ("--num-experts", "4", "--moe-aux-loss-coeff", "0.1", "--moe-router-load-balancing-type", "none")
    (line,) = note_lines(read(*spread))
    assert "--moe-aux-loss-coeff 0.1" in line


def test_some_values_of_a_flag_may_need_nothing() -> None:
    assert [note.needs_nothing for note in read("--exit-signal", "SIGTERM").notes] == [("--exit-signal",)]
    with pytest.raises(ConfigError, match="--exit-signal SIGQUIT"):
        read("--exit-signal", "SIGQUIT")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--num-query-groups 2", ("--num-query-groups 2", "--group-query-attention")),
        ("--save-interval 5", ("--save-interval 5", "--save")),
        ("--phase-transition-iterations 4", ("--phase-transition-iterations 4", "--save")),
        ("--finetune", ("--finetune", "--load")),
        (
            "--no-use-tokenizer-model-from-checkpoint-args",
            ("--no-use-tokenizer-model-from-checkpoint-args", "--use-checkpoint-args"),
        ),
        ("--no-t5-logits-bias", ("--no-t5-logits-bias",)),
        ("--t5-scaled-logits", ("--t5-scaled-logits",)),
        ("--use-torch-fsdp2", ("--use-torch-fsdp2",)),
        (
            "--torch-fsdp2-no-reshard-after-forward",
            ("--torch-fsdp2-no-reshard-after-forward", "--use-torch-fsdp2"),
        ),
        ("--hysteresis 4", ("--hysteresis 4", "--fp16")),
        ("--split 100,0,0", ("--split 100,0,0", "--mock-data")),
        ("--recompute-method block", ("--recompute-method block", "--recompute-granularity")),
        ("--recompute-activations", ("core_attn",)),
        ("--recompute-granularity selective --recompute-modules core_attn", ("core_attn",)),
        ("--recompute-modules", ("--recompute-modules", "--recompute-granularity selective")),
        ("--recompute-modules mlp", ("--recompute-modules mlp", "--recompute-granularity selective")),
        *(
            (
                f"--recompute-granularity selective --recompute-modules {part} {more}",
                (f"--recompute-modules {part}", without),
            )
            for part, more, without in (
                ("moe_act", "", "--num-experts"),
                ("shared_experts", "--num-experts 2", "--moe-shared-expert-intermediate-size"),
                ("mla_up_proj", "", "--multi-latent-attention"),
            )
        ),
        ("--window-attn-skip-freq 2", ("--window-attn-skip-freq 2", "--window-size")),
        (
            "--num-experts 4 --moe-aux-loss-coeff 0.1 0.2",
            ("--moe-aux-loss-coeff 0.1 0.2", "--moe-router-load-balancing-type aux_loss"),
        ),
        (
            "--num-experts 4 --moe-router-score-function sigmoid --moe-router-pre-softmax",
            ("--moe-router-pre-softmax", "--moe-router-score-function sigmoid"),
        ),
        (
            "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-topk-scaling-factor 2.5",
            ("--moe-router-topk-scaling-factor 2.5", "sinkhorn"),
        ),
        (
            "--multi-latent-attention --position-embedding-type rope --rope-type rope --mscale 2",
            ("--mscale 2", "--rope-type rope"),
        ),
        ("--window-size 8,3", ("--window-size 8,3", "8,0")),
        ("--no-rope-freq 1", ("--no-rope-freq 1", "--position-embedding-type learned_absolute")),
        ("--glu-linear-offset 1", ("--glu-linear-offset 1",)),
        (
            "--apply-query-key-layer-scaling",
            ("--apply-query-key-layer-scaling", "--attention-backend unfused"),
        ),
        ("--lr-wsd-decay-iters 4", ("--lr-wsd-decay-iters 4", "--lr-decay-style WSD")),
        ("--sgd-momentum 0.5", ("--sgd-momentum 0.5", "--optimizer adam")),
        ("--optimizer sgd --adam-beta1 0.8", ("--adam-beta1 0.8", "--optimizer sgd")),
        ("--muon-nesterov", ("--muon-nesterov", "--optimizer adam")),
        ("--optimizer dist_muon", ("--optimizer dist_muon", "--optimizer muon")),
        ("--decoupled-min-lr 1e-5", ("--decoupled-min-lr 1e-05", "--decoupled-lr")),
        (
            "--use-precision-aware-optimizer",
            ("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--main-params-dtype fp16"),
        ),
        ("--error-injection-rate 5 --rerun-mode disabled", ("--error-injection-rate 5", "--rerun-mode disabled")),
        ("--fp16 --nan-policy skip", ("--nan-policy skip",)),
        ("--iterations-to-skip 3 10", ("--iterations-to-skip 10", "9")),
        ("--grad-reduce-in-bf16", ("--grad-reduce-in-bf16", "--bf16")),
        ("--fp16 --loss-scale 8 --hysteresis 3", ("--hysteresis 3", "--loss-scale")),
        ("--lr-decay-style constant --min-lr 1e-5", ("--min-lr 1e-05", "--lr-decay-style constant")),
        ("--lr-decay-style constant --lr-decay-iters 5", ("--lr-decay-iters 5", "--lr-decay-style constant")),
        ("--lr-warmup-init 1e-5", ("--lr-warmup-init 1e-05",)),
        (
            "--weight-decay 0.3 --start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear",
            ("--weight-decay 0.3", "--start-weight-decay 0.1", "--end-weight-decay 0.2"),
        ),
        ("--override-opt-param-scheduler", ("--override-opt-param-scheduler", "--load")),
        ("--use-checkpoint-opt-param-scheduler", ("--use-checkpoint-opt-param-scheduler", "--load")),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 3", ("--lr-wsd-decay-iters 8", "2", "3")),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-fraction 0.3", ("--lr-wsd-decay-iters 8", "2", "3")),
        ("--skip-train", ("--skip-train", "--load")),
        ("--account-for-loss-in-pipeline-split", ("--account-for-loss-in-pipeline-split",)),
        ("--profile --profile-step-start 10", ("--profile", "--profile-step-start 10")),
        ("--num-experts 2 --moe-layer-freq [0]*2", ("--moe-layer-freq [0]*2",)),
        ("--multi-latent-attention --position-embedding-type none", ("--position-embedding-type none", "--rope-type")),
    ],
)
def test_what_has_no_effect_is_noted(words: str, named: tuple[str, ...]) -> None:
    (note,) = map(str, read(*words.split()).notes)
    assert all(re.search(rf"(?<![\w-]){re.escape(fact)}(?![\w-])", note) for fact in named), note


def test_the_launcher_speaks_through_the_environment() -> None:
    assert read(environ={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "3"}).launch.local_rank == 3
    assert read("--local-rank", "1", environ={"LOCAL_RANK": "3"}).launch.local_rank == 1
    with pytest.raises(ConfigError, match="--rank "):
        read("--rank", "0")


def test_a_recipe_without_its_flag_is_told_it() -> None:
    with pytest.raises(ConfigError, match="--config my.toml") as caught:
        read("my.toml")
    assert len(caught.value.violations) == 1


def test_several_processes_make_a_layout() -> None:
    words = "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    run = read(*words.split(), environ={"RANK": "1", "WORLD_SIZE": "4"})
    assert str(run.layout) == "tp2 x dp2"
    assert run.parallel.sequence_parallel_here and not run.notes


def test_words_of_settings_can_be_taken_out_in_every_spelling() -> None:
    argv = [
        "--ckpt_step",
        "3",
        "--lr=1",
        "--finetune",
        "--ckpt-step=4",
        "--data-path",
        "a",
        "--load",
        "-1",
        "--no-finetune",
    ]
    assert without_settings(argv, ["ckpt_step", "finetune"]) == ["--lr=1", "--data-path", "a", "--load", "-1"]
    assert given_settings(argv) == {"ckpt_step", "lr", "finetune", "data_path", "load"}


def test_the_length_of_a_constant_rate_counts_for_a_fraction_of_it() -> None:
    words = "--lr-decay-style constant --lr-decay-iters 5 --lr-warmup-fraction 0.2 --lr-warmup-init 1e-5"
    assert read(*words.split()).notes == ()
    assert read(*["--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "7", "--lr-warmup-iters", "3"]).notes == ()


@pytest.mark.parametrize(("precision", "said"), [([], True), (["--fp16"], False), (["--bf16"], False)])
def test_a_loss_scale_without_half_precision_has_no_effect(precision: list[str], said: bool) -> None:
    text = "\n".join(note_lines(read("--loss-scale", "8", *precision)))
    assert ("--loss-scale 8" in text) is said


def test_a_batch_is_rounded_down_where_that_is_asked_for() -> None:
    run = read("--global-batch-size", "7", "--decrease-batch-size-if-needed")
    assert (
        run.global_batch_size,
        run.num_micro_batches,
        run.batch_sizes.num_micro_batches(0) * run.batch_sizes.unit,
    ) == (7, 3, 6)
    assert (run.eval_micro_batches, run.eval_batch_size) == (3, 6)  # the samples that an evaluation reads
    with pytest.raises(ConfigError, match="--global-batch-size 7 .*--micro-batch-size 2"):
        read("--global-batch-size", "7")


def test_a_batch_by_tokens_is_the_last_one_at_the_end() -> None:
    run = read("--step-batch-size-schedule", "0:2 256:4 1K:8")
    assert [run.batch_sizes.nominal_size(samples) for samples in (0, 3, 4, 14, 15)] == [2, 2, 4, 4, 8]
    assert (run.global_batch_size, run.num_micro_batches) == (8, 4)


def test_quotes_that_the_shell_has_kept_are_taken_off() -> None:
    reading = read_command_line(["--split", "'99,1,0'", "--save", '"a b"', "--load", "'"])
    assert (reading.values["split"], reading.values["save"], reading.values["load"]) == ("99,1,0", "a b", "'")
    assert reading.notes[0].startswith("--split '99,1,0'")
