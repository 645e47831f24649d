"""Megatron's flags that have no setting here: which need nothing, and which are refused and why.

Together with the settings of the groups this covers the flags of the sources that were compared, so that none of them
is silently ignored: NVIDIA's arguments.py of about 2019/20, late 2020, early and autumn 2021, 2022, early, autumn and
end of 2023, spring 2024, early and mid 2025 and October 2025; docs/reference/megatron-flags.md for 23.06, core 0.8,
core 0.12 and August 2026; BigScience's forks for 2021. A flag that came and went between two of these may be missing,
and is an error then. tests/unit/config/nvidia_flags.txt has those of 2021 and 2023 to 2025.

Notation, one word per flag: `--x` takes no value, `--x=5` one value with Megatron's default 5, `--x=` one value without
a default, `--x:3=` three values, `--x+=` one or more, `--x*=` any number. A refused flag given with Megatron's default
asks for nothing and is accepted.
"""

from megalith.config.megatron_flags.nothing import NEED_NOTHING
from megalith.config.megatron_flags.partly import PARTLY
from megalith.config.megatron_flags.refused import REFUSED

__all__ = ["LAUNCHER", "NEED_NOTHING", "PARTLY", "REFUSED", "RENAMED"]

# Flags of older versions that have another name now; some of them Megatron itself answers with an error that says so.
RENAMED: dict[str, str] = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
    "--num-experts-switch": "--num-experts",
    "--checkpoint-granularity": "--recompute-granularity",
    "--checkpoint-method": "--recompute-method",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--eval-batch-size": "--eval-micro-batch-size",
}

# Flags of torchrun that ended up behind the script name.
LAUNCHER = """
        --nproc-per-node= --nnodes= --node-rank= --master-addr= --master-port= --rdzv-backend= --rdzv-endpoint=
        --rdzv-id= --use-env
"""
