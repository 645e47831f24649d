"""Planned beside counted memory, and the memory of recipes.

    python benchmarks/plan_memory.py --number 10 --seed 1       # random configurations of 1, 2 and 4 CPU ranks
    python benchmarks/plan_memory.py --sharded --number 10      # the same with FSDP2, of 2 and 4
    python benchmarks/plan_memory.py --resident --number 20     # the resident size of models of 300 MB
    python benchmarks/plan_memory.py --recipes                  # of the recipes for GPUs
    python benchmarks/plan_memory.py --megatron MEASURED.json   # of what Megatron-LM measured

With `--markdown docs/results/plan.md` the table of that page is replaced.

Each random configuration is planned (`megalith.plan`), then trained for two steps by as many forked processes. In these
a dispatch mode counts the bytes of all live tensors; the peak is that of the last step, and what is allocated is that
at its start. The fullest rank is compared. Configurations that the rules refuse are drawn again. With `--keep FILE`
what is counted is kept line by line, and not counted again by the next call: many configurations in several calls.

With `--resident` the steps are those of `megalith train`, freed memory is kept, and found is by how much the resident
size of a process (VmHWM) has grown since it trained a tiny model, when all was imported and all libraries started.

The file of Megatron-LM's measurements is a list of objects with `args` (flag -> value, true for a flag alone), `gpu`
(a100, h100 or gb200), `nodes_gpus` ([[nodes, GPUs a node]]; others than one entry are left out) and
`mem_allocated_bytes`, which torch's allocator had given to the last rank after a step.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it in a backward pass, of each fork again

from megalith.assemble.training import build_run
from megalith.config import RunConfig, load
from megalith.config.families import FAMILIES
from megalith.distributed.context import ParallelContext
from megalith.distributed.forked import run_forked
from megalith.errors import MegalithError
from megalith.kernels.cpu.process import keep_freed_memory, return_freed_memory
from megalith.plan.devices import DEVICES, GIB
from megalith.plan.measure import MemoryTrace
from megalith.plan.plan import Plan, plan_run
from megalith.train.step import train_step

STEPS = 2
SECONDS = 300.0  # that a rank may take
HOST = torch.device("cpu")
BASE = (
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-3 --device cpu --train-iters 3 --num-workers 0 "
    "--eval-iters 0 --split 100,0,0"
)
TINY = (
    f"{BASE} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 4 --vocab-size 500"
)
WITHIN, SHARE = 0.05, 0.95  # of random configurations: the peak
CLOSE, LARGE = 0.10, 300 * 10**6  # of resident sizes, of models of so many bytes
BESIDE, PART = 0.10, 0.85  # of Megatron-LM's measurements: what is allocated after a step
SEVERAL = 3  # runs that are refused for one reason
RECIPES = Path(__file__).resolve().parents[1] / "recipes"
VOCABULARIES = {"llama2": 32_000, "llama3": 128_256, "mixtral": 32_000, "nanochat": 65_536}
BY_SIZE = {16: "T4", 24: "RTX4090", 32: "V100S", 40: "A100-40GB", 80: "H100"}


@dataclass(frozen=True)
class Comparison:
    """Planned and counted bytes of the fullest rank."""

    ranks: int
    flags: str
    planned: tuple[int, int]  # allocated, peak
    counted: tuple[int, int]

    @property
    def errors(self) -> tuple[float, float]:
        """Return planned over counted, minus 1: of what is allocated, and of the peak."""
        allocated, peak = (one / other - 1 for one, other in zip(self.planned, self.counted, strict=True))
        return allocated, peak


def draw(chance: random.Random, *, large: bool = False) -> tuple[int, list[str]]:
    """Return a number of ranks and the flags of a configuration, which may break rules.

    Args:
        large: A larger model and fewer tokens.
    """
    pick = chance.choice
    ranks, heads = pick((1, 2, 4)), pick((4, 8))
    tp, pp, cp = (pick((1, 1, 2, 4)) for _ in range(3))
    sizes = (64, 128) if large else (16, 32, 64)
    words = f"{BASE} --num-layers {pick((2, 4, 6, 8))} --hidden-size {heads * pick(sizes)} "
    length = pick((128, 256) if large else (128, 256, 512))
    words += f"--num-attention-heads {heads} --seq-length {length} --max-position-embeddings {length} "
    micro = pick((1, 2) if large else (1, 2, 4))
    words += f"--micro-batch-size {micro} --global-batch-size {micro * 4 * (1 if large else pick((1, 2, 4)))} "
    words += f"--vocab-size {pick((500, 4000, 16000))} --tensor-model-parallel-size {tp} "
    words += f"--pipeline-model-parallel-size {pp} --context-parallel-size {cp} "
    options = (
        *("--bf16", "", "", ""),
        "--swiglu --normalization RMSNorm --disable-bias-linear",
        "--position-embedding-type rope",
        "--untie-embeddings-and-output-weights",
        "--use-distributed-optimizer",
        "--sequence-parallel",
        f"--group-query-attention --num-query-groups {max(2, heads // 4)}",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--recompute-granularity selective",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-schedule zb-h1",
        "--optimizer sgd",
        "--calculate-per-token-loss",
    )
    words += " ".join(option for option in options if chance.random() < 0.3)
    if chance.random() < 0.5:
        words += " --hidden-dropout 0 --attention-dropout 0"
    return ranks, words.split()


def draw_sharded(chance: random.Random) -> tuple[int, list[str]]:
    """Return the same with FSDP2, in every third ZeRO-2."""
    ranks, words = draw(chance)
    words = [word for word in words if word != "--use-distributed-optimizer"] + ["--use-torch-fsdp2"]
    return ranks, words + ["--torch-fsdp2-no-reshard-after-forward"] * (chance.random() < 0.33)


def sound(ranks: int, words: Sequence[str]) -> bool:
    """Return whether the rules let a configuration start, and FSDP2 has replicas."""
    try:
        run = load(list(words), {"RANK": "0", "WORLD_SIZE": str(ranks)})
    except MegalithError:
        return False
    return run.fully_sharded or not run.parallel.fully_shards


def build(rank: int, words: Sequence[str], ranks: int) -> tuple[Any, RunConfig, ParallelContext]:
    """Build a run as one rank of a group that is joined (`run_forked`)."""
    run = load(list(words), {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)})
    context = ParallelContext.create(run.layout, HOST) if ranks > 1 else ParallelContext.solo(HOST)
    return build_run(run, context).run, run, context


def train(rank: int, words: Sequence[str], ranks: int) -> tuple[int, int]:
    """Train as one rank; return its counted bytes at the start of the last step, and at its peak."""
    with MemoryTrace(HOST) as trace:
        trained, run, _ = build(rank, words, ranks)
        for _ in range(STEPS):
            start = len(trace.events)
            train_step(
                trained.state, iter(trained.train), run.num_micro_batches, pipeline_schedule=run.pipeline_schedule
            )
    now, found = 0, []
    for place, event in enumerate(trace.events):
        now += trace.tensors[event].size if event >= 0 else -trace.tensors[~event].size
        if place >= start - 1:
            found.append(now)
    return found[0], max(found)


def live(rank: int, words: Sequence[str], ranks: int) -> int:
    """Train a tiny model, then as one rank; return by how many bytes the resident size has grown since at most."""
    keep_freed_memory(ranks)
    _steps(build_run(load(TINY.split(), {}), ParallelContext.solo(HOST)).run, 4)
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts anew, from what is resident now
    before = _status("VmRSS")
    trained, run, _ = build(rank, words, ranks)
    return_freed_memory()
    _steps(trained, run.num_micro_batches, run.pipeline_schedule)
    return _status("VmHWM") - before


def _steps(trained: Any, micro_batches: int, schedule: str | None = None) -> None:
    for _ in range(STEPS):
        train_step(trained.state, iter(trained.train), micro_batches, pipeline_schedule=schedule)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, name
    return 1024 * int(found[1])


def planned(rank: int, words: Sequence[str], ranks: int) -> tuple[int, int]:
    """Return the planned bytes of the least rank between steps, and of the fullest at its peak.

    To be run in a process of its own: it starts threads, which a later fork would lack.
    """
    plan = plan_run(words, DEVICES["CPU"], world_size=ranks)
    return min(one.allocated_bytes for one in plan.ranks), plan.fullest.peak_bytes


def resident_runs(number: int, seed: int) -> tuple[str, float]:
    """Return planned peaks beside resident sizes of large configurations as Markdown, and the share that is near."""
    chance, lines, near = random.Random(seed), list[tuple[float, str]](), 0
    while len(lines) < number:
        ranks, words = draw(chance, large=True)
        if not sound(ranks, words):
            continue
        ((model, peak),) = run_forked(1, planned, words, ranks, seconds=SECONDS)
        if model < LARGE:
            continue
        found = max(run_forked(ranks, live, words, ranks, seconds=SECONDS))
        error, flags = peak / found - 1, " ".join(words[len(BASE.split()) :])
        near += abs(error) <= CLOSE
        lines.append((-abs(error), f"| {ranks} | {found / 2**20:.0f} | {error:+.1%} | `{flags}` |"))
        print(lines[-1][1], flush=True)
    head = [
        f"Of {number} configurations the planned peak of {near} is within {CLOSE:.0%} of the resident size "
        f"({near / number:.0%}).",
        "",
        "| ranks | resident MiB | planned peak | flags |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *(line for _, line in sorted(lines))]), near / number


def count(ranks: int, words: Sequence[str]) -> tuple[int, int]:
    """Train with as many forked processes; return the most bytes of a rank between steps, and at the peak."""
    found = run_forked(ranks, train, words, ranks, seconds=SECONDS)
    return max(one for one, _ in found), max(peak for _, peak in found)


def compare(ranks: int, words: Sequence[str], counted: tuple[int, int]) -> Comparison:
    memory = plan_run(words, DEVICES["CPU"], world_size=ranks).ranks
    planned = max(one.allocated_bytes for one in memory), max(one.peak_bytes for one in memory)
    return Comparison(ranks, " ".join(words[len(BASE.split()) :]), planned, counted)


def table(found: Sequence[Comparison]) -> str:
    """Return the comparisons as Markdown."""
    near = sum(abs(one.errors[1]) <= WITHIN for one in found)
    lines = [
        f"Of {len(found)} configurations the planned peak of {near} is within {WITHIN:.0%} of the counted one "
        f"({near / len(found):.0%}; wanted: {SHARE:.0%}).",
        "",
        "| ranks | counted peak, MiB | planned peak | planned between steps | flags |",
        "|---|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda one: -abs(one.errors[1])):
        allocated, peak = one.errors
        lines.append(f"| {one.ranks} | {one.counted[1] / 2**20:.1f} | {peak:+.1%} | {allocated:+.1%} | `{one.flags}` |")
    return "\n".join(lines)


def recipes() -> str:
    """Return the memory of the recipes for GPUs as Markdown."""
    lines = ["| recipe | GPUs | peak GiB | room GiB | fullest in |", "|---|---|---|---|---|"]
    for path in sorted(RECIPES.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        number, gib = (re.search(rf"^# {name}: (\d+)$", text, re.MULTILINE) for name in ("GPUs", "GiB of a GPU"))
        if not number or not gib or number[1] == "0":
            continue
        device = BY_SIZE[int(gib[1])]
        vocabulary = next((size for name, size in VOCABULARIES.items() if path.name.startswith(name)), 50_304)
        words = ["--config", str(path), "--padded-vocab-size", str(vocabulary)]
        plan = plan_run(words, DEVICES[device], world_size=int(number[1]))
        peak, room = plan.fullest.peak_bytes / GIB, plan.device.room / GIB
        lines.append(f"| `{path.name}` | {number[1]}x{device} | {peak:.1f} | {room:.1f} | {plan.fullest.moment} |")
    return "\n".join(lines)


def megatron(path: Path) -> tuple[str, float]:
    """Return planned beside measured memory of Megatron-LM's runs as Markdown, and the share that is near."""
    rows = [row for row in json.loads(path.read_text(encoding="utf-8")) if len(row["nodes_gpus"]) == 1]
    alone, near, lines, refused = 0, 0, list[str](), Counter[str]()
    for row in rows:
        family = row["case"].partition("/")[0]
        words = ["--model-family", family] if family in FAMILIES else []  # their scripts set it: pretrain_bert.py
        words += [word for flag, value in row["args"].items() for word in _words(flag, value)]
        nodes, each = row["nodes_gpus"][0]
        try:
            plan = plan_run(words, DEVICES[row["gpu"].upper()], world_size=nodes * each, nodes=nodes)
        except MegalithError as error:
            refused[re.split(r"[:;(]", str(error))[0]] += 1
            continue
        planned, measured = plan.ranks[-1].allocated_bytes, row["mem_allocated_bytes"]
        own = theirs(plan, row)
        alone += abs(planned / measured - 1) <= BESIDE
        near += abs((planned + own) / measured - 1) <= BESIDE
        name, figures = f"{row['case']} ({row['gpu']}, {row['software']})", f"{planned / GIB:.2f} | {own / GIB:.2f}"
        difference = f"{planned / measured - 1:+.1%} | {(planned + own) / measured - 1:+.1%}"
        lines.append(f"| {name} | {measured / GIB:.2f} | {figures} | {difference} |")
        print(lines[-1], flush=True)
    count = max(1, len(lines))
    head = [
        f"Of {len(lines)} runs what is allocated after a step is planned within {BESIDE:.0%} for {alone} "
        f"({alone / count:.0%}), and for {near} ({near / count:.0%}; wanted: {PART:.0%}) with the buffers that the "
        f"other program keeps. {sum(refused.values())} runs could not be planned:",
        "",
        *(f"- {number}: {why}" for why, number in refused.most_common() if number >= SEVERAL),
        f"- {sum(number for number in refused.values() if number < SEVERAL)}: others",
        "",
        "| run | measured GiB | planned | buffers | planned alone | with buffers |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines]), near / count


def theirs(plan: Plan, row: Mapping[str, Any]) -> int:
    """Return the bytes that Megatron-LM keeps from step to step and Megalith does not.

    - torch's cuBLAS workspaces of two threads, of the size in CUBLAS_WORKSPACE_CONFIG (:KIB:NUMBER), above its default;
    - with --moe-grouped-gemm TransformerEngine's workspaces for its four streams: 32 MiB each from Hopper on, 4 MiB
      before (transformer_engine/pytorch/module/base.py, common/util/multi_stream.cpp). Its workspace for other
      products is not counted: most runs with it have no such bytes beside those of torch;
    - with --transformer-impl local the buffer that attention scores are multiplied into, B x H / tp x S x S, which its
      GlobalMemoryBuffer keeps (megatron/core/transformer/dot_product_attention.py);
    - with --fp16 the fp32 copy of the gradients, which the main parameters hold until the next step begins
      (megatron/core/optimizer: _copy_model_grads_to_main_grads); in bf16 the fp32 gradients are not copied.
    """
    run, args, new = plan.run, row["args"], (plan.device.compute or (0, 0)) >= (9, 0)
    found = 0
    if size := re.fullmatch(r":(\d+):(\d+)", row["env"].get("CUBLAS_WORKSPACE_CONFIG", "")):
        found += 2 * 1024 * int(size[1]) * int(size[2]) - plan.device.libraries
    if args.get("--transformer-impl") == "local":
        samples, length, model = run.train.micro_batch_size, run.data.seq_length, run.model
        itemsize = 4 if run.precision.params_dtype == "float32" else 2
        found += samples * model.num_attention_heads // run.layout.tp * length**2 * itemsize
    elif "--moe-grouped-gemm" in args:
        found += (32 if new else 4) * 2**20 * 4
    if run.precision.fp16:
        elements = plan.ranks[-1].allocated["weights"] // 2
        replicas = run.layout.dp * run.layout.cp if run.parallel.sharding_setting else 1
        found += 4 * elements // replicas
    return found


def _words(flag: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag] if value else []
    text = re.sub(r"\$\{\w+\}", "1", " ".join(map(str, value)) if isinstance(value, list) else str(value))
    names = re.fullmatch(r"\[([a-z_ ]+)\]", text)  # a list of YAML
    return [flag, *(names[1] if names else text).split()]


def write(path: Path, name: str, text: str) -> None:
    """Replace the text between the marks of a page."""
    before, _, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->")
    after = rest.partition("<!-- end -->")[2]
    path.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- end -->{after}", encoding="utf-8")


def random_runs(number: int, seed: int, kept: Path | None, *, sharded: bool) -> tuple[str, float]:
    """Return planned beside counted memory of random configurations as Markdown, and the share that is near."""
    chance, found = random.Random(seed), list[Comparison]()
    drawn: list[tuple[int, list[str]]] = []
    while len(drawn) < number:
        one = (draw_sharded if sharded else draw)(chance)
        drawn += [one] if sound(*one) else []
    lines = kept.read_text(encoding="utf-8").splitlines() if kept and kept.is_file() else []
    saved = [(ranks, flags.split(), tuple(counted)) for ranks, flags, counted in map(json.loads, lines)]
    known = {" ".join(words): counted for _, words, counted in saved}
    drawn = drawn or [(ranks, words) for ranks, words, _ in saved]
    for ranks, words in drawn:  # before all plans, whose threads a fork would lack
        if (flags := " ".join(words)) not in known:
            known[flags] = count(ranks, words)
            if kept:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([ranks, flags, known[flags]]) + "\n")
    for ranks, words in drawn:
        found.append(beside := compare(ranks, words, known[" ".join(words)]))
        allocated, peak = beside.errors
        print(f"{peak:+7.1%} peak {allocated:+7.1%} between, {ranks} ranks: {beside.flags}", flush=True)
    return table(found), sum(abs(one.errors[1]) <= WITHIN for one in found) / len(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--number", type=int, default=10, help="random configurations (default: %(default)s; 0: those kept)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
    parser.add_argument("--sharded", action="store_true", help="draw configurations with FSDP2")
    parser.add_argument("--resident", action="store_true", help="compare with the resident size of large ones")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep what is counted, and continue from it")
    parser.add_argument("--recipes", action="store_true", help="plan the recipes for GPUs")
    parser.add_argument("--megatron", type=Path, metavar="FILE", help="compare with Megatron-LM's measurements")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="replace the table of a page")
    options = parser.parse_args()
    if options.recipes:
        name, (text, share), wanted = "recipes", (recipes(), 1.0), 1.0
    elif options.megatron:
        name, (text, share), wanted = "megatron", megatron(options.megatron), PART
    elif options.resident:
        name, (text, share), wanted = "resident", resident_runs(options.number, options.seed), 1.0
    else:
        name, wanted = "sharded" if options.sharded else "random", SHARE
        text, share = random_runs(options.number, options.seed, options.keep, sharded=options.sharded)
    print(text if options.recipes else text.splitlines()[0])
    if options.markdown:
        write(options.markdown, name, text)
    return 0 if share >= wanted else 1


if __name__ == "__main__":
    sys.exit(main())
