"""What the start of a training run reports, step by step, to whoever wants to show it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalith.config import RunConfig
from megalith.config.changes import Change
from megalith.data.build import Datasets
from megalith.tokenizers import Tokenizer
from megalith.train.checkpoint_restore import Resumed
from megalith.train.results import Times
from megalith.train.state import TrainState


class StartObserver:
    """Receives each step of `build_run`, in this order; methods do nothing unless overridden."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def warn(self, text: str) -> None:
        """Something that the user should look into."""

    def log(self, text: str) -> None:
        """Something for the log only."""

    def configured(self, config: RunConfig, device: torch.device) -> None:
        """The configuration is valid; the tokenizer is built next."""

    def changed(self, changes: Sequence[Change], iteration: int) -> None:
        """These settings differ from those that the checkpoint of `iteration` was written with."""

    def vocabulary_padded(self, config: RunConfig, tokenizer: Tokenizer, padded: int, *, resumed: bool) -> None:
        """The embedding has `padded` rows; those of a checkpoint where the run has one."""

    def initialized(self, config: RunConfig, seconds: float) -> None:
        """Ranks, tokenizer and random streams are ready, so many seconds after the start."""

    def building_model(self, config: RunConfig) -> None:
        """The model is built next."""

    def model_built(self, config: RunConfig, parameters: Sequence[tuple[int, int, int]]) -> None:
        """The model is built; number of parameters, tensor rank and pipeline rank of each part of it."""

    def no_checkpoint(self, load: str | None) -> None:
        """--load holds no checkpoint: the run starts from random weights."""

    def loading(self, path: str, iteration: int, config: RunConfig, *, distributed: bool) -> None:
        """The checkpoint of `iteration` in `path` is read next; `distributed` but for the format torch."""

    def loaded(self, path: str, iteration: int, config: RunConfig, resumed: Resumed, state: TrainState) -> None:
        """It is read."""

    def setup_done(self) -> None:
        """Model, optimizer and schedule are ready."""

    def building_datasets(self, sizes: tuple[int | None, int | None, int | None]) -> None:
        """The datasets are built next, of these numbers of samples for train, validation and test."""

    def datasets_built(self, config: RunConfig, datasets: Datasets) -> None:
        """They are built."""

    def data_done(self) -> None:
        """The loaders are ready; the first step follows."""

    def timed(self, config: RunConfig, times: Times) -> None:
        """Seconds that parts of the start took on each rank."""
