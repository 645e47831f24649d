"""Random accepted command lines and those of fine-tuning, in miniature: their layouts equal one process in fp64."""

from __future__ import annotations

import pytest

from ..campaigns.configurations import Configuration, drawn, proven

SEEDS = tuple(range(1_000_000, 1_000_010))  # not those of the campaign's record
EACH = 3


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_random_configurations_equal_one_process(seed: int) -> None:
    chosen = drawn(seed, EACH)
    assert len(chosen) > 1
    for configuration in chosen:
        found = proven(configuration)
        assert not found["differences"], (configuration, found["differences"])
        assert found["compared"] > 20


GPT = "--tokenizer-type NullTokenizer --vocab-size 1000"
FOUND = {
    "a stage without experts waits for the norm": (
        f"{GPT} --pipeline-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 2 --moe-layer-freq 2",
        4,
    ),
    "the miniature of an uneven split keeps no layer with experts": (
        f"{GPT} --pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --num-experts 8 --moe-layer-freq [0]*4+[1]*4 --moe-z-loss-coeff 1e-3 "
        "--window-size 16,0 --window-attn-skip-freq 2",
        2,
    ),
    "rounding decides the signs of Lion": (f"{GPT} --tensor-model-parallel-size 2 --optimizer lion", 2),
    "rounding decides the eigenbases of SOAP": (
        f"{GPT} --tensor-model-parallel-size 2 --optimizer soap --swiglu --num-experts 8 --moe-router-topk 2",
        2,
    ),
    "Adam makes weights of rounding": (
        f"{GPT} --tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel --use-torch-fsdp2 "
        "--torch-fsdp2-no-reshard-after-forward --recompute-activations --rotary-percent 0.5 --qk-layernorm "
        "--window-size 16,0 --decoupled-lr 1e-2 --bf16 --clip-grad 0 --reset-attention-mask --overlap-param-gather "
        "--untie-embeddings-and-output-weights --init-method-xavier-uniform",
        8,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_campaign_has_found_is_mended(name: str) -> None:
    found = proven(Configuration(*FOUND[name]))
    assert not found["differences"] and found["compared"] > 20 and found["worst"] < 1e-11


LLAMA = (
    "--tokenizer-type NullTokenizer --vocab-size 1000 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --ffn-hidden-size 192 --group-query-attention --num-query-groups 2 --sft"
)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
        "--context-parallel-size 2 --cp-comm-type a2a --no-sft-packing",
        "--use-distributed-optimizer",
        "--use-torch-fsdp2",
    ],
)
def test_fine_tuning_equals_one_process(layout: str) -> None:
    found = proven(Configuration(f"{LLAMA} {layout}", 2))
    assert not found["differences"], found["differences"]
    assert found["compared"] > 20 and found["worst"] < 1e-10
