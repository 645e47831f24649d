"""Who launched a process: torchrun, srun, mpirun or a hand, and where they put rank 0."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megalith.config import load
from megalith.config.environment import first_host, first_of_machine, read_launch, tasks_per_node
from megalith.errors import ConfigError

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[03-04,09]-ib",
    "SLURM_TASKS_PER_NODE": "4,3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 "
    "--micro-batch-size 1 --train-iters 2 --lr 0.1 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)


def test_srun_on_several_hosts() -> None:
    found = read_launch(SRUN)
    port = int(found.pop("MASTER_PORT"))
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu03-ib",
        "MEGALITH_LAUNCHER": "srun",
    }
    assert 12288 <= port < 28672
    others = {read_launch({**SRUN, "SLURM_PROCID": str(rank)})["MASTER_PORT"] for rank in range(7)}
    assert others == {str(port)}
    assert read_launch({**SRUN, "SLURM_JOB_ID": "4712"})["MASTER_PORT"] != str(port)


def test_srun_on_one_host_stays_on_the_loopback_interface() -> None:
    one = {**SRUN, "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "7", "SLURM_JOB_NODELIST": "gpu03"}
    assert read_launch(one)["MASTER_ADDR"] == "127.0.0.1"


def test_a_step_has_its_own_number_of_tasks() -> None:
    assert read_launch({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert read_launch({**SRUN, "SLURM_STEP_NUM_TASKS": "6"})["WORLD_SIZE"] == "6"


BATCH = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}


def test_a_batch_script_without_srun_is_one_process() -> None:
    """SLURM sets the number of tasks and SLURM_PROCID=0 for the script too, which runs once."""
    assert read_launch(BATCH) == {}
    config = load(MODEL.split(), BATCH)
    assert config.launch.world_size == 1
    assert any("SLURM_NTASKS=7" in note.text and "srun" in note.text for note in config.notes)
    with_address = load(MODEL.split(), {**BATCH, "MASTER_ADDR": "gpu03-ib", "MASTER_PORT": "6000"})
    assert any("srun" in note.text for note in with_address.notes)
    for nothing_to_say in ({**BATCH, "SLURM_NTASKS": "1"}, {**BATCH, "RANK": "0", "WORLD_SIZE": "1"}):
        assert not any("srun" in note.text for note in load(MODEL.split(), nothing_to_say).notes)
    with_launcher = load([*MODEL.split(), "--nproc", "2"], BATCH)
    assert with_launcher.launch.world_size == 2 and not any("srun" in note.text for note in with_launcher.notes)


@pytest.mark.parametrize("of_step", ["SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS"])
def test_any_variable_of_a_step_means_srun(of_step: str) -> None:
    assert read_launch({**BATCH, of_step: "7"})["WORLD_SIZE"] == "7"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("gpu09-ib\ngpu03-ib\ngpu03-ib\n", "gpu09-ib"),
        ("# order\n\n gpu09-ib*2 # rank 0\ngpu03-ib\n", "gpu09-ib"),
        ("gpu[09,03]-ib,gpu04-ib\n", "gpu09-ib"),
    ],
)
def test_rank_0_of_an_arbitrary_distribution_is_on_the_first_host_of_the_host_file(
    tmp_path: Path, text: str, first: str
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    arbitrary = {**SRUN, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": str(hosts)}
    assert read_launch(arbitrary)["MASTER_ADDR"] == first
    assert read_launch({**arbitrary, "SLURM_DISTRIBUTION": "block"})["MASTER_ADDR"] == "gpu03-ib"


@pytest.mark.parametrize("file", [{}, {"SLURM_HOSTFILE": "/no/such/file"}, {"SLURM_HOSTFILE": ""}])
def test_an_arbitrary_distribution_without_its_host_file_needs_an_address(file: dict[str, str]) -> None:
    """`srun -m arbitrary -w LIST` sets no SLURM_HOSTFILE, and the node list that it sets is sorted."""
    arbitrary = {**SRUN, "SLURM_DISTRIBUTION": "arbitrary", **file}
    with pytest.raises(ConfigError, match="SLURM_HOSTFILE.*MASTER_ADDR"):
        read_launch(arbitrary)
    assert read_launch({**arbitrary, "MASTER_ADDR": "gpu09-ib"})["MASTER_ADDR"] == "gpu09-ib"
    one_host = {**arbitrary, "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "7"}
    assert read_launch(one_host)["MASTER_ADDR"] == "127.0.0.1"


# Recorded from SLURM 22.05.8 (`env` in each), less what names the cluster, the user and ports.
SRUN_2205 = {  # srun -n 4 -N 2, task 3
    "SLURMD_NODENAME": "beta", "SLURM_CPUS_ON_NODE": "1", "SLURM_GTIDS": "3", "SLURM_JOBID": "1", "SLURM_JOB_ID": "1",
    "SLURM_JOB_CPUS_PER_NODE": "3,1", "SLURM_JOB_NODELIST": "alpha,beta", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_NODELIST": "alpha,beta",
    "SLURM_NPROCS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_STEPID": "0", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "alpha,beta", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_TASKS_PER_NODE": "3,1",
}  # fmt: skip
BATCH_2205 = {  # sbatch --ntasks 4, in the script
    "SLURMD_NODENAME": "alpha", "SLURM_CPUS_ON_NODE": "4", "SLURM_GTIDS": "0", "SLURM_JOBID": "2", "SLURM_JOB_ID": "2",
    "SLURM_JOB_CPUS_PER_NODE": "4", "SLURM_JOB_NODELIST": "alpha", "SLURM_JOB_NUM_NODES": "1",
    "SLURM_LOCALID": "0", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NODELIST": "alpha",
    "SLURM_NPROCS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "4",
}  # fmt: skip
OF_A_STEP_2205 = {  # what a script inherits where task 0 of `srun -n 2` calls sbatch
    "SLURM_STEPID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "alpha", "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip
SHELL_2205 = {  # the shell of `salloc -n 4` under LaunchParameters=use_interactive_step
    **BATCH_2205, "SLURM_STEPID": "4294967290", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "alpha",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip
HYDRA_2205 = {  # rank 2 of MPICH's `mpiexec -n 4` in `sbatch -N 2`: srun has started one proxy on each node
    **SRUN_2205, "SLURMD_NODENAME": "alpha", "SLURM_GTIDS": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x2)",
    "PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3",
}  # fmt: skip


def test_recorded_srun() -> None:
    found = read_launch(SRUN_2205)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "0")
    assert (found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("1", "alpha")
    # srun -E -n 2 in a job of 4 tasks keeps the numbers of the job beside those of the step
    kept = {**BATCH_2205, **OF_A_STEP_2205, "SLURM_GTIDS": "0,1"}
    assert read_launch(kept)["WORLD_SIZE"] == "2"
    pmi = {**SRUN_2205, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "12"}  # srun --mpi=pmi2
    assert read_launch(pmi) == found


@pytest.mark.parametrize("environ", [BATCH_2205, {**BATCH_2205, **OF_A_STEP_2205}, SHELL_2205])
def test_recorded_scripts_and_shells_are_one_process(environ: dict[str, str]) -> None:
    assert read_launch(environ) == {}
    assert any("SLURM_NTASKS=4" in note.text for note in load(MODEL.split(), environ).notes)


def test_mpirun_inside_a_slurm_job() -> None:
    hydra = read_launch({**HYDRA_2205, "MASTER_ADDR": "alpha"})
    assert (hydra["RANK"], hydra["WORLD_SIZE"], hydra["LOCAL_RANK"]) == ("2", "4", "2")
    open_mpi = {**BATCH_2205, **OPEN_MPI}
    assert read_launch(open_mpi)["MEGALITH_LAUNCHER"] == "mpirun"
    assert not first_of_machine(HYDRA_2205) and not first_of_machine(open_mpi)


def test_torchrun_inside_a_slurm_job() -> None:
    own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    found = read_launch({**SRUN, **own})
    assert (found["RANK"], found["WORLD_SIZE"], found["MEGALITH_LAUNCHER"]) == ("0", "2", "torchrun")


def test_a_blank_beside_a_number_is_no_error() -> None:
    launch = load(MODEL.split(), {"RANK": "1 ", "WORLD_SIZE": " 2"}).launch
    assert (launch.rank, launch.world_size) == (1, 2)


def test_what_is_exported_by_hand_holds() -> None:
    found = read_launch({**SRUN, "MASTER_PORT": "6000", "MASTER_ADDR": "10.0.0.1"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "6000")


def test_mpirun() -> None:
    found = read_launch(OPEN_MPI)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "1")
    assert (found["MASTER_ADDR"], found["MEGALITH_LAUNCHER"]) == ("127.0.0.1", "mpirun")
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert read_launch(hydra)["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun_on_several_hosts_needs_an_address() -> None:
    with pytest.raises(ConfigError, match="export MASTER_ADDR"):
        read_launch({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"})
    assert read_launch({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "a"})["MASTER_ADDR"] == "a"


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({}, True),
        (SRUN, False),
        (OPEN_MPI, False),
        ({**SRUN, "SLURM_LOCALID": "0"}, True),
        ({"RANK": "4", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1"}, True),  # a pod of its own, as PyTorchJob starts them
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"RANK": "0", "LOCAL_RANK": "3"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, True),
    ],
)
def test_the_first_of_a_machine_speaks(environ: dict[str, str], first: bool) -> None:
    assert first_of_machine(environ) is first


def test_nothing_is_said_of_processes_whose_number_could_not_be_read() -> None:
    argv = f"{MODEL} --tensor-model-parallel-size 2 --num-layers 0".split()
    with pytest.raises(ConfigError) as caught:
        load(argv, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"})
    assert [text.partition(" ")[0] for text in caught.value.violations] == ["mpirun", "--num-layers"]


@pytest.mark.parametrize(
    ("environ", "how"),
    [
        (SRUN, "srun --ntasks"),
        (OPEN_MPI, "mpirun -n"),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, "torchrun --nproc_per_node"),
        ({}, "--nproc, or torchrun --nproc_per_node"),
    ],
)
def test_the_remedy_speaks_of_the_launcher(environ: dict[str, str], how: str) -> None:
    with pytest.raises(ConfigError, match=rf"--context-parallel-size 4.*\({how}\)"):
        load(f"{MODEL} --context-parallel-size 4".split(), environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,09],login1", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("rack[1-2]n[04-08]-ib", "rack1n04-ib"),
    ],
)
def test_the_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_tasks_per_node() -> None:
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert tasks_per_node("2") == [2]


def test_launch_errors_come_with_all_others_before_anything_starts() -> None:
    with pytest.raises(ConfigError) as caught:
        load([*MODEL.replace("--hidden-size 16", "--hidden-size 15").split(), "--nproc", "2"], {"RANK": "3"})
    texts = caught.value.violations
    assert any("RANK=3" in text and "WORLD_SIZE" in text for text in texts)
    assert any("--hidden-size 15" in text for text in texts)


TWO = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ("", {"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ("--nproc 2", {"RANK": "0", "WORLD_SIZE": "4"}, "--nproc 2 "),
        ("--max-restarts 3", {}, "--max-restarts 3 "),
        ("--nproc 3 --tensor-model-parallel-size 2", {}, "--tensor-model-parallel-size 2 "),
        ("", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"}, "environment variable MASTER_PORT=x"),
        ("", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "environment variable MASTER_PORT=99999"),
        ("", {"RANK": "-1", "WORLD_SIZE": "2"}, "environment variable RANK=-1"),
        ("", {**TWO, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ("", {**TWO, "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 with WORLD_SIZE=2"),
        ("", {**SRUN, "SLURM_JOB_NODELIST": ""}, "MASTER_ADDR"),
        ("", {**SRUN, "SLURM_NTASKS": "x"}, "environment variable SLURM_NTASKS=x"),
        ("", {**SRUN, "SLURM_PROCID": "y"}, "environment variable SLURM_PROCID=y"),
        ("", {**SRUN, "SLURM_PROCID": "7"}, "SLURM_PROCID=7 with SLURM_NTASKS=7"),
        ("", {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK=2 with "),
        ("", {**HYDRA_2205, "PMI_SIZE": "z"}, "environment variable PMI_SIZE=z"),
    ],
)
def test_refused_launches(flags: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load([*MODEL.split(), *flags.split()], environ)


def test_a_number_of_processes_out_of_range_is_one_violation() -> None:
    with pytest.raises(ConfigError) as caught:
        load([*MODEL.split(), "--nproc", "0"], {})
    assert len(caught.value.violations) == 1
    assert "--nproc 0" in caught.value.violations[0]


def test_nproc_sets_the_world_of_the_parent_and_of_the_children() -> None:
    parent = load([*MODEL.split(), "--nproc", "2"], {})
    assert (parent.launch.world_size, parent.data_parallel_size, "rank" in parent.given) == (2, 2, False)
    child = load([*MODEL.split(), "--nproc", "2"], {"RANK": "1", "WORLD_SIZE": "2", "MEGALITH_LAUNCHER": "megalith"})
    assert (child.launch.rank, child.launch.world_size, child.launch.launcher) == (1, 2, "megalith")


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [("", 600.0), ("--distributed-timeout-minutes 2", 120.0), ("--distributed-timeout-seconds-after-init 7", 7.0)],
)
def test_the_longest_wait(flags: str, seconds: float) -> None:
    assert load([*MODEL.split(), *flags.split()], {}).parallel.timeout_seconds == seconds


def test_where_the_processes_meet() -> None:
    launch = load(MODEL.split(), {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "6000"}, files=False).launch
    assert (launch.master_addr, launch.master_port, launch.one_host) == ("10.0.0.1", 6000, False)
    launch = load(MODEL.split(), {}, files=False).launch
    assert (launch.master_addr, launch.master_port, launch.one_host) == ("127.0.0.1", 29500, True)
