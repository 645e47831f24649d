"""Observer of the start of a training run."""

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
    """Observer of `build_run`; it calls the methods in this order, and they do nothing unless overridden."""

    def info(self, text: str) -> None:
        """Receive information for the user."""

    def warn(self, text: str) -> None:
        """Receive a warning for the user."""

    def log(self, text: str) -> None:
        """Receive text for the log file only."""

    def configured(self, config: RunConfig, device: torch.device) -> None:
        """Receive that the configuration is valid, before the tokenizer is built."""

    def changed(self, changes: Sequence[Change], iteration: int) -> None:
        """Receive the settings that differ from those of the checkpoint of `iteration`."""

    def vocabulary_padded(self, config: RunConfig, tokenizer: Tokenizer, padded: int, *, resumed: bool) -> None:
        """Receive the number of rows of the embedding (the checkpoint's if the run resumes)."""

    def initialized(self, config: RunConfig, seconds: float) -> None:
        """Receive that ranks, tokenizer and random streams are ready, and the seconds since the start."""

    def building_model(self, config: RunConfig) -> None:
        """Receive that the model is built next."""

    def model_built(self, config: RunConfig, parameters: Sequence[tuple[int, int, int]]) -> None:
        """Receive (number of parameters, tensor rank, pipeline rank) of each part of the model."""

    def no_checkpoint(self, load: str | None) -> None:
        """Receive that --load holds no checkpoint, so that the run starts from random weights."""

    def loading(self, path: str, iteration: int, config: RunConfig, *, distributed: bool) -> None:
        """Receive that the checkpoint of `iteration` is read next; `distributed` is False for the format torch."""

    def loaded(self, path: str, iteration: int, config: RunConfig, resumed: Resumed, state: TrainState) -> None:
        """Receive that the checkpoint is loaded."""

    def setup_done(self) -> None:
        """Receive that model, optimizer and schedule are ready."""

    def building_datasets(self, sizes: tuple[int | None, int | None, int | None]) -> None:
        """Receive the target numbers of samples for train, validation and test, before the datasets are built."""

    def datasets_built(self, config: RunConfig, datasets: Datasets) -> None:
        """Receive the datasets."""

    def data_done(self) -> None:
        """Receive that the loaders are ready, before the first step."""

    def timed(self, config: RunConfig, times: Times) -> None:
        """Receive the seconds that parts of the start took on each rank."""
