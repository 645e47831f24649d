"""Run what Megalith writes and serves with the tools of others: `make ecosystem`, docs/results/ecosystem.md.

Each tool has an environment of its own in build/ecosystem, which sees the packages of the one that runs this, so that
neither torch nor what is there already is installed again. Exit code 1: a tool gives another result, or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks.machine import describe

from .checks import BROKEN_AT, SAVED_AT, STEPS, notebooks
from .material import NEW_TOKENS, PROMPTS, REPOSITORY, prepare

PAGE = REPOSITORY / "docs/results/ecosystem.md"
ENVIRONMENTS = REPOSITORY / "build/ecosystem"
GREEDY = f"greedy continuations of {len(PROMPTS)} prompts by {NEW_TOKENS} tokens, and the ids of the prompts"
RESUMED = f"`--tracker`: {STEPS} steps, saved at {SAVED_AT}, ended by an error at {BROKEN_AT}, resumed; "
KILLED = RESUMED.replace("an error", "SIGKILL")


@dataclass(frozen=True)
class Tool:
    """A tool of the table.

    Attributes:
        packages: arguments of pip; the first names the distribution whose version is shown.
        ran: what was run.
    """

    title: str
    packages: tuple[str, ...]
    ran: str


TOOLS = {
    "transformers": Tool("transformers", ("transformers",), f"`checkpoint export`: {GREEDY}"),
    "lm_eval": Tool(
        "lm-evaluation-harness", ("lm_eval", "transformers", "accelerate"),
        "three tasks from local files: `--model megalith` on the checkpoint, `--model hf` on its export",
    ),
    "llama_cpp": Tool("llama.cpp", ("llama-cpp-python", "gguf"), f"`export --to gguf --dtype float32`: {GREEDY}"),
    "ctranslate2": Tool(
        "CTranslate2", ("ctranslate2", "transformers"),
        "`checkpoint export`, ct2-transformers-converter, also with `--quantization int8`: greedy continuations",
    ),
    "openai": Tool("openai", ("openai",), "`megalith serve`: completions and chat, whole and streamed"),
    "litellm": Tool("litellm", ("litellm",), "`megalith serve`: text_completion, completion, streamed"),
    "tensorboard": Tool("TensorBoard", ("tensorboard",), f"{KILLED}read by EventAccumulator"),
    "wandb": Tool("Weights & Biases", ("wandb",), f"{RESUMED}offline, the records of both starts"),
    "trackio": Tool("trackio", ("trackio",), f"{RESUMED}its database"),
    "mlflow": Tool("MLflow", ("mlflow-skinny", "sqlalchemy", "alembic"), f"{KILLED}get_metric_history from SQLite"),
    "swanlab": Tool("SwanLab", ("swanlab",), f"{RESUMED}offline"),
    "nbclient": Tool("nbclient", ("nbclient", "ipykernel", "matplotlib"), "the notebooks of docs and examples"),
}  # fmt: skip
NOT_HERE = {
    "ollama": "needs its own server, which no package index has",
    "vLLM, SGLang": "need a GPU; they read the folder that transformers reads above",
}
"""Tools that this script does not install, and why."""

HEAD = """\
# Other programs on what Megalith writes

<!-- Generated: `make ecosystem`. -->
`make ecosystem` trains two small models (`llama` and `gpt2`: 2 layers, fp32, a tokenizer of 512 tokens) on pages
of this repository, and runs checkpoints, exports, server and trackers with the tools below, each in an environment of
its own with the newest version that pip finds beside the packages of `make dev`. Where a tool is not to be had, its row
says so. Tokens, texts and values are compared exactly, unless the row says otherwise.

"""


def environment(name: str, packages: tuple[str, ...]) -> tuple[Path, str]:
    """Make the environment of a tool, and return its Python and, if pip failed, why."""
    folder = ENVIRONMENTS / name
    python = folder / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True, symlinks=True)
    (inside,) = folder.glob("lib/python3*/site-packages")
    beside = [place for place in sys.path if place.endswith("site-packages")]
    (inside / "beside.pth").write_text("\n".join([*beside, str(REPOSITORY / "src")]) + "\n")
    torch = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    (folder / "constraints.txt").write_text(f"torch=={torch.stdout.strip()}\n")
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", folder / "constraints.txt"]
    done = subprocess.run([*command, *packages], capture_output=True, text=True)
    lines = (done.stderr or done.stdout).strip().splitlines() or ["pip failed"]
    return python, lines[-1] if done.returncode else ""


def run(name: str, material: Path) -> tuple[str, str, bool]:
    """Return version and result of a tool, and whether the result is as it should be or the tool is not to be had."""
    tool = TOOLS[name]
    if name == "nbclient" and not notebooks():
        return "", "not run: there is no notebook yet", True
    python, failure = environment(name, tool.packages)
    if failure:
        return "", f"not run: pip cannot install it here ({failure})", True
    ask = f"from importlib.metadata import version; print(version({tool.packages[0]!r}))"
    version = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix=f"megalith-{name}-") as copied:
        shutil.copytree(material, folder := Path(copied) / "m")
        for task in (folder / "tasks").glob("*.yaml"):
            task.write_text(task.read_text().replace(str(material), str(folder)))
        command = [python, "-m", "tests.ecosystem.checks", name, str(folder)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = {"failed": done.stderr[-1000:]}
    if "result" in answer:
        return version, answer["result"], True
    kind, said = answer.popitem()
    print(said, file=sys.stderr)
    return version, f"**{kind}**: {' '.join(said.split())[:300]}", False


def earlier_rows() -> dict[str, list[str]]:
    """Return the rows of the page as it is, by tool."""
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows[1:]}


def page(found: dict[str, list[str]]) -> str:
    """Return the page with the rows that are there, by tool."""
    rows = [found.get(tool.title, [tool.title, "", tool.ran, "not run yet", ""]) for tool in TOOLS.values()]
    rows += [[title, "", "", f"not run: {why}", ""] for title, why in NOT_HERE.items()]
    machine = describe()
    where = f"{machine['processor']} ({' '.join(machine['features'])}), {machine['cores']} cores, Python "
    where += f"{machine['python']}, torch {machine['versions']['torch']}"
    lines = ["| tool | version | what was run | result | date |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') or '-' for cell in row)} |" for row in rows]
    return HEAD + f"The machine of the last run: {where}.\n\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem", description=__doc__)
    parser.add_argument(
        "tools", nargs="*", metavar="TOOL", help=f"{', '.join(TOOLS)} (default: all); others keep their row"
    )
    options = parser.parse_args()
    if unknown := set(options.tools) - set(TOOLS):
        parser.error(f"there is no tool {', '.join(unknown)}; there are {', '.join(TOOLS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    found, wrong = earlier_rows(), 0
    with tempfile.TemporaryDirectory(prefix="megalith-ecosystem-") as made:
        prepare(Path(made))
        for name in options.tools or TOOLS:
            version, result, sound = run(name, Path(made))
            row = [TOOLS[name].title, version, TOOLS[name].ran, result, str(date.today())]
            found[row[0]] = row
            wrong += not sound
            print(" | ".join(row), flush=True)
            PAGE.write_text(page(found), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
