"""Initial weights of parts of a model are parts of the initial weights of the model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megalith.config import ModelConfig
from megalith.distributed.context import Axis
from megalith.models.bert import Bert
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise, initialise_as_megatron_cpu, megatron_draw_order
from megalith.models.language_model import LanguageModel, Stage, named_placements
from megalith.models.t5 import T5
from megalith.nn.placement import local_part
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
    stages = [Stage(range(0, 1), predicts=False), Stage(range(1, 3), False, False), Stage(range(3, 4), embeds=False)]
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
