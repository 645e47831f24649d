"""Initial weights of parts of a model are parts of the initial weights of the model."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megalith.config import ModelConfig
from megalith.distributed.context import Axis
from megalith.errors import ConfigError
from megalith.models.bert import Bert
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise, initialise_as_megatron_cpu, megatron_draw_order
from megalith.models.language_model import LanguageModel, Stage, named_placements
from megalith.models.t5 import T5
from megalith.nn.norm import LayerNorm, RMSNorm
from megalith.nn.placement import Placement, Replicated, local_part
from megalith.nn.region import Region
from megalith.parallel.tensor import TensorParallel

GPT2 = ModelConfig(num_layers=4, hidden_size=16, num_attention_heads=4, max_position_embeddings=8)
LLAMA = dataclasses.replace(
    GPT2,
    position_embedding_type="rope",
    swiglu=True,
    ffn_hidden_size=24,
    untie_embeddings_and_output_weights=True,
    group_query_attention=True,
    num_query_groups=2,
)
STYLES = {"gpt2": GPT2, "llama": LLAMA}
FAMILIES = {
    **STYLES,
    "bert": dataclasses.replace(GPT2, model_family="bert"),
    "t5": dataclasses.replace(GPT2, model_family="t5", decoder_num_layers=2, position_embedding_type="relative"),
}
CLASSES = {"bert": Bert, "t5": T5}
VOCABULARY = 27


def _rank(index: int, size: int = 4) -> Region:
    return TensorParallel(Axis("tp", tuple(range(size)), index))


def _whole_or_part(style: str, region: Region | None = None) -> LanguageModel:
    return CLASSES.get(style, GPT)(FAMILIES[style], VOCABULARY, region=region)


def _draw(model: LanguageModel, as_megatron: bool, seed: int = 3) -> LanguageModel:
    if as_megatron:
        initialise_as_megatron_cpu(model, torch.Generator().manual_seed(seed))
    else:
        initialise(model, seed)
    return model


@pytest.mark.parametrize("as_megatron", [False, True])
@pytest.mark.parametrize("style", FAMILIES)
def test_every_rank_holds_its_part_of_the_same_weights(style: str, as_megatron: bool) -> None:
    whole = dict(_draw(_whole_or_part(style), as_megatron).named_parameters())
    for index in range(4):
        model = _draw(_whole_or_part(style, _rank(index)), as_megatron)
        for name, parameter, placement in named_placements(model):
            assert torch.equal(parameter, local_part(whole[name], placement, 4, index)), name


@pytest.mark.parametrize("style", STYLES)
def test_stages_hold_the_weights_of_the_whole_model(style: str) -> None:
    config = STYLES[style]
    whole = dict(_draw(GPT(config, VOCABULARY), False).named_parameters())
    stages = [Stage(range(0, 1), is_last=False), Stage(range(1, 3), False, False), Stage(range(3, 4), is_first=False)]
    names = set()
    for stage in stages:
        model = _draw(GPT(config, VOCABULARY, region=_rank(1), stage=stage), False)
        for name, parameter, placement in named_placements(model):
            origin = "embedding.word_embeddings.weight" if name == model.copied_weight else name
            assert torch.equal(parameter, local_part(whole[origin], placement, 4, 1)), name
            names.add(origin)
    assert names == set(whole)


@pytest.mark.parametrize("style", ["bert", "t5"])
def test_every_matrix_is_drawn_as_megatron(style: str) -> None:
    model = _whole_or_part(style)
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert set(megatron_draw_order(model)) == matrices


class _WithNorms(GPT):
    """A model of someone else's: norms of any name and kind, and a parameter that is neither weight nor bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, VOCABULARY)
        self.decoder.norm = _Placed(RMSNorm(8, 1e-5, dtype=torch.float32, device=torch.device("cpu")))
        self.decoder.before = _Placed(torch.nn.LayerNorm(8))
        self.decoder.layernorm_mixer = _Placed(torch.nn.Module())
        self.decoder.layernorm_mixer.inner.weight = torch.nn.Parameter(torch.full((8, 8), 0.25))
        self.decoder.mixer = _Placed(torch.nn.Linear(8, 8, bias=False))
        self.decoder.gate = _Placed(torch.nn.Module())
        self.decoder.gate.inner.gamma = torch.nn.Parameter(torch.full((8,), 0.25))


class _Placed(torch.nn.Module):
    """A module that has its parameters on every rank."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def placements(self) -> dict[str, Placement]:
        return {f"inner.{name}": Replicated() for name, _ in self.inner.named_parameters()}


@pytest.mark.parametrize("around_one", [False, True])
def test_what_a_weight_is_does_not_hang_on_its_name(around_one: bool) -> None:
    model = _draw(_WithNorms(dataclasses.replace(GPT2, apply_layernorm_1p=around_one)), False)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    own = {name: parameters[f"decoder.{name}"] for name in ("norm.inner.weight", "before.inner.weight")}
    assert all(weight.unique().tolist() == [1.0] for weight in own.values()), "neither is kept around one"
    assert parameters["decoder.before.inner.bias"].count_nonzero() == 0
    assert parameters["decoder.final_layernorm.weight"].unique().tolist() == [0.0 if around_one else 1.0]
    deviations = {
        name: float(parameters[f"decoder.{name}.inner.weight"].std()) for name in ("layernorm_mixer", "mixer")
    }
    assert 0.005 < deviations["layernorm_mixer"] < 0.05, "drawn, whatever its name"
    assert deviations["mixer"] == pytest.approx(1 / math.sqrt(3 * 8), rel=0.3), "drawn by its own reset_parameters"
    again = _draw(_WithNorms(dataclasses.replace(GPT2, apply_layernorm_1p=around_one)), False)
    assert torch.equal(again.get_parameter("decoder.mixer.inner.weight"), parameters["decoder.mixer.inner.weight"])
    assert parameters["decoder.gate.inner.gamma"].unique().tolist() == [0.25], "as its module has set it"


def test_megatrons_stream_is_refused_for_weights_that_megatron_has_not() -> None:
    with pytest.raises(ConfigError, match=r"--use-cpu-initialization.*layernorm_mixer"):
        _draw(_WithNorms(GPT2), True)


@pytest.mark.parametrize("around_one", [False, True])
@pytest.mark.parametrize("style", FAMILIES)
def test_norms_begin_as_identities(style: str, around_one: bool) -> None:
    config = dataclasses.replace(FAMILIES[style], apply_layernorm_1p=around_one, qk_layernorm=style == "llama")
    model = _draw(CLASSES.get(style, GPT)(config, VOCABULARY), False)
    norms = [module for module in model.modules() if isinstance(module, LayerNorm | RMSNorm)]
    assert norms
    for norm in norms:
        assert torch.equal(norm.weight + float(norm.around_one), torch.ones_like(norm.weight))


def test_embeddings_may_have_a_deviation_of_their_own() -> None:
    config = dataclasses.replace(FAMILIES["bert"], embedding_init_method_std=5.0)
    for as_megatron in (False, True):
        model = _draw(Bert(config, VOCABULARY), as_megatron)
        wide = {name for name, parameter in model.named_parameters() if float(parameter.detach().abs().max()) > 1.5}
        assert wide == {f"embedding.{kind}_embeddings.weight" for kind in ("word", "position", "tokentype")}


def test_stages_draw_as_megatron_their_own_layers_from_their_own_stream() -> None:
    """The layers of a stage are drawn as a model draws its layers whose embedding draws nothing."""
    stage = _draw(GPT(LLAMA, VOCABULARY, stage=Stage(range(2, 4), False, False)), True, seed=103)
    generator = torch.Generator().manual_seed(103)
    for name in ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"):
        parameter = stage.get_parameter(f"decoder.layers.2.{name}.weight")
        std = LLAMA.init_method_std / (8**0.5 if name.endswith(("proj", "fc2")) else 1.0)
        assert torch.equal(parameter, torch.empty(parameter.shape).normal_(0.0, std, generator=generator)), name


def test_virtual_stages_continue_the_stream() -> None:
    generator = torch.Generator().manual_seed(3)
    chunks = [GPT(LLAMA, VOCABULARY, stage=Stage(range(n, n + 1), False, False)) for n in (0, 2)]
    for chunk in chunks:
        initialise_as_megatron_cpu(chunk, generator)
    together = _draw(GPT(LLAMA, VOCABULARY, stage=Stage(range(0, 2), False, False)), True)
    name = "mlp.linear_fc2.weight"
    for layer, chunk in enumerate(chunks):
        found = chunk.get_parameter(f"decoder.layers.{2 * layer}.{name}")
        assert torch.equal(found, together.get_parameter(f"decoder.layers.{layer}.{name}"))
