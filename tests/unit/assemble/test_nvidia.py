"""A GPU that torch cannot use stops `--device auto`. The files and outputs are those of real machines; torch is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith.assemble import nvidia
from megalith.assemble.model import choose_device
from megalith.assemble.nvidia import Driver, find_driver, unused_gpu
from megalith.cli.main import main
from megalith.config import LaunchConfig
from megalith.errors import ConfigError

V100 = """\
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 470.57.02    Driver Version: 470.57.02    CUDA Version: 11.4     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|                               |                      |               MIG M. |
|===============================+======================+======================|
|   0  Tesla V100-SXM2...  Off  | 00000000:00:1E.0 Off |                    0 |
| N/A   38C    P0    24W / 300W |      0MiB / 16160MiB |      0%      Default |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
"""
RTX_3080 = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 610.43.03              KMD Version: 610.43.03     CUDA UMD Version: 13.3     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA GeForce RTX 3080 ...    Off |   00000000:01:00.0 Off |                  N/A |
| N/A   40C    P0            751W /   80W |      14MiB /  16384MiB |      6%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|    0   N/A  N/A            2251      G   /usr/bin/gnome-shell                      4MiB |
+-----------------------------------------------------------------------------------------+
"""
V100S = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.90.07              Driver Version: 550.90.07      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  Tesla V100S-PCIE-32GB          Off |   00000000:3B:00.0 Off |                    0 |
| N/A   34C    P0             25W /  250W |       1MiB /  32768MiB |      0%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
"""
BROKEN = "Failed to initialize NVML: Driver/library version mismatch\n"
NVRM = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021
GCC version:  gcc version 9.3.0 (Ubuntu 9.3.0-17ubuntu1~20.04)
"""
NVRM_OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16-I3)  Thu Jan 23
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
INFORMATION = "Model: \t\t {}\nIRQ:   \t\t 24\nGPU UUID: \t GPU-????????-????\nBus Type: \t PCIe\nGPU Excluded:\t No\n"

Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes a machine's files, with an nvidia-smi that prints a recorded output, and has our commands look there."""

    def make(
        smi: str = "", module: str = "", models: tuple[str, ...] = (), nodes: bool = True, query: str = ""
    ) -> Path:
        root, programs = tmp_path / "root", tmp_path / "bin"
        (root / "dev").mkdir(parents=True)
        for number, model in enumerate(models):
            folder = root / f"proc/driver/nvidia/gpus/0000:0{number}:1e.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(INFORMATION.format(model))
            if nodes:
                (root / f"dev/nvidia{number}").write_text("")
        if module:
            (root / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
            (root / "proc/driver/nvidia/version").write_text(module)
        programs.mkdir()
        (tmp_path / "said").write_text(smi)
        program = programs / "nvidia-smi"
        (tmp_path / "query").write_text(query)
        program.write_text(
            f"#!/bin/sh\n/bin/echo asked >> {tmp_path}/asked\n"
            f"case $1 in --query*) /bin/cat {tmp_path}/query;; *) /bin/cat {tmp_path}/said;; esac\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(programs), prepend=":")
        monkeypatch.setattr(nvidia, "_ROOT", root)
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        return root

    return make


def _built(monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_the_driver_is_read_from_files_and_recorded_outputs(machine: Machine) -> None:
    root = machine(V100, NVRM, ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-16GB"))
    assert find_driver(root) == Driver("470.57.02", "11.4", ("Tesla V100-SXM2-16GB",) * 2)
    assert str(find_driver(root)) == "2 x Tesla V100-SXM2-16GB (driver 470.57.02, CUDA 11.4)"


def test_the_header_of_newer_drivers_is_read(machine: Machine) -> None:
    root = machine(RTX_3080)
    (root / "dev/nvidia0").write_text("")
    assert find_driver(root) == Driver("610.43.03", "13.3", ("NVIDIA GeForce RTX 3080 ...",))


def test_without_a_working_nvidia_smi_the_kernel_module_tells_its_version(machine: Machine) -> None:
    root = machine(BROKEN, NVRM_OPEN, ("NVIDIA L4",))
    assert find_driver(root) == Driver("570.86.15", "", ("NVIDIA L4",))


def test_a_machine_without_a_gpu_asks_nothing(machine: Machine, tmp_path: Path) -> None:
    root = machine(V100, NVRM)  # a driver is loaded, and there is no GPU
    assert find_driver(root) is None and unused_gpu(root) == ""
    assert choose_device("auto") == torch.device("cpu")
    assert not (tmp_path / "asked").exists()


def test_a_driver_older_than_the_cuda_of_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(V100, NVRM, ("Tesla V100-SXM2-16GB",))
    _built(monkeypatch, "2.13.0+cu130", "13.0")
    for wanted in ("auto", "cuda"):
        with pytest.raises(ConfigError) as refused:
            choose_device(wanted)
        for fragment in (f"--device {wanted}", "Tesla V100", "470.57.02", "2.13.0+cu130", "580", "--device cpu"):
            assert fragment in str(refused.value)
    assert choose_device("cpu") == torch.device("cpu")


def test_a_build_without_cuda(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(V100, NVRM, ("Tesla V100-SXM2-16GB",))
    _built(monkeypatch, "2.13.0+cpu", None)
    with pytest.raises(ConfigError, match=r"2\.13\.0\+cpu.*CUDA 11\.4"):
        choose_device("auto")


def test_the_remedy_names_the_build_for_the_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(V100S, models=("Tesla V100S-PCIE-32GB",), query="Tesla V100S-PCIE-32GB, 550.90.07, 7.0\n")
    for version, cuda in (("2.13.0+cu130", "13.0"), ("2.13.0+cpu", None)):
        _built(monkeypatch, version, cuda)
        with pytest.raises(ConfigError, match=r"V100S.*550\.90\.07.*cu126.*--device cpu"):
            choose_device("auto")


def test_no_build_but_a_newer_driver_serves_blackwell(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(V100S.replace("550.90.07", "570.133.20"), models=("NVIDIA B200",), query="NVIDIA B200, 570.133.20, 10.0\n")
    _built(monkeypatch, "2.13.0+cu130", "13.0")
    with pytest.raises(ConfigError, match=r"570\.133\.20.*update the driver to 580"):
        choose_device("auto")


def test_a_container_without_its_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(BROKEN, NVRM_OPEN, ("NVIDIA L4",), nodes=False)
    _built(monkeypatch, "2.13.0+cu126", "12.6")
    with pytest.raises(ConfigError, match=r"NVIDIA L4.*--gpus all"):
        choose_device("auto")


def test_a_job_that_was_given_no_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control group of a SLURM job refuses the files, whatever their mode."""

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted", str(path))

    machine(BROKEN, NVRM_OPEN, ("NVIDIA L4",))
    _built(monkeypatch, "2.13.0+cu126", "12.6")
    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(ConfigError, match=r"nvidia0.*--gres"):
        choose_device("auto")


def test_what_torch_says_is_passed_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported drivers\n...")

    machine(BROKEN, NVRM_OPEN, ("NVIDIA L4",))
    _built(monkeypatch, "2.13.0+cu126", "12.6")
    monkeypatch.setattr(torch.cuda, "init", fails)
    with pytest.raises(ConfigError, match="Error 803"):
        choose_device("auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=7"):
        choose_device("auto")


@pytest.mark.parametrize(
    ("name", "value", "nodes"),
    [
        ("CUDA_VISIBLE_DEVICES", "", True),
        ("NVIDIA_VISIBLE_DEVICES", "void", False),
        ("NVIDIA_VISIBLE_DEVICES", "", False),
    ],
)
def test_a_gpu_that_is_hidden_on_purpose(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, value: str, nodes: bool
) -> None:
    machine(V100, NVRM, ("Tesla V100-SXM2-16GB",), nodes=nodes)
    monkeypatch.setenv(name, value)
    assert choose_device("auto") == torch.device("cpu")


def test_a_container_that_was_given_its_gpus_by_cdi(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """There NVIDIA_VISIBLE_DEVICES=void stops the older hook from adding others: nothing is hidden."""
    machine(V100, NVRM, ("Tesla V100-SXM2-16GB",))
    _built(monkeypatch, "2.13.0+cpu", None)
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "void")
    with pytest.raises(ConfigError, match="Tesla V100"):
        choose_device("auto")


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"], (6, 1), False),
        (["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"], (8, 9), True),
        (["sm_50", "sm_60", "sm_70", "sm_80", "sm_90"], (12, 0), False),
        (["sm_50", "sm_60", "sm_70", "sm_80", "sm_90", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_90a"], (10, 0), False),
    ],
)
def test_a_gpu_without_kernels(
    monkeypatch: pytest.MonkeyPatch, built: list[str], capability: tuple[int, int], runs: bool
) -> None:
    _built(monkeypatch, "2.13.0+cu130", "13.0")
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_arch_list": built,
        "get_device_capability": capability,
        "get_device_name": "a card",
        "set_device": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    if runs:
        assert choose_device("auto") == torch.device("cuda", 0)
        return
    with pytest.raises(ConfigError, match=f"sm_{capability[0]}{capability[1]}.*--device cpu"):
        choose_device("auto")


def test_the_remedy_for_a_gpu_without_kernels(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new driver starts CUDA 13, which has nothing for Volta."""
    root = machine(V100S.replace("550.90.07", "580.65.06").replace("12.4", "13.0"), models=("Tesla V100S-PCIE-32GB",))
    _built(monkeypatch, "2.13.0+cu130", "13.0")
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_arch_list": ["sm_75", "sm_80"],
        "get_device_capability": (7, 0),
        "get_device_name": "Tesla V100S-PCIE-32GB",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert all(word in unused_gpu(root) for word in ("V100S", "sm_70", "cu126"))


def test_an_old_card_behind_those_that_are_needed_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    _built(monkeypatch, "2.13.0+cu130", "13.0")
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "get_arch_list": ["sm_80"],
        "set_device": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (8, 9) if number == 0 else (3, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: ("RTX 4090", "GT 710")[number])
    assert choose_device("auto") == torch.device("cuda", 0)
    for rank in range(2):
        with pytest.raises(ConfigError, match="GT 710"):
            choose_device("auto", LaunchConfig(local_rank=rank, local_world_size=2))


TRAIN = (
    "train --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--eval-iters 0 --num-workers 0 --save c --save-interval 1"
)


@pytest.mark.skipif(sys.platform != "linux", reason="the files are those of Linux")
def test_every_command_stops(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine(V100, NVRM, ("Tesla V100-SXM2-16GB",))
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN.split(), "--device", "cpu"]) == 0, "--device cpu insists"
    (tmp_path / "text.txt").write_text("1 2 3")
    flags = "--tokenizer-type NullTokenizer --vocab-size 60"
    for words in (
        TRAIN,
        f"generate c --prompt 1 {flags}",
        f"evaluate c --task wikitext103 --data text.txt {flags}",
        f"serve c {flags} --port 0",
        "quickstart --data text.txt --minutes 0.01",
    ):
        capsys.readouterr()
        assert main(words.split()) == 2, words
        said = capsys.readouterr().err
        assert all(fragment in said for fragment in ("Tesla V100", "470.57.02", torch.__version__, "--device cpu")), (
            said
        )
    assert main(["doctor"]) == 1
    assert "470.57.02" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "chosen"), [("xpu", "xpu"), ("hpu", "hpu"), ("mps", "cpu"), (None, "cpu")])
def test_another_accelerator_than_cuda_is_chosen(
    kind: str | None, chosen: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an Ascend is, whose package adds its type to torch; not Apple's, which has no fp64."""
    machine()
    set_to: list[torch.device] = []
    module = SimpleNamespace(device_count=lambda: 2, set_device=set_to.append)
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert choose_device("auto", LaunchConfig(local_rank=1, local_world_size=2)).type == chosen
    assert set_to == ([] if chosen == "cpu" else [torch.device(chosen, 1)])
    if chosen != "cpu":
        with pytest.raises(ConfigError, match="3 processes"):
            choose_device("auto", LaunchConfig(local_rank=0, local_world_size=3))
    with pytest.raises(ConfigError, match="--device cuda"):
        choose_device("cuda")
