"""Log-probabilities, perplexity and greedy choices of an evaluation are those of transformers with the same weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.assemble.trained import Trained, load_trained
from megalith.cli.main import main
from megalith.evaluate.score import Sample, Scorer
from megalith.evaluate.text import read_texts, wikitext
from megalith.tokenizers import train_byte_level_bpe

transformers = pytest.importorskip("transformers", reason="the second witness needs the hf extra (transformers)")

VOCABULARY, CONTEXT = 300, 24
TEXT = (
    " = A head = \n \n The fire , which began at 3 @.@ 5 in the morning , burned for ( at least ) two days . It was "
    "the town 's worst ; nobody who saw it would forget it . \n"
) * 4
CLOZE = [
    "the fire burned for two days and the town was gone",
    "nobody who saw it would forget the fire",
    "it began in the morning",
    "a town and a fire which burned for at least two days in the morning and the worst of it was the morning",
]
Build = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Kind -> a folder with a random model of transformers and a tokenizer, and the model."""
    made: dict[str, tuple[Path, Any]] = {}

    def save(kind: str) -> tuple[Path, Any]:
        if kind in made:
            return made[kind]
        folder = tmp_path_factory.mktemp(kind)
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
        if kind == "gpt2":
            config = transformers.GPT2Config(n_positions=CONTEXT, n_embd=24, n_layer=2, n_head=4, **sizes)
            model = transformers.GPT2LMHeadModel(config)
        else:
            config = transformers.LlamaConfig(
                hidden_size=24,
                intermediate_size=40,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=CONTEXT,
                tie_word_embeddings=False,
                **sizes,
            )
            model = transformers.LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15, generator=generator)
        model.save_pretrained(folder)
        _save_tokenizer(folder)
        made[kind] = folder, model.eval()
        return made[kind]

    return save


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    vocab, merges = train_byte_level_bpe([wikitext(TEXT), *CLOZE], VOCABULARY, folder)
    tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    vocab.unlink(), merges.unlink()


def _load(folder: Path) -> Trained:
    return load_trained(folder, torch.device("cpu"))


def _their_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_logprobs_and_greedy_choices(build: Build, kind: str) -> None:
    folder, theirs = build(kind)
    generator = np.random.default_rng(0)
    samples = [
        Sample(generator.integers(0, VOCABULARY, length).tolist(), targets)
        for length, targets in ((2, 1), (CONTEXT + 1, CONTEXT), (10, 3), (7, 6), (20, 1))
    ]
    for sample, score in zip(samples, Scorer(_load(folder).model, batch_size=2)(samples), strict=True):
        wanted = _their_logprobs(theirs, list(sample.ids[:-1]))[-sample.num_targets :]
        targets = torch.tensor(sample.ids[-sample.num_targets :])
        np.testing.assert_allclose(score.logprobs, wanted.gather(1, targets[:, None])[:, 0], rtol=0, atol=2e-5)
        assert score.greedy.tolist() == (wanted.argmax(-1) == targets).tolist()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("stride", [CONTEXT, 5])
def test_wikitext_perplexities(build: Build, kind: str, stride: int, tmp_path: Path) -> None:
    """Against the loop over strides of transformers' own guide to the perplexity of models with a fixed length."""
    folder, theirs = build(kind)
    file, out = tmp_path / "wiki.test.txt", tmp_path / "out.json"
    file.write_text(TEXT)
    words = ["evaluate", str(folder), "--task", "wikitext103", "--data", str(file), "--overlapping-eval", str(stride)]
    assert main([*words, "--json", str(out)]) == 0
    ids = _load(folder).tokenizer.encode(wikitext(TEXT))
    total, scored = 0.0, 0
    for begin in range(0, len(ids) - 1, stride):
        end = min(begin + CONTEXT, len(ids) - 1)
        logprobs = _their_logprobs(theirs, ids[begin:end])
        total -= sum(float(logprobs[place - begin, ids[place + 1]]) for place in range(scored, end))
        scored = end
        if end == len(ids) - 1:
            break
    mean, ratio = total / (len(ids) - 1), (len(ids) - 1) / (len(TEXT.strip().split(" ")) - 1)
    result = json.loads(out.read_text())["result"]
    assert result["mean"] == pytest.approx(mean, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    assert result["adjusted_perplexity"] == pytest.approx(math.exp(min(20.0, mean * ratio)), rel=1e-3)
    assert result["token_ratio"] == ratio


def test_an_imported_model_has_the_tokenizer_of_its_training(build: Build, tmp_path: Path) -> None:
    folder, _ = build("llama")
    file, out = tmp_path / "text.txt", tmp_path / "out.json"
    file.write_text(TEXT)
    assert main(["checkpoint", "import", str(folder), str(tmp_path / "C"), "--no-compare"]) == 0
    assert main(["evaluate", str(tmp_path / "C"), "--task", "text", "--data", str(file), "--json", str(out)]) == 0
    assert not [alarm for alarm in json.loads(out.read_text())["alarms"] if "tokenizer" in alarm["what"]]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("strict", [False, True])
def test_lambada(build: Build, kind: str, strict: bool, tmp_path: Path) -> None:
    """Sentences of the file, and each one's beginning continued by what transformers itself finds most likely."""
    folder, theirs = build(kind)
    tokenizer = _load(folder).tokenizer
    texts = list(CLOZE)
    for text in CLOZE:
        ids = tokenizer.encode(text.rsplit(" ", 1)[0])[-CONTEXT:]
        texts.append(tokenizer.decode([*ids, int(_their_logprobs(theirs, ids)[-1].argmax())]).replace("\ufffd", "x"))
    texts = [text for text in texts if text.split()]
    file, out = tmp_path / "lambada_test.jsonl", tmp_path / "out.json"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flag = ["--strict-lambada"] if strict else []
    assert main(["evaluate", str(folder), "--task", "lambada", "--data", str(file), "--json", str(out), *flag]) == 0
    correct = 0
    for text in read_texts(file):
        if strict:
            word = text.split()[-1]
            context, target = tokenizer.encode(text[: text.rfind(word)].strip()), tokenizer.encode(" " + word)
        else:
            context, target = tokenizer.encode(text)[:-1], tokenizer.encode(text)[-1:]
        ids = (context + target)[-CONTEXT - 1 :]
        best = _their_logprobs(theirs, ids[:-1]).argmax(-1)[-len(target) :]
        correct += best.tolist() == target
    result = json.loads(out.read_text())["result"]
    assert (result["correct"], result["total"]) == (correct, len(texts))
    assert correct > 0 or strict
