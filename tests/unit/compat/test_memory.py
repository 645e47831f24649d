"""Megatron's memory report, with the figures of docs/reference/console.md#memory-report."""

from __future__ import annotations

import pytest

from megalith.compat.megatron.console_lines import timing_lines
from megalith.compat.megatron.memory import memory_line, theoretical_memory, theory_lines
from megalith.compat.megatron.run_console import duration
from megalith.config import RunConfig, from_values
from megalith.models.gpt import GPT


def run(layers: int, hidden: int, heads: int, length: int, **more: object) -> RunConfig:
    """A run that is sound."""
    values: dict[str, object] = {
        **{"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": length},
        **{"max_position_embeddings": length, "micro_batch_size": 1, "global_batch_size": 16, "train_iters": 1},
        **{"lr": 1.0, "mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": 50257},
    }
    environ = {"RANK": "0", "WORLD_SIZE": str(more.pop("world_size", 1))}
    return from_values({**values, **more}, environ=environ, files=False)


def test_the_users_124m() -> None:
    assert theory_lines(theoretical_memory(run(12, 768, 12, 512), 50304)).splitlines() == [
        "Number of parameters in transformer block in billions:  0.08",
        "Number of parameters in embedding layers in billions: 0.04",
        "Total number of parameters in billions: 0.12",
        "Number of parameters in most loaded shard in billions: 0.1236",
        "Theoretical memory footprints: weight and optimizer=2121.85 MB, activation=213.42 MB, total=2335.26 MB",
    ]


def test_of_a_model_of_experts_every_expert_counts() -> None:
    """The sizes of golden `pretrain/moe_ep2`, whose log has the figures to two digits."""
    parts = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}
    parts |= {"untie_embeddings_and_output_weights": True, "group_query_attention": True, "num_query_groups": 2}
    parts |= {"ffn_hidden_size": 48, "num_experts": 4, "moe_router_topk": 2}
    text = theory_lines(theoretical_memory(run(2, 16, 4, 32, **parts, micro_batch_size=2, global_batch_size=4), 512))
    assert "weight and optimizer=0.63 MB, activation=0.14 MB, total=0.76 MB" in text
    some = theoretical_memory(run(2, 16, 4, 32, **parts, moe_layer_freq="[0,1]"), 512).transformer
    every = theoretical_memory(run(2, 16, 4, 32, **parts), 512).transformer
    assert every - some == 3 * 16 * 48 * 3  # three experts less in the first layer


def test_experts_on_latent_vectors_are_narrow() -> None:
    parts = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}
    parts |= {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 8}
    parts |= {"ffn_hidden_size": 48}
    settings = run(2, 16, 4, 32, **parts, moe_latent_size=6, moe_layer_freq="[0,1]")
    model = GPT(settings.model, 512)
    routers = 4 * 16  # which Megatron's formula leaves out
    embedding = 512 * 16
    whole = sum(parameter.numel() for parameter in model.parameters()) - routers - embedding
    assert theoretical_memory(settings, 512).transformer == whole


def test_of_t5_both_stacks_count() -> None:
    parts = {"model_family": "t5", "decoder_seq_length": 16, "tokenizer_type": "BertWordPieceCase"}
    parts |= {"vocab_size": None, "vocab_file": "v.txt", "vocab_extra_ids": 10, "decoder_num_layers": 3}
    figures = theoretical_memory(run(2, 64, 4, 32, **parts, mock_data=False, data_path=["x"]), 512)
    norm, attention, feed_forward = 2 * 64, 4 * 64 * 64, 2 * 64 * 256
    encoder = 2 * (attention + feed_forward + 2 * norm) + norm
    assert figures.transformer == encoder + 3 * (2 * attention + feed_forward + 3 * norm) + norm
    assert figures.activation is None


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ({}, "0.25"),
        ({"world_size": 2, "tensor_model_parallel_size": 2}, "0.12"),
        ({"world_size": 2, "use_distributed_optimizer": True}, "0.17"),
    ],
    ids=["one process", "tensor", "distributed optimizer"],
)
def test_the_goldens(more: dict[str, object], weights: str) -> None:
    """`weight and optimizer` of golden `pretrain/gpt2_torch_dist`, and by its formula in other layouts."""
    text = theory_lines(theoretical_memory(run(2, 16, 4, 32, **more), 512))
    assert f"weight and optimizer={weights} MB" in text


def test_activations_where_megatron_has_a_formula() -> None:
    parts = {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    text = theory_lines(theoretical_memory(run(12, 768, 12, 512, **parts), 50432))
    layers, embedding, loss = 12 * 22 * 512 * 768, 8 * 512 + 512 * 768, 2 * 512 * (768 + 50432 / 2)
    assert f"activation={1.05 * (layers + embedding + loss) / 2**20:.2f} MB" in text
    text = theory_lines(theoretical_memory(run(12, 768, 12, 512, recompute_granularity="selective", **parts), 50432))
    # 12 layers x 34 s b h, embedding 9 s b (h) and the loss 4 s b (h + V), over two ranks.
    layers, embedding, loss = 12 * 34 * 512 * 768, 8 * 512 + 512 * 768, 4 * 512 * (768 + 50432)
    assert f"activation={(layers + embedding + loss) / 2 / 2**20:.2f} MB" in text


def test_what_a_rank_holds() -> None:
    assert memory_line(1, 10, {"resident_bytes": 3 << 20, "max_resident_bytes": 5 << 20}) == (
        "[Rank 1] (after 10 iterations) memory (MB) | resident: 3.0 | max resident: 5.0"
    )
    figures = {"allocated_bytes": 1, "max_allocated_bytes": 2, "reserved_bytes": 3 << 20, "max_reserved_bytes": 4 << 20}
    assert memory_line(0, 1, {**figures, "max_resident_bytes": 7}) == (
        "[Rank 0] (after 1 iterations) memory (MB) | allocated: 0.0 | max allocated: 0.0 | reserved: 3.0 | "
        "max reserved: 4.0"
    )


def test_blocks_of_times() -> None:
    times = {"evaluate": [0.5, 0.25], "save-checkpoint": [0.001, 0.002]}
    assert timing_lines(times).splitlines() == [
        "(min, max) time across ranks (ms):",
        "    evaluate .......................................: (250.00, 500.00)",
        "    save-checkpoint ................................: (1.00, 2.00)",
    ]
    assert timing_lines(times, "max").splitlines()[:2] == [
        "max time across ranks (ms):",
        "    evaluate .......................................: 500.00",
    ]
    assert timing_lines(times, "all").splitlines()[:4] == [
        "times across ranks (ms):",
        "  evaluate:",
        "     rank  0: 500.00",
        "     rank  1: 250.00",
    ]


def test_the_time_that_is_left() -> None:
    shown = {7.4: "7 s", 65: "1 min 5 s", 3600: "1 h 0 min", 200_000: "2 d 7 h", 0.2: "0 s"}
    assert {seconds: duration(seconds) for seconds in shown} == shown
