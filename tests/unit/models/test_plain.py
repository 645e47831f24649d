"""Plain modules in the place of a model: what they must return, how they start, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megalith.config import DataConfig, ModelConfig
from megalith.errors import ConfigError
from megalith.evaluate.score import Sample, Scorer
from megalith.layout import Recompute
from megalith.models.families import model_class
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise, seeded
from megalith.models.language_model import Inputs, LanguageModel, Stage
from megalith.models.plain import PlainModel, require_tokens_alone
from megalith.models.saved import saved_tensors
from megalith.nn.attention import LocalAttention
from megalith.nn.linear import Linear
from megalith.nn.placement import Replicated
from megalith.nn.region import Solo
from megalith.registry import Entry, Registered
from megalith.serve.model_runner import PlainRunner, runner_of
from megalith.serve.runner import Batch, Chunk

ROWS = 24


class Recurrent(nn.Module):
    """Small, causal, with tied embeddings, a buffer, and a constructor that draws by no reset_parameters."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.table = nn.Embedding(vocab_size, size)
        nn.init.normal_(self.table.weight, std=0.02)
        self.gain = nn.Parameter(torch.randn(size))
        self.layers = nn.ModuleList(nn.GRU(size, size, batch_first=True) for _ in range(config.num_layers))
        self.head = nn.Linear(size, vocab_size, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * self.gain * self.scale
        for layer in self.layers:
            x = x + layer(x)[0]
        logits: Tensor = self.head(x)
        return logits


def config_of(thing: Any, **settings: Any) -> ModelConfig:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 20}
    return ModelConfig(**sizes, model=Registered(Entry("model", "mine", thing)), **settings)


def build(thing: Any = Recurrent, seed: int = 5, **options: Any) -> LanguageModel:
    parts = {name: options.pop(name) for name in ("region", "mixer", "stage", "recompute", "dtype") if name in options}
    config = config_of(thing, **options)
    with seeded(seed, "model", torch.device("cpu")):
        model = model_class(config)(config, ROWS, **parts)
    initialise(model, seed)
    return model


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_masked_cross_entropy(smoothing: float) -> None:
    model = build(label_smoothing=smoothing).train()
    tokens, labels, mask = tokens_of(2, 6), tokens_of(2, 6).flip(0), torch.tensor([[1.0] * 6, [1.0, 0, 0, 1, 1, 0]])
    (loss,) = model.losses(Inputs({"tokens": tokens, "labels": labels, "loss_mask": mask}), None)
    log_probs = torch.log_softmax(model(tokens), -1)
    target = torch.full((2, 6, ROWS), smoothing / (ROWS - 1)).scatter_(2, labels[..., None], 1.0 - smoothing)
    torch.testing.assert_close(loss.summed, (-(target * log_probs).sum(-1) * mask).sum())
    assert float(loss.count) == 9.0


def test_the_constructor_draws_the_initial_weights_from_the_seed() -> None:
    before = torch.random.get_rng_state()
    one, same, other = build(), build(), build(seed=6)
    assert torch.equal(before, torch.random.get_rng_state())
    for (name, left), right, third in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right) and not torch.equal(left, third), name
    assert float(one.get_parameter("model.table.weight").detach().std()) == pytest.approx(0.02, rel=0.3)


def test_layers_of_megalith_inside_are_drawn() -> None:
    class Mixed(Recurrent):
        def __init__(self, config: ModelConfig, vocab_size: int) -> None:
            super().__init__(config, vocab_size)
            self.ours = Linear(8, 8, Replicated(), bias=True)

    weight, bias = (build(Mixed).get_parameter(f"model.ours.{name}").detach() for name in ("weight", "bias"))
    assert 0.0 < float(weight.abs().max()) < 0.2 and not bool(bias.any())


def test_tied_weights_are_saved_once_and_buffers_too() -> None:
    names = [name for name, _, _ in saved_tensors(build())]
    assert "model.table.weight" in names and "model.head.weight" not in names and "model.scale" in names
    assert len(names) == len(set(names)) == 2 + 2 * 4 + 1


def test_units_for_sharding_share_no_weight() -> None:
    model = build()
    assert isinstance(model, PlainModel) and list(model.blocks()) == list(model.model.layers)  # type: ignore[arg-type]

    class Alike(Recurrent):
        def __init__(self, config: ModelConfig, vocab_size: int) -> None:
            super().__init__(config, vocab_size)
            self.layers.append(self.layers[0])
            self.stack = nn.Sequential(nn.Linear(8, 8), self.head)

    model = build(Alike)
    assert isinstance(model, PlainModel)
    assert list(model.blocks()) == [*list(model.model.layers)[1:2], model.model.stack[0]]  # type: ignore


class Two(Solo):
    size = 2


class Half(LocalAttention):
    parts = 2


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"region": Two()}, r"--tensor-model-parallel-size.*mine.*model\.gain, model\.table\.weight.*model\.layers\.1"),
        ({"stage": Stage(range(1), is_last=False)}, r"--pipeline-model-parallel-size.*model\.table\.weight"),
        ({"mixer": Half()}, "--context-parallel-size.*mine"),
        ({"recompute": Recompute("uniform", 1)}, "--recompute-granularity"),
        ({"num_experts": 2}, "--num-experts"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"model_family": "bert"}, "--model-family bert"),
        ({"use_cpu_initialization": True}, "--use-cpu-initialization"),
    ],
)
def test_what_a_plain_module_cannot_do_is_refused(parts: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(**parts)


@pytest.mark.parametrize("asked", ["reset_attention_mask", "reset_position_ids"])
def test_data_that_it_does_not_see_is_refused(asked: str) -> None:
    data = DataConfig(seq_length=4, **{asked: True})
    with pytest.raises(ConfigError, match="--" + asked.replace("_", "-")):
        require_tokens_alone(build(), data)
    require_tokens_alone(GPT(replace(config_of(Recurrent), model=None), ROWS), data)


def test_a_wrong_shape_or_module_is_refused() -> None:
    class Hidden(Recurrent):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.table(tokens)  # type: ignore[no-any-return]

    class Frozen(Recurrent):
        def __init__(self, config: ModelConfig, vocab_size: int) -> None:
            super().__init__(config, vocab_size)
            self.gain.requires_grad_(False)

    class Empty(nn.Module):
        def __init__(self, config: ModelConfig, vocab_size: int) -> None:
            super().__init__()

    with pytest.raises(ConfigError, match=r"\[2, 6, 8\].*\[2, 6, 24\]"):
        build(Hidden)(tokens_of(2, 6))
    with pytest.raises(ConfigError, match=r"model\.gain|gain"):
        build(Frozen)
    with pytest.raises(ConfigError, match="Empty"):
        build(Empty)
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        build(lambda config, vocab_size, **parts: SimpleNamespace())


def test_half_precision_covers_weights_and_buffers() -> None:
    model = build(dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert model(tokens_of(1, 4), tokens_of(1, 4)).dtype == torch.float32


def test_it_generates_by_full_passes() -> None:
    model = build().eval()
    assert isinstance(model, PlainModel)
    tokens = tokens_of(1, 12)
    with torch.no_grad():
        wanted = model(tokens)[0]
    runner = runner_of(model, 8)
    assert isinstance(runner, PlainRunner)
    runner.block_size, runner.cache = 4, type(runner.cache)(8, 4)
    row = tokens[0].tolist()
    first = runner.run(Batch([Chunk(row[:7], 0, [5, 2], num_logits=2), Chunk([3], 0, [0], num_logits=0)]))
    torch.testing.assert_close(first, wanted[5:7])
    rest = runner.run(Batch([Chunk(row[7:], 7, [5, 6, 1])], copies=[(2, 6)]))
    torch.testing.assert_close(rest, wanted[11:])


def test_its_targets_are_scored() -> None:
    model = build().eval()
    assert isinstance(model, PlainModel)
    ids = tokens_of(1, 9)[0]
    (score, _) = Scorer(model, batch_size=2)([Sample(ids.tolist(), 3), Sample(ids[:4].tolist(), 1)])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None, :-1])[0].double(), -1)
    np.testing.assert_allclose(score.logprobs, logprobs[range(5, 8), ids[6:]].numpy(), atol=1e-5)


def extended(config: ModelConfig, vocab_size: int, **parts: Any) -> GPT:
    model = GPT(replace(config, model=None), vocab_size, **parts)
    model.extra = nn.Linear(8, 8)
    return model


class Extended(GPT):
    def __init__(self, config: ModelConfig, vocab_size: int, **parts: Any) -> None:
        super().__init__(config, vocab_size, **parts)
        self.extra = nn.Linear(8, 8)


@pytest.mark.parametrize("thing", [extended, Extended])
def test_what_builds_one_of_ours_is_whole_and_named_where_it_has_no_placement(thing: Callable[..., GPT]) -> None:
    model = build(thing)
    assert isinstance(model, GPT) and model(tokens_of(2, 6)).shape == (2, 6, ROWS)
    with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size 2.*extra\.weight, extra\.bias"):
        build(thing, region=Two())
