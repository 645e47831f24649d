"""What saves memory, and what it costs: recomputation and the fused loss, each beside off and beside theory.

    python benchmarks/memory.py --out benchmarks/results/memory-cpu.json

Every contender runs in processes of its own: a few steps (forward and backward, no optimizer) of a small GPT in fp32
without dropout, or of the loss alone in bf16. Memory is the peak of what torch has allocated in one step, above what it
had before it, as its profiler records every allocation; `saved_mib` is that of the contender it is compared with less
its own. The peak resident size of the process (VmHWM, with an allocator that gives back what is freed) stands beside
it: it hides 30 to 50 % of what is saved, since it is reached where the libraries take their scratch memory. Time is the
processor's, of all threads, in other processes, whose allocator is as it is. The theory counts what is kept between the
passes, with T tokens a micro-batch, D hidden, H heads, S sequence, V vocabulary, 4 bytes a number:

    a layer with fused attention     16 T D      both inputs and outputs of norms 4, q k v 3, context 1, inside MLP 8
    a layer with unfused attention   + T H S + T D   the weights, and the queries times their scale
    recomputed core_attn             - T H S - T D   in each layer but the one that is under way
    recomputed mlp                   - 8 T D     likewise; the output of its norm stays
    recomputed layernorm             - 2 T D     in each layer; with mlp - 2 T D more than that alone
    recomputed moe_act               - 2 K T F   K choices of experts of width F; in each layer but the one under way
    recomputed shared_experts        - 2 T F     likewise
    recomputed mla_up_proj           - T H (2 C + N + V)   likewise; C channels of queries and of keys, N of these not
                                                 turned, V of values, which lie beside those N
    recomputed whole layers          - 15 T D    their input stays; in each recomputed layer, but for the one that is
                                                 under way where all of them are recomputed: the peak is in the last
    fused loss, bf16                 - 10 T V    bytes: fp32 logits, their log-softmax, and the gradient of the logits;
                                                 the bf16 logits (2 T V) are there in both

The optimizer's CPU offload moves what is on a GPU to the host; on a CPU there is nothing to move.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megalith.config import ModelConfig, OptimizerConfig, PrecisionConfig
from megalith.layout import Recompute
from megalith.models.gpt import GPT
from megalith.models.initialise import initialise
from megalith.nn.loss import LogitsBuffer, vocabulary_loss
from megalith.optim import build_optimizer

LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY = 8, 256, 4, 1024, 512
LOSS_TOKENS, LOSS_VOCABULARY = 2048, 32768
MIB = 1024.0 * 1024.0
_TD, _THS = 4 * LENGTH * HIDDEN / MIB, 4 * LENGTH * HEADS * LENGTH / MIB


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        off: what it is compared with; empty for those.
        theory: MiB that it keeps less than that.
        recompute: what is recomputed.
        unfused: attention step by step.
        model: further fields of its architecture.
    """

    off: str = ""
    theory: float = 0.0
    recompute: Recompute | None = None
    unfused: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)


def _parts(*names: str) -> Recompute:
    return Recompute(parts=frozenset(names))


EXPERTS, WIDTH, SHARED = 4, 512, 1024
MIXTURE = {"num_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "moe_shared_expert_intermediate_size": SHARED}
MIXTURE |= {"moe_router_topk": 2}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_head_dim": 64, "v_head_dim": 96}
LATENT |= {"qk_pos_emb_head_dim": 32, "position_embedding_type": "rope", "rope_type": "rope"}
_MIXED, _HEADS = 4 * LENGTH / MIB, 4 * LENGTH * HEADS * (96 + 96 + 64 + 96) / MIB

CONTENDERS = {
    "unfused": Contender(unfused=True),
    "unfused, core_attn": Contender("unfused", (LAYERS - 1) * (_THS + _TD), _parts("core_attn"), unfused=True),
    "fused": Contender(),
    "fused, layernorm": Contender("fused", 2 * LAYERS * _TD, _parts("layernorm")),
    "fused, mlp": Contender("fused", 8 * (LAYERS - 1) * _TD, _parts("mlp")),
    "fused, mlp and layernorm": Contender("fused", (10 * LAYERS - 8) * _TD, _parts("mlp", "layernorm")),
    "fused, half of the layers": Contender("fused", 15 * (LAYERS // 2) * _TD, Recompute("block", LAYERS // 2)),
    "fused, all layers": Contender("fused", 15 * (LAYERS - 1) * _TD, Recompute("uniform", 1)),
    "mixture": Contender(model=MIXTURE),
    "mixture, moe_act": Contender("mixture", 4 * (LAYERS - 1) * WIDTH * _MIXED, _parts("moe_act"), model=MIXTURE),
    "mixture, shared_experts": Contender(
        "mixture", 2 * (LAYERS - 1) * SHARED * _MIXED, _parts("shared_experts"), model=MIXTURE
    ),
    "latent": Contender(model=LATENT),
    "latent, mla_up_proj": Contender("latent", (LAYERS - 1) * _HEADS, _parts("mla_up_proj"), model=LATENT),
}
LOSSES = ("plain loss", "fused loss")


def _training(contender: Contender) -> Callable[[], None]:
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend="unfused" if contender.unfused else "fused",
        **contender.model,
    )
    model = GPT(config, VOCABULARY, recompute=contender.recompute)
    initialise(model, seed=1)
    optimizer = build_optimizer(model, OptimizerConfig(), PrecisionConfig())
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH))

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, labels_BS=tokens).mean().backward()

    return step


def _loss(name: str) -> Callable[[], None]:
    hidden = torch.randn(LOSS_TOKENS, HIDDEN).bfloat16().requires_grad_()
    weight = nn.Parameter(torch.randn(LOSS_VOCABULARY, HIDDEN).bfloat16())
    targets, buffer = torch.randint(0, LOSS_VOCABULARY, (LOSS_TOKENS,)), LogitsBuffer()

    def step() -> None:
        if name == "fused loss":
            losses = vocabulary_loss(hidden, weight, targets, None, buffer)
        else:
            losses = nn.functional.cross_entropy((hidden @ weight.t()).float(), targets, reduction="none")
        losses.mean().backward()
        hidden.grad = weight.grad = None

    return step


def _peak_resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM; this benchmark measures memory on Linux only")


def _step_of(name: str) -> Callable[[], None]:
    return _loss(name) if name in LOSSES else _training(CONTENDERS[name])


def _peak_allocated_mib(step: Callable[[], None]) -> float:
    """Of what torch allocates in a first step, buffers that stay included, above what was allocated before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found = sorted((float(event["ts"]), event["args"]) for event in events if event.get("name") == "[memory]")
    totals = [args["Total Allocated"] for _, args in found]
    return float(max(totals) - (totals[0] - found[0][1]["Bytes"])) / MIB


def run_one(name: str, steps: int) -> dict[str, Any]:
    """Peak MiB and the processor seconds of each step but the first, in this process."""
    step = _step_of(name)
    seconds = []
    for _ in range(steps + 1):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    resident = _peak_resident_mib()
    return {"resident_mib": resident, "peak_mib": _peak_allocated_mib(_step_of(name)), "seconds": seconds[1:]}


GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def _in_child(name: str, threads: int, steps: int, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--threads", str(threads), "--steps"]
    environment = {**os.environ, **environment}
    done = subprocess.run([*command, str(steps)], check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All contenders in turn, `--rounds` times; time over that of off is the median of the rounds' quotients."""
    names = [*CONTENDERS, *LOSSES]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            found[name].append(_in_child(name, options.threads, options.steps, {}))
    seconds = {name: [statistics.median(one["seconds"]) for one in runs] for name, runs in found.items()}
    lean = {name: _in_child(name, options.threads, 1, GIVES_BACK) for name in names}
    theory = {name: (c.off, c.theory) for name, c in CONTENDERS.items()}
    theory["plain loss"] = ("", 0.0)
    theory["fused loss"] = ("plain loss", 10 * LOSS_TOKENS * LOSS_VOCABULARY / MIB)
    result: dict[str, Any] = {}
    for name, (off, wanted) in theory.items():
        own = {kind: round(lean[name][kind], 1) for kind in ("peak_mib", "resident_mib")}
        result[name] = {**own, "seconds": [round(value, 3) for value in seconds[name]]}
        if off:
            over = statistics.median(a / b for a, b in zip(seconds[name], seconds[off], strict=True))
            result[name] |= {
                "off": off,
                "saved_mib": round(lean[off]["peak_mib"] - lean[name]["peak_mib"], 1),
                "saved_mib_in_theory": round(wanted, 1),
                "saved_resident_mib": round(lean[off]["resident_mib"] - lean[name]["resident_mib"], 1),
                "time_over_off": round(over, 2),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(run_one(options.one, options.steps)))
        return
    result = {
        "what": __doc__,
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
        "load_before": os.getloadavg(),
        "torch": torch.__version__,
        "threads": options.threads,
        "contenders": measure(options),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
