"""Choose the build of torch for this machine: print pip's arguments for it, and on stderr one line with the reason.

The Makefile runs this before it installs, with its variables in the environment. The rules are in
src/megalith/torch_builds.py; indexes that the user names go before them, and a torch that is installed stays.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from megalith.errors import ConfigError
from megalith.torch_builds import BUILDS, choose, query_gpus, requirement

_SOURCES = re.compile(r"(?:^|\s)(?:-i|-f|--index-url|--extra-index-url|--find-links|--no-index|torch[<>=~@ ])")
_SETTINGS = re.compile(r"^\S*\.((?:extra-)?index-url|find-links|no-index)=", re.MULTILINE)


def main(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Print the arguments; return 0, or 2 if the user has to choose.

    Args:
        environ: TORCH, the build or "auto"; CONSTRAINTS, the file that pins torch; PIP_FLAGS and WHEELHOUSE.
        root: where the files of devices and drivers are.
    """
    wanted = environ.get("TORCH") or "auto"
    try:
        build, reason = _choose(environ, root) if wanted == "auto" else (wanted, "TORCH")
        words = [] if build == "pypi" else requirement(build, _pinned(environ) or _installed().partition("+")[0])
    except ConfigError as error:
        names = ", ".join(known.name for known in BUILDS)
        print(f"torch: {error}. TORCH names a build: {names}, cpu, or pypi (docs/install.md)", file=sys.stderr)
        return 2
    where = f"{build} from {words[-1]}" if words else "what pip finds"
    print(f"torch: {where} ({reason}); TORCH names another (docs/install.md)", file=sys.stderr)
    print(*words)
    return 0


def _choose(environ: Mapping[str, str], root: Path) -> tuple[str, str]:
    """Return the build for this machine, "pypi" for what pip finds by itself, and the reason.

    Raises:
        ConfigError: no build serves its GPUs, or nvidia-smi does not list them.
    """
    decided = _decided(environ)
    try:
        build, reason = _for_this_machine(root)
    except ConfigError as error:
        if not decided:
            raise
        build, reason = "none", str(error)
    return ("pypi", f"{decided}; for this machine: {build}, {reason}") if decided else (build, reason)


def _decided(environ: Mapping[str, str]) -> str:
    """Return by what the user has decided where torch comes from; "" if by nothing."""
    if environ.get("WHEELHOUSE"):
        return "WHEELHOUSE"
    if _SOURCES.search(environ.get("PIP_FLAGS", "")):
        return "PIP_FLAGS"
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    if named := _SETTINGS.search(listed):
        return f"pip's setting {named[1]}"
    return f"torch {installed} is installed" if (installed := _installed()) else ""


def _for_this_machine(root: Path) -> tuple[str, str]:
    if platform.system() != "Linux":
        return "pypi", platform.system()
    if gpus := query_gpus(root):
        build, reason = choose(gpus)
        on_pypi = build is BUILDS[0] and platform.machine() == "x86_64"
        return "pypi" if on_pypi else build.name, reason
    if files := [*root.glob("dev/nvidia[0-9]*"), *root.glob("proc/driver/nvidia/gpus/*")]:
        raise ConfigError(f"{files[0]} shows an NVIDIA GPU and nvidia-smi lists none; repair the driver or choose")
    return "cpu", "no NVIDIA GPU"


def _pinned(environ: Mapping[str, str]) -> str:
    file = environ.get("CONSTRAINTS")
    found = re.search(r"^torch==([\d.]+)", Path(file).read_text(encoding="utf-8"), re.MULTILINE) if file else None
    return found[1] if found else ""


def _installed() -> str:
    """Return the version of the installed torch; "" if there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
