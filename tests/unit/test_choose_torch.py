"""Which build of torch an install takes. The outputs of nvidia-smi are those of real machines; nothing is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from megalith import torch_builds
from megalith.errors import ConfigError
from megalith.torch_builds import BUILDS, Gpu, choose, query_gpus, remedy, requirement, runs

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "choose_torch.py"

V100S = "Tesla V100S-PCIE-32GB, 550.90.07, 7.0\n" * 2
FOUR_4090 = "NVIDIA GeForce RTX 4090, 580.65.06, 8.9\n" * 4
H100 = "NVIDIA H100 80GB HBM3, 535.183.01, 9.0\n" * 8
B200 = "NVIDIA B200, 580.82.07, 10.0\n" * 8
OLD_FIELD = 'Field "compute_cap" is not a valid field to query.\n\n'
NO_DEVICES = "No devices were found\n"
BROKEN = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)

Machine = Callable[..., Path]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script where no torch is installed, on x86-64 Linux, with pip's own settings out of the way."""
    spec = importlib.util.spec_from_file_location("choose_torch", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_installed", lambda: "")
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return module


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes the root of a machine, with an nvidia-smi that answers the query, and the one without compute_cap."""

    def make(answer: str | None, older: str = "", *, files: tuple[str, ...] = (), exits: int = 0) -> Path:
        programs, root = tmp_path / "bin", tmp_path / "root"
        programs.mkdir()
        root.mkdir()
        for file in files:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).touch()
        monkeypatch.setenv("PATH", str(programs))
        if answer is not None:
            (tmp_path / "answer").write_text(answer)
            (tmp_path / "older").write_text(older)
            program = programs / "nvidia-smi"
            program.write_text(
                "#!/bin/sh\n"
                f"case $1 in *compute_cap) /bin/cat {tmp_path}/answer;; *) /bin/cat {tmp_path}/older;; esac\n"
                f"exit {exits}\n"
            )
            program.chmod(0o755)
        return root

    return make


@pytest.mark.parametrize(
    ("answer", "build", "reasons"),
    [
        (V100S, "cu126", ("Tesla V100S", "sm_70", "550.90.07")),
        ("Tesla V100-SXM2-16GB, 580.65.06, 7.0\n", "cu126", ("sm_70", "580.65.06")),
        (FOUR_4090, "pypi", ("RTX 4090", "580.65.06")),
        ("NVIDIA GeForce RTX 4090, 550.54.14, 8.9\n", "cu126", ("580", "550.54.14")),
        (H100, "cu126", ("H100", "535.183.01")),
        ("NVIDIA H100 80GB HBM3, 580.82.07, 9.0\n", "pypi", ("H100",)),
        (B200, "pypi", ("B200", "sm_100")),
        ("NVIDIA GeForce RTX 5090, 590.44.01, 12.0\n", "pypi", ("sm_120",)),
        ("Tesla P100-PCIE-16GB, 525.60.13, 6.0\n", "cu126", ("sm_60",)),
        ("Tesla T4, 580.65.06, 7.5\n", "pypi", ("sm_75",)),
        # In MIG mode the query lists the whole GPU, once.
        ("NVIDIA A100-SXM4-40GB, 535.161.08, 8.0\n", "cu126", ("A100",)),
        # Two unlike cards that one build serves.
        (
            "Tesla V100S-PCIE-32GB, 580.65.06, 7.0\nNVIDIA GeForce RTX 4090, 580.65.06, 8.9\n",
            "cu126",
            ("V100S", "4090"),
        ),
    ],
)
def test_the_build_for_the_gpus(
    script: ModuleType,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    build: str,
    reasons: tuple[str, ...],
) -> None:
    assert script.main({"CONSTRAINTS": str(REPOSITORY / "constraints.txt")}, machine(answer)) == 0
    printed = capsys.readouterr()
    words = printed.out.split()
    if build == "pypi":
        assert words == []
    else:
        assert re.fullmatch(rf"torch==2\.\d+\.\d+\+{build}", words[0])
        assert words[1:] == ["--extra-index-url", f"https://download.pytorch.org/whl/{build}"]
    assert printed.err.count("\n") == 1
    assert all(reason in printed.err for reason in reasons)


@pytest.mark.parametrize(
    ("answer", "older", "named"),
    [
        ("NVIDIA B200, 570.133.20, 10.0\n", "", ("B200", "570.133.20", "580")),
        ("NVIDIA GeForce RTX 5090, 575.51.02, 12.0\n", "", ("RTX 5090", "580")),
        ("Tesla V100S-PCIE-32GB, 580.65.06, 7.0\nNVIDIA B200, 580.65.06, 10.0\n", "", ("V100S", "B200")),
        ("Tesla K80, 470.256.02, 3.7\n", "", ("K80", "sm_37")),
        ("NVIDIA A100-SXM4-40GB, 515.105.01, 8.0\n", "", ("515.105.01", "525")),
        (OLD_FIELD, "Tesla V100-SXM2-16GB, 470.57.02\n", ("V100", "470.57.02", "525")),
        # An nvidia-smi that is older than the driver, as in a snap, does not know the field either.
        (OLD_FIELD, "NVIDIA RTX PRO 2000, 580.95.05\n", ("RTX PRO 2000", "capability", "cu126")),
    ],
)
def test_where_no_build_serves_the_install_stops(
    script: ModuleType,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    older: str,
    named: tuple[str, ...],
) -> None:
    root = machine(answer, older)
    assert script.main({}, root) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and all(name in printed.err for name in ("TORCH", *named))
    assert script.main({"TORCH": "cu130"}, root) == 0
    assert "cu130" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [None, NO_DEVICES, BROKEN])
def test_a_machine_without_a_gpu_gets_the_cpu_build(
    script: ModuleType, machine: Machine, capsys: pytest.CaptureFixture[str], answer: str | None
) -> None:
    assert (
        script.main({"CONSTRAINTS": str(REPOSITORY / "constraints.txt")}, machine(answer, answer or "", exits=9)) == 0
    )
    assert re.match(
        r"torch==[\d.]+\+cpu --extra-index-url https://download.pytorch.org/whl/cpu$", capsys.readouterr().out
    )


@pytest.mark.parametrize("file", ["dev/nvidia0", "proc/driver/nvidia/gpus/0000:00:1e.0"])
@pytest.mark.parametrize("answer", [None, BROKEN])
def test_a_gpu_that_nvidia_smi_does_not_list_is_no_cpu_machine(
    script: ModuleType, machine: Machine, capsys: pytest.CaptureFixture[str], answer: str | None, file: str
) -> None:
    root = machine(answer, answer or "", files=(file,), exits=9)
    assert script.main({}, root) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and file in printed.err and "nvidia-smi" in printed.err


def test_an_nvidia_smi_that_hangs(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_builds, "_NVIDIA_SMI_SECONDS", 0.2)
    root = machine("")
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    assert query_gpus(root) == []


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"PIP_FLAGS": "-i https://mirror/simple"}, "PIP_FLAGS"),
        ({"PIP_FLAGS": "--quiet --find-links wheels"}, "PIP_FLAGS"),
        ({"PIP_FLAGS": "torch==2.12.0"}, "PIP_FLAGS"),
        ({"WHEELHOUSE": "wheelhouse"}, "WHEELHOUSE"),
        ({"PIP_INDEX_URL": "https://mirror/simple"}, "index-url"),
        ({"PIP_EXTRA_INDEX_URL": "https://mirror/simple"}, "extra-index-url"),
        ({"PIP_FIND_LINKS": "/opt/wheels"}, "find-links"),
    ],
)
@pytest.mark.parametrize(("answer", "advice"), [(V100S, "cu126"), (BROKEN, "nvidia0")])
def test_the_users_index_decides_and_the_choice_is_advice(
    script: ModuleType,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    named: str,
    answer: str,
    advice: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert script.main(environ, machine(answer, files=("dev/nvidia0",))) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == "" and named in printed.err and advice in printed.err
    assert script.main({**environ, "TORCH": "cu126"}) == 0, "TORCH goes before all"
    assert "whl/cu126" in capsys.readouterr().out


def test_flags_of_pip_that_name_no_index_decide_nothing(
    script: ModuleType, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main({"PIP_FLAGS": "--quiet --trusted-host mirror"}, machine(V100S)) == 0
    assert "cu126" in capsys.readouterr().out


def test_an_installed_torch_stays_unless_torch_names_a_build(
    script: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "_installed", lambda: "2.12.1+cu130")
    root = machine(V100S)
    assert script.main({}, root) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == "" and "2.12.1+cu130" in printed.err and "cu126" in printed.err
    assert script.main({"TORCH": "cu126"}, root) == 0
    assert capsys.readouterr().out.startswith("torch==2.12.1+cu126 ")


def test_a_build_that_this_torch_does_not_have(
    script: ModuleType, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text("numpy==2.4.6\ntorch==2.15.0\n")
    assert script.main({"CONSTRAINTS": str(pins)}, machine(V100S)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "2.15" in printed.err and "cu126" in printed.err
    assert script.main({}, tmp_path / "root") == 0
    assert capsys.readouterr().out.startswith("torch<2.15 ")


def test_on_arm_the_index_is_named(
    script: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch of PyPI has been a CPU build there."""
    monkeypatch.setattr(script.platform, "machine", lambda: "aarch64")
    assert script.main({}, machine("NVIDIA GH200 480GB, 580.65.06, 9.0\n")) == 0
    assert "whl/cu130" in capsys.readouterr().out


def test_a_mac_takes_what_pip_finds(
    script: ModuleType, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.platform, "system", lambda: "Darwin")
    assert script.main({}, machine(None)) == 0
    assert capsys.readouterr().out.strip() == ""


def test_the_script_needs_the_standard_library_alone(machine: Machine) -> None:
    root = machine(None)
    environ = {"PATH": str(root), "TORCH": "cu126", "CONSTRAINTS": str(REPOSITORY / "constraints.txt")}
    done = subprocess.run([sys.executable, "-I", "-S", SCRIPT], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch==")


@pytest.mark.parametrize(
    ("gpu", "installed", "words"),
    [
        (Gpu("Tesla V100S-PCIE-32GB", "550.90.07", (7, 0)), "2.13.0+cu130", ("2.13.0+cu126", "whl/cu126")),
        (Gpu("Tesla V100S-PCIE-32GB", "550.90.07", (7, 0)), "2.15.0+cu130", ("'torch<2.15'", "whl/cu126")),
        (Gpu("NVIDIA B200", "580.82.07", (10, 0)), "2.13.0+cpu", ("2.13.0+cu130",)),
        (Gpu("NVIDIA B200", "570.133.20", (10, 0)), "2.13.0+cu126", ("driver", "580")),
    ],
)
def test_the_remedy_is_that_of_the_installer(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu, installed: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "prefix", "/opt/conda")
    assert all(word in remedy([gpu], installed) for word in words)
    monkeypatch.setattr(sys, "prefix", str(REPOSITORY / ".venv"))
    if "driver" not in words:
        build, _ = choose([gpu])
        assert f"install TORCH={build.name}" in remedy([gpu], installed)
    assert remedy([], installed) == ""


def test_the_pinned_torch_has_every_build() -> None:
    pinned = re.search(r"^torch==(\S+)", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    for build in BUILDS:
        assert requirement(build.name, pinned[1])[0] == f"torch=={pinned[1]}+{build.name}"
    with pytest.raises(ConfigError, match="cu126"):
        requirement("cu126", "2.15.0")


def test_code_runs_within_a_major_version_and_ptx_on_later_ones() -> None:
    assert runs("sm_86", (8, 9)) and runs("compute_120", (13, 0)) and runs("sm_100", (10, 3))
    assert not runs("sm_90", (8, 9)) and not runs("sm_80", (9, 0)) and not runs("sm_86", (8, 0))
