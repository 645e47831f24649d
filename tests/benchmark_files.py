"""Small benchmarks in the forms of the Hugging Face Hub, with random questions; their scores by lm-eval's own model."""

from __future__ import annotations

import csv
import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WORDS = ["king", "queen", "crown", "castle", "heavy", "gold", "sun", "moon", "sea", "river"]
SUBJECTS = {"mmlu": ("anatomy", "astronomy"), "ceval": ("law", "logic"), "cmmlu": ("agronomy", "virology")}
TASKS = (*SUBJECTS, "gsm8k", "hellaswag")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_benchmarks(folder: Path) -> None:
    """Write a folder for each task."""
    import pyarrow
    import pyarrow.parquet

    draw = random.Random(1)

    def parquet(name: str, rows: list[dict[str, Any]]) -> None:
        path = folder / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    def question() -> str:
        return " ".join(draw.choices(WORDS, k=6)) + "?"

    def letters() -> dict[str, str]:
        return dict(zip("ABCD", draw.sample(WORDS, 4), strict=True))

    for subject in SUBJECTS["mmlu"]:
        for split, count in (("dev", 5), ("test", 6)):
            rows = [{"question": question(), "choices": draw.sample(WORDS, 4), "answer": draw.randrange(4)}
                    for _ in range(count)]  # fmt: skip
            parquet(f"mmlu/{subject}/{split}", rows)
    for subject in SUBJECTS["ceval"]:
        for split, count in (("dev", 5), ("val", 6)):
            rows = [{"question": question(), **letters(), "answer": draw.choice("ABCD")} for _ in range(count)]
            parquet(f"ceval/{subject}/{split}", rows)
    (folder / "cmmlu").mkdir(parents=True)
    with zipfile.ZipFile(folder / "cmmlu/cmmlu_v1_0_1.zip", "w") as archive:
        for subject in SUBJECTS["cmmlu"]:
            for split in ("dev", "test"):
                text = io.StringIO(newline="")
                writer = csv.writer(text)
                writer.writerow(["", "Question", *"ABCD", "Answer"])
                writer.writerows([n, question(), *letters().values(), draw.choice("ABCD")] for n in range(6))
                archive.writestr(f"{split}/{subject}.csv", text.getvalue())
    for split in ("train", "test"):
        pairs = [(draw.randrange(9), draw.randrange(9)) for _ in range(6)]
        parquet(f"gsm8k/main/{split}", [{"question": f"{a} and {b}?", "answer": f"#### {a + b}"} for a, b in pairs])
    about = {"activity_label": "Ruling", "ctx_a": "The king sits.", "ctx_b": "he"}
    for split in ("train", "validation"):  # lm-eval reads the first even if it takes no examples from it
        endings = [[" ".join(draw.choices(WORDS, k=4)) for _ in range(4)] for _ in range(8)]
        rows = [{**about, "endings": each, "label": str(draw.randrange(4))} for each in endings]
        parquet(f"hellaswag/data/{split}", rows)


def compare(folder: Path, checkpoint: Path, exported: Path, say: Callable[[str], None] = print) -> int:
    """Ask all benchmarks of a checkpoint and, by lm-eval's model `hf`, of its export; return the number of scores.

    Raises:
        AssertionError: A score or an answer differs.
    """
    from lm_eval.models.huggingface import HFLM

    from megalith.assemble.trained import load_trained
    from megalith.distributed.context import ParallelContext
    from megalith.evaluate.benchmark import Asking, ask
    from megalith.evaluate.harness import MegalithLM
    from megalith.tokenizers.chat_template import ChatTemplate

    device, count = torch.device("cpu"), 0
    trained, theirs = load_trained(checkpoint, device), HFLM(pretrained=str(exported), device="cpu", dtype="float32")
    theirs.tokenizer.chat_template = CHATML
    for task in TASKS:
        for chat in (False, True):
            shots = None if task == "gsm8k" else 0 if task == "hellaswag" else 2
            asking = Asking(task, folder / task, shots, chat, SUBJECTS.get(task, ()))
            template = ChatTemplate(CHATML) if chat else None
            ours = ask(MegalithLM.of(trained, ParallelContext.solo(device), 4, template), asking)
            wanted = ask(theirs, asking)
            assert ours.scores == wanted.scores, (task, chat, ours.scores, wanted.scores)
            assert ours.answers == wanted.answers, (task, chat, ours.answers, wanted.answers)
            count += sum(map(len, ours.scores.values()))
            say(f"{task}, {'chat' if chat else 'plain'}: {ours.correct} of {ours.total}")
    return count
