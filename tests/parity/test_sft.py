"""Fine-tuning is TRL's: loss of conversations and every gradient, packed and one a row (written by trl_writer.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megalith.api import load_trained
from megalith.config import DataConfig
from megalith.config.groups import TokenizerConfig
from megalith.data.build import build_gpt_datasets
from megalith.data.indexed import LOSS_MASK, IndexedWriter
from megalith.data.loader import BatchLoader
from megalith.models.huggingface import family_for
from megalith.tokenizers.null import NullTokenizer

FIXTURES = Path(__file__).parent / "fixtures" / "sft"
TOLERANCE = 1e-6  # of the loss, and of the largest element of a gradient
LENGTH = 24


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_loss_and_gradients_are_those_of_trl(name: str, packing: bool, tmp_path: Path) -> None:
    golden = load_file(FIXTURES / name / "golden.safetensors")
    lengths, prefix = golden["lengths"].tolist(), str(tmp_path / "talk")
    for path, field, dtype in ((prefix, "tokens", np.uint16), (prefix + LOSS_MASK, "mask", np.uint8)):
        with IndexedWriter(path, dtype) as writer:
            for part in golden[field].split(lengths):
                writer.add_document(part.numpy(), [len(part)])
            writer.finalize()
    data = DataConfig(LENGTH, train_data_path=(prefix,), sft=True, sft_packing=packing)
    rows = build_gpt_datasets(data, NullTokenizer(48), sizes=(None, 0, 0), seed=1).train
    assert rows is not None and (len(rows) == len(lengths)) is not packing
    model = load_trained(
        FIXTURES / name, torch.device("cpu"), tokenizer=TokenizerConfig("NullTokenizer", vocab_size=47)
    ).model
    model.requires_grad_(True)
    (loss,) = model.losses(model.prepare(next(BatchLoader(rows, len(rows), 0))), None)
    mean = loss.summed / loss.count
    mean.backward()
    kind = "packed" if packing else "padded"
    assert mean.item() == pytest.approx(float(golden[f"{kind} loss"]), rel=TOLERANCE)
    parameters, compared = dict(model.named_parameters()), set[str]()
    for theirs in family_for(model.config, name).tensors(model.config, 48):
        for part in theirs.parts:
            grad, wanted = parameters[part.parameter].grad, golden[f"{kind} {theirs.name}"]
            assert grad is not None, part.parameter
            difference = grad.narrow(0, part.at, part.length) - wanted.narrow(0, part.start, part.length)
            assert difference.abs().max() < TOLERANCE * wanted.abs().max(), theirs.name
            compared.add(f"{kind} {theirs.name}")
    assert compared == {key for key in golden if key.startswith(kind)} - {f"{kind} loss"}
