"""Flags of which some values need nothing here and the others are refused."""

from __future__ import annotations

from megalith.config.megatron_flags.family import Partly

PARTLY: tuple[Partly, ...] = (
    Partly(
        "--spec*=",
        "local megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec "
        "get_gpt_layer_with_transformer_engine_spec",
        "there is one implementation of the layers",
        "code is not imported by its path; of Megatron's layer specifications those of GPT are known",
    ),
    Partly(
        "--exit-signal=",
        "1 2 10 12 15 SIGHUP SIGINT SIGUSR1 SIGUSR2 SIGTERM",
        "this signal is always answered by finishing the step and saving",
        "signals other than SIGINT, SIGTERM, SIGUSR1, SIGUSR2 and SIGHUP are left alone; use --exit-signal 15",
    ),
    Partly(
        "--dist-ckpt-format=",
        "torch_dist",
        "it is the only layout of the files",
        "other checkpoint layouts come with the work on checkpoint formats",
    ),
    Partly(
        "--DDP-impl=local",
        "local",
        "gradients are reduced in buckets of our own",
        "torch DDP is not used",
    ),
)
