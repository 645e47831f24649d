"""Peers of `megalith train` in training a GPT-2: what else one could run for the same step.

    python benchmarks/peers/train.py compiled --layers 12 --hidden 768 --heads 12 --sequence 1024 --batch 2

  compiled     a minimal GPT under torch.compile, as nanoGPT trains one: tied embeddings, SDPA, fused AdamW, clipping
  eager        the same without torch.compile
  huggingface  transformers' GPT2LMHeadModel, the rest of the step alike
  library      Megalith's model and optimizer in a loop of one's own (docs/extending.md), without the command

All multiply bf16 over fp32 main parameters (autocast; Megalith's own mixed precision) and keep freed memory as
`megalith train` does. A line per step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalith.kernels.cpu.process import keep_freed_memory

Step = Callable[[Tensor, Tensor], float]


class Layer(nn.Module):
    """Attention and feed-forward, each on its own normalized input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = (
            part.view(batch, sequence, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(hidden, 2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A minimal GPT-2."""

    def __init__(self, vocabulary: int, sequence: int, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def peer_step(options: argparse.Namespace) -> Step:
    """The step of a model of plain PyTorch."""
    loss_of: Callable[[Tensor, Tensor], Tensor]
    if options.peer == "huggingface":
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": options.vocabulary, "n_positions": options.sequence, "n_embd": options.hidden}
        dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        shape = {"n_layer": options.layers, "n_head": options.heads, "use_cache": False}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **shape, attn_implementation="sdpa")).train()
        loss_of = lambda tokens, labels: model(tokens, labels=labels, shift_labels=labels).loss  # noqa: E731
    else:
        model = GPT(options.vocabulary, options.sequence, options.layers, options.hidden, options.heads)
        loss_of = torch.compile(model) if options.peer == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step(tokens: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if options.precision == "bf16" else nullcontext():
            loss = loss_of(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def library_step(options: argparse.Namespace) -> Step:
    """The step of Megalith's model and optimizer."""
    from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
    from megalith.models.gpt import GPT as MegalithGPT
    from megalith.models.initialise import initialise
    from megalith.optim import build_optimizer

    config = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        max_position_embeddings=options.sequence,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    bf16 = options.precision == "bf16"
    model = MegalithGPT(config, options.vocabulary, dtype=torch.bfloat16 if bf16 else torch.float32)
    initialise(model, 1)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig(bf16=bf16))

    def step(tokens: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(tokens, labels_BS=labels).mean()
        loss.backward()
        optimizer.step(1e-4, 0.1)
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("compiled", "eager", "huggingface", "library"))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    for name in ("layers", "hidden", "heads", "sequence", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=10**9)
    options = parser.parse_args()
    keep_freed_memory(1)
    torch.manual_seed(0)
    step = library_step(options) if options.peer == "library" else peer_step(options)
    for number in range(1, options.steps + 1):
        began = time.perf_counter()
        ids = torch.randint(0, options.vocabulary, (options.batch, options.sequence + 1))
        loss = step(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        print(f"step {number}: loss {loss:.4f}, {1000 * (time.perf_counter() - began):.1f} ms", flush=True)


if __name__ == "__main__":
    main()
