"""The settings of LoRA: adapters that are trained beside a frozen model."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting

PROJECTIONS = {
    "q_proj": ("self_attention.linear_qkv", 0),
    "k_proj": ("self_attention.linear_qkv", 1),
    "v_proj": ("self_attention.linear_qkv", 2),
    "o_proj": ("self_attention.linear_proj", 0),
    "gate_proj": ("mlp.linear_fc1", 0),
    "up_proj": ("mlp.linear_fc1", 1),
    "down_proj": ("mlp.linear_fc2", 0),
}
"""Projection that may have an adapter, under its name in Hugging Face's models -> module of a layer, and its part."""
_OF_MODULES = {
    module.partition(".")[2]: tuple(name for name, (where, _) in PROJECTIONS.items() if where == module)
    for module, _ in PROJECTIONS.values()
}
LORA_TARGETS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    **_OF_MODULES,
    **{name: (name,) for name in PROJECTIONS},
}
"""Word of --lora-targets -> projections."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters beside frozen projections (Hu et al. 2021, arXiv:2106.09685)."""

    lora_rank: int | None = setting(
        None,
        help="train LoRA adapters of this rank; the model of --pretrained-checkpoint stays frozen",
        at_least=1,
        ours=True,
    )
    lora_alpha: float = setting(32.0, help="factor of the adapters' output, divided by --lora-rank", above=0, ours=True)
    lora_targets: str = setting(
        "attention,mlp",
        help=f"projections with an adapter, separated by commas: {', '.join(LORA_TARGETS)}",
        ours=True,
    )
    lora_dropout: float = setting(0.0, help="dropout of the adapters' input", at_least=0, below=1, ours=True)
    lora_use_rslora: bool = setting(
        False, help="divide --lora-alpha by the square root of the rank (rsLoRA)", ours=True
    )

    @property
    def lora_scale(self) -> float:
        """Factor of the adapters' output."""
        rank = self.lora_rank or 1
        return self.lora_alpha / (rank**0.5 if self.lora_use_rslora else rank)

    @property
    def lora_projections(self) -> tuple[str, ...]:
        """Names of `PROJECTIONS` that have an adapter, in its order; unknown words are a rule's matter."""
        chosen = {name for word in self.lora_targets.split(",") for name in LORA_TARGETS.get(word.strip(), ())}
        return tuple(name for name in PROJECTIONS if name in chosen) if self.lora_rank else ()
