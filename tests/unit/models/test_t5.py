"""T5: relative positions as Hugging Face has them, and padding that changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.initialise import initialise
from megalith.models.t5 import T5
from megalith.nn.region import SOLO
from megalith.nn.relative_positions import RelativePositions, buckets

VOCABULARY = 37


def _model(positions: str = "learned_absolute", **changes: Any) -> T5:
    values: dict[str, Any] = {
        "model_family": "t5",
        "num_layers": 2,
        "decoder_num_layers": 3,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "max_position_embeddings": 24,
        "position_embedding_type": positions,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.3,
    }
    model = T5(ModelConfig(**{**values, **changes}), VOCABULARY, dtype=torch.float64)
    initialise(model, 3)
    return model.eval()


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (8, 20), (16, 50)])
def test_buckets_are_those_of_hugging_face(both_ways: bool, count: int, most: int) -> None:
    theirs = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distances = torch.arange(-300, 301)
    expected = theirs._relative_position_bucket(distances, both_ways, count, most)
    assert torch.equal(buckets(distances, count, most, both_ways=both_ways), expected)


def test_a_bias_is_the_row_of_its_bucket() -> None:
    positions = RelativePositions(8, 12, 2, SOLO, both_ways=True, dtype=torch.float64, device=torch.device("cpu"))
    torch.nn.init.normal_(positions.relative_attention_bias.weight)
    bias_HQS = positions(range(2, 5), 7)
    for query, key in ((2, 0), (4, 6), (3, 3)):
        bucket = buckets(torch.tensor(key - query), 8, 12, both_ways=True)
        assert torch.equal(bias_HQS[:, query - 2, key], positions.relative_attention_bias.weight[bucket])


@pytest.mark.parametrize("positions", ["learned_absolute", "relative", "rope", "none"])
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_padding_changes_nothing(positions: str, implementation: str) -> None:
    model = _model(positions, transformer_impl=implementation)
    seen, told = torch.randint(0, VOCABULARY, (2, 9)), torch.randint(0, VOCABULARY, (2, 6))
    labels = told.roll(-1, 1)
    whole = model(seen, told, labels_BS=labels)
    more_seen = torch.cat((seen, torch.randint(0, VOCABULARY, (2, 4))), 1)
    more_told = torch.cat((told, torch.randint(0, VOCABULARY, (2, 3))), 1)
    padded = model(
        more_seen,
        more_told,
        padding_BE=(torch.arange(13) >= 9).expand(2, 13),
        padding_BS=(torch.arange(9) >= 6).expand(2, 9),
        labels_BS=torch.cat((labels, torch.full((2, 3), -1)), 1),
    )
    assert torch.allclose(padded[:, :6], whole, atol=1e-12)
    assert not torch.allclose(model(more_seen, told, labels_BS=labels), whole, atol=1e-3)


def test_logits_as_published() -> None:
    """Without a bias, and of hidden states that are divided by sqrt(hidden size)."""
    seen, told = torch.randint(0, VOCABULARY, (2, 9)), torch.randint(0, VOCABULARY, (2, 6))
    plain, bare, scaled = (_model(**options) for options in ({}, {"t5_logits_bias": False}, {"t5_scaled_logits": True}))
    assert plain.output_bias is not None and bare.output_bias is None
    assert set(dict(plain.named_parameters())) - set(dict(bare.named_parameters())) == {"lm_head.output_layer.bias"}
    torch.nn.init.normal_(plain.output_bias)
    assert torch.allclose(plain(seen, told), bare(seen, told) + plain.output_bias)
    assert torch.allclose(scaled(seen, told), bare(seen, told) / 4.0)
    assert (
        scaled.losses(scaled.prepare(_batch(seen, told)), None)[0].summed
        != bare.losses(bare.prepare(_batch(seen, told)), None)[0].summed
    )


def _batch(seen: Tensor, told: Tensor) -> dict[str, Tensor]:
    return {
        **{"text_enc": seen, "text_dec": told, "labels": told.roll(-1, 1), "loss_mask": torch.ones_like(told)},
        **{"enc_mask": torch.ones_like(seen), "dec_mask": torch.ones_like(told)},
    }
