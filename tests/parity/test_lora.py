"""LoRA is PEFT's: logits, loss and every gradient of adapters, read from its folders (written by peft_writer.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.api import load_trained
from megalith.checkpoint import CheckpointContent, DirectoryStore
from megalith.checkpoint.base import open_base
from megalith.checkpoint.formats.torch_dist import model_chunks, stacking_of
from megalith.checkpoint.sources.peft import adapter_tensors
from megalith.checkpoint.sources.source import open_source
from megalith.config.from_args import model_from_args
from megalith.config.groups import TokenizerConfig
from megalith.distributed.context import ParallelContext
from megalith.models.gpt import GPT
from megalith.models.huggingface import family_for
from megalith.models.saved import saved_tensors

FIXTURES = Path(__file__).parent / "fixtures" / "lora"
CASES = ("llama", "qwen2", "qwen3")
TOLERANCE = 1e-6  # of the largest element


def unmerged(folder: Path) -> GPT:
    """Return the model with its adapters beside."""
    store = DirectoryStore(folder)
    model = GPT(model_from_args(vars(store.common(0)["args"])), 48)
    base, iteration, _ = open_base(store, 0, ParallelContext.solo())
    for trained, (place, number) in ((True, (store, 0)), (False, (base, iteration))):
        held = [item for item in saved_tensors(model) if item[1].requires_grad is trained]
        place.load(number, CheckpointContent(model_chunks(held, stacking_of(model.config))))
    return model


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.detach() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_of_adapters_are_pefts(name: str) -> None:
    golden, model = load_file(FIXTURES / name / "golden.safetensors"), unmerged(FIXTURES / name / "adapter")
    tokens = golden["tokens"]
    assert relative(model(tokens[:, :-1]), golden["logits"]) < TOLERANCE
    loss = model(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
    loss.backward()
    assert relative(loss, golden["loss"]) < TOLERANCE
    family = family_for(model.config, name)
    parameters, compared = dict(model.named_parameters()), set[str]()
    for theirs in adapter_tensors(family.tensors(model.config, 48), model.config):
        for part in theirs.parts:
            grad = parameters[part.parameter].grad
            assert grad is not None, part.parameter
            wanted = golden[theirs.name].narrow(0, part.start, part.length)
            assert relative(grad.narrow(0, part.at, part.length), wanted) < TOLERANCE, theirs.name
            compared.add(theirs.name)
    assert compared == golden.keys() - {"tokens", "logits", "loss"}
    frozen = [key for key, parameter in parameters.items() if ".adapter." not in key]
    assert frozen and all(parameters[key].grad is None for key in frozen)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_peft_is_loaded_with_its_base(name: str) -> None:
    golden = load_file(FIXTURES / name / "golden.safetensors")
    tokenizer = TokenizerConfig("NullTokenizer", vocab_size=47)
    trained = load_trained(FIXTURES / name / "adapter", torch.device("cpu"), tokenizer=tokenizer)
    with torch.no_grad():
        assert relative(trained.model(golden["tokens"][:, :-1]), golden["logits"]) < TOLERANCE


def test_the_source_says_what_it_holds() -> None:
    contents = open_source(FIXTURES / "qwen2" / "adapter").contents()
    key = "decoder.layers.self_attention.linear_qkv.adapter.lora_"
    assert contents.tensors[f"{key}A.weight"].shape == (2, 2 * 4, 24)  # of queries and values
    assert contents.tensors[f"{key}B.weight"].shape == (2, 48, 4)
