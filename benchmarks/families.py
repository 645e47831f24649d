"""Speed of one training step of BERT base and T5 base, against Hugging Face in the same run.

    python benchmarks/families.py --out benchmarks/results/families-cpu.json

Contenders, on the same threads and token ids, fp32, without dropout:
  megalith       `megalith.models` and `megalith.optim` as `megalith train` uses them
  huggingface    transformers' BertForPreTraining and T5ForConditionalGeneration with SDPA and torch's fused AdamW

Both clip their gradients by the norm, and both keep freed memory as `megalith train` does.

BERT: 12 layers of 768, sequences of 512, 15 % of the words hidden, the order of two texts told. T5 (v1.0): 12 + 12
layers of 768, 512 tokens read and 128 written. Our models have the form that Hugging Face has (norms behind
the residual sums; RMSNorm, no biases, relative positions), so that both do the same arithmetic. Each
contender has a process of its own, as when it is used. Each round takes one step of each, the order changing; the ratio
is the median over rounds of the ratio within a round. `--profile FAMILY`
prints where the time of our step goes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from turns import in_processes, seconds_in_turns

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.kernels.cpu.process import keep_freed_memory
from megalith.models.families import model_class
from megalith.models.initialise import initialise
from megalith.optim import build_optimizer

LAYERS, HIDDEN, HEADS, FFN, SEQUENCE, ANSWER, HIDDEN_SHARE = 12, 768, 12, 3072, 512, 128, 0.15
VOCABULARY = {"bert": 30522, "t5": 32128}
BOUND = 1.1
Step = Callable[[], float]


def _batch(family: str, size: int) -> dict[str, Tensor]:
    """A micro-batch in the fields of our samples."""
    draws = torch.Generator().manual_seed(0)

    def ids(length: int) -> Tensor:
        return torch.randint(5, VOCABULARY[family], (size, length), generator=draws)

    if family == "bert":
        hidden = torch.rand(size, SEQUENCE, generator=draws) < HIDDEN_SHARE
        words = ids(SEQUENCE)
        return {
            "text": words.masked_fill(hidden, 4),
            "labels": words.masked_fill(~hidden, -1),
            "loss_mask": hidden.long(),
            "types": (torch.arange(SEQUENCE) >= SEQUENCE // 2).long().expand(size, SEQUENCE).contiguous(),
            "padding_mask": torch.ones(size, SEQUENCE, dtype=torch.int64),
            "is_random": torch.arange(size) % 2,
        }
    answer = ids(ANSWER)
    return {
        "text_enc": ids(SEQUENCE),
        "text_dec": torch.cat((torch.zeros(size, 1, dtype=torch.int64), answer[:, :-1]), dim=1),
        "labels": answer,
        "loss_mask": torch.ones_like(answer),
        "enc_mask": torch.ones(size, SEQUENCE, dtype=torch.int64),
        "dec_mask": torch.ones_like(answer),
    }


def _config(family: str) -> ModelConfig:
    common: dict[str, Any] = {
        **{"model_family": family, "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS},
        **{"ffn_hidden_size": FFN, "max_position_embeddings": SEQUENCE},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
    }
    if family == "bert":
        return ModelConfig(**common, apply_residual_connection_post_layernorm=True, bias_gelu_fusion=False)
    return ModelConfig(
        **common,
        position_embedding_type="relative",
        normalization="RMSNorm",
        add_bias_linear=False,
        softmax_scale=1.0,
        relu=True,
        t5_logits_bias=False,
        t5_scaled_logits=True,
    )


def megalith_step(family: str, size: int) -> Step:
    config = _config(family)
    model = model_class(config)(config, VOCABULARY[family])
    initialise(model, 1)
    model.train()
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig())
    batch = _batch(family, size)

    def step() -> float:
        optimizer.zero_grad(1)
        losses = model.losses(model.prepare(batch), None)
        loss = torch.stack([loss.summed / loss.count for loss in losses]).sum()
        loss.backward()
        optimizer.step(1e-4, 0.1)
        return float(loss.detach())

    return step


def huggingface_step(family: str, size: int) -> Step:
    import transformers

    fields, batch = _batch(family, size), dict[str, Tensor]()
    if family == "bert":
        bert = transformers.BertConfig(
            vocab_size=VOCABULARY[family],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )
        model = transformers.BertForPreTraining(bert)
        batch = {
            "input_ids": fields["text"],
            "token_type_ids": fields["types"],
            "labels": fields["labels"].masked_fill(fields["labels"] < 0, -100),
            "next_sentence_label": fields["is_random"],
        }
    else:
        t5 = transformers.T5Config(
            vocab_size=VOCABULARY[family],
            d_model=HIDDEN,
            d_ff=FFN,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            use_cache=False,
            attn_implementation="sdpa",
        )
        model = transformers.T5ForConditionalGeneration(t5)
        batch = {
            "input_ids": fields["text_enc"],
            "decoder_input_ids": fields["text_dec"],
            "labels": fields["labels"],
        }
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


STEPS = {"huggingface": huggingface_step, "megalith": megalith_step}


def build(contender: str, family: str, size: int, threads: int) -> Step:
    """The step of a contender, in a process that has done nothing yet."""
    torch.set_num_threads(threads)
    keep_freed_memory(1)  # as `megalith train` does
    return STEPS[contender](family, size)


def measure(family: str, rounds: int, size: int, threads: int) -> dict[str, Any]:
    """The two contenders in turns."""
    with in_processes({name: functools.partial(build, name, family, size, threads) for name in STEPS}) as steps:
        times = seconds_in_turns(steps, rounds)
    ratios = [theirs / ours for theirs, ours in zip(times["huggingface"], times["megalith"], strict=True)]
    return {
        "micro_batch_size": size,
        "seconds": {name: [round(value, 4) for value in values] for name, values in times.items()},
        "speed_over_huggingface": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "bound": BOUND,
    }


def profile(family: str, size: int, contender: str) -> str:
    """A table of where the time of a step goes."""
    step = build(contender, family, size, torch.get_num_threads())
    step()
    with torch.profiler.profile() as profiled:
        step()
    return str(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--families", nargs="+", choices=VOCABULARY, default=list(VOCABULARY))
    parser.add_argument(
        "--profile", choices=VOCABULARY, help="print where the time of a step goes, and measure nothing"
    )
    parser.add_argument("--contender", choices=STEPS, default="megalith", help="of --profile")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.profile:
        print(profile(options.profile, options.micro_batch_size, options.contender))
        return
    import transformers

    result: dict[str, Any] = {
        "what": __doc__,
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
        "load_before": os.getloadavg(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": options.threads,
    }
    for family in options.families:
        result[family] = measure(family, options.rounds, options.micro_batch_size, options.threads)
        print(json.dumps({family: result[family]}, indent=1), flush=True)
    result["load_after"] = os.getloadavg()
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
