"""The settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.fields import setting

_WORK_CHECKPOINTS = "the work on checkpoint formats"


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, and what is taken from a checkpoint."""

    save: str | None = setting(None, help="folder that checkpoints are saved to")
    save_interval: int | None = setting(
        None,
        help="iterations between checkpoints",
        unit="iterations",
        aliases=("--persistent-save-interval",),
        at_least=1,
    )
    load: str | None = setting(None, help="folder to resume from; a fresh start where it holds no checkpoint")
    ckpt_format: str = setting(
        "torch_dist",
        help="layout on disk",
        choices=("torch_dist", "torch"),
        later=("torch_dcp", "fsdp_dtensor", "zarr"),
        later_with=_WORK_CHECKPOINTS,
    )
    ckpt_convert_format: str | None = setting(
        None,
        help="write the checkpoint of --load in this format and the layout of the run, and exit",
        choices=("torch", "torch_dist"),
    )
    ckpt_convert_save: str | None = setting(
        None, help="with --ckpt-convert-format: folder to write it to; a folder of the format's name is made in it"
    )
    ckpt_step: int | None = setting(None, help="iteration to load instead of the latest", at_least=0)
    no_load_optim: bool = setting(False, help="start with a fresh optimizer state")
    no_load_rng: bool = setting(False, help="start with fresh random states")
    no_save_optim: bool = setting(False, help="leave the optimizer state out of checkpoints")
    no_save_rng: bool = setting(False, help="leave the random states out of checkpoints")
    async_save: bool = setting(
        False, help="write checkpoints while training goes on; it waits only until its state is copied in memory"
    )
    keep_last: int | None = setting(
        None, help="newest sound checkpoints to keep; older ones are deleted after a save", at_least=1, ours=True
    )
    save_retain_interval: int | None = setting(
        None,
        help="after a save delete the checkpoint before it unless its iteration is a multiple of this; with "
        "--keep-last: never delete these multiples",
        unit="iterations",
        at_least=1,
    )
    non_persistent_save_interval: int | None = setting(
        None, help="iterations between checkpoints of which only the last one is kept", unit="iterations", at_least=1
    )
    non_persistent_ckpt_type: str | None = setting(
        None,
        help="save checkpoints of which only the last one is kept, and resume from it where it is the newest",
        choices=("global", "local", "in_memory"),
    )
    non_persistent_global_ckpt_dir: str | None = setting(
        None, help="folder of those checkpoints; non_persistent in --save or --load by default"
    )
    non_persistent_local_ckpt_dir: str | None = setting(
        None, help="folder of those checkpoints on a disk of this machine, for --non-persistent-ckpt-type local"
    )
    finetune: bool = setting(False, help="take the weights only and start at iteration 0")
    exit_on_missing_checkpoint: bool = setting(False, help="stop when --load holds no checkpoint")
    pretrained_checkpoint: str | None = setting(
        None, help="folder whose weights to begin with where --load holds no checkpoint"
    )
    use_checkpoint_args: bool = setting(False, help="take the architecture and the tokenizer from the checkpoint")
    use_mp_args_from_checkpoint_args: bool = setting(
        False, help="with --use-checkpoint-args: take the tensor and pipeline sizes too"
    )
    use_tokenizer_model_from_checkpoint_args: bool = setting(
        True, help="with --use-checkpoint-args: take the tokenizer too; otherwise the one that the flags name"
    )
    dist_ckpt_strictness: str = setting(
        "assume_ok_unexpected",
        help="what to do about tensors of a checkpoint that the run does not ask for: nothing, say them (log_..., "
        "return_...) or stop (raise_...); what it lacks is always an error",
        choices=(
            *("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all"),
            *("return_unexpected", "return_all", "ignore_all"),
        ),
    )
    accept_data_change: bool = setting(
        False, help="go on although the training data is not that of the checkpoint; it is said and recorded", ours=True
    )

    @property
    def save_folders(self) -> tuple[str, ...]:
        """All the folders that the run saves checkpoints to."""
        if self.save is None:
            return ()
        passing = self.passing_folder(self.save) if self.non_persistent_save_interval else None
        return (self.save,) if passing is None else (self.save, passing)

    def passing_folder(self, folder: str) -> str | None:
        """Where the checkpoints are of which only the last one is kept, beside those in a folder; None for none."""
        if self.non_persistent_ckpt_type is None:
            return None
        if self.non_persistent_ckpt_type == "local":
            return self.non_persistent_local_ckpt_dir
        return self.non_persistent_global_ckpt_dir or f"{folder.rstrip('/')}/non_persistent"
