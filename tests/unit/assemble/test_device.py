"""Which device a process computes on. torch's view of the GPUs is made up."""

from __future__ import annotations

import pytest
import torch

from megalith.assemble import nvidia
from megalith.assemble.model import choose_device
from megalith.config import LaunchConfig
from megalith.errors import ConfigError


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch sees two."""
    _sees(2, monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def _sees(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(nvidia, "find_driver", lambda root: None)


@pytest.mark.usefixtures("gpus")
def test_each_process_of_a_machine_has_its_own_gpu() -> None:
    places = [LaunchConfig(local_rank=rank, local_world_size=2) for rank in range(2)]
    assert [choose_device("auto", launch) for launch in places] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu", places[1]) == torch.device("cpu")


@pytest.mark.usefixtures("gpus")
def test_more_processes_than_gpus_are_refused_on_all_of_them() -> None:
    """Were it said only where there is no GPU, the first process of the machine, which speaks for all, would wait."""
    for rank in range(3):
        with pytest.raises(ConfigError, match=r"3 processes .* 2 GPUs"):
            choose_device("auto", LaunchConfig(local_rank=rank, local_world_size=3))
    with pytest.raises(ConfigError, match="3 processes"):
        choose_device("cuda", LaunchConfig(local_rank=2))


def test_srun_may_show_each_process_the_gpu_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    _sees(1, monkeypatch)
    for launcher in ("srun", "mpirun"):
        launch = LaunchConfig(local_rank=3, local_world_size=4, launcher=launcher)
        assert choose_device("auto", launch) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"4 processes .* 1 GPU"):
        choose_device("auto", LaunchConfig(local_rank=3, local_world_size=4, launcher="torchrun"))


@pytest.mark.parametrize(
    "visible", ["3", "GPU-5d4e8a2f-1111-2222-3333-444455556666", "MIG-a6c2f3de-5c27-5c2e-8a62-1f0a3d0f0c11"]
)
def test_a_script_under_torchrun_may_show_each_process_one_gpu(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _sees(1, monkeypatch)
    for rank in (0, 3):
        launch = LaunchConfig(local_rank=rank, local_world_size=4, launcher="torchrun")
        assert choose_device("auto", launch) == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r"4 processes .* 1 GPU"):  # our own launcher shows all GPUs to all processes
        choose_device("auto", LaunchConfig(local_rank=3, local_world_size=4, launcher="megalith"))


def test_two_visible_gpus_of_four_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    _sees(2, monkeypatch)
    for rank in range(4):
        with pytest.raises(ConfigError, match=r"4 processes .* 2 GPUs .*CUDA_VISIBLE_DEVICES"):
            choose_device("auto", LaunchConfig(local_rank=rank, local_world_size=4, launcher="torchrun"))


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _sees(0, monkeypatch)
    assert choose_device("auto", LaunchConfig(local_rank=1, local_world_size=2)) == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device cuda"):
        choose_device("cuda")
