"""Two small models trained on the README, as checkpoints and exports, and what Megalith generates with them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = {
    "llama": "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --ffn-hidden-size 128",
    "gpt2": "--normalization LayerNorm --position-embedding-type learned_absolute",
}
"""model_type of the export -> flags."""
TRAIN = (
    "train --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 128 "
    "--micro-batch-size 8 --global-batch-size 8 --lr 0.01 --lr-warmup-iters 10 --lr-decay-style cosine --min-lr 0.001 "
    "--hidden-dropout 0 --attention-dropout 0 --device cpu --log-interval 1 --eval-iters 0 --num-workers 0 "
    "--split 100,0,0 --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt "
    "--data-path text_text_document "
)
PROMPTS = ("Megalith trains", "Every byte of", "The server")
NEW_TOKENS = 32
TASKS = {
    "multiple_choice": 'doc_to_text: "{{query}}"\ndoc_to_choice: "{{choices}}"\ntarget_delimiter: ""\n'
    "doc_to_target: gold\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "loglikelihood_rolling": 'doc_to_text: ""\ndoc_to_target: "{{page}}"\n'
    "metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]\n",
    "generate_until": 'doc_to_text: "{{query}}"\ndoc_to_target: "{{choices[0]}}"\n'
    'generation_kwargs: {until: ["."], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n',
}
"""output_type of a task of lm-eval -> the rest of its file."""


def megalith(words: str, folder: Path, environ: Mapping[str, str] = {}, code: int = 0) -> str:
    """Run a command of Megalith in a folder, and return what it printed; RuntimeError if it ends otherwise."""
    command = [sys.executable, "-m", "megalith", *shlex.split(words)]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True)
    if done.returncode != code:
        raise RuntimeError(
            f"megalith {words} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout + done.stderr


def prepare(folder: Path) -> None:
    """Write text, models, exports, tasks of lm-eval, and expected.json: the greedy continuation of each prompt."""
    from megalith.tokenizers import train_byte_level_bpe

    pages = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("\n## ")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    for made, name in zip(train_byte_level_bpe(pages, 512, folder), ("vocab.json", "merges.txt"), strict=True):
        made.rename(folder / name)
    megalith(
        "preprocess --input text.jsonl --output-prefix text --append-eod --tokenizer-type GPT2BPETokenizer "
        "--vocab-file vocab.json --merge-file merges.txt --workers 1",
        folder,
    )
    expected = {}
    for model, flags in MODELS.items():
        megalith(f"{TRAIN} {flags} --train-iters 200 --save {model} --save-interval 200", folder)
        megalith(f"checkpoint export {model} {model}-hf", folder)
        expected[model] = _continued(folder / model)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))
    _write_tasks(folder)


def _continued(checkpoint: Path) -> list[dict[str, Any]]:
    """Return ids and text of each prompt and of its greedy continuation."""
    import torch

    from megalith.assemble.trained import load_trained
    from megalith.serve.engine import Engine
    from megalith.serve.model_runner import blocks_for, runner_of
    from megalith.serve.request import Request, Sampling, Token

    trained = load_trained(checkpoint, torch.device("cpu"))
    found = []
    for prompt in PROMPTS:
        ids = tuple(trained.tokenizer.encode(prompt))
        engine = Engine(runner_of(trained.gpt, blocks_for(128)), trained.tokenizer)
        events = [one for one in engine.run(Request(ids, NEW_TOKENS, Sampling(0.0))) if isinstance(one, Token)]
        new = [event.id for event in events]
        found.append({"prompt": prompt, "ids": list(ids), "new": new, "text": "".join(one.text for one in events)})
    return found


def _write_tasks(folder: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").glob("*.md"))]
    lines = [line for page in pages for line in page.splitlines() if 60 < len(line) < 120 and line[0].isalpha()][:40]
    halves = [(line[:40], line[40:60], other[40:60]) for line, other in zip(lines, reversed(lines), strict=True)]
    documents = [
        {"query": query, "choices": [right, wrong][:: 1 - 2 * (n % 2)], "gold": n % 2, "page": page[:1500]}
        for n, ((query, right, wrong), page) in enumerate(zip(halves, pages * 2, strict=False))
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    (folder / "tasks").mkdir()
    for kind, rest in TASKS.items():
        (folder / f"tasks/{kind}.yaml").write_text(
            f"task: local_{kind}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: "
            f"{folder / 'documents.jsonl'}}}}}\ntest_split: test\noutput_type: {kind}\n{rest}"
        )
