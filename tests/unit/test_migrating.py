"""docs/migrating.md names what is there: modules, classes, functions and flags; its example runs."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from megalith.config import all_settings
from megalith.config.known import known_flags

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")

OF_TORCHRUN = {"--nnodes", "--node_rank", "--nproc_per_node", "--master_addr"}
OF_OTHER_COMMANDS = {"--loss-mask", "--config", "--dataset-impl", "--chunk-size", "--split-sentences"}
OF_CONVERTERS = {
    "--target-expert-parallel-size",
    *("--model-type", "--loader", "--saver", "--load-dir", "--save-dir", "--target-tensor-parallel-size"),
    *("--true-vocab-size", "--max-queue-size", "--megatron-path", "--no-checking", "--checkpoint-type"),
    *("--tp", "--pp", "--format", "--no-optim", "--dtype", "--upcycle"),
}


def test_every_name_of_the_library_exists() -> None:
    names = sorted(set(re.findall(r"`(megalith(?:\.\w+)+)`", PAGE)))
    assert len(names) > 40
    missing = [name for name in names if not _exists(name)]
    assert not missing


def _exists(dotted: str) -> bool:
    module, _, name = dotted.rpartition(".")
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(dotted)
    except ImportError:
        return False
    return True


def test_every_flag_is_known() -> None:
    spellings = [(*s.spellings, *s.off_spellings, *s.about.shorthands) for s in all_settings().values()]
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGE))
    assert len(flags) > 30
    assert (
        flags - set().union(*spellings) - known_flags().keys() - OF_TORCHRUN - OF_OTHER_COMMANDS - OF_CONVERTERS
        == set()
    )


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    found: dict[str, object] = {}
    exec(code, found)
    assert getattr(found["loss_BS"], "shape", None) == (8, 64)
