"""The examples run as typed: some in each run of the tests, all in the full one.

The flags of every script are read in each run, by a torchrun that only prints them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.config import load
from megalith.config.run import all_settings
from megalith.tokenizers import train_byte_level_bpe

from .warm import WarmProcess

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def _train_loop(repository: Path, folder: Path, ranks: int, flags: str) -> list[str]:
    """What the train loop of the examples prints on so many processes, torchrun's own lines left out."""
    words = [str(repository / "examples/simple_train_loop.py"), *shlex.split(flags)]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *words]
    done = subprocess.run([sys.executable, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def alone(repository: Path, warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of the train loop in one process, and what it printed."""
    folder = tmp_path_factory.mktemp("alone")
    program = str(repository / "examples/simple_train_loop.py")
    done = warm.start_script(f"import runpy; runpy.run_path({program!r}, run_name='__main__')", folder).finish()
    assert done.code == 0, done.text
    return folder, done.text.splitlines()


def _parts(folder: Path) -> set[str]:
    return {file.name[:4] for file in (folder / "checkpoints/simple/iter_0000005").glob("*.distcp")}


def test_simple_train_loop(repository: Path, alone: tuple[Path, list[str]]) -> None:
    assert len((repository / "examples/simple_train_loop.py").read_text().splitlines()) < 80
    folder, printed = alone
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d{4}),", "\n".join(printed))]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert printed[5:] == ["saved and loaded: every weight is equal; the checkpoint is in checkpoints/simple"]
    assert _parts(folder) == {"__0_"}


@pytest.mark.full
@pytest.mark.parametrize("flags", ["--pp 2", "--tp 2"])
def test_simple_train_loop_prints_the_same_losses_in_every_layout(
    repository: Path, tmp_path: Path, alone: tuple[Path, list[str]], flags: str
) -> None:
    assert _train_loop(repository, tmp_path, 2, flags) == alone[1]
    assert _parts(tmp_path) == {"__0_", "__1_"}, "both ranks write their part"


@pytest.fixture(scope="module")
def corpus(warm: WarmProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small corpus and its tokenizer, by the variables that the scripts of the examples give their paths in."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "to be or not to be that is the question\n\n" * 400
    (folder / "text.txt").write_text(text)
    vocab, merges = train_byte_level_bpe([text], 280, folder)
    words = ["--input", str(folder / "text.txt"), "--output-prefix", str(folder / "data")]
    words += ["--vocab-file", str(vocab), "--merge-file", str(merges)]
    words += ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--workers", "1"]
    done = warm.run(words, folder, command="preprocess")
    assert done.code == 0, done.text
    return {"DATA": str(folder / "data_text_document"), "VOCAB": str(vocab), "MERGES": str(merges)}


def _run_script(script: str, flags: str, variables: dict[str, str]) -> str:
    """Run a script with this Python, and with more flags; what it prints."""
    bin_folder = str(Path(sys.executable).parent)
    environment = {**ENVIRONMENT, **variables, "PATH": f"{variables.get('PATH', '')}:{bin_folder}:{os.environ['PATH']}"}
    command = ["bash", "-c", script, "train", *shlex.split(flags)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has NOT been destroyed" not in done.stderr
    return done.stdout


def _script(repository: Path, name: str) -> str:
    """A script of the examples, as if it ran from there, with a port of its own."""
    script = (repository / "examples" / name).read_text()
    script = script.replace('HERE=$(cd "$(dirname "$0")/.." && pwd)', f"HERE={repository}")
    return script.replace("torchrun ", "torchrun --standalone ")


SMALL = {"LAYERS": "2", "HIDDEN": "32", "HEADS": "4", "LENGTH": "32", "STEPS": "2"}


@pytest.mark.full  # test_slurm_job runs one on two ranks, the flags of all are read below
@pytest.mark.parametrize(
    ("name", "variables", "expected"),
    [
        ("train_gpt3_124m.sh", {"PROCESSES": "2", "TP": "2", "MICRO_BATCH": "4"}, "tensor-model-parallel size: 2"),
        ("train_gpt3_345m.sh", {"PROCESSES": "2", "MICRO_BATCH": "2"}, "world size: 2, data-parallel size: 2"),
        ("train_gpt3_857m_distributed.sh", {}, "parameters on (tensor, pipeline) model parallel rank (1, 1)"),
        ("train_llama.sh", {"FFN": "64"}, "using torch.bfloat16 for parameters"),
        ("long_context.sh", {}, "context-parallel size: 2"),
    ],
)
def test_scripts_with_smaller_sizes_in_the_environment(
    name: str, variables: dict[str, str], expected: str, repository: Path, tmp_path: Path, corpus: dict[str, str]
) -> None:
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    set_by_user = {**SMALL, **variables, **corpus, "CHECKPOINTS": str(tmp_path), "MASTER_PORT": port}
    printed = _run_script(_script(repository, name), "--eval-iters 0 --log-interval 1", set_by_user)
    assert expected in printed
    assert "iteration        2/" in printed
    assert (tmp_path / "iter_0000002/manifest.json").exists()
    assert len(list((tmp_path / "tensorboard").glob("events.*"))) == ("857m" in name)


def _printing(folder: Path, program: str) -> dict[str, str]:
    """Make a program that prints its words, one a line; return the variables with which it is found."""
    (folder / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / program).chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("name", "world_size", "expected"),
    [
        ("train_gpt3_124m.sh", 1, {"num_layers": 12, "hidden_size": 768}),
        ("train_gpt3_857m_distributed.sh", 4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        ("train_gpt3_slurm.sbatch", 8, {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True}),
        ("train_llama.sh", 1, {"swiglu": True, "normalization": "RMSNorm"}),
        ("long_context.sh", 2, {"context_parallel_size": 2, "seq_length": 16384}),
        ("train_bert.sh", 1, {"tokenizer_type": "BertWordPieceLowerCase", "fp16": True}),
        ("train_t5.sh", 1, {"seq_length": 512, "decoder_seq_length": 128}),
        ("train_moe.sh", 2, {"num_experts": 8, "moe_router_topk": 2, "expert_model_parallel_size": 2}),
    ],
)
def test_the_flags_of_a_script_make_a_run_of_its_default_size(
    name: str, world_size: int, expected: dict[str, object], repository: Path, tmp_path: Path
) -> None:
    on_slurm = name.endswith(".sbatch")
    variables = _printing(tmp_path, "srun" if on_slurm else "torchrun")
    words = _run_script(_script(repository, name), "", {**variables, "SLURM_SUBMIT_DIR": str(repository)}).splitlines()
    if not on_slurm:
        assert words[words.index("--nproc_per_node") + 1] == str(world_size)
    (program,) = (number for number, word in enumerate(words) if word.endswith(".py"))
    assert Path(words[program]).is_file()
    family = Path(words[program]).stem.removeprefix("pretrain_")
    place = {"WORLD_SIZE": world_size, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": 6000}
    environ = {"MASTER_ADDR": "127.0.0.1", **{variable: str(value) for variable, value in place.items()}}
    run = load(["--model-family", family, *words[program + 1 :]], environ, files=False)
    values = {setting.name: getattr(getattr(run, setting.group), setting.name) for setting in all_settings().values()}
    assert {setting: values[setting] for setting in expected} == expected


def test_train_llama_with_a_tokenizer_model(repository: Path, tmp_path: Path) -> None:
    variables = {**_printing(tmp_path, "torchrun"), "TOKENIZER": "t.model"}
    printed = _run_script(_script(repository, "train_llama.sh"), "", variables).replace("\n", " ")
    assert "--tokenizer-type Llama2Tokenizer --tokenizer-model t.model" in printed
    assert "--vocab-file" not in printed and "--merge-file" not in printed


def _sentences(repository: Path, folder: Path, kind: str) -> dict[str, str]:
    """A corpus of sentences with a vocabulary of word pieces, as the heads of the scripts of BERT and T5 prepare it."""
    (folder / "text.txt").write_text("To be or not to be, said he. That is the question! So she went.\n\n" * 200)
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "To", "That", "So", "to", "be", "or", "not", ",", ".", "!"]
    pieces += ["said", "he", "that", "is", "the", "question", "so", "she", "went"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "punkt.json").write_text(json.dumps(PUNKT))
    words = ["--input", str(folder / "text.txt"), "--output-prefix", str(folder / "data"), "--split-sentences"]
    words += ["--punkt-parameters", str(folder / "punkt.json"), "--tokenizer-type", kind, "--workers", "1"]
    preprocess = [sys.executable, str(repository / "tools/preprocess_data.py"), "--vocab-file"]
    subprocess.run([*preprocess, str(folder / "vocab.txt"), *words], check=True, capture_output=True, env=ENVIRONMENT)
    return {"DATA": str(folder / "data_text_sentence"), "VOCAB": str(folder / "vocab.txt")}


PUNKT = {"abbrev_types": [], "collocations": [], "sent_starters": [], "ortho_context": {}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "variables", "expected"),
    [
        ("train_bert.sh", {"PROCESSES": "2", "TP": "2"}, "building BERT model ..."),
        ("train_t5.sh", {"PROCESSES": "2", "TP": "2", "DECODER_LENGTH": "16"}, "building T5 model ..."),
        ("train_moe.sh", {}, "load_balancing_loss: "),
    ],
)
def test_scripts_of_other_models(
    name: str, variables: dict[str, str], expected: str, repository: Path, tmp_path: Path, corpus: dict[str, str]
) -> None:
    with socket.create_server(("", 0)) as free:
        port = str(free.getsockname()[1])
    kinds = {"train_bert.sh": "BertWordPieceLowerCase", "train_t5.sh": "BertWordPieceCase"}
    data = _sentences(repository, tmp_path, kinds[name]) if name in kinds else corpus
    set_by_user = {**SMALL, **variables, **data, "CHECKPOINTS": str(tmp_path / "c"), "MASTER_PORT": port}
    printed = _run_script(_script(repository, name), "--eval-iters 0 --log-interval 1", set_by_user)
    assert expected in printed
    assert "iteration        2/" in printed
    assert (tmp_path / "c/iter_0000002/manifest.json").exists()


def test_several_hosts_need_to_know_their_numbers(repository: Path) -> None:
    """torchrun itself waits for ever, without a word, when every host says that it is the first."""
    script = str(repository / "examples/train_gpt3_124m.sh")
    done = subprocess.run(["bash", script], env={**ENVIRONMENT, "HOSTS": "2"}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "NODE_RANK" in done.stderr


SRUN = """#!/bin/bash
[ "$1" = --cpus-per-task ] && shift 2
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=$HOSTNAME SLURM_NODEID=0 SLURM_STEP_ID=0
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@"
code=$?
wait
exit $code
"""


def _slurm(folder: Path, srun: str) -> dict[str, str]:
    """A folder with stand-ins for SLURM's programs before the others, and the variables of a job."""
    programs = folder / "slurm"
    programs.mkdir()
    for name, text in {"srun": srun, "scontrol": f'#!/bin/bash\necho "$@" > {folder}/scontrol.txt\n'}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {"PATH": str(programs), "SLURM_JOB_ID": str(os.getpid()), "SLURM_CPUS_PER_TASK": "1"}


def test_slurm_job(repository: Path, tmp_path: Path, corpus: dict[str, str]) -> None:
    job = {**_slurm(tmp_path, SRUN), **corpus, "CHECKPOINTS": str(tmp_path), "SLURM_SUBMIT_DIR": str(repository)}
    smaller = "--num-layers 1 --hidden-size 48 --seq-length 32 --train-iters 2 --eval-iters 0 --global-batch-size 8"
    printed = _run_script(_script(repository, "train_gpt3_slurm.sbatch"), f"{smaller} --log-interval 1", job)
    assert "tensor-model-parallel size: 2" in printed
    assert "iteration        2/" in printed
    assert not (tmp_path / "scontrol.txt").exists()


def test_slurm_job_that_was_told_to_stop_goes_back_to_the_queue(repository: Path, tmp_path: Path) -> None:
    job = _slurm(tmp_path, "#!/bin/bash\nexit 75\n")
    script = str(repository / "examples/train_gpt3_slurm.sbatch")
    environment = {**ENVIRONMENT, **job, "PATH": f"{job['PATH']}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", script], env=environment).returncode == 75
    assert (tmp_path / "scontrol.txt").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
