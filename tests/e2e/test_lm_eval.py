"""lm-evaluation-harness runs tasks from local files on a checkpoint, by its own command."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.tokenizers import train_byte_level_bpe

from ..benchmark_files import compare, write_benchmarks

pytest.importorskip("lm_eval", reason="needs the eval extra (lm-eval), which is not part of dev: it is 490 MB")
transformers = pytest.importorskip("transformers", reason="makes the model and is the witness (hf extra)")

CONTEXT, VOCABULARY = 32, 300
DOCUMENTS = [
    {
        "query": "the fire burned",
        "choices": [" for two days", " a town"],
        "gold": 0,
        "page": "the fire burned for two " * 9,
    },
    {
        "query": "nobody who",
        "choices": [" saw it", " forget the fire in the morning"],
        "gold": 1,
        "page": "nobody saw it",
    },
    {
        "query": "in the",
        "choices": [" morning", " town"],
        "gold": 0,
        "page": "in the morning and in the town and it began",
    },
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
"""
KINDS = {
    "multiple_choice": 'doc_to_text: "{{query}}"\ndoc_to_choice: "{{choices}}"\ntarget_delimiter: ""\n'
    "doc_to_target: gold\nmetric_list: [{metric: acc}]\n",
    "loglikelihood_rolling": 'doc_to_text: ""\ndoc_to_target: "{{page}}"\nmetric_list: [{metric: bits_per_byte}]\n',
    "generate_until": 'doc_to_text: "{{query}}"\ndoc_to_target: "{{choices[0]}}"\n'
    'generation_kwargs: {until: [" the"], max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]\n',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of transformers with a tokenizer (hf), and the tasks (tasks)."""
    from tokenizers import ByteLevelBPETokenizer

    place = tmp_path_factory.mktemp("lm_eval")
    vocab, merges = train_byte_level_bpe([json.dumps(DOCUMENTS)], VOCABULARY, place)
    end = json.loads(vocab.read_text())["<|endoftext|>"]
    ends = {"bos_token_id": end, "eos_token_id": end}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=24, n_layer=2, n_head=4, **ends)
    model = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15, generator=generator)
    model.save_pretrained(place / "hf")
    ByteLevelBPETokenizer(str(vocab), str(merges)).save(str(place / "hf/tokenizer.json"))
    (place / "hf/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (place / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    (place / "tasks").mkdir()
    for kind, rest in KINDS.items():
        text = TASK.format(name=f"local_{kind}", file=place / "documents.jsonl", kind=kind) + rest
        (place / f"tasks/{kind}.yaml").write_text(text)
    return place


def _lm_eval(folder: Path, launcher: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command on all local tasks."""
    tasks = ["--include_path", str(folder / "tasks"), "--tasks", ",".join(f"local_{kind}" for kind in KINDS)]
    done = subprocess.run(
        [*launcher, "megalith.evaluate.lm_eval", "run", *words, *tasks],
        capture_output=True,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")},
            **{"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def _run(folder: Path, args: str, ranks: int = 1) -> dict[str, Any]:
    """What lm-eval logs of each sample, by task."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
    out = folder / f"out-{args.replace('/', '-')[-12:]}-{ranks}"
    words = ["--model", "megalith", "--model_args", args, "--batch_size", "2", "--output_path", str(out)]
    done = _lm_eval(folder, launcher, *words, "--log_samples")
    assert "rolling windows: 100%" in done.stderr, "a long document is not scored in silence"
    found: dict[str, Any] = {}
    for kind in KINDS:
        file = sorted(out.rglob(f"samples_local_{kind}_*.jsonl"))[0]
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[kind] = [line["filtered_resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]
    return found


def _theirs(folder: Path) -> tuple[Any, Any]:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "hf/tokenizer.json"))
    return transformers.GPT2LMHeadModel.from_pretrained(folder / "hf").eval(), tokenizer


@torch.no_grad()
def _logprob(model: Any, ids: list[int], count: int) -> float:
    logprobs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[place - 1, ids[place]]) for place in range(len(ids) - count, len(ids)))


def test_tasks_from_local_files_against_transformers(folder: Path) -> None:
    found = _run(folder, f"checkpoint={folder / 'hf'}")
    model, tokenizer = _theirs(folder)
    end = model.config.eos_token_id
    for document, answers in zip(DOCUMENTS, found["multiple_choice"], strict=True):
        for choice, (logprob, _) in zip(document["choices"], answers, strict=True):
            ids = tokenizer.encode(document["query"] + choice)
            count = len(ids) - len(tokenizer.encode(document["query"]))
            assert float(logprob) == pytest.approx(_logprob(model, ids, count), abs=1e-4)
    for document, (total,) in zip(DOCUMENTS, found["loglikelihood_rolling"], strict=True):
        ids = [end, *tokenizer.encode(document["page"])]
        expected, scored = 0.0, 1
        while scored < len(ids):
            stop = min(scored + CONTEXT, len(ids))
            window = ids[max(0, stop - CONTEXT - 1) : stop]
            expected += _logprob(model, window, stop - scored)
            scored = stop
        assert float(total) == pytest.approx(expected, abs=1e-3)
    for document, (answer,) in zip(DOCUMENTS, found["generate_until"], strict=True):
        prompt = torch.tensor([tokenizer.encode(document["query"])])
        made = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=end)[
            0, prompt.shape[1] :
        ].tolist()
        made = made[: made.index(end)] if end in made else made
        assert answer == tokenizer.decode(made).split(" the")[0]
    assert not math.isnan(float(found["multiple_choice"][0][0][0]))


def test_the_models_of_lm_eval_itself_are_found(folder: Path) -> None:
    assert "local_multiple_choice" in _lm_eval(folder, [sys.executable, "-m"], "--model", "dummy").stdout


def test_two_ranks_and_a_tokenizer_from_elsewhere_give_the_same(folder: Path) -> None:
    alone = _run(folder, f"checkpoint={folder / 'hf'}")
    shutil.copytree(folder / "hf", folder / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    shared = _run(folder, f"checkpoint={folder / 'bare'},tokenizer_model={folder / 'hf'},tp=2", ranks=2)
    assert shared["generate_until"] == alone["generate_until"]
    for ours, theirs in zip(shared["multiple_choice"], alone["multiple_choice"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert float(one[0]) == pytest.approx(float(other[0]), abs=1e-4)


def test_only_the_tokens_of_a_checkpoint_have_probability(folder: Path) -> None:
    """Not the padded rows of its table; a Hugging Face folder has none, and all of its rows count as they do there."""
    from megalith.cli.main import main
    from megalith.evaluate.harness import MegalithLM

    assert main(["checkpoint", "import", str(folder / "hf"), str(folder / "native"), "--no-compare"]) == 0
    found = []
    for name in ("hf", "native"):
        model = MegalithLM(checkpoint=str(folder / name), device="cpu")
        ids = model.tok_encode(DOCUMENTS[0]["page"])[: CONTEXT - 1]
        found.append(
            (
                model._scorer.num_tokens,
                model._loglikelihood_tokens([(("", ""), ids[:2], ids[2:])], disable_tqdm=True)[0],
            )
        )
        model.close()
    (all_rows, hf), (num_tokens, native) = found
    assert all_rows is None and num_tokens == VOCABULARY
    assert native[0] == pytest.approx(hf[0], rel=1e-6) and native[1] == hf[1]


def test_the_entry_point_names_the_model_class(repository: Path) -> None:
    """By which versions of lm-eval that look for plugins find it."""
    from importlib.metadata import EntryPoint

    from megalith.evaluate.harness import MegalithLM

    text = (repository / "pyproject.toml").read_text()
    (value,) = re.findall(r'\[project\.entry-points\."lm_eval\.models"\]\nmegalith = "(.+)"', text)
    assert EntryPoint("megalith", value, "lm_eval.models").load() is MegalithLM


def test_benchmarks_from_local_files_score_as_lm_evals_own_model(folder: Path, tmp_path: Path) -> None:
    write_benchmarks(tmp_path)
    lines = list[str]()
    shutil.copytree(folder / "hf", wide := tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**config, "n_positions": 1024})).save_pretrained(wide)
    assert compare(tmp_path, wide, wide, lines.append) >= 20 and len(lines) == 10
    command = [sys.executable, "-m", "megalith", "evaluate", str(wide), "--others", str(folder / "hf")]
    words = ["--task", "mmlu", "--data", "mmlu", "--subjects", "anatomy", "--samples", "4", "--json", "found.json"]
    done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mmlu_anatomy" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["result"]["total"] == found["others"][0]["result"]["total"] == 4
    assert any("lost their beginning" in alarm["what"] for alarm in found["others"][0]["alarms"])
    done = subprocess.run([*command, "--task", "mmlu", "--data", "mmlu"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3 and "hf download cais/mmlu" in done.stderr, "the other subjects"
