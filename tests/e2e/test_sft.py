"""Supervised fine-tuning as typed: conversations with masks, killed and resumed in mid-epoch, divided in any way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megalith.data.indexed import LOSS_MASK, IndexedDataset, IndexedWriter
from megalith.train.metrics import read_metrics

from .checkpoints import assert_same, curve_of, state_of
from .warm import WarmProcess

RUN = [
    *("--num-layers", 2, "--hidden-size", 16, "--num-attention-heads", 2, "--seq-length", 16),
    *("--max-position-embeddings", 16, "--global-batch-size", 4, "--lr", 1e-2, "--weight-decay", 0.1),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", 99, "--make-vocab-size-divisible-by", 8),
    *("--log-interval", 1, "--num-workers", 1, "--train-iters", 8, "--save-interval", 5),
    *("--hidden-dropout", 0, "--attention-dropout", 0, "--sft", "--train-data-path", "talk"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 40 conversations, which make about 13 rows."""
    folder, rng = tmp_path_factory.mktemp("sft"), np.random.default_rng(5)
    with (
        IndexedWriter(str(folder / "talk"), "uint16") as tokens,
        IndexedWriter(str(folder / "talk_loss_mask"), "uint8") as mask,
    ):
        for length in rng.integers(2, 11, 40).tolist():
            tokens.add_document(rng.integers(0, 99, length), [length])
            mask.add_document(np.arange(length) >= rng.integers(1, length), [length])
        tokens.finalize()
        mask.finalize()
    return folder


@pytest.mark.full
def test_a_killed_run_continues_in_mid_epoch(warm: WarmProcess, folder: Path) -> None:
    common = [*RUN, "--micro-batch-size", 2, "--eval-iters", 0, "--hidden-dropout", 0.1]
    assert warm.run([*common, "--save", "whole"], folder).code == 0
    again = [*common, "--save", "again", "--load", "again"]
    killed = warm.run(again, folder, MEGALITH_FAULT="kill9@step=7,point=fwd")
    assert killed.code == -9, killed.text
    done = warm.run(again, folder)
    assert done.code == 0 and "at iteration 5" in done.text, done.text
    assert_same(state_of(folder / "whole", 8), state_of(folder / "again", 8))
    assert len(curve_of(folder / "whole")) == 8 and curve_of(folder / "whole") == curve_of(folder / "again")


def test_the_loss_is_per_token_however_the_batch_is_divided(warm: WarmProcess, folder: Path) -> None:
    held_out = ["--valid-data-path", "talk", "--full-validation", "--eval-interval", 4]
    common = [*RUN, *held_out, "--log-interval", 1]
    whole = warm.run([*common, "--micro-batch-size", 4, "--save", "of-four"], folder)
    assert whole.code == 0, whole.text
    words = [*common, "--micro-batch-size", 1, "--use-distributed-optimizer", "--save", "of-one"]
    for done in warm.run_ranks(2, words, folder):
        assert done.code == 0, done.text
    biased = warm.run([*common, "--micro-batch-size", 1, "--no-calculate-per-token-loss", "--save", "biased"], folder)
    assert biased.code == 0 and "no --calculate-per-token-loss" in biased.text
    four, one, biased = (np.array(curve_of(folder / name))[:, :3] for name in ("of-four", "of-one", "biased"))
    np.testing.assert_allclose(four, one, rtol=1e-4)
    assert abs(four - biased).max() > 1e-3


def test_what_contradicts_conversations_is_refused(warm: WarmProcess, folder: Path) -> None:
    common = [*RUN, "--micro-batch-size", 1]
    for words in (["--reset-attention-mask"], ["--eod-mask-loss"], ["--model-family", "bert"]):
        done = warm.run([*common, *words], folder)
        assert done.code == 2 and "--sft" in done.text and words[0] in done.text, done.text
    (folder / "talk.jsonl").write_text("{}\n")
    done = warm.run([*common, "--train-data-path", "talk.jsonl"], folder)
    assert done.code == 2 and "--sft-tokenizer-prompt-format" in done.text and "chatml" in done.text, done.text
    done = warm.run([*common, "--train-data-path", "talk_loss_mask"], folder)
    assert done.code == 3 and "--sft" in done.text and "megalith preprocess" in done.text, done.text


@pytest.mark.full
def test_conversations_are_given_as_text(warm: WarmProcess, tmp_path: Path) -> None:
    """Two ranks prepare files once, in a blend, and train as on what preprocess makes of them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.add_special_tokens(["<end>"])
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    for name in "ab":
        rows = [{"prompt": f"{name} {number}", "completion": "x" * (1 + number % 9)} for number in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "."]
    base = [*RUN[: RUN.index("--tokenizer-type")], *RUN[RUN.index("--make-vocab-size-divisible-by") : -2], *tokenizer]
    base += ["--micro-batch-size", 1, "--train-iters", 3]
    base += ["--eval-iters", 1, "--eval-interval", 3, "--sft-tokenizer-prompt-format", "plain"]
    words = [*base, "--train-data-path", 1, "a.jsonl", 2, "b.jsonl", "--valid-data-path", "b.jsonl"]
    assert warm.run(words, tmp_path, command="config").code == 0
    assert not (tmp_path / ".sft").exists()
    for times in ("prepared", "found"):
        first, second = warm.run_ranks(2, [*words, "--save", times], tmp_path)
        assert first.code == second.code == 0, first.text
        said = [line for line in first.text.splitlines() if "template plain" in line and ".sft" in line]
        assert len(said) == 2 and all(f"{times} in " in line for line in said), first.text
    for name in "ab":
        command = ["--input", f"{name}.jsonl", "--output-prefix", name, "--loss-mask", "--chat-template", "plain"]
        assert warm.run([*command, *tokenizer], tmp_path, command="preprocess").code == 0
    by_hand = [word if not str(word).endswith("jsonl") else f"{word[0]}_messages_document" for word in words]
    done, _ = warm.run_ranks(2, [*by_hand, "--save", "by-hand"], tmp_path)
    assert done.code == 0 and "--sft-tokenizer-prompt-format plain has no effect" in done.text, done.text
    assert len(curve_of(tmp_path / "found")) == 3
    for save in ("found", "by-hand"):  # the template that the tokenizer lacks stays with the model
        talk = warm.run([save, "--chat", "--prompt", "a 1", "--max-new-tokens", 2], tmp_path, command="generate")
        assert talk.code == 0, talk.text
    assert curve_of(tmp_path / "prepared") == curve_of(tmp_path / "found") == curve_of(tmp_path / "by-hand")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n')
    first, second = warm.run_ranks(2, words, tmp_path)
    assert first.code == second.code == 3
    text = first.text + second.text  # one of the ranks prints it
    assert "b.jsonl, line 2" in text and "megalith preprocess --input b.jsonl" in text, text


def test_answers_to_held_out_prompts_are_the_same_in_every_layout(warm: WarmProcess, folder: Path) -> None:
    common = [*RUN, "--micro-batch-size", 2, "--valid-data-path", "talk", "--eval-iters", 1, "--eval-interval", 8]
    common += ["--sft-sample-prompts", 2, "--padded-vocab-size", 112]  # else it depends on the layout
    solo = warm.run([*common, "--save", "answers"], folder)
    assert solo.code == 0, solo.text
    layout = ["--tensor-model-parallel-size", 2, "--sequence-parallel", "--save", "divided"]
    divided = warm.run_ranks(2, [*common, *layout], folder)
    assert all(done.code == 0 for done in divided), divided[0].text
    records = [read_metrics(folder / save / "run" / "metrics.jsonl") for save in ("answers", "divided")]
    (found,), (same,) = ([one for one in record if one["event"] == "samples"] for record in records)
    assert found["samples"] == same["samples"] and found["iteration"] == 8
    tokens, mask = (IndexedDataset(str(folder / f"talk{ending}")).get(0).tolist() for ending in ("", LOSS_MASK))
    begin = mask.index(1)
    assert found["samples"][0]["prompt"] == " ".join(map(str, tokens[:begin]))
    assert found["samples"][0]["held_out"] == " ".join(map(str, tokens[begin:]))
    answer = list(map(int, found["samples"][0]["answer"].split()))
    assert answer[-1] == tokens[-1] or len(tokens[:begin]) + len(answer) == 16, "it ends with its turn or the context"
    assert f'sample 2 at iteration 8 | prompt: "{found["samples"][1]["prompt"]}"' in solo.text
    written = warm.run(
        [
            "answers",
            "--prompt",
            found["samples"][0]["prompt"],
            "--max-new-tokens",
            len(answer),
            "--greedy",
        ],
        folder,
        command="generate",
    )
    assert found["samples"][0]["answer"] in written.text
