"""Processes to which CUDA_VISIBLE_DEVICES shows one GPU each: it must not be the same one."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megalith.config import LaunchConfig
from megalith.distributed.launch import _Rendezvous, named_gpu
from megalith.errors import ConfigError

MIG = "MIG-a6c2f3de-5c27-5c2e-8a62-1f0a3d0f0c11"


def _join(visible: list[str], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank, value in enumerate(visible):
        launch = LaunchConfig(rank=rank, world_size=2, local_rank=rank, local_world_size=2, launcher="torchrun")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        _Rendezvous(launch, 5.0, {}, lambda: False, backend)._register(store)


@pytest.mark.parametrize("visible", [["0", "1"], [MIG, MIG.replace("a6", "b7")], ["0,1", "0,1"]])
def test_each_has_its_own(visible: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _join(visible, "nccl", monkeypatch)


def test_the_same_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"CUDA_VISIBLE_DEVICES=0 .*ranks 0 and 1"):
        _join(["0", "0"], "nccl", monkeypatch)
    _join(["0", "0"], "gloo", monkeypatch)


def test_launchers_that_number_gpus_for_each_process_are_believed() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    for launcher, gpu in {"torchrun": "0", "hand": "0", "srun": "", "mpirun": "", "megalith": ""}.items():
        assert named_gpu(LaunchConfig(local_rank=1, launcher=launcher), environ) == gpu
    assert named_gpu(LaunchConfig(launcher="torchrun"), environ) == "", "one process"
