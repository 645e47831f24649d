"""Small models and a tokenizer for tests of the engine, and the loop that needs no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from megalith.config import ModelConfig
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.models.t5 import T5
from megalith.serve.engine import Engine, RequestHandle
from megalith.serve.request import Event, Request, Token

from ...styles import as_llama

VOCABULARY = 28
CONTEXT = 48
GPT2 = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, max_position_embeddings=CONTEXT, init_method_std=0.5
)
LLAMA = as_llama(GPT2)
EXPERTS = dataclasses.replace(
    LLAMA, num_experts=4, moe_ffn_hidden_size=24, moe_shared_expert_intermediate_size=16, moe_latent_size=12
)
LATENT = dataclasses.replace(
    LLAMA,
    group_query_attention=False,
    num_query_groups=1,
    multi_latent_attention=True,
    q_lora_rank=10,
    kv_lora_rank=8,
    qk_head_dim=6,
    qk_pos_emb_head_dim=4,
    v_head_dim=5,
    rope_type="rope",
    qk_layernorm=True,
)
T5_MEGATRON = dataclasses.replace(GPT2, model_family="t5", decoder_num_layers=3)
T5_PUBLISHED = dataclasses.replace(
    T5_MEGATRON,
    position_embedding_type="relative",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    normalization="RMSNorm",
    add_bias_linear=False,
    relu=True,
    softmax_scale=1.0,
    t5_logits_bias=False,
    t5_scaled_logits=True,
    kv_channels=6,
)
T5_ROTARY = dataclasses.replace(T5_MEGATRON, position_embedding_type="rope", num_experts=4, moe_router_topk=2)
ANSWERING = {"megatron": T5_MEGATRON, "published": T5_PUBLISHED, "rotary": T5_ROTARY}
WINDOWS = dataclasses.replace(LLAMA, window_size="4,0", window_attn_skip_freq="[1,0]")
SINKS = dataclasses.replace(WINDOWS, softmax_type="learnable")
STYLES = {"gpt2": GPT2, "llama": LLAMA, "experts": EXPERTS, "latent": LATENT, "windows": WINDOWS, "sinks": SINKS}


def model_of(style: str, dtype: torch.dtype = torch.float64, seed: int = 7) -> GPT:
    model = GPT(STYLES[style], 32, dtype=dtype)
    initialise(model, seed)
    return model.eval().requires_grad_(False)


def answering_of(style: str, dtype: torch.dtype = torch.float64, seed: int = 7) -> T5:
    model = T5(ANSWERING[style], 32, dtype=dtype)
    initialise(model, seed)
    return model.eval().requires_grad_(False)


class Letters:
    """26 letters, a space and the end."""

    vocab_size = VOCABULARY
    eod = VOCABULARY - 1
    end_ids = (eod,)
    pad = None

    def encode(self, text: str) -> list[int]:
        return [26 if letter == " " else ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz ."[token] for token in ids)


def full_forward(model: GPT, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """The greedy answer by passes over the whole text, and by how much the best logit of each step was ahead."""
    tokens, margins = list(prompt), []
    for _ in range(count):
        with torch.inference_mode():
            best = model(torch.tensor([tokens]))[0, -1, :VOCABULARY].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], margins


def collect(engine: Engine, requests: Sequence[Request], gaps: Sequence[int] = ()) -> list[list[Event]]:
    """The events of each request; before the one of index i there are gaps[i] steps."""
    handles: list[RequestHandle] = []
    events: dict[RequestHandle, list[Event]] = {}

    def step() -> None:
        for handle, event in engine.step():
            events[handle].append(event)

    for index, request in enumerate(requests):
        for _ in range(gaps[index] if index < len(gaps) else 0):
            step()
        handles.append(engine.submit(request))
        events[handles[-1]] = []
    while engine.has_work:
        step()
    return [events[handle] for handle in handles]


def tokens_of(events: Sequence[Event], sample: int = 0) -> list[int]:
    return [event.id for event in events if isinstance(event, Token) and event.sample == sample]


def text_of(events: Sequence[Event], sample: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Token) and event.sample == sample)
