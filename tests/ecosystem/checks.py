"""Checks of one tool each, run by the Python of its environment: `python -m tests.ecosystem.checks NAME FOLDER`.

Each returns the result for the table, or raises an error.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..benchmark_files import compare, write_benchmarks
from .material import MODELS, NEW_TOKENS, REPOSITORY, TRAIN, megalith

CHECKS: dict[str, Callable[[Path], str]] = {}
STEPS, SAVED_AT, BROKEN_AT = 40, 20, 30
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class Different(Exception):
    """A tool gives another result than Megalith, or than it should."""


def check(function: Callable[[Path], str]) -> Callable[[Path], str]:
    CHECKS[function.__name__] = function
    return function


def expected(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads((folder / "expected.json").read_text())
    return found


def compare_tokens(folder: Path, generate: Callable[[str, dict[str, Any]], list[int]]) -> str:
    """Compare the continuations of all prompts, `generate(model, case) -> new ids`, with those of Megalith."""
    tokens = 0
    for model, cases in expected(folder).items():
        for case in cases:
            made = generate(model, case)
            if made != case["new"]:
                raise Different(f"{model}, {case['prompt']!r}: {made} instead of {case['new']}")
            tokens += len(made)
    return f"all {tokens} tokens of {len(MODELS)} models equal"


@check
def transformers(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def generate(model: str, case: dict[str, Any]) -> list[int]:
        tokenizer = AutoTokenizer.from_pretrained(folder / f"{model}-hf")
        ids = tokenizer(case["prompt"], return_tensors="pt").input_ids
        if ids[0].tolist() != case["ids"]:
            raise Different(f"{model}: its tokenizer makes {ids[0].tolist()} of {case['prompt']!r}, not {case['ids']}")
        loaded = AutoModelForCausalLM.from_pretrained(folder / f"{model}-hf", dtype=torch.float32)
        made = loaded.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)[0, ids.shape[1] :].tolist()
        if tokenizer.decode(made) != case["text"]:
            raise Different(f"{model}: its tokenizer writes {tokenizer.decode(made)!r}, not {case['text']!r}")
        return made

    return compare_tokens(folder, generate)


@check
def lm_eval(folder: Path) -> str:
    tasks = ",".join(f"local_{path.stem}" for path in sorted((folder / "tasks").glob("*.yaml")))
    offline = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    scores = {}
    for name, arguments in (("hf", "pretrained=llama-hf,dtype=float32"), ("megalith", "checkpoint=llama")):
        module = "lm_eval" if name == "hf" else "megalith.evaluate.lm_eval"
        command = [sys.executable, "-m", module, "run", "--model", name, "--model_args", arguments, "--device", "cpu"]
        command += ["--include_path", "tasks", "--tasks", tasks, "--batch_size", "4", "--output_path", f"scores-{name}"]
        done = subprocess.run(command, cwd=folder, env={**os.environ, **offline}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"lm_eval --model {name}: {done.stderr[-2000:]}")
        (file,) = (folder / f"scores-{name}").rglob("results_*.json")
        results = json.loads(file.read_text())["results"]
        scores[name] = {
            f"{task} {metric.partition(',')[0]}": value
            for task, metrics in results.items()
            for metric, value in metrics.items()
            if isinstance(value, float)
        }
    shown = {name: {key: f"{value:.4f}" for key, value in each.items()} for name, each in scores.items()}
    if shown["hf"] != shown["megalith"] or len(shown["hf"]) < 6:
        raise Different(f"hf {shown['hf']}, megalith {shown['megalith']}")
    largest = max(abs(value - scores["hf"][key]) / max(abs(value), 1e-9) for key, value in scores["megalith"].items())
    return (
        f"all {len(shown['hf'])} figures equal to the last digit that lm-eval prints (largest difference "
        f"{largest:.0e}); benchmarks from made files, plain and as dialogues: {_benchmarks(folder)}"
    )


def _benchmarks(folder: Path) -> str:
    """Compare `megalith evaluate --task mmlu` and its like with lm-eval's `hf`, on the export of a rotary model."""
    write_benchmarks(folder / "benchmarks")
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    config = json.loads((folder / "llama-hf/config.json").read_text())
    config["max_position_embeddings"] = 1024  # for prompts with examples
    (folder / "llama-hf/config.json").write_text(json.dumps(config))
    asked = compare(folder / "benchmarks", folder / "llama-hf", folder / "llama-hf", lambda line: None)
    return f"all {asked} scores of mmlu, ceval, cmmlu, gsm8k and hellaswag equal"


@check
def llama_cpp(folder: Path) -> str:
    llama: Any = importlib.import_module("llama_cpp")
    for model in MODELS:
        megalith(f"checkpoint export {model} {model}-gguf --to gguf --dtype float32", folder)

    def generate(model: str, case: dict[str, Any]) -> list[int]:
        (file,) = (folder / f"{model}-gguf").glob("*.gguf")
        loaded = llama.Llama(str(file), n_ctx=128, verbose=False)
        ids = loaded.tokenize(case["prompt"].encode(), add_bos=False)
        if ids != case["ids"]:
            raise Different(f"{model}: its tokenizer makes {ids} of {case['prompt']!r}, not {case['ids']}")
        stream = loaded.generate(ids, temp=0.0, repeat_penalty=1.0)
        made: list[int] = []
        while len(made) < NEW_TOKENS and (not made or made[-1] != loaded.token_eos()):
            made.append(next(stream))
        return made

    return compare_tokens(folder, generate)


@check
def ctranslate2(folder: Path) -> str:
    ct2: Any = importlib.import_module("ctranslate2")
    converter = str(Path(sys.executable).with_name("ct2-transformers-converter"))
    for model in MODELS:
        for kind, flags in (("float32", []), ("int8", ["--quantization", "int8"])):
            command = [converter, "--model", f"{model}-hf", "--output_dir", f"{model}-{kind}", *flags]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"ct2-transformers-converter: {done.stderr[-2000:]}")

    def generate(model: str, case: dict[str, Any], kind: str = "float32") -> list[int]:
        names = {number: token for token, number in json.loads((folder / f"{model}-hf/vocab.json").read_text()).items()}
        prompt = [names[number] for number in case["ids"]]
        generator = ct2.Generator(str(folder / f"{model}-{kind}"), device="cpu", compute_type=kind)
        (made,) = generator.generate_batch(
            [prompt], max_length=NEW_TOKENS, sampling_topk=1, include_prompt_in_result=False
        )
        return list(made.sequences_ids[0])

    exact = compare_tokens(folder, generate)
    cases = [(model, case) for model, cases in expected(folder).items() for case in cases]
    same = [len(os.path.commonprefix([generate(*case, "int8"), case[1]["new"]])) for case in cases]
    if not any(same):
        raise Different("int8: not one continuation begins with the same token")
    return f"float32: {exact}; int8: the first {min(same)} to {max(same)} of each"


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Serve the llama, and give the URL of its OpenAI API."""
    (folder / "template.jinja").write_text(CHAT_TEMPLATE)
    command = [sys.executable, "-m", "megalith", "serve", "llama", "--port", "0", "--device", "cpu"]
    command += ["--chat-template", "template.jinja"]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    try:
        said = ""
        for line in running.stdout:
            said += line
            if found := re.search(r"http://[\d.]+:\d+", line):
                yield f"{found[0]}/v1"
                break
        else:
            raise RuntimeError(f"megalith serve: {said[-2000:]}")
    finally:
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)


def same_text(what: str, text: str, case: Mapping[str, Any]) -> None:
    if text != case["text"]:
        raise Different(f"{what}: {text!r} instead of {case['text']!r}")


@check
def openai(folder: Path) -> str:
    library: Any = importlib.import_module("openai")
    with server(folder) as url:
        client = library.OpenAI(base_url=url, api_key="none", max_retries=0)
        (model,) = client.models.list().data
        for case in expected(folder)["llama"]:
            ask = {"model": model.id, "temperature": 0, "max_tokens": NEW_TOKENS}
            said = [{"role": "user", "content": case["prompt"]}]
            same_text("completions", client.completions.create(prompt=case["prompt"], **ask).choices[0].text, case)
            stream = client.completions.create(prompt=case["prompt"], stream=True, **ask)
            same_text("completions, streamed", "".join(part.choices[0].text for part in stream), case)
            chat = client.chat.completions
            same_text("chat", chat.create(messages=said, **ask).choices[0].message.content, case)
            stream = chat.create(messages=said, stream=True, **ask)
            parts = [part.choices[0].delta.content or "" for part in stream if part.choices]
            same_text("chat, streamed", "".join(parts), case)
    return "all texts equal to those of the engine"


@check
def litellm(folder: Path) -> str:
    library: Any = importlib.import_module("litellm")
    library.telemetry = False
    with server(folder) as url:
        for case in expected(folder)["llama"]:
            ask = {"api_base": url, "api_key": "none", "temperature": 0, "max_tokens": NEW_TOKENS}
            made = library.text_completion(model="text-completion-openai/llama", prompt=case["prompt"], **ask)
            same_text("text_completion", made.choices[0].text, case)
            said = [{"role": "user", "content": case["prompt"]}]
            made = library.completion(model="openai/llama", messages=said, **ask)
            same_text("completion", made.choices[0].message.content, case)
            stream = library.completion(model="openai/llama", messages=said, stream=True, **ask)
            same_text("streamed", "".join(part.choices[0].delta.content or "" for part in stream), case)
    return "all texts equal to those of the engine"


def broken_and_resumed(
    folder: Path, tracker: str, environ: Mapping[str, str], fault: str = "raise"
) -> dict[int, float]:
    """Train, with a fault between two saves, and to the end; return the loss of each step in metrics.jsonl.

    An error, unlike a SIGKILL, leaves a tracker the time to begin and to write what it has.
    """
    run = f"run-{tracker}"
    words = f"{TRAIN} {MODELS['llama']} --train-iters {STEPS} --save {run} --load {run} --save-interval {SAVED_AT} "
    words += f"--tracker {tracker}"
    broken = {**environ, "MEGALITH_FAULT": f"{fault}@step={BROKEN_AT},point=opt"}
    megalith(words, folder, broken, code=1 if fault == "raise" else -signal.SIGKILL)
    megalith(words, folder, environ)
    lines = (folder / run / "run/metrics.jsonl").read_text().splitlines()
    losses = {one["iteration"]: one["loss"] for one in map(json.loads, lines) if one["event"] == "step"}
    if sorted(losses) != list(range(1, STEPS + 1)):
        raise Different(f"metrics.jsonl has the steps {sorted(losses)}")
    return losses


def compare_curve(points: list[tuple[int, float]], losses: Mapping[int, float], repeats: bool) -> str:
    """Compare the points of a curve with the losses; after a resume a tracker may have steps twice, with one value."""
    for step, value in points:
        if abs(value - losses.get(step, float("nan"))) > 1e-6 * abs(value):
            raise Different(f"step {step}: {value} instead of {losses.get(step)}")
    steps = [step for step, _ in points]
    again = sorted({step for step in steps if steps.count(step) > 1})
    if set(steps) != set(losses) or (again and not repeats):
        raise Different(f"steps {steps}")
    twice = f"; steps {again[0]} to {again[-1]} twice, with equal values" if again else ", each once"
    return f"steps 1 to {STEPS} with their losses{twice}"


@check
def tensorboard(folder: Path) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = broken_and_resumed(folder, "tensorboard", {}, "kill9")
    events = EventAccumulator(str(folder / "run-tensorboard/run/tensorboard"), size_guidance={"scalars": 0}).Reload()
    return compare_curve([(one.step, one.value) for one in events.Scalars("lm loss")], losses, repeats=False)


@check
def wandb(folder: Path) -> str:
    losses = broken_and_resumed(folder, "wandb", {"WANDB_MODE": "offline"})
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    points, runs = [], set()
    for file in sorted((folder / "run-wandb/run/wandb").glob("offline-run-*/*.wandb")):
        for data in _records(file.read_bytes()):
            record = records.Record.FromString(data)
            runs |= {record.run.run_id} - {""}
            row = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "lm loss" in row:
                points.append((record.history.step.num or int(row["_step"]), float(row["lm loss"])))
    if len(runs) != 1:
        raise Different(f"the records name the runs {runs}")
    return f"one run id; {compare_curve(points, losses, repeats=True)}"


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the whole records of a .wandb file: 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        part = data[place + 7 : place + 7 + size]
        if len(part) < size:  # cut off by a SIGKILL
            return
        record, place = (part if kind in (1, 2) else record + part), place + 7 + size
        if kind in (1, 4):
            yield record


@check
def trackio(folder: Path) -> str:
    import sqlite3

    losses = broken_and_resumed(folder, "trackio", {"TRACKIO_DIR": str(folder / "trackio")})
    with sqlite3.connect(folder / "trackio/megalith.db") as kept:
        rows = kept.execute("select run_name, step, metrics from metrics order by id").fetchall()
    if len({name for name, _, _ in rows}) != 1:
        raise Different(f"runs {[name for name, _, _ in rows]}")
    points = [(step, value["lm loss"]) for _, step, text in rows if "lm loss" in (value := json.loads(text))]
    return f"one run; {compare_curve(points, losses, repeats=True)}"


@check
def mlflow(folder: Path) -> str:
    library: Any = importlib.import_module("mlflow")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    losses = broken_and_resumed(folder, "mlflow", {"MLFLOW_TRACKING_URI": uri}, "kill9")
    client = library.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("megalith").experiment_id])
    if len(runs) != 1 or runs[0].info.status != "FINISHED":
        raise Different(f"runs {[(run.info.run_name, run.info.status) for run in runs]}")
    points = [(one.step, one.value) for one in client.get_metric_history(runs[0].info.run_id, "lm loss")]
    return f"one run; {compare_curve(points, losses, repeats=True)}"


@check
def swanlab(folder: Path) -> str:
    broken_and_resumed(folder, "swanlab", {"SWANLAB_MODE": "offline", "SWANLAB_SAVE_DIR": str(folder / "swanlab")})
    files = sorted((folder / "run-swanlab/run/swanlog").glob("run-*/*.swanlab"))
    empty = [file for file in files if b"lm loss" not in file.read_bytes()]
    if len(files) != 2 or empty:
        raise Different(f"files {files}, without the loss {empty}")
    return "one file for each start, with the curve of the loss (not read further: its format is SwanLab's own)"


@check
def nbclient(folder: Path) -> str:
    library: Any = importlib.import_module("nbclient")
    nbformat: Any = importlib.import_module("nbformat")
    files = notebooks()
    for file in files:
        place = folder / file.stem
        place.mkdir()
        notebook = nbformat.read(file, as_version=4)
        library.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(place)}}).execute()
    return f"ran to the end: {', '.join(str(file.relative_to(REPOSITORY)) for file in files)}"


def notebooks() -> list[Path]:
    return sorted(file for place in ("docs", "examples") for file in (REPOSITORY / place).rglob("*.ipynb"))


def main() -> int:
    name, folder = sys.argv[1:]
    try:
        answer = {"result": CHECKS[name](Path(folder))}
    except Different as error:
        answer = {"different": str(error)}
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
    print("\n" + json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
