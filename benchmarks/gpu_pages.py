"""The pages of results on GPUs: a report of one card, and the tables of docs/gpu.md and the READMEs.

Everything is computed from the files benchmarks/results/gpu-*.json. A page has its part between two comments,
`<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parts import RESULTS, read_results

ROOT = Path(__file__).parents[1]
PREDICTED = RESULTS / "gpu_predicted.json"
Record = Mapping[str, Any]

_NONE = {
    "en": "No result yet: nothing of Megalith has run on a GPU, and nothing is claimed of it.",
    "zh": "还没有任何结果：Megalith 从未在 GPU 上运行过，本页也不对此作任何断言。",
}
_STATUS = {
    "en": ("**Not run yet.** The code and its tests exist; no GPU was available", "Ran on {}: [results](#on-a-gpu)"),
    "zh": ("**还没有运行过。**代码和测试都已写好，但手头没有 GPU", "在 {} 上运行过：[结果](#在-gpu-上)"),
}
_HEADS = {
    "en": ("card", "tests", "largest step: MFU", "by", "when"),
    "zh": ("GPU", "测试", "最大的训练步：MFU", "测试者", "时间"),
}
_TESTS = {"en": "{} passed, {} failed, {} skipped", "zh": "{} 通过，{} 失败，{} 跳过"}


def write_pages() -> None:
    """Write the parts of the pages that show results."""
    results = read_results("gpu")
    for path, parts in pages(results).items():
        path.write_text(fill(path.read_text(encoding="utf-8"), parts), encoding="utf-8")


def pages(results: Mapping[str, Record]) -> dict[Path, dict[str, str]]:
    """Return the parts of each page by their names."""
    found = {ROOT / "docs" / "gpu.md": {"results": f"\n{details(results)}\n"}}
    for file, language in (("README.md", "en"), ("README.zh.md", "zh")):
        table = f"\n{overview(results, language)}\n"
        found[ROOT / file] = {"on a gpu": table, "gpu status": status(results, language)}
    return found


def fill(text: str, parts: Mapping[str, str]) -> str:
    """Return a page with these parts.

    Raises:
        ValueError: The page has no such part.
    """
    for name, part in parts.items():
        text, count = re.subn(
            rf"(<!-- {name} -->).*?(<!-- end -->)",
            lambda match, part=part: match[1] + part + match[2],
            text,
            flags=re.S,
        )
        if count != 1:
            raise ValueError(f"a page has {count} parts <!-- {name} --> ... <!-- end -->")
    return text


def status(results: Mapping[str, Record], language: str) -> str:
    """Return the cell of the README about GPUs: the cards that something ran on."""
    without, ran = _STATUS[language]
    cards = dict.fromkeys(_card(record) for record in results.values())
    return ran.format(", ".join(cards)) if cards else without


def overview(results: Mapping[str, Record], language: str) -> str:
    """Return the table of the READMEs: a line for each file."""
    if not results:
        return _NONE[language]
    lines = _table(_HEADS[language])
    for record in results.values():
        cells = (_card(record), _TESTS[language].format(*tests(record)), _best(record), _by(record), _dates(record))
        lines.append(_row(cells))
    return "\n".join(lines)


def details(results: Mapping[str, Record]) -> str:
    """Return the tables of docs/gpu.md: the files, and the steps of all of them."""
    if not results:
        return _NONE["en"]
    heads = ("file", "card", "driver", "torch", "tests", "by", "when", "commit")
    lines = _table(heads)
    for name, record in results.items():
        file = f"[gpu-{name}](../benchmarks/results/gpu-{name}.md)"
        said = _TESTS["en"].format(*tests(record))
        versions = (record["machine"]["driver"], _distinct(record, "torch"))
        lines.append(
            _row((file, _card(record), *versions, said, _by(record), _dates(record), _distinct(record, "commit")))
        )
    lines += ["", *_table(_STEP_HEADS)]
    lines += [line for record in results.values() for line in _step_lines(record)]
    return "\n".join(lines)


def tests(record: Record) -> tuple[int, int, int]:
    """Return how many tests passed, failed and were skipped."""
    rows = [row for name, row in record["found"].items() if name.startswith("tests ") and "passed" in row]
    return (
        sum(row["passed"] for row in rows),
        sum(len(row["left_out"]) for row in rows),
        sum(sum(row["skipped"].values()) for row in rows),
    )


# --- steps ------------------------------------------------------------------------------------------------------------

_STEP_HEADS = ("card", "step", "precision, samples x tokens", "s", "tokens/s", "MFU", "predicted MFU", "peak memory")


def steps(record: Record) -> dict[str, Record]:
    """Return the steps that were measured, by what follows `step` in their names."""
    return {
        name.removeprefix("step "): row
        for name, row in record["found"].items()
        if name.startswith("step ") and "seconds" in row
    }


def _step_lines(record: Record) -> Iterator[str]:
    for name, row in steps(record).items():
        samples = f"{row['precision']}, {row['micro_batches']} x {row['micro_batch']} x {row['length']}"
        memory = row["memory_mib"].get("peak_allocated")
        yield _row(
            (
                _card(record),
                name,
                samples,
                f"{statistics.median(row['seconds']):.3g}",
                row["tokens_per_second"],
                _percent(row["mfu"]),
                predicted(_card(record), name),
                f"{memory / 1024:.1f} GiB" if memory else "",
            )
        )


def predicted(card: str, step: str) -> str:
    """Return the MFU that was counted beforehand for a step, as `42 to 44 %`; "" if none was."""
    found = json.loads(PREDICTED.read_text(encoding="utf-8"))["mfu"]
    ranges = next((steps for name, steps in found.items() if re.search(name, card)), {})
    if step not in ranges:
        return ""
    low, high = (f"{100 * value:.0f}" for value in ranges[step])
    return f"{low} %" if low == high else f"{low} to {high} %"


def _best(record: Record) -> str:
    """Return the MFU of the steps of the largest model."""
    rows = steps(record)
    largest = max((row["parameters"] for name, row in rows.items() if not name.startswith("experts")), default=0)
    size = next((name.split()[1] for name, row in rows.items() if row["parameters"] == largest), "")
    found = (
        f"{name.replace(f' {size}', '')} {_percent(row['mfu'])}" for name, row in rows.items() if f" {size} " in name
    )
    return f"{size}: {', '.join(found)}" if size else ""


# --- the report of a card ---------------------------------------------------------------------------------------------


def report(name: str, record: Record) -> str:
    """Return the page about one card."""
    machine, found = record["machine"], record["found"]
    passed, failed, skipped = tests(record)
    lines = [
        f"# Megalith on {_card(record)}",
        "",
        f"Written by `benchmarks/gpu.py` from `gpu-{name}.json`. Measured {_dates(record)} by {_by(record)} at commit "
        f"{_distinct(record, 'commit') or 'unknown'}; {machine['processor']}, {machine['cores']} cores; driver "
        f"{machine['driver'] or '-'}, torch {_distinct(record, 'torch')}, Python {machine['python']}.",
        "",
        f"Tests: {passed} passed, {failed} failed, {skipped} skipped.",
    ]
    for what, row in found.items():
        reasons = {**row.get("left_out", {}), **{f"{n} skipped": why for why, n in row.get("skipped", {}).items()}}
        reasons |= {"skipped": row["without"]} if "without" in row else {}
        lines += [f"- {what}, {kind}: {(reason.strip() or '-').splitlines()[-1]}" for kind, reason in reasons.items()]
    lines += _section("Peak of a matrix product", _peak_lines(found))
    lines += _section("Attention, forward and backward, milliseconds", _attention_lines(found))
    if rows := steps(record):
        lines += _section("The training step", [*_table(_STEP_HEADS), *_step_lines(record)])
        lines += ["", *_table(_TRACE_HEADS), *(_trace_line(*row) for row in rows.items())]
    lines += _section("Answers, tokens per second", _answer_lines(found))
    return "\n".join(lines) + "\n"


def _section(title: str, lines: Iterable[str]) -> list[str]:
    """Return a heading and its lines; nothing if there are none."""
    written = list(lines)
    return ["", f"## {title}", "", *written] if written else []


def _peak_lines(found: Mapping[str, Record]) -> Iterator[str]:
    for what, row in found.items():
        if what.startswith("peak ") and "teraflops" in row:
            sheet, (first, second) = row["datasheet"], row["teraflops"]
            known = f"; datasheet {sheet['teraflops']:.0f} ({sheet['device']})" if sheet else "; no datasheet known"
            yield f"- {what}: {first:.4g} and {second:.4g} TFLOP/s{known}"


def _attention_lines(found: Mapping[str, Record]) -> Iterator[str]:
    for what, row in found.items():
        if "milliseconds" in row:
            kernels = (f"{kernel} {value:.3g}" for kernel, value in row["milliseconds"].items())
            missing = "".join(f"; without {kernel}" for kernel in row["unavailable"])
            yield f"- {what}: {', '.join(kernels)}{missing}"


def _answer_lines(found: Mapping[str, Record]) -> Iterator[str]:
    for what, row in found.items():
        for streams, one in row.get("streams", {}).items():
            launches = one.get("launches_per_token")
            more = "" if launches is None else f", {launches:.0f} launches a token"
            yield f"- {what}, {streams} at once: {one['tokens_per_second']:.4g}{more}"


_KINDS = ("attention", "matrix products", "optimizer", "copies", "the rest")
_TRACE_HEADS = ("step", *_KINDS, "device busy", "launches", "host waits", "warm-up", "state: counted, measured")


def _trace_line(name: str, row: Record) -> str:
    kinds, waits = row["trace"]["kinds"], row["host_waits"]
    state = row["memory_mib"].get("state")
    return _row(
        (
            name,
            *(_percent(kinds.get(kind)) for kind in _KINDS),
            _percent(row["trace"]["busy"]),
            row["trace"]["launches"],
            "" if waits is None else ", ".join(f"{count} at {place}" for place, count in waits.items()) or "none",
            f"{row['warm_up_seconds']:.1f} s",
            f"{row['counted_state_mib']}, {'' if state is None else state} MiB",
        )
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _card(record: Record) -> str:
    machine = record["machine"]
    return machine["gpu"] + (f" x {machine['gpus']}" if machine["gpus"] > 1 else "")


def _by(record: Record) -> str:
    return record["machine"].get("by") or "not named"


def _dates(record: Record) -> str:
    return _distinct(record, "date")


def _distinct(record: Record, key: str) -> str:
    return ", ".join(sorted({str(row[key]) for row in record["found"].values() if row.get(key)}))


def _table(heads: Sequence[str]) -> list[str]:
    return [_row(heads), _row(["---"] * len(heads))]


def _row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
