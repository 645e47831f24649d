"""An accelerator whose memory is the CPU's: a device of its own for torch, with kernels that are the CPU's.

A tensor of this device is in memory that a CPU tensor has too (made through DLPack), so that it has values, and every
operator of torch that has a kernel of its own on CPUs and GPUs runs on such tensors as they are seen from the CPU.
Operators that torch composes of others are composed here as they are on a GPU. Attention, RMSNorm and the grouped
product have the kernels that CUDA has and the CPU lacks; which attention kernel is taken follows from the
`Capability` that is set for the device.

As on a GPU, a tensor on the CPU beside one of the device is an error (unless it is a scalar). `recorded` counts what a
GPU would launch, the bytes of it, and where the host would wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.bias
from torch import Tensor

import megalith
from megalith.device import DESCRIBED, Capability, capability_of
from megalith.plan.work import count_op

NAME = "elsewhere"
PACKAGE = str(Path(megalith.__file__).parent)
ALLOCATIONS = {"empty.memory_format", "empty_strided", "resize_"}
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal"}
"""Operators whose result, or the shape of it, needs values: the host waits for them."""
_COMPOSED = {  # one kernel on a GPU
    "_grouped_mm",
    "_chunk_cat.out",
    "split_with_sizes_copy.out",
}


def missing() -> str:
    """Return why this torch cannot have such a device; "" if it can."""
    from torch.utils import backend_registration

    needed = hasattr(torch._C, "_acc") and hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    return "" if needed else f"torch {torch.__version__} has no devices that are written in Python"


# --- memory -----------------------------------------------------------------------------------------------------------

_CPU, _EXTENSION = 1, 12  # DLPack's numbers of devices
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _moved(x: Tensor, kind: int) -> Tensor:
    """Return a tensor over the same memory on another device."""
    capsule = torch._C._to_dlpack(x)
    pointer = _pointer_of(capsule, b"dltensor")
    ctypes.c_int32.from_address(pointer + ctypes.sizeof(ctypes.c_void_p)).value = kind  # DLTensor.device.device_type
    moved: Tensor = torch._C._from_dlpack(capsule)
    return moved


def is_here(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME


def on_host(x: Tensor) -> Tensor:
    """Return a tensor of the device as a CPU tensor over the same memory; another one as it is."""
    return _moved(x, _CPU) if is_here(x) else x


def on_device(x: Tensor) -> Tensor:
    """Return a CPU tensor as one of the device over the same memory."""
    return _moved(x, _EXTENSION)


# --- what is recorded -------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """What a GPU would have done.

    Attributes:
        launches: kernels and copies, by operator.
        bytes: read and written by these, each tensor once for each.
        work: bytes and FLOPs of each launch.
        waits: operators that make the host wait, with the place in the package.
        collectives: by name.
    """

    launches: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)
    work: list[tuple[int, int]] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)


_RECORDS: list[Record] = []
_SHAPES_ONLY = False


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Compute nothing: results have shapes, and memory that is not written, so that sizes of a real model cost nothing.

    What the host reads is 0.
    """
    global _SHAPES_ONLY
    _SHAPES_ONLY = True
    try:
        yield
    finally:
        _SHAPES_ONLY = False


@contextlib.contextmanager
def recorded() -> Iterator[Record]:
    record = Record()
    _RECORDS.append(record)
    try:
        yield record
    finally:
        _RECORDS.remove(record)


def _place() -> str:
    """Return the line of the package that is being computed, as file:line."""
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}" if frame is not None else "a test"


def _launched(name: str, given: list[Any], found: Any) -> None:
    if _RECORDS:
        op = count_op(name.split(".")[0], given, found)  # of attention all of its square
        for record in _RECORDS:
            record.launches[name] += 1
            record.bytes[name] += op.bytes
            record.work.append((op.bytes, op.flops))


def _waited(what: str) -> None:
    if _RECORDS:
        place = f"{what} at {_place()}"
        for record in _RECORDS:
            record.waits.append(place)


# --- kernels ----------------------------------------------------------------------------------------------------------


class DeviceMismatch(RuntimeError):
    """An operator got tensors of the device and of the CPU."""


def _check_devices(name: str, hosts: list[Tensor]) -> None:
    """Raise if there are tensors with dimensions on the CPU, which an operator on the device does not take."""
    hosts = [x for x in hosts if x.dim()]
    if hosts and name.split(".")[0] in ("index", "index_put_", "_index_put_impl_"):
        _waited(f"{name} with indices on the CPU")
    elif hosts:
        raise DeviceMismatch(f"{name}: a tensor on {hosts[0].device} beside others on {NAME}")


def _seen_from_host(value: Any, strangers: list[Tensor]) -> Any:
    """Return arguments as the CPU's kernels take them; `strangers` are the tensors that were the CPU's already."""
    if isinstance(value, Tensor):
        if value.device.type == NAME:
            return _shape(value) if _SHAPES_ONLY else _moved(value, _CPU)
        strangers.append(value)
    elif isinstance(value, (list, tuple)):
        return [_seen_from_host(one, strangers) for one in value]
    elif isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _shape(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _put_on_device(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.device.type == "meta":
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return on_device(value)
    return type(value)(map(_put_on_device, value)) if type(value) in (list, tuple) else value


def _kernel(op: Any) -> Callable[..., Any]:
    """Return the kernel of the device for an operator: the CPU's, for the same memory."""
    schema, name = op._schema, op._schema.name.removeprefix("aten::")
    full = f"{name}.{schema.overload_name}" if schema.overload_name else name
    returns = [None if r.alias_info is None else r.alias_info.is_write for r in schema.returns]
    if False in returns or name == "set_":  # no computation, but a view of the same storage
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        return lambda *args, **kwargs: op.redispatch(keys, *args, **kwargs)
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    outputs = [argument.name for argument in schema.arguments if argument.is_out]
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    generator, reads, packet = places.get("generator"), name in READS, op.overloadpacket
    tensors = [place for place, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"]

    def run(*args: Any, **kwargs: Any) -> Any:
        strangers: list[Tensor] = []
        mine = [_seen_from_host(value, strangers) for value in args]
        named = {word: _seen_from_host(value, strangers) for word, value in kwargs.items()}
        if strangers:
            _check_devices(full, strangers)
        if generator is not None and len(mine) <= generator and named.get("generator") is None:
            named["generator"] = _Module.generator
        if reads or (name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])):
            _waited(full)
        grows = [word for word in outputs if isinstance(out := kwargs.get(word), Tensor) and out.numel() == 0]
        for word in grows:
            named[word] = torch.empty(0, dtype=kwargs[word].dtype)
        # torch passes a number that it had made a tensor of as a number again
        numbers = any(isinstance(mine[place], (int, float)) for place in tensors if place < len(mine))
        needless = _SHAPES_ONLY and not grows and (True in returns or not returns)
        found = None if needless else 0 if _SHAPES_ONLY and reads else (packet if numbers else op)(*mine, **named)
        for word in grows:
            kwargs[word].resize_(named[word].shape)
            if not _SHAPES_ONLY:
                _moved(kwargs[word], _CPU).copy_(named[word])
        if _RECORDS and full not in ALLOCATIONS:
            _launched(full, [*mine, *named.values()], () if written else found)
        if not returns:
            return None
        if True in returns:
            changed = [args[place] if place < len(args) else kwargs.get(word) for place, word in written]
            return changed[0] if len(returns) == 1 else tuple(changed)
        return _put_on_device(found)

    return run


def _copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    if is_here(self) != is_here(src):
        host, way = (src, "to the device") if is_here(self) else (self, "to the host")
        if not (non_blocking and getattr(host, "pinned", False)):
            _waited(f"copy {way}")
    _launched("copy_", [self, src], None)
    if not _SHAPES_ONLY:
        on_host(self).copy_(on_host(src))
    elif not is_here(self):
        self.zero_()
    return self


def _to_copy(self: Tensor, *, device: Any = None, non_blocking: bool = False, **options: Any) -> Tensor:
    options = {name: value for name, value in options.items() if value is not None and name != "pin_memory"}
    made = torch.ops.aten._to_copy(_shape(self) if _SHAPES_ONLY else on_host(self), **options)
    _launched("_to_copy", [self], made)
    if _SHAPES_ONLY:
        made = (torch.zeros if device is not None and device.type == "cpu" else torch.empty)(
            made.shape, dtype=made.dtype
        )
    if not is_here(self) and not (non_blocking and getattr(self, "pinned", False)):
        _waited("copy to the device")
    if device is not None and device.type == "cpu":
        if non_blocking:
            made.pinned = True
        else:
            _waited("copy to the host")
        return made
    return on_device(made)


def _resize(self: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    if list(self.shape) != list(size):
        more = torch.empty(tuple(size), dtype=self.dtype, device=self.device)
        self.set_(more.untyped_storage(), 0, more.shape, more.stride())
    return self


# --- kernels of CUDA that the CPU has not -----------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float, window: int = -1) -> Tensor:
    """Return the scores [B, H, Q, S] of queries [B, H, Q, K] and keys [B, G, S, K] in at least fp32.

    The last query's own key is the last one.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.matmul(q.to(wide), k.to(wide).mT) * scale
    if bias is not None:
        scores = scores + bias.to(wide)
    ones, earlier = torch.ones(scores.shape[-2:], dtype=torch.bool), k.shape[2] - q.shape[2]
    if causal:
        scores = scores.masked_fill(ones.triu(earlier + 1), -math.inf)
    if window >= 0:
        scores = scores.masked_fill(ones.tril(earlier - window - 1), -math.inf)
    return scores


def _kept(scores: Tensor, dropout: float, seed: Tensor) -> Tensor | float:
    """Return the factor of each probability: 0, or 1 / (1 - p)."""
    if not dropout:
        return 1.0
    generator = torch.Generator().manual_seed(int(seed.view(-1)[0].to(torch.int64)))
    return (torch.rand(scores.shape, generator=generator) >= dropout).to(scores.dtype) / (1 - dropout)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    seed: Tensor,
    window: int = -1,
) -> tuple[Tensor, Tensor]:
    """Return context [B, H, Q, K] and lse [B, H, Q]."""
    scores = _scores(q, k, bias, causal, q.shape[-1] ** -0.5 if scale is None else scale, window)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp() * _kept(scores, dropout, seed)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.matmul(weights, v.to(weights.dtype)).to(q.dtype), lse


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    seed: Tensor,
    window: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and the gradient of the scores; `out` and `lse` may be those of more keys than these."""
    scale, groups = q.shape[-1] ** -0.5 if scale is None else scale, k.shape[1]
    scores = _scores(q, k, bias, causal, scale, window)
    weights, kept = (scores - lse[..., None]).exp(), _kept(scores, dropout, seed)
    k, v = (x.repeat_interleave(q.shape[1] // groups, dim=1).to(scores.dtype) for x in (k, v))
    wide = grad.to(scores.dtype)
    delta = (wide * out.to(scores.dtype)).sum(-1, keepdim=True)
    d_scores = weights * (torch.matmul(wide, v.mT) * kept - delta)
    dk, dv = torch.matmul(d_scores.mT, q.to(scores.dtype)) * scale, torch.matmul((weights * kept).mT, wide)
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2).to(q.dtype) for x in (dk, dv))
    return (torch.matmul(d_scores, k) * scale).to(q.dtype), dk, dv, d_scores


def _seed() -> Tensor:
    return torch.randint(2**62, (2,), generator=_Module.generator)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    assert q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0, "flash attention does not take these"
    seed, none = _seed(), torch.empty(0)
    out, lse = _attend(q, k, v, None, is_causal, scale, dropout_p, seed)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # as CUDA's has it
    return out, lse, none, none.clone(), q.shape[2], k.shape[2], seed, none.clone(), none.clone()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float | None = None
) -> Any:
    _, _, _, _, dropout, causal, seed, _ = rest
    return _attend_backward(grad, q, k, v, out, lse, None, causal, scale, dropout, seed)[:3]


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    assert k.shape[1] == q.shape[1], "the memory-efficient kernel takes no groups"
    seed = _seed()
    out, lse = _attend(q, k, v, attn_bias, is_causal, scale, dropout_p, seed)
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse, seed, torch.zeros_like(seed)


def _efficient_lower_right(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any, scale: float | None = None, **more: Any
) -> Any:
    """The memory-efficient kernel as `CausalBias` calls it, whose second form is aligned with the last key."""
    *offsets_and_lengths, dropout, kind = rest[:6]
    assert bias is None and kind == 2 and offsets_and_lengths == [None] * 4
    context, *others = _efficient(*(x.transpose(1, 2) for x in (q, k, v)), None, False, dropout, True, scale=scale)
    return context.transpose(1, 2), *others, q.shape[1], k.shape[1]


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    *found, d_scores = _attend_backward(grad, q, k, v, out, lse, attn_bias, is_causal, scale, dropout_p, seed)
    wanted = attn_bias is not None and grad_input_mask[3]
    bias = d_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype) if wanted else None
    return *found, bias


def _documents(q: Tensor, k: Tensor, offsets: tuple[Tensor | None, Tensor | None]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield where the queries, the keys and the lse of each document are, of packed [T, H, K] or of [B, S, H, K]."""
    if offsets[0] is None or offsets[1] is None:
        yield from ((number, number, number) for number in range(q.shape[0]))
        return
    queries, keys = (places.tolist() for places in offsets if places is not None)
    for number in range(len(queries) - 1):
        rows, held = (slice(*ends[number : number + 2]) for ends in (queries, keys))
        yield rows, held, (slice(None), rows)


def _by_head(x_SHK: Tensor) -> Tensor:
    return x_SHK.transpose(0, 1)[None]


def _window(options: dict[str, Any]) -> int:
    left = options.get("window_size_left")
    return -1 if left is None else int(left)


def _varlen(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float | None = None, **more: Any) -> Any:
    offsets, keys, _, _, dropout, causal, _ = rest
    seed, none = _seed(), torch.empty(0)
    out, lse = torch.empty_like(q), torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3])
    for rows, held, place in _documents(q, k, (offsets, keys)):
        each = (_by_head(q[rows]), _by_head(k[held]), _by_head(v[held]))
        context, part = _attend(*each, None, causal, scale, dropout, seed, _window(more))
        out[rows], lse[place] = context[0].transpose(0, 1), part[0]
    return out, lse, seed, none, none.clone()


def _varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **more: Any
) -> Any:
    offsets, keys, _, _, dropout, causal, seed, _ = rest
    found = [torch.empty_like(x) for x in (q, k, v)]
    for rows, held, place in _documents(q, k, (offsets, keys)):
        each = (_by_head(grad[rows]), _by_head(q[rows]), _by_head(k[held]), _by_head(v[held]), _by_head(out[rows]))
        scale, own = more.get("scale"), lse[place][None]
        parts = _attend_backward(*each, own, None, causal, scale, dropout, seed, _window(more))
        for whole, part, to in zip(found, parts[:3], (rows, held, held), strict=True):
            whole[to] = part[0].transpose(0, 1)
    return tuple(found)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Any:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = tuple(range(-len(shape), 0))
    scale = torch.rsqrt(wide.square().mean(dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
    y = wide * scale
    return (y if weight is None else y * weight).to(x.dtype), scale


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> Any:
    dims = tuple(range(-len(shape), 0))
    normed = x.to(rstd.dtype) * rstd
    wide = grad.to(rstd.dtype)
    d_normed = wide if weight is None else wide * weight
    dx = (d_normed - normed * (d_normed * normed).mean(dims, keepdim=True)) * rstd
    dw = None if weight is None or not mask[1] else (wide * normed).sum_to_size(weight.shape).to(weight.dtype)
    return dx.to(x.dtype) if mask[0] else None, dw


_OF_CUDA = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_efficient_attention_forward": _efficient_lower_right,
    "_flash_attention_forward": _varlen,
    "_flash_attention_backward": _varlen_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
}


def _flash_shapes(given: list[Any]) -> Any:
    q, none = given[0], torch.empty(0)
    out = q.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.empty(q.shape[:3], device="meta")
    return out, lse, none, none.clone(), q.shape[2], given[1].shape[2], torch.empty(2), none.clone(), none.clone()


_SHAPES: dict[str, Callable[[list[Any]], Any]] = {
    "_scaled_dot_product_flash_attention": _flash_shapes,
    "_scaled_dot_product_flash_attention_backward": lambda given: tuple(map(torch.empty_like, given[1:4])),
    "_scaled_dot_product_efficient_attention": lambda given: (
        *_flash_shapes(given)[:2],
        torch.empty(2),
        torch.empty(2),
    ),
    "_scaled_dot_product_efficient_attention_backward": lambda given: (*map(torch.empty_like, given[1:4]), None),
    "_fused_rms_norm": lambda given: (
        torch.empty_like(given[0]),
        torch.empty(*given[0].shape[:-1], 1, device="meta"),
    ),
    "_fused_rms_norm_backward": lambda given: (torch.empty_like(given[1]), torch.empty_like(given[4])),
}


def _computed(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        strangers: list[Tensor] = []
        mine = [_seen_from_host(value, strangers) for value in args]
        _check_devices(name, strangers)
        found = _SHAPES[name](mine) if _SHAPES_ONLY else compute(*mine, **kwargs)
        _launched(name, mine, found)
        return _put_on_device(found)

    return run


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Take the kernel that CUDA's SDPA takes: flash, memory-efficient, or else products of whole matrices."""
    aten, kernels = torch.ops.aten, capability_of(q.device).attention
    assert not is_causal or q.shape[2] == k.shape[2], "SDPA aligns with the first key, the kernels with the last"
    half = q.dtype in (torch.float16, torch.bfloat16)
    found: Tensor
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -math.inf)
    if half and attn_mask is None and "flash" in kernels and q.shape[-1] % 8 == 0:
        found = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    elif (half or q.dtype == torch.float32) and "efficient" in kernels and k.shape[1] == q.shape[1]:
        bias = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])
        needs = any(x.requires_grad for x in (q, k, v))
        found = aten._scaled_dot_product_efficient_attention(q, k, v, bias, needs, dropout_p, is_causal, scale=scale)[0]
    else:
        found = aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return found


# --- what torch asks of a device beside its kernels -------------------------------------------------------------------


class _Event:
    """Work is done when it is called, so that nothing need be waited for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> _Event:
        return self

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        _waited("Stream.synchronize")

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class _Module:
    """`torch.elsewhere`."""

    generator = torch.Generator()
    Event, Stream = _Event, _Stream

    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    current_stream = staticmethod(lambda device=None: _Stream())
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    set_device = staticmethod(lambda device: None)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        cls.generator.manual_seed(seed)

    manual_seed = manual_seed_all

    @classmethod
    def get_rng_state(cls, device: Any = None) -> Tensor:
        return cls.generator.get_state()

    @classmethod
    def set_rng_state(cls, state: Tensor, device: Any = None) -> None:
        cls.generator.set_state(state)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        _waited("synchronize")


_LIBRARIES: list[Any] = []


def install(able: Capability) -> torch.device:
    """Give this process the device, or set what it can do; return it."""
    if not _LIBRARIES:
        _register()
    device = torch.device(NAME, 0)
    DESCRIBED[device] = able
    return device


def _register() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    own: dict[str, Callable[..., Any]] = {name: _computed(name, compute) for name, compute in _OF_CUDA.items()}
    own |= {"copy_": _copy, "_to_copy": _to_copy, "resize_": _resize, "scaled_dot_product_attention": _sdpa}
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        space, _, name = full.partition("::")
        if space == "aten":
            own.setdefault(name, _kernel(_overload(name)))
    for name in (*_COMPOSED, *_foreach()):
        own.setdefault(name, _kernel(_overload(name)))
    for name, function in own.items():
        library.impl(name, function, "PrivateUse1")
    library.impl("scaled_dot_product_attention", _sdpa, "AutogradPrivateUse1")
    for name in ("log_softmax.int_out", "softmax.int_out"):  # CUDA's read half precision and write fp32
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            library.impl(name, _kernel(_overload(name)), key)
    _LIBRARIES.append(library)
    _patch_what_python_cannot_register()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _foreach() -> Iterator[str]:
    for name in dir(torch):
        if name.startswith("_foreach_"):
            for overload in getattr(torch.ops.aten, name).overloads():
                yield name if overload == "default" else f"{name}.{overload}"


class _Generator(torch.Generator):
    """A generator of the CPU in place of one of the device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


class _AnyEvent(torch.Event):
    def __new__(cls, device: Any = None, **more: Any) -> Any:
        here = device is not None and torch.device(device).type == NAME
        return _Event() if here else super().__new__(cls, device, **more)


class _AnyStream(torch.Stream):
    def __new__(cls, device: Any = None, **more: Any) -> Any:
        here = device is not None and torch.device(device).type == NAME
        return _Stream() if here else super().__new__(cls, device, **more)


def _patch_what_python_cannot_register() -> None:
    """Replace generators, events, streams, pinned memory and the freeing of storages, which need hooks in C++."""
    resize, current_stream = torch.UntypedStorage.resize_, torch.accelerator.current_stream

    def pinned(x: Tensor, *device: Any) -> Tensor:
        copy = x.clone()
        copy.pinned = True  # type: ignore[attr-defined]
        return copy

    def resized(storage: Any, size: int) -> Any:
        return storage if storage.device.type == NAME else resize(storage, size)

    bias = torch.nn.attention.bias  # asks libraries of CUDA
    bias.can_use_flash_attention = lambda params, debug=False: False
    bias.can_use_efficient_attention = lambda params, debug=False: True

    def stream_of(device: Any = None) -> Any:
        here = isinstance(device, torch.device) and device.type == NAME
        return _Stream() if here else current_stream(device)

    torch.Generator, torch.Event, torch.Stream = _Generator, _AnyEvent, _AnyStream  # type: ignore[misc]
    torch.accelerator.current_stream = stream_of
    Tensor.pin_memory, torch.UntypedStorage.resize_ = pinned, resized  # type: ignore[assignment,method-assign]


# --- collectives ------------------------------------------------------------------------------------------------------

_CALLS = ("all_reduce", "broadcast", "isend", "irecv", "all_to_all_single")
_LONG = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


def check_collectives() -> None:
    """Let collectives run on what torch.distributed has (gloo), for contiguous tensors of the device alone."""
    from megalith.distributed import comm

    if getattr(dist.all_reduce, "checked", False):
        return
    for name in _CALLS:
        setattr(dist, name, _checked(name, getattr(dist, name)))
    comm._all_gather = _checked("all_gather", comm._all_gather)
    comm._reduce_scatter = _checked("reduce_scatter", comm._reduce_scatter)
    message = dist.P2POp
    plain = {getattr(dist, name): getattr(dist, name).plain for name in ("isend", "irecv")}

    def checked_message(operation: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return message(plain[operation], _on_wire(operation.__name__, tensor), *args, **kwargs)

    dist.P2POp = checked_message  # type: ignore[misc,assignment]


def _checked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_on_wire(name, value) if isinstance(value, Tensor) else value for value in args)
        return call(*args, **kwargs)

    run.plain, run.checked, run.__name__ = call, True, name  # type: ignore[attr-defined]
    return run


def _on_wire(name: str, x: Tensor) -> Tensor:
    if not is_here(x) or not x.is_contiguous():
        raise DeviceMismatch(f"{name} of a tensor on {x.device} with strides {x.stride()} for {tuple(x.shape)}")
    for record in _RECORDS:
        record.collectives[name] += 1
    return on_host(x)
