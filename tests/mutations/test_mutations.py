"""`megalith prove` finds faults that are planted in the code, by a plain command line that uses the feature."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.assemble import training
from megalith.checkpoint.writers import huggingface
from megalith.cli import prove
from megalith.distributed import comm
from megalith.distributed.comm import AsyncHandle
from megalith.models import huggingface_tensors
from megalith.nn import lora
from megalith.nn.dropout import HiddenDropout
from megalith.optim import norms
from megalith.optim.gradients import GradientBuffers
from megalith.optim.norms import GlobalNorms
from megalith.optim.optimizer import Optimizer
from megalith.parallel import context, data, tensor
from megalith.parallel.experts import TokenPeers
from megalith.train import checkpoint_restore, loop, step
from megalith.train.step import MicroBatchRunner

BASE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--position-embedding-type rope --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 1e-3 "
    "--eval-interval 100 --eval-iters 10 --data-path my-data_text_document --tokenizer-type GPT2BPETokenizer "
    "--vocab-file vocab.json --merge-file merges.txt"
)
EXPERTS = "--num-experts 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"


LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 4"
)
LORA = "--lora-rank 8 --pretrained-checkpoint base"


def _rounded(start: Any) -> Any:
    def wrong(x: Tensor, axis: Any) -> Any:
        start(x, axis).wait()
        return AsyncHandle(x.copy_(x.bfloat16()) if x.dtype == torch.float32 else x)

    return wrong


RESUME = ""  # in place of an axis: the fault shows where a checkpoint is continued or exported


@dataclass(frozen=True)
class Fault:
    """What is wrong: `attribute` of `owner` is replaced by what `make` makes of it; and where it must be found."""

    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    flags: str
    gpus: int
    kind: str
    name: str
    axis: str
    precision: str = "--bf16"


def _experts_scaled(init: Any) -> Any:
    def wrong(self: Any, ctx: Any, *, experts: bool = False) -> None:
        init(self, ctx, experts=experts)
        self._grad_scale *= ctx.ep.size if experts else 1

    return wrong


def _averaged(init: Any) -> Any:
    def wrong(self: Any, ctx: Any, *, experts: bool = False) -> None:
        init(self, ctx, experts=experts)
        self._grad_scale /= ctx.cp.size

    return wrong


def _alone_in_sharing(init: Any) -> Any:
    def wrong(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.sharing = 1

    return wrong


def _counts_of_one_replica(apply_step: Any) -> Any:
    def wrong(state: Any, runner: Any, *args: Any, **options: Any) -> Any:
        before = state.lr_schedule_samples
        update = apply_step(state, runner, *args, **options)
        state.lr_schedule_samples = before + runner.num_samples
        return update

    return wrong


def _evaluated(change: Callable[[Any, int], int], scale: Callable[[Any], float]) -> Callable[[Any], Any]:
    def make(evaluate: Any) -> Any:
        def wrong(state: Any, eval_set: Any, number: int, **options: Any) -> Any:
            found = evaluate(state, eval_set, change(state.context, number), **options)
            return dataclasses.replace(found, loss=found.loss * scale(state.context))

        return wrong

    return make


def _dropping(of: Any) -> Any:
    def wrong(cls: Any, table: Any, *args: Any) -> Any:
        return of.__func__(cls, [one for one in table if not one.name.endswith("1.mlp.down_proj.weight")], *args)

    return classmethod(wrong)


def _transposing(right: Any) -> Any:
    def wrong(self: Any, tensor: Any, dtype: Any) -> Any:
        whole = right(self, tensor, dtype)
        return whole.t().contiguous() if tensor.name.endswith("1.self_attn.o_proj.weight") else whole

    return wrong


def _other_shape(right: Any) -> Any:
    """The header of the file says what its bytes do not."""

    def wrong(order: Any) -> Any:
        for name, place in right(order):
            yield name, place | {"shape": place["shape"][::-1]} if name.endswith("0.mlp.up_proj.weight") else place

    return wrong


def _gates_exchanged(right: Any) -> Any:
    """Written and read alike, so that only another program can tell."""

    def wrong(*args: Any) -> Any:
        tensors = list(right(*args))
        for one, other in zip(tensors[::2], tensors[1::2], strict=False):
            if one.name.endswith("gate_proj.weight"):
                parts = one.parts, other.parts
                tensors[:2] = dataclasses.replace(one, parts=parts[1]), dataclasses.replace(other, parts=parts[0])
        return tensors

    return wrong


FAULTS = {
    "gradients summed over replicas": Fault(
        data._Replicas, "_scale_", lambda _: lambda self, grads: grads, "", 2, "gradient", ".", "dp"
    ),
    "partial gradients of sequence parallelism not summed": Fault(
        GradientBuffers,
        "_reduce_partial_grads",
        lambda _: lambda self: None,
        "--tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "gradient",
        "norm|bias",
        "tp",
    ),
    "tied embeddings not summed": Fault(
        GradientBuffers,
        "_reduce_partial_grads",
        lambda _: lambda self: None,
        "--pipeline-model-parallel-size 2",
        4,
        "gradient",
        "embedding",
        "pp",
    ),
    "norm counts replicas": Fault(
        GlobalNorms,
        "_counted",
        lambda _: lambda self, tensors: list(tensors.values()),
        "--tensor-model-parallel-size 2",
        2,
        "number",
        "grad_norm|num_zeros",
        "tp",
    ),
    "positions of context ranks swapped": Fault(
        context,
        "positions_of",
        lambda right: lambda length, parts, index, device=None: right(length, parts, parts - 1 - index, device),
        "--context-parallel-size 2",
        4,
        "output",
        "layers.0",
        "cp",
    ),
    "a step of the ring dropped": Fault(
        context,
        "ring_blocks",
        lambda right: lambda *args: [*right(*args)[:-1], []],
        "--context-parallel-size 2",
        2,
        "output",
        "layers.0",
        "cp",
    ),
    "updated weights not gathered": Fault(
        data.Zero1,
        "gather",
        lambda _: lambda self, parameters: AsyncHandle(parameters),
        "--use-distributed-optimizer",
        2,
        "number|weight",
        "loss|params_norm|.",
        "dp",
    ),
    "gradients of experts scaled by expert-parallel ranks": Fault(
        data._Replicas,
        "__init__",
        _experts_scaled,
        f"{EXPERTS} --expert-model-parallel-size 2",
        4,
        "gradient",
        "experts",
        "ep",
    ),
    "auxiliary loss over the tokens of one rank": Fault(
        TokenPeers,
        "sum_of_micro_batch",
        lambda _: lambda self, x: x,
        f"{EXPERTS} --context-parallel-size 2",
        2,
        "number",
        "load_balancing|aux",
        "cp",
    ),
    "sum behind a row-parallel product dropped": Fault(
        tensor.TensorParallel,
        "reduce",
        lambda _: lambda self, x: AsyncHandle(x),
        "--tensor-model-parallel-size 2",
        2,
        "output",
        "layers.0",
        "tp",
    ),
    "cross-entropy over a part of the vocabulary": Fault(
        tensor.TensorParallel,
        "all_reduce_sum",
        lambda _: lambda self, x: x,
        "--tensor-model-parallel-size 2",
        2,
        "number",
        "loss",
        "tp",
    ),
    "gradients not divided by micro-batches": Fault(
        MicroBatchRunner,
        "num_micro_batches",
        lambda _: property(lambda self: 1, lambda self, value: None),
        "",
        2,
        "gradient",
        ".",
        "dp",
    ),
    "validation over too few samples": Fault(
        loop,
        "evaluate",
        _evaluated(lambda context, number: max(1, number // context.dp.size), lambda context: 1.0),
        "",
        2,
        "number",
        "validation",
        "dp",
    ),
    "validation loss times context-parallel ranks": Fault(
        loop,
        "evaluate",
        _evaluated(lambda context, number: number, lambda context: context.cp.size),
        "--context-parallel-size 2",
        2,
        "number",
        "validation",
        "cp",
    ),
    "gradients averaged over context ranks too": Fault(
        data._Replicas, "__init__", _averaged, "--context-parallel-size 2", 2, "gradient", ".", "cp"
    ),
    "gradients of shared key-value heads not summed": Fault(
        GradientBuffers,
        "_reduce_partial_grads",
        lambda _: lambda self: None,
        "--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 4",
        8,
        "gradient",
        "linear_qkv",
        "tp",
    ),
    "tokens of one context rank divide the loss": Fault(
        step,
        "comm",
        lambda _: SimpleNamespace(all_reduce=lambda x, axis: x),
        "--context-parallel-size 2",
        2,
        "gradient",
        ".",
        "cp",
    ),
    "tokens of one replica divide the gradient": Fault(
        MicroBatchRunner,
        "unmasked_tokens",
        lambda right: lambda self: right(self) / self.context.dp.size,
        "--calculate-per-token-loss",
        2,
        "gradient",
        ".",
        "dp",
    ),
    "norm of one shard": Fault(
        norms, "all_reduce", lambda _: lambda x, axis: x, "--use-distributed-optimizer", 2, "number", "grad_norm", "dp"
    ),
    "shards of the optimizer in another order": Fault(
        data.Zero1,
        "owned_range",
        lambda right: lambda self, start, stop: tuple(start + stop - end for end in right(self, start, stop)[::-1]),
        "--use-distributed-optimizer",
        2,
        "gradient|number|weight",
        ".",
        "dp",
    ),
    "replicas read the same samples": Fault(
        training,
        "build_loaders",
        lambda right: lambda config, datasets, replica, **options: right(config, datasets, 0, **options),
        "",
        2,
        "output",
        "layers.0",
        "dp",
    ),
    "samples of one replica counted": Fault(
        step, "_apply", _counts_of_one_replica, "--pipeline-model-parallel-size 2", 4, "number", "samples|rate", "dp"
    ),
    "auxiliary loss scaled by context ranks": Fault(
        TokenPeers,
        "__init__",
        _alone_in_sharing,
        f"{EXPERTS} --context-parallel-size 2",
        2,
        "number|gradient",
        ".",
        "cp",
    ),
    "outputs of experts of other ranks dropped": Fault(
        comm,
        "scatter_out",
        lambda _: comm.own_part,
        f"{EXPERTS} --expert-model-parallel-size 2",
        2,
        "output",
        "layers.0",
        "ep",
    ),
    "gradients reduced in bf16": Fault(data, "start_all_reduce", _rounded, "", 2, "rounded gradient", ".", "dp"),
    "gradients of an fp32 run reduced in bf16": Fault(
        data, "start_all_reduce", _rounded, "", 2, "rounded", ".", "dp", precision=""
    ),
    "gradients not divided by the loss scale": Fault(
        Optimizer,
        "_unscale",
        lambda _: lambda self, grads: torch.zeros(1),
        "",
        2,
        "rounded number",
        "grad_norm",
        "dp",
        precision="--fp16",
    ),
    "dropout left out where the sequence is divided": Fault(
        HiddenDropout,
        "forward",
        lambda right: lambda self, x: x if self.region.needs_grad_reduce else right(self, x),
        "--tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "output",
        "layers.0",
        "tp",
    ),
    "a moment not restored": Fault(
        checkpoint_restore,
        "chunks_to_load",
        lambda right: (
            lambda *args, **options: [chunk for chunk in right(*args, **options) if ".exp_avg_sq." not in chunk.key]
        ),
        "",
        2,
        "moment",
        "exp_avg_sq",
        RESUME,
    ),
    "the step of the optimizer not restored": Fault(
        Optimizer, "load_scalars", lambda _: lambda self, scalars: None, "", 2, "weight|number", ".", RESUME
    ),
    "partial sums of adapters not summed": Fault(
        lora,
        "leave",
        lambda _: lambda x, region: x,
        f"{LLAMA} {LORA} --tensor-model-parallel-size 2",
        2,
        "output",
        "layers.0",
        "tp",
    ),
    "adapters not restored": Fault(
        checkpoint_restore,
        "chunks_to_load",
        lambda right: lambda *args, **options: [chunk for chunk in right(*args, **options) if "optimizer" in chunk.key],
        f"{LLAMA} {LORA}",
        2,
        "weight|number",
        ".",
        RESUME,
    ),
    "a tensor dropped in export": Fault(
        huggingface._Layout, "of", _dropping, LLAMA, 2, "tensor", r"layers.1.mlp.down_proj.weight", RESUME
    ),
    "a tensor transposed in export": Fault(
        huggingface.TensorReader, "tensor", _transposing, LLAMA, 2, "tensor", "linear_proj.weight of layer 1", RESUME
    ),
    "a tensor of another shape in export": Fault(
        huggingface, "_places", _other_shape, LLAMA, 2, "tensor", "layers.0.mlp.up_proj.weight", RESUME
    ),
    "gates exchanged in export and import": Fault(
        huggingface_tensors, "gated", _gates_exchanged, LLAMA, 2, "logit", ".", RESUME
    ),
}
ALWAYS = ("partial gradients of sequence parallelism not summed", "validation loss times context-parallel ranks")


@pytest.mark.parametrize(
    "fault", [pytest.param(one, marks=[] if one in ALWAYS else pytest.mark.full) for one in FAULTS], ids=str
)
def test_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted, file = FAULTS[fault], tmp_path / "certificate.json"
    right = planted.owner.__dict__.get(planted.attribute)
    monkeypatch.setattr(planted.owner, planted.attribute, planted.make(right))
    words = f"{BASE} {planted.precision} {planted.flags}".split()
    quick = [] if planted.axis == RESUME else ["--quick"]
    assert prove.run([*words, *quick, "--gpus", f"{planted.gpus}xH100", "--json", str(file)]) == 1
    (found,) = json.loads(file.read_text())["miniatures"]
    cause = found["cause"]
    assert re.search(planted.kind, cause["kind"]), cause
    assert re.search(planted.name, cause["name"]), cause
    assert planted.axis in (cause["axes"] or [RESUME]), cause


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        pytest.param(EXPERTS, marks=pytest.mark.full),
        pytest.param(f"{LLAMA} {LORA} --tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.full),
        pytest.param(f"{LLAMA} {LORA} --use-distributed-optimizer", marks=pytest.mark.full),
        pytest.param("--ckpt-format torch --use-distributed-optimizer", marks=pytest.mark.full),
    ],
)
def test_no_fault_no_alarm(flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "certificate.json"
    words = [*f"{BASE} --bf16 {flags}".split(), "--gpus", "2", "--json", str(file)]
    assert prove.run(words) == 0
    certificate = json.loads(file.read_text())
    assert certificate["verdict"] == "proven"
    assert all(one["compared"]["gradient"]["count"] > 20 for one in certificate["miniatures"])
    assert all("one process" in one["checkpoint continued in"] for one in certificate["miniatures"])
    assert any("export to Hugging Face" in text for text in certificate["not covered"])  # none has rope and LayerNorm
    assert "NCCL" in capsys.readouterr().out
