"""Launch scripts of bash are read as bash would, without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.compat.megatron.script import find_launch, read_script
from megalith.compat.megatron.script_words import Variables, plain, tokens

SCRIPTS = Path(__file__).parent / "scripts"


def words(line: str, arguments: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> list[str]:
    """The words of the only echo of a script."""
    (command,) = [command for command in read_script(line, arguments, environ).commands if command.words[0] == "echo"]
    return list(command.words)


ECHOES = [
    "echo a 'b c' \"d  e\" f\\ g",
    "echo one \\\n   two \\\n  three",
    'A=\'x y\'; echo $A "$A" ${A}z "pre${A}post" pre${A}post',
    "A=(one 'two three' four); echo ${A[@]} ${A[1]} ${#A[@]}",
    'A=(one "two three"); echo "${A[@]}" "${A[*]}"',
    'A=(); B="--x 1"; echo start ${A[@]} $B end',
    "A=(\n  --a 1  # a comment\n  # --b 2\n  --c '#3'\n)\nA+=(--d 4)\necho ${A[@]}",
    'A="x"; A+=" y"; echo $A "$A"',
    "echo ${NO:-default} ${NO-other} ${HOME:+there} ${NO:=kept} $NO",
    "N=4; M=2; echo $((N*M)) $(($N + ${M} * 3)) $((N/3)) $((N % 3))",
    "F=/a/b.txt.gz; echo ${F##*/} ${F%.*} ${F%%.*} ${F#/}",
    "echo $1 $2 $# ; ",
    "X=1; if [ $X -eq 1 ]; then Y=yes; else Y=no; fi; echo $Y",
    'X=""; if [ -z "$X" ]; then Y=empty; fi; echo $Y',
    'X=a; if [[ "$X" == b ]]; then Y=1; elif [ "$X" = a ]; then Y=2; else Y=3; fi; echo $Y',
    'if [ -n "" ]; then if [ 1 -eq 1 ]; then Y=1; fi; Y=2; else Y=3; fi; echo $Y',
    "if [ 1 -eq 2 ] || [ 1 -eq 1 ] && [ -n x ]; then Y=1; else Y=2; fi; echo $Y",
    "if [ 1 -eq 1 ] && [[ a == b ]] || [[ -z x ]]; then Y=1; else Y=2; fi; echo $Y",
    "echo a > /dev/null b 2>&1",
    "c='echo x y'; eval $c",
    "export A=5 B=6; echo $A$B",
    "echo --output-prefix dir/name\\\n   --next",
    "for x in p q; do echo $x; break; done",
    "N=4; echo $(( ($N > 1) ? 1 : 0 )) $((N<1?2:N==4?3:5)) $((N>=4 && N!=5)) $((!N || N<=3))",
    "N=4; echo $((!0 + 1)) $((!N == 0)) $((-N - 3 % 2)) $((-7 % 2)) $((-7 / 2))",
    "N=4; if [ $(( N > 1 ? 1 : 0 )) -eq 1 ]; then Y=yes; fi; echo $Y",
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here to compare with")
@pytest.mark.parametrize("line", ECHOES)
def test_the_words_are_those_of_bash(line: str) -> None:
    shown = line.replace("> /dev/null b 2>&1", "b")
    done = subprocess.run(
        ["bash", "-c", f"echo() {{ printf '<%s>' \"$@\"; }}; {shown}", "script", "first", "second"],
        capture_output=True,
        text=True,
        check=True,
    )
    command = words(line, ("first", "second"), {"HOME": "/root"})
    assert command[0] == "echo"
    assert "".join(f"<{word}>" for word in command[1:]) == done.stdout


def test_a_backslash_with_a_comment_behind_it_continues_the_line() -> None:
    """In bash that backslash escapes the blank; what its author meant is a line that goes on."""
    script = "python train.py --a 1 \\  # the first\n  --b 2 \\\n  # ${LAST[@]}\nnext"
    first, second = read_script(script).commands
    assert first.words == ("python", "train.py", "--a", "1", "--b", "2")
    assert second.words == ("next",)


def test_what_needs_a_shell_is_left_and_said() -> None:
    script = read_script('D=$(cd "$(dirname "$0")" && pwd)\npython $D/pretrain_gpt.py --lr $LR\n[ -f x ] && echo\n')
    assert script.commands[0].words[-1] == "--lr"
    unset, unexpanded = script.notes
    assert unset.startswith("$LR:") and unexpanded.endswith(': $(cd "$(dirname "$0")" && pwd)')


def test_nothing_is_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    read_script(f"touch {target}\nX=$(touch {target})\n`touch {target}`\neval touch {target}\n")
    assert not target.exists()


@pytest.mark.parametrize("text", ["'", '"', "${", "$((", "A=(", "`", "if [", "\\", "$(", "a=b c=", "((", "fi", "}"])
def test_a_broken_script_is_read_as_far_as_it_goes(text: str) -> None:
    assert tokens(text) is not None
    read_script(text)


def test_functions_that_call_themselves_come_to_an_end() -> None:
    script = read_script("f() {\n f\n f\n f\n}\nf\npython pretrain_gpt.py --fp16\n")
    assert [command.words for command in script.commands] == [("python", "pretrain_gpt.py", "--fp16")]
    assert len(script.notes) == 1


def test_a_sum_calls_nothing() -> None:
    variables = Variables()
    (word,) = tokens("$((__import__('os').getpid()))")
    (found,) = variables.expand(word)  # type: ignore[arg-type]
    assert plain(found) == "$((__import__('os').getpid()))"


def test_what_is_left_stays_one_piece_through_texts_that_are_read_again() -> None:
    text = 'D="out_$(date "+%Y %m")"\nRUN="torchrun pretrain_gpt.py --save $D --fp16"\neval $RUN | tee log\n'
    (launch,) = find_launch(read_script(text))
    assert launch.flags == ("--save", 'out_$(date "+%Y %m")', "--fp16")
    script = read_script('if [ "$(date)" = now ]; then X=1; else X=2; fi\necho $X\n')
    assert script.notes[0].startswith("line 1: ") and "`if`" in script.notes[0]


def test_other_scripts_are_named() -> None:
    script = read_script(". conf/base.sh\nmpirun -np 8 bash entry.sh pretrain_llama_x.py ' --lr 1 --fp16 '\n")
    sourced, started = script.notes
    assert sourced.startswith("line 1: ") and "conf/base.sh" in sourced
    assert started.startswith("line 2: ") and "entry.sh" in started
    (launch,) = find_launch(script)
    assert (launch.name, launch.processes, launch.flags) == ("pretrain_llama_x.py", 8, ("--lr", "1", "--fp16"))


def test_the_launch_of_the_arrays() -> None:
    text = (SCRIPTS / "gpt_arrays.sh").read_text()
    (launch,) = find_launch(read_script(text, ("ckpt", "tb", "v.json", "m.txt", "text_document")))
    assert (launch.name, launch.launcher, launch.processes, launch.hosts) == ("pretrain_gpt.py", "torchrun", 8, 1)
    assert launch.flags[:4] == ("--num-layers", "12", "--hidden-size", "768")
    assert "--sequence-parallel" in launch.flags
    assert not {"--attention-backend", "2>&1", "tee"} & set(launch.flags)
    assert launch.flags[-2:] == ("--tensorboard-dir", "tb")


def test_the_launch_of_the_texts() -> None:
    text = (SCRIPTS / "gpt3_175b.sh").read_text()
    (launch,) = find_launch(read_script(text, ("ckpt/", "data"), {"SLURM_NODEID": "3"}))
    assert (launch.launcher, launch.processes, launch.hosts) == ("torch.distributed.launch", 8, 16)
    assert launch.options == {
        "processes": "8",
        "hosts": "16",
        "host": "3",
        "address": "first-host",
        "port": "6000",
    }
    assert launch.flags[-4:] == ("--save", "ckpt", "--save-interval", "10000")


STYLES: dict[str, tuple[str, ...]] = {
    "bert_arrays": ("ckpt", "tb", "vocab.txt", "text_sentence"),
    "colon_defaults": ("--exit-interval", "50"),
    "deepspeed": (),
    "gpt3_175b": ("ckpt/", "data"),
    "gpt_arrays": ("ckpt", "tb", "v.json", "m.txt", "text_document"),
    "llama_conditions": ("ckpt", "tokenizer folder", "text_document"),
    "loop_of_rates": (),
    "mixtral": ("tokenizer.model", "text_document"),
    "sbatch_heredoc": (),
    "sizes_by_case": ("7b",),
    "srun_text": (),
    "t5_texts": ("ckpt", "vocab.txt", "text_document"),
}
RECIPES = {
    "gpt_arrays": ("#   megalith train --nproc 8 --config recipe.toml", (), "8"),
    "bert_arrays": ("#   megalith train --nproc 4 --config recipe.toml", ("--model-family", "bert"), "4"),
    "t5_texts": ("#   megalith train --nproc 8 --config recipe.toml", ("--model-family", "t5"), "8"),
    "mixtral": ("#   megalith train --nproc 8 --config recipe.toml", (), "8"),
    "llama_conditions": ("#   megalith train --nproc 8 --config recipe.toml", (), "8"),
    "srun_text": ("#   srun --nodes 2 --ntasks-per-node 8 megalith train --config recipe.toml", (), "16"),
    "sbatch_heredoc": ("#   srun --nodes 2 --ntasks-per-node 8 megalith train --config recipe.toml", (), "16"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_prints_a_recipe_that_gives_the_same_configuration(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from megalith.config import load

    start, family, world = RECIPES[name]
    script, arguments = SCRIPTS / f"{name}.sh", [word.replace(" ", "-") for word in STYLES[name]]
    assert main(["from-megatron", str(script), *arguments]) == 0
    out, err = capsys.readouterr()
    assert start in out
    assert ("note: CUDA_DEVICE_MAX_CONNECTIONS " in err) == ("export CUDA" in script.read_text())
    (tmp_path / "recipe.toml").write_text(out)
    environ = {"RANK": "0", "WORLD_SIZE": world}
    (launch,) = find_launch(read_script(script.read_text(), arguments))
    assert load(["--config", str(tmp_path / "recipe.toml")], environ, files=False) == load(
        [*family, *launch.flags], environ, files=False
    )


SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 16 --micro-batch-size 1 "
    "--train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 30"
)


def test_a_script_that_bash_runs_is_explained_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, repository: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"LENGTHS='--seq-length 16 --save {tmp_path}/run --save-interval 5'\n"
        f"{sys.executable} {repository}/pretrain_gpt.py {SMALL} $LENGTHS --use-flash-attn\n"
    )
    assert main(["from-megatron", str(script)]) == 0
    expected = capsys.readouterr()
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        ["bash", str(script)],
        env={**environ, "MEGALITH_EXPLAIN": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == expected.out.splitlines()[1:]  # but for the name of the script
    assert done.stderr == expected.err and "--use-flash-attn" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.sh"]


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, "megalith train --nproc 4 --config recipe.toml"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "--nnodes 2"),
        ({"RANK": "3", "WORLD_SIZE": "4"}, ""),
    ],
)
def test_rank_0_alone_explains(
    environ: dict[str, str], start: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**environ, "MEGALITH_EXPLAIN": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--model-family", "t5", *SMALL.split()]) == (2 if start else 0)
    out, err = capsys.readouterr()
    assert start in out and bool(out) == bool(start)
    assert ('model_family = "t5"' in out) == ("--decoder-seq-length" in err) == bool(start)


def test_what_does_not_fit_is_said_behind_the_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python pretrain_gpt.py --num-layers 3 --fp8-format e4m3 --hidden-size 10 --num-attention-heads 3"
    )
    assert main(["from-megatron", str(script)]) == 2
    out, err = capsys.readouterr()
    assert "num_layers = 3" in out
    assert "--fp8-format e4m3" in err and "--lr " in err and "--hidden-size 10 " in err


def test_scripts_without_a_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("echo hello")
    assert main(["from-megatron", str(script)]) == 2
    assert str(script) in capsys.readouterr().err
    assert main(["from-megatron", str(tmp_path / "none.sh")]) == 2
    capsys.readouterr()
    script.write_text("python mean.py a.txt")
    assert main(["from-megatron", str(script)]) == 2
    assert "mean.py" in capsys.readouterr().err
    script.write_text("torchrun pretrain_vlm.py --lr 1")
    assert main(["from-megatron", str(script)]) == 2
    assert "pretrain_vlm.py" in capsys.readouterr().err
    script.write_text("torchrun pretrain_bert.py --lr 1")
    assert main(["from-megatron", str(script)]) == 2
    out, err = capsys.readouterr()
    assert 'model_family = "bert"' in out and "--num-layers " in err


@pytest.mark.parametrize(
    "command",
    [
        "tools/preprocess_data.py --input a.jsonl --output-prefix out --vocab-file v --merge-file m --workers 2",
        "/opt/Megatron-LM/tools/merge_datasets.py --input parts --output-prefix whole",
        "tools/checkpoint/convert.py --model-type GPT --load-dir a --save-dir b --vocab-file none.json",
        "tools/checkpoint_util.py --model-type GPT --load-dir a --save-dir b",
        "tasks/main.py --task LAMBADA --valid-data none.jsonl --load C",
        "tools/run_text_generation_server.py --load C --host 0.0.0.0 --api-key-file none",
        "tools/text_generation_cli.py localhost:5000",
    ],
)
def test_a_tools_command_line_that_runs_unchanged_is_shown(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"python {command}")
    assert main(["from-megatron", str(script)]) == 0
    assert f"\npython {command}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("tools/preprocess_data.py --input a.jsonl --find-optimal-num-workers", "--find-optimal-num-workers"),
        ("tools/preprocess_data.py --input a.jsonl", "--output-prefix"),
        ("tools/merge_datasets.py --input parts --output-prefix whole --bogus", "--bogus"),
        ("tools/merge_datasets.py --output-prefix whole", "--input"),
        ("tools/checkpoint/convert.py --model-type GPT --load-dir a --save-dir b --saver hf", "--saver hf"),
        ("tools/checkpoint_util.py --model-type GPT --load-dir a --save-dir b --bogus 3", "--bogus 3"),
        ("tasks/main.py --task RACE --load C", "--task RACE"),
        ("tasks/msdp/main.py --task MSDP-PROMPT --num-layers 2 --train-iters 3", "tasks/msdp/main.py"),
        ("tasks/vision/main.py --task CLASSIFY", "tasks/vision/main.py"),
        ("tools/run_text_generation_server.py --load C --export-te-mcore-model", "--export-te-mcore-model"),
        ("tools/run_text_generation_server.py --load C --host 0.0.0.0", "--host 0.0.0.0"),
        ("tools/text_generation_cli.py", "HOST:PORT"),
        ("convert.py --model-type GPT --load-dir a --save-dir b", "convert.py"),
    ],
)
def test_a_tools_command_line_that_would_be_refused_is_refused(
    command: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"\npython {command}")
    assert main(["from-megatron", str(script)]) == 2
    out, err = capsys.readouterr()
    assert named in err and "unchanged" not in out


@pytest.mark.parametrize(
    ("command", "family"),
    [
        ("pretrain_gpt2.py --lr 1", ""),
        ("pretrain_bert_x.py --lr 1", 'model_family = "bert"'),
        ("finetune_deepseek.py --num-layers 2 --train-iters 3 --lr 1 --save $1", ""),
    ],
)
def test_programs_of_forks_are_taken_for_megatrons(
    command: str, family: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"torchrun {command}")
    assert main(["from-megatron", str(script)]) == 2
    out, err = capsys.readouterr()
    assert f"note: {command.split()[0]} " in err
    assert "lr = 1" in out and ("model_family" in out) == bool(family) and family in out
    assert ("$1:" in err) == ("$1" in command)


def test_of_another_fork_its_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-megatron", str(SCRIPTS / "deepspeed.sh")]) == 2
    out, err = capsys.readouterr()
    assert "num_experts = 128" in out and "train_iters = 858" in out
    assert "--zero-stage 1" in err and "--use-distributed-optimizer" in err


# Programs that say their words, and what SLURM's give on to: srun runs its command, sbatch its script.
RECORD = 'printf "%s\\0" "${0##*/}" "$@" >> "$RECORD"; printf "\\n" >> "$RECORD"'
PROGRAMS = dict.fromkeys(("torchrun", "python", "python3", "deepspeed"), RECORD)
PROGRAMS |= dict.fromkeys(("scontrol", "git", "hostname", "mkdir"), "")
PROGRAMS |= {
    "tee": "cat > /dev/null",
    "sbatch": "exec bash",
    "srun": 'while [[ $1 == -* ]]; do [[ $1 == --container-image ]] && shift; shift; done; exec "$@"',
}


def the_words_of_bash(script: Path, arguments: tuple[str, ...], folder: Path) -> list[list[str]]:
    """What a script of `SCRIPTS` starts when bash runs it: name and words of each program of `PROGRAMS`."""
    programs, record = folder / "bin", folder / "record"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record), "MEGATRON_PATH": "/"}
    subprocess.run(["bash", str(script), *arguments], env=environ, cwd=folder, capture_output=True, timeout=60)
    return [line.split("\0")[:-1] for line in record.read_text().splitlines()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here to compare with")
@pytest.mark.parametrize("name", STYLES)
def test_a_script_starts_what_bash_starts(name: str, tmp_path: Path) -> None:
    script = SCRIPTS / f"{name}.sh"
    started = the_words_of_bash(script, STYLES[name], tmp_path)
    (launch,) = find_launch(read_script(script.read_text(), STYLES[name], {"MEGATRON_PATH": "/"}))
    (words,) = [words for words in started if any(word.endswith(".py") for word in words)]
    place = next(place for place, word in enumerate(words) if word.endswith(".py"))
    assert [launch.program, *launch.flags] == words[place:]
    assert launch.launcher in (words[0], "srun", *words)


def test_every_script_is_tried() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == set(STYLES)
