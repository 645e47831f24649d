"""Every flag of the reference has a status, and the users' command lines get the answers that they should."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from megalith.config import all_settings, load
from megalith.config.known import known_flags, read_known_flags
from megalith.errors import ConfigError

FILES = "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt"
SMALL_RUN = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --max-position-embeddings 512 "
    "--attention-backend auto --micro-batch-size 1 --global-batch-size 16 --train-iters 1000 --weight-decay 0.1 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 0.0001 --lr-decay-style "
    "cosine --min-lr 0.00001 --lr-warmup-fraction .01 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    f"--data-path P_text_document {FILES} --split 949,50,1 --log-interval 10 --save-interval 100 --eval-interval 50 "
    "--save C --load C --eval-iters 5"
)
RECOMPUTING_RUN = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    f"--micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 1000 --data-path P {FILES} "
    "--recompute-activations --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 "
    "--lr-warmup-fraction .01 --clip-grad 1.0 --distributed-backend nccl --log-interval 100 --save C --load C "
    "--save-interval 1 --eval-interval 1 --eval-iters 10 --fp16"
)
LARGE_RUN = (
    f"--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
    f"--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 1536 "
    f"--rampup-batch-size 16 16 5859375 --train-iters 500000 --lr-decay-iters 430000 --lr-warmup-fraction .001 "
    f"--lr 6.0e-5 --min-lr 6.0e-6 --fp16 --data-path P {FILES} --save C --save-interval 10000"
)
SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --data-path P --tokenizer-type NullTokenizer --vocab-size 30"
)
WORKING_GOLDENS = (
    "gpt2_rampup",
    "gpt2_decoupled_lr",
    "gpt2_torch_dist",
    "gpt2_resume_torch_dist",
    "llama_torch_dist",
    "llama_bf16_torch_dist",
    "gpt2_fp16",
    "gpt2_train_samples",
    "gpt2_wsd",
    "gpt2_wd_incr",
    "gpt2_weights_50",
    "gpt2_cyclic",
    "mock_data",
)


REFERENCE = Path(__file__).resolve().parents[3] / "docs/reference/megatron-flags.md"


def flags_with_a_status() -> set[str]:
    settings = all_settings().values()
    own = {flag for s in settings for flag in (*s.spellings, *s.off_spellings, *s.about.shorthands)}
    return own | set(known_flags())


def test_every_flag_of_megatron_has_a_status() -> None:
    """Of Megatron-LM 23.06, core 0.8.0, core 0.12.0 and the main branch of August 2026."""
    _, _, tables = REFERENCE.read_text(encoding="utf-8").partition("## Model\n")
    flags = set(re.findall(r"`(--\w[\w-]*)`", tables))
    assert len(flags) > 750
    assert flags - flags_with_a_status() == set()


def test_no_flag_has_two_statuses() -> None:
    listed = [flag.flag for flag in read_known_flags()]
    assert [flag for flag, count in Counter(listed).items() if count > 1] == []
    settings = all_settings().values()
    assert {f for s in settings for f in (*s.spellings, *s.off_spellings, *s.about.shorthands)} & set(listed) == set()


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ("--min-scale 2 --fp16", ("precision", "min_loss_scale", 2.0)),
        ("--fp32-allreduce --fp16", ("precision", "accumulate_allreduce_grads_in_fp32", True)),
        ("--cp-comm-type a2a a2a --lazy-mpu-init True", ("parallel", "cp_comm_type", "a2a")),
        ("--intermediate-size 48", ("model", "ffn_hidden_size", 48)),
        (
            "--vocab words.txt --tokenizer-type GPT2BPETokenizer --merge-file M",
            ("tokenizer", "vocab_file", "words.txt"),
        ),
        ("--override-lr-scheduler --load C", ("schedule", "override_opt_param_scheduler", True)),
        ("--use-checkpoint-lr-scheduler --load C", ("schedule", "use_checkpoint_opt_param_scheduler", True)),
        ("--no-weight-decay-cond-type qwen3_next --qk-layernorm", ("optimizer", "decays_qk_layernorm", True)),
    ],
)
def test_older_and_newer_spellings_set_the_same(flags: str, answer: tuple[str, str, object]) -> None:
    """Megatron of 2019 to 2021 wrote these; the last one is of 2026."""
    group, name, value = answer
    run = load(f"{SMALL} {flags}".split(), {}, files=False)
    assert getattr(getattr(run, group), name) == value


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ("--scaled-upper-triang-masked-softmax-fusion --bias-dropout-fusion --deep-init", ""),
        ("--scaled-upper-triang-masked-softmax-fusion True --resume-dataloader --skip-mmap-warmup", ""),
        ("--activations-checkpoint-method uniform", "--recompute-method"),
        ("--train-weighted-split-paths 'T: 1 0:1 A'", "--train-data-path"),
        ("--glu-activation geglu", "--quick-geglu"),
        ("--data-loader tfrecords --loose-json", "tools/preprocess_data.py"),
        ("--export-quant-cfg FP8", "ModelOpt"),
        ("--rl-generation-lag 1", "reinforcement learning"),
        ("--genfile out.txt --temperature 0.7", "megalith generate"),
        ("--projection-dim 128 --shared-query-context-model --pool-type max", "retrieval models"),
        ("--expert-parallel", "--expert-model-parallel-size"),
        ("--load-model-opt-format", "ModelOpt"),
        ("--heterogeneous-context-parallel --max-seqlen-per-cp-rank 8", "this kind of layout"),
        ("--enable-onelogger --inference-dynamic-batching-chunk-size 512", ""),
        ("--temperature 1 --rl-default-top-k -1 --export-model-type GPTModel", ""),
    ],
)
def test_flags_of_all_years_and_forks_are_answered(flags: str, answer: str) -> None:
    words = [*SMALL.split(), *shlex.split(flags)]
    if not answer:
        needless = [flag for note in load(words, {}, files=False).notes for flag in note.needs_nothing]
        assert needless == [word for word in shlex.split(flags) if word.startswith("--")]
        return
    with pytest.raises(ConfigError) as caught:
        load(words, {}, files=False)
    (problem,) = caught.value.violations
    assert answer in problem


def test_every_flag_of_the_goldens_has_a_status(shared: Path) -> None:
    cases = json.loads((shared / "golden" / "pretrain" / "manifest.json").read_text(encoding="utf-8"))["cases"]
    flags = {word for case in cases for word in case["args"] if word.startswith("--")}
    assert flags - flags_with_a_status() == set()


@pytest.mark.parametrize("name", WORKING_GOLDENS)
def test_the_golden_runs_of_one_process_are_accepted(name: str, shared: Path) -> None:
    cases = json.loads((shared / "golden" / "pretrain" / "manifest.json").read_text(encoding="utf-8"))["cases"]
    (args,) = [case["args"] for case in cases if case["name"] == name]
    run = load(args, {}, files=False)
    assert run.model.hidden_size == 16
    assert run.model.fused_attention is False


@pytest.mark.parametrize(
    "environ", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}], ids=["plain python", "torchrun"]
)
def test_w2(environ: dict[str, str]) -> None:
    run = load(SMALL_RUN.split(), environ, files=False)
    assert (run.model.num_layers, run.num_micro_batches, run.schedule.min_lr) == (12, 16, 1e-5)
    assert run.notes == ()


def test_flags_of_versions_between_those_of_the_reference_need_nothing() -> None:
    words = ["--enable-one-logger", "--one-logger-entity", "e"]
    (note,) = load([*SMALL_RUN.split(), *words], {}, files=False).notes
    assert note.needs_nothing == tuple(words[:2])


def test_flags_of_pai_megatron_patch_are_named_with_what_does_the_same() -> None:
    words = "--dataset RAW --enable-shared-expert --num-shared-experts 2 --optimizer-offload-policy auto"
    with pytest.raises(ConfigError) as caught:
        load([*SMALL_RUN.split(), *words.split()], {}, files=False)
    (problem,) = caught.value.violations
    assert "--moe-shared-expert-intermediate-size" in problem


def test_a_wrong_choice_is_answered_by_one_that_works() -> None:
    with pytest.raises(ConfigError, match="GPT2BPETokenizer") as caught:
        load([*SMALL_RUN.split(), "--tokenizer-type", "DeepSeekV3Tokenizer"], {}, files=False)
    assert "ByteLevelTokenizer" not in str(caught.value)


@pytest.mark.parametrize("launcher", ["--local-rank=0", "--local_rank=0", ""])
@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}])
def test_w4(launcher: str, environ: dict[str, str]) -> None:
    run = load([*launcher.split(), *RECOMPUTING_RUN.split()], environ, files=False)
    assert run.schedule.lr_decay_iters == 320000
    assert [note.needs_nothing for note in run.notes] == [(), ()]


def test_w6_ramps_up_over_its_iterations() -> None:
    run = load(LARGE_RUN.split(), {"RANK": "0", "WORLD_SIZE": "128"}, files=False)
    assert [run.batch_sizes.nominal_size(consumed) for consumed in (0, 70_000, 5_859_376)] == [16, 32, 1536]
    assert run.train_iters == 500_000
    assert run.batch_sizes.consumed_after(500_000) < 500_000 * 1536


def test_w6_on_two_processes_is_one_message_with_everything_that_does_not_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        load(LARGE_RUN.split(), {"RANK": "0", "WORLD_SIZE": "2"}, files=False)
    (processes,) = caught.value.violations
    named = ("--tensor-model-parallel-size 8", "--pipeline-model-parallel-size 16", "128")
    assert all(fact in processes for fact in named)


def test_no_module_is_recomputed_where_the_flag_has_no_value() -> None:
    words = [*SMALL.split(), "--recompute-granularity", "selective", "--attention-backend", "unfused"]
    assert load(words, {}, files=False).train.recomputed_parts == {"core_attn"}
    assert load([*words, "--recompute-modules"], {}, files=False).train.recomputed_parts == frozenset()
    assert load([*words, "--recompute-modules", "--seed", "2"], {}, files=False).train.recomputed_parts == frozenset()


@pytest.mark.parametrize("name", ["flex", "alltoall_seq"])
def test_other_dispatchers_of_tokens_are_all_to_all(name: str) -> None:
    experts = f"--num-experts 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type {name}"
    words = f"{SMALL} {experts} --global-batch-size 2".split()
    notes = [str(note) for note in load(words, {"RANK": "0", "WORLD_SIZE": "2"}, files=False).notes]
    assert [note for note in notes if note.startswith(f"--moe-token-dispatcher-type {name}: ")]
