"""A registered model trains alike in every layout that it has, resumes bit for bit, and is refused in others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .warm import Finished, WarmProcess

MODULE = '''
import torch
from torch import nn
from megalith.api import GPT, Linear, Replicated, register_model, register_norm


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(size), nn.GRU(size, size, batch_first=True)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.mix(self.norm(x))[0])


@register_model("recurrent")
class Recurrent(nn.Module):
    def __init__(self, config, vocab_size):
        super().__init__()
        size = config.hidden_size
        self.table, self.head = nn.Embedding(vocab_size, size), nn.Linear(size, vocab_size, bias=False)
        self.gain = nn.Parameter(torch.randn(size))
        nn.init.normal_(self.table.weight, std=0.02)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList(Layer(size) for _ in range(config.num_layers))

    def forward(self, tokens):
        x = self.table(tokens) * self.gain
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@register_model("recurrent-without-dropout")
class WithoutDropout(Recurrent):
    def __init__(self, config, vocab_size):
        super().__init__(config, vocab_size)
        for layer in self.layers:
            layer.drop = nn.Identity()


@register_model("normalised")
class Normalised(nn.Module):
    def __init__(self, config, vocab_size):
        super().__init__()
        self.table, self.norm = nn.Embedding(vocab_size, config.hidden_size), nn.BatchNorm1d(config.hidden_size)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.norm(x.flatten(0, 1)).view_as(x) @ self.table.weight.t()


@register_norm("centred")
class Centred(nn.Module):
    def __init__(self, size, epsilon, *, dtype, device):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.register_buffer("mean", torch.zeros(size, dtype=dtype, device=device))

    def placements(self):
        return {"scale": Replicated()}

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.flatten(0, -2).mean(0), 0.1)
        return self.scale * (x - self.mean)


@register_model("extended")
class Extended(GPT):
    """A GPT whose last hidden states go through one more layer."""

    def __init__(self, config, vocab_size, **parts):
        super().__init__(config, vocab_size, **parts)
        self.extra = None
        if self.stage.is_last:
            self.extra = Linear(config.hidden_size, config.hidden_size, Replicated(), bias=False, **self.factory)

    def head_input(self, states):
        states = super().head_input(states)
        return states + self.extra(states)
'''
WORDS = """--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --lr-decay-style constant --eval-iters 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 30 --make-vocab-size-divisible-by 2 --import own_models
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1"""

AGAIN = """--import own_models --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant
    --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 30"""


class OwnModels:
    """Commands in a folder with the models of `MODULE`."""

    def __init__(self, warm: WarmProcess, folder: Path) -> None:
        (folder / "own_models.py").write_text(MODULE)
        self.warm, self.folder = warm, folder

    def run(self, command: str, *words: str) -> Finished:
        return self.warm.run(words, self.folder, command=command)

    def evaluated(self, name: str) -> list[float]:
        """The losses of the evaluations of a training that saves in the folder `name`."""
        records = map(json.loads, (self.folder / name / "run" / "metrics.jsonl").read_text().splitlines())
        return [record["loss"] for record in records if record["event"] == "evaluation"]

    def losses(self, name: str, model: str, *words: str, ranks: int = 1) -> list[float]:
        """The losses of a training on so many ranks that saves in the folder `name`."""
        command = [*WORDS.split(), "--model", model, "--save", name, "--save-interval", "2", *words]
        ended = self.warm.run_ranks(ranks, command, self.folder) if ranks > 1 else [self.run("train", *command)]
        assert [one.code for one in ended] == [0] * ranks, "\n".join(one.text[-2000:] for one in ended)
        records = map(json.loads, (self.folder / name / "run" / "metrics.jsonl").read_text().splitlines())
        return [record["loss"] for record in records if record["event"] == "step"]


@pytest.fixture
def own(warm: WarmProcess, tmp_path: Path) -> OwnModels:
    return OwnModels(warm, tmp_path)


def test_every_layout_of_a_plain_module_gives_the_losses_of_one_process(own: OwnModels) -> None:
    alone = own.losses("alone", "recurrent-without-dropout")
    assert len(alone) == 4 and alone[-1] < alone[0]
    for name, words in {
        "replicas": [],
        "zero1": ["--use-distributed-optimizer"],
        "fsdp": ["--use-torch-fsdp2"],
        "bf16": ["--use-torch-fsdp2", "--bf16"],
    }.items():
        found = own.losses(name, "recurrent-without-dropout", *words, ranks=2)
        assert found == pytest.approx(alone, rel=2e-2 if name == "bf16" else 1e-5), name
    for name in ("zero1", "fsdp"):
        rest = own.losses(f"{name}-alone", "recurrent-without-dropout", "--load", name, "--ckpt-step", "2")
        assert rest == pytest.approx(alone[2:], rel=1e-5), name


def test_a_plain_module_with_dropout_resumes_bit_for_bit_and_generates(own: OwnModels) -> None:
    whole = own.losses("whole", "recurrent")
    assert own.losses("rest", "recurrent", "--load", "whole", "--ckpt-step", "2") == whole[2:]
    same = own.run("checkpoint", "diff", "whole", "rest")
    assert same.code == 0, same.text
    answer = own.run("generate", "whole", "--import", "own_models", "--prompt", "1 2 3", "--max-new-tokens", "4")
    assert answer.code == 0 and re.search("^1 2 3 ", answer.text, re.MULTILINE), answer.text
    (own.folder / "own_models.py").write_text(MODULE + "# changed\n")
    changed = own.run("generate", "whole", "--import", "own_models", "--prompt", "1 2 3", "--max-new-tokens", "4")
    assert changed.code == 0 and re.search("--import own_models.*([0-9a-f]{12}).*(?!\\1)[0-9a-f]{12}", changed.text)
    (own.folder / "own_models.py").write_text(MODULE)
    without = own.run("generate", "whole", "--prompt", "1 2 3")
    assert without.code == 4 and "--import own_models" in without.text
    (own.folder / "text.txt").write_text(" ".join(str(number % 30) for number in range(100)))
    words = ("whole", "--import", "own_models", "--task", "text", "--data", "text.txt", "--json", "scored.json")
    scored = own.run("evaluate", *words)
    assert scored.code == 0, scored.text
    again = own.run("train", "--use-checkpoint-args", *AGAIN.split(), "--load", "whole", "--train-iters", "5")
    assert again.code == 0, again.text


@pytest.mark.parametrize("words", [[], ["--use-torch-fsdp2"]])
def test_buffers_that_forward_passes_change_are_alike_on_all_replicas(own: OwnModels, words: list[str]) -> None:
    evaluation = [*words, "--eval-iters", "4", "--eval-interval", "4"]
    own.losses("whole", "normalised", *evaluation, ranks=2)
    own.losses("rest", "normalised", *evaluation, "--load", "whole", "--ckpt-step", "2", ranks=2)
    whole, rest = (own.evaluated(name) for name in ("whole", "rest"))
    assert whole == rest and whole
    own.losses("alone", "normalised", *evaluation[len(words) :], "--load", "whole", "--train-iters", "5")
    assert own.run("checkpoint", "diff", "whole", "rest").code == 0


@pytest.mark.parametrize("words", [[], ["--sequence-parallel"]])
def test_buffers_of_layers_are_alike_on_tensor_parallel_ranks(own: OwnModels, words: list[str]) -> None:
    layout = ["--normalization", "centred", "--tensor-model-parallel-size", "2", *words]
    evaluation = [*layout, "--eval-iters", "4", "--eval-interval", "4"]
    own.losses("whole", "extended", *evaluation, ranks=2)
    own.losses("rest", "extended", *evaluation, "--load", "whole", "--ckpt-step", "2", ranks=2)
    whole, rest = (own.evaluated(name) for name in ("whole", "rest"))
    assert whole == rest and whole
    assert own.run("checkpoint", "diff", "whole", "rest").code == 0


def test_a_plain_module_is_refused_by_name_over_tensor_parallel_ranks(own: OwnModels) -> None:
    words = [*WORDS.split(), "--model", "recurrent", "--tensor-model-parallel-size", "2"]
    ended = own.warm.run_ranks(2, words, own.folder)
    assert [one.code for one in ended] == [2, 2]
    said = "".join(one.text for one in ended)
    assert "--tensor-model-parallel-size" in said and "model.layers.1.mix.weight_ih_l0" in said


def test_a_subclass_of_ours_has_every_layout(own: OwnModels) -> None:
    alone = own.losses("alone", "extended")
    for name, words in {
        "tp": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        "pp": ["--pipeline-model-parallel-size", "2"],
        "cp": ["--context-parallel-size", "2"],
        "zero1": ["--use-distributed-optimizer"],
    }.items():
        assert own.losses(name, "extended", *words, ranks=2) == pytest.approx(alone, rel=1e-5), name
    rest = own.losses("rest", "extended", "--load", "tp", "--ckpt-step", "2")
    assert rest == pytest.approx(alone[2:], rel=1e-5)
