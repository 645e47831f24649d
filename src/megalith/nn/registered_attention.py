"""Attention layers that users register: theirs are the projections, the attention over the heads is given to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from megalith.errors import ConfigError
from megalith.nn.attend import AttentionKernel, AttentionRule, Mask
from megalith.nn.attention import Attention, ContextParallelAttention
from megalith.nn.cache import LayerCache
from megalith.nn.documents import Documents
from megalith.nn.region import Region
from megalith.nn.rope import Rotation, rotate


@dataclass(eq=False)
class Attend:
    """Attention over heads, as the run wants it: with its mask, dropout, KV cache and context parallelism."""

    _layer: RegisteredAttention
    _rope: Rotation | None
    _cache: LayerCache | None
    _rule: AttentionRule
    called: bool = False

    def rotate(self, heads: Tensor) -> Tensor:
        """Apply the rotary embedding of the run to queries or keys [S, B, H, K]; unchanged where it has none."""
        return heads if self._rope is None else rotate(heads, self._rope, interleaved=self._layer.interleaved)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to this and earlier positions; q [S, B, H, K], k and v [S, B, G, K], H a multiple of G -> as q.

        Raises:
            ConfigError: `k` or `v` has not the key-value heads of this rank, or not their size.
        """
        self.called = True
        if k.shape[2:] != (self._layer.num_groups, self._layer.head_size) or v.shape != k.shape:
            raise ConfigError(
                f"--attention: attend(q, k, v) got keys {list(k.shape)} and values {list(v.shape)}; they must be "
                f"[S, B, {self._layer.num_groups}, {self._layer.head_size}], by the key-value heads of this rank and "
                "their size (--num-query-groups or --num-attention-heads, --kv-channels)"
            )
        if self._cache is None:
            return self._layer.context(q, k, v, self._rule)
        return self._layer.mixer.attend_cached(self._cache, q, k, v, self._rule)


class RegisteredAttention(Attention):
    """A registered attention, which replaces `SelfAttention`; arguments as of `Attention`.

    Args:
        layer: The user's module, `forward(hidden [S, B, D], attend) -> [S, B, D]`.
        interleaved: How `Attend.rotate` pairs channels.
        num_groups: Key-value heads on this rank.
    """

    def __init__(
        self,
        layer: nn.Module,
        dropout: float,
        region: Region,
        kernel: AttentionKernel,
        rule: AttentionRule,
        mixer: ContextParallelAttention,
        *,
        recompute_core: bool,
        interleaved: bool,
        num_groups: int,
        head_size: int,
    ) -> None:
        super().__init__(dropout, region, kernel, rule, mixer, recompute_core=recompute_core)
        self.layer, self.interleaved = layer, interleaved
        self.num_groups, self.head_size = num_groups, head_size

    def forward(
        self,
        x_SBD: Tensor,
        rope: Rotation | None,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Call the user's module; arguments as of `SelfAttention.forward`.

        Raises:
            ConfigError: The layer has not called `attend`, on which what the run asks for depends.
        """
        attend = Attend(self, rope, cache, replace(self.rule, documents=documents, mask=mask))
        y_SBD: Tensor = self.layer(x_SBD, attend)
        if not attend.called:
            needs: dict[str, Callable[[], bool]] = {
                "a KV cache": lambda: cache is not None,
                "context parallelism": lambda: self.mixer.parts > 1,
                "attention inside documents": lambda: documents is not None,
                "--window-size": lambda: self.rule.window is not None,
                "--recompute-modules core_attn": lambda: self.recompute_core and self.training,
            }
            if missed := [name for name, asked in needs.items() if asked()]:
                raise ConfigError(
                    f"--attention: {type(self.layer).__name__} does not call attend(q, k, v), which {missed[0]} needs; "
                    "call it, or leave that out"
                )
        return y_SBD
