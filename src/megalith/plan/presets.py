"""Models by name for plans: flags of their architecture, context and usual batch, from their papers and config.json.

GPT-3: Brown et al. 2020, arXiv:2005.14165, table 2.1 (345M and 857M: Megatron's example scripts); Llama 2 and 3:
arXiv:2307.09288, arXiv:2407.21783; Mixtral: arXiv:2401.04088.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalith.config.values import closest
from megalith.errors import ConfigError
from megalith.plan.devices import Device

_DATA = "--mock-data --tokenizer-type NullTokenizer --train-iters 100000"
_LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
)


def llama(layers: int, hidden: int, heads: int, ffn: int, groups: int, run: str) -> str:
    """Return the flags of a model with the architecture of Llama; `groups` 0 for a key head of each query head."""
    shared = f" --group-query-attention --num-query-groups {groups}" if groups else ""
    sizes = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --ffn-hidden-size {ffn}{shared}"
    )
    return f"{sizes} {_LLAMA} {run}"


def _gpt3(layers: int, hidden: int, heads: int, *, batch: int, lr: float, length: int = 2048) -> str:
    sizes = f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}"
    return f"{sizes} --hidden-dropout 0 --attention-dropout 0 {run_flags(50257, length, batch, lr)}"


def run_flags(vocabulary: int, length: int, batch: int, lr: float) -> str:
    """Return the flags of lengths, batch, rate and stand-ins for data."""
    lengths = f"--seq-length {length} --max-position-embeddings {length} --global-batch-size {batch}"
    return f"{lengths} --lr {lr:g} {_DATA} --vocab-size {vocabulary - 1}"


PRESETS = {
    "gpt2-124m": _gpt3(12, 768, 12, batch=480, lr=6e-4, length=1024),
    "gpt3-345m": _gpt3(24, 1024, 16, batch=256, lr=3e-4, length=1024),
    "gpt3-857m": _gpt3(24, 1664, 16, batch=256, lr=2.5e-4, length=1024),
    "gpt3-1.3b": _gpt3(24, 2048, 16, batch=512, lr=2e-4),
    "gpt3-2.7b": _gpt3(32, 2560, 32, batch=512, lr=1.6e-4),
    "gpt3-6.7b": _gpt3(32, 4096, 32, batch=1024, lr=1.2e-4),
    "gpt3-13b": _gpt3(40, 5120, 40, batch=1024, lr=1e-4),
    "gpt3-175b": _gpt3(96, 12288, 96, batch=1536, lr=6e-5),
    "llama2-1.1b": llama(22, 2048, 32, 5632, 4, run_flags(32_000, 2048, 1024, 4e-4)),
    "llama2-7b": llama(32, 4096, 32, 11_008, 0, run_flags(32_000, 4096, 1024, 3e-4)),
    "llama2-13b": llama(40, 5120, 40, 13_824, 0, run_flags(32_000, 4096, 1024, 3e-4)),
    "llama2-70b": llama(80, 8192, 64, 28_672, 8, run_flags(32_000, 4096, 1024, 1.5e-4)),
    "llama3-8b": llama(32, 4096, 32, 14_336, 8, run_flags(128_256, 8192, 512, 3e-4)),
    "llama3-70b": llama(80, 8192, 64, 28_672, 8, run_flags(128_256, 8192, 512, 1.5e-4)),
    "llama3-405b": llama(126, 16_384, 128, 53_248, 8, run_flags(128_256, 8192, 2048, 8e-5)),
    "mixtral-8x7b": llama(32, 4096, 32, 14_336, 8, run_flags(32_000, 4096, 1024, 1e-4))
    + " --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.02",
}
"""Name of `--preset` -> flags; their number of steps stands for a run whose length is not known."""


def preset_words(name: str, device: Device) -> list[str]:
    """Return the flags of a preset in the 16-bit dtype of a device; ConfigError if there is none of this name."""
    if problems := preset_problems(name):
        raise ConfigError(problems)
    return [*PRESETS[name].split(), *half(device)]


def preset_problems(name: str) -> list[str]:
    """Return a message if no preset has this name."""
    if name in PRESETS:
        return []
    near = closest(name, PRESETS)
    return [f"--preset {name}: {f'did you mean {near}? ' if near else ''}presets are {', '.join(PRESETS)}"]


def half(device: Device) -> Sequence[str]:
    """Return the flag of the 16-bit dtype that a device multiplies fast; none on a CPU."""
    if device.compute is None:
        return ()
    return ("--bf16",) if device.compute >= (8, 0) else ("--fp16",)
