"""A minimal PyTorch loop with the hyperparameters of a recipe, on the characters of a text: a peer of `megalith train`.

    python benchmarks/peers/characters.py recipes/shakespeare-char-cpu.toml train.txt valid.txt --seed 1

It does what nanoGPT describes for these runs: each batch is drawn at random, with replacement, from all windows of the
text; linear layers and norms have no bias; matrices and embeddings decay. Flags of `megalith train` may follow: they
override the recipe. Prints the validation losses as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalith.config import RunConfig, load


class Layer(nn.Module):
    """Attention and feed-forward, each on its own normalized input."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden, bias=False), nn.LayerNorm(hidden, bias=False)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rate = self.dropout if self.training else 0.0
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=rate)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), rate)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), rate)


class GPT(nn.Module):
    """GPT-2 without biases, with tied embeddings."""

    def __init__(self, run: RunConfig, vocabulary: int) -> None:
        super().__init__()
        model = run.model
        hidden, self.dropout = model.hidden_size, model.hidden_dropout
        self.words, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(run.data.seq_length, hidden)
        self.layers = nn.ModuleList(
            Layer(hidden, model.num_attention_heads, self.dropout) for _ in range(model.num_layers)
        )
        self.norm = nn.LayerNorm(hidden, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                is_residual = name.endswith(("out.weight", "down.weight"))
                scale = math.sqrt(2 * model.num_layers) if is_residual else 1.0
                nn.init.normal_(weight, std=model.init_method_std / scale)

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        x = F.dropout(x, self.dropout if self.training else 0.0)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def learning_rate(run: RunConfig, iteration: int) -> float:
    """Return the rate of an iteration, counted from 0: linear warm-up, then a cosine to the end of the run."""
    schedule, warmup = run.schedule, run.schedule.lr_warmup_iters
    assert schedule.lr is not None
    if iteration < warmup:
        return schedule.lr * (iteration + 1) / (warmup + 1)
    done = (iteration - warmup) / (run.train_iters - warmup)
    return schedule.min_lr + 0.5 * (1 + math.cos(math.pi * done)) * (schedule.lr - schedule.min_lr)


@torch.no_grad()
def validation_loss(model: GPT, ids: Tensor, length: int, batch: int = 64) -> float:
    """Return the mean loss of all characters but the first, in windows that do not overlap; the last may be short."""
    model.eval()
    whole = (len(ids) - 1) // length * length
    tokens, labels = ids[:whole].view(-1, length), ids[1 : whole + 1].view(-1, length)
    pairs = [*zip(tokens.split(batch), labels.split(batch), strict=True)]
    if whole < len(ids) - 1:
        pairs.append((ids[None, whole:-1], ids[None, whole + 1 :]))
    total = sum(float(model(*pair, reduction="sum")) for pair in pairs)
    model.train()
    return total / (len(ids) - 1)


def train(run: RunConfig, training: Tensor, validation: Tensor, vocabulary: int, kept: Path) -> dict[str, float]:
    """Train and return the validation losses by iteration; continue from the state in the file `kept`, if it exists."""
    model, length, batch = GPT(run, vocabulary), run.data.seq_length, run.global_batch_size
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    betas, decay = (run.optimizer.adam_beta1, run.optimizer.adam_beta2), run.optimizer.weight_decay
    optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=decay, fused=True)
    first, losses = 0, dict[str, float]()
    if kept.exists():
        weights, moments, random, first, losses = torch.load(kept, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        torch.set_rng_state(random)
    for iteration in range(first, run.train_iters):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run, iteration)
        starts = torch.randint(len(training) - length, (batch, 1))
        windows = training[starts + torch.arange(length + 1)]
        model(windows[:, :-1], windows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (iteration + 1) % run.train.eval_interval == 0 or iteration + 1 == run.train_iters:
            losses[str(iteration + 1)] = validation_loss(model, validation, length)
        if run.checkpoint.save_interval and (iteration + 1) % run.checkpoint.save_interval == 0:
            partial = kept.with_suffix(".partial")
            state = (model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), iteration + 1, losses)
            torch.save(state, partial)
            partial.replace(kept)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("train_text", type=Path)
    parser.add_argument("valid_text", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, default=Path("state.pt"), help="file that a killed run continues from")
    options, flags = parser.parse_known_args()
    texts = [path.read_bytes().decode() for path in (options.train_text, options.valid_text)]
    number_of = {character: number for number, character in enumerate(sorted(set(texts[0])))}
    ids = [torch.tensor([number_of[character] for character in text]) for text in texts]
    torch.manual_seed(options.seed)
    losses = train(load(["--config", options.recipe, *flags], {}, files=False), *ids, len(number_of), options.state)
    print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
