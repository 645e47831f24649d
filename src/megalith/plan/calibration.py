"""What finished runs say of a device, beside what was planned of them: `megalith plan --calibrate RUN`.

Learned are the speed of a step over what the rates say, the bytes at the peak that no plan accounts for, and those
outside of torch's allocator: of several runs their medians. The gaps between torch's blocks are not learned: its
allocator does not close them as long as memory is left. Without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import megalith
from megalith.distributed.machine import processor
from megalith.errors import ConfigError
from megalith.plan import cache_folder
from megalith.plan.devices import DEVICES, GIB, Device, find_device
from megalith.plan.remember import remember

_LEARNED = ("efficiency", "unplanned", "context")


def circumstances(device: Device) -> dict[str, Any]:
    """Return what a run records beside its plan: device, versions, and what of earlier calibrations is in the plan."""
    return {
        "device": processor() if device.name == DEVICES["CPU"].name else device.name,
        "versions": [megalith.__version__, version("torch")],
        "rates": device.rates.source,
        "efficiency": device.rates.efficiency,
        "unplanned_bytes": device.unplanned,
    }


def calibrated(device: Device) -> Device:
    """Return a device as finished runs have shown it; as given if there are none with its rates and these versions."""
    here, learned = circumstances(device), dict[str, float]()
    with suppress(KeyError, TypeError, AttributeError):  # no calibration of ours
        runs = [run for run in _runs(device).values() if all(run[name] == here[name] for name in ("versions", "rates"))]
        for name in _LEARNED:
            if seen := [run[name] for run in runs if run[name] is not None]:
                learned[name] = median(seen)
    if not learned:
        return device
    rates = replace(device.rates, efficiency=learned.get("efficiency", 1.0))
    outside = None if "context" not in learned else int(learned["context"])
    return replace(device, rates=rates, unplanned=int(learned.get("unplanned", 0)), outside=outside, runs=len(runs))


def calibrate(record: Mapping[str, Any] | None, run: Path) -> str:
    """Learn from the record of plan and measurement at the end of a run; return a line about what was learned.

    Raises:
        ConfigError: the run has none, or is of a device that plans do not know, another processor or other versions.
    """
    if not record or "rates" not in record:
        raise ConfigError(
            f"--calibrate {run}: no plan stands beside what it measured; run `megalith plan` with the flags of a run "
            "before it starts, on the machine that trains"
        )
    name = record["device"]
    device = find_device(name) or DEVICES["CPU"]
    if device.compute is None and name != processor():
        raise ConfigError(
            f"--calibrate {run}: it ran on {name}, which is neither this machine's {processor()} nor a device of plans"
        )
    here = circumstances(device)
    if record["versions"] != here["versions"]:
        was, now = (" and torch ".join(versions) for versions in (record["versions"], here["versions"]))
        raise ConfigError(
            f"--calibrate {run}: it ran with Megalith {was}, plans are now of {now}; calibrate by a new run"
        )
    seconds, peak, context = (record.get(f"measured_{name}") for name in ("seconds", "peak_bytes", "context_bytes"))
    speed = record["planned_seconds"] and record["planned_seconds"] * record["efficiency"] / seconds
    beside = None if peak is None else max(0, peak - record["planned_peak_bytes"] + record["unplanned_bytes"])
    one = {"efficiency": speed, "unplanned": beside, "context": context}
    file, runs = _file(device), _runs(device)
    runs[str(run.resolve())] = {**one, "versions": record["versions"], "rates": record["rates"]}
    remember(file, json.dumps(runs))
    if _runs(device) != runs:
        raise ConfigError(f"{file} cannot be written; set XDG_CACHE_HOME to a folder that can")
    found = [f"{speed:.3g} of the speed that its rates say"] if speed else []
    found += [] if beside is None else [f"{beside / GIB:.2f} GiB at the peak that no plan accounts for"]
    found += [] if context is None else [f"{context / GIB:.2f} GiB outside of torch's allocator"]
    return f"{device.name}: {', '.join(found)}; saved in {file}: plans take the median of {len(runs)} runs"


def _file(device: Device) -> Path:
    return cache_folder() / f"calibration-{device.file_name}.json"


def _runs(device: Device) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(_file(device).read_text(encoding="utf-8")))
    return {}
