"""Every launcher's own variables give the place that the launcher meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from asyncrpc.core.environment import GivenPlace, resolve
from asyncrpc.core.environment.slurm import expand_counts, expand_hosts, first_host
from asyncrpc.core.environment.values import Field, port_of_text
from asyncrpc.errors import UsageError
from tests.unit.core.environment import captured


class Place(NamedTuple):
    rank: int
    size: int
    local: tuple[int | None, int | None]
    host: str | None
    port: int | None
    launcher: str


PLACES: Mapping[str, tuple[Mapping[str, str], Place]] = {
    "torchrun": (
        captured.TORCHRUN,
        Place(1, 2, (1, 2), "localhost", 37913, "torchrun"),
    ),
    "slurm": (
        captured.SLURM_STEP,
        Place(2, 4, (2, 3), "node1", 15000 + 10 * 16, "Slurm"),
    ),
    "slurm pmi2": (
        {**captured.SLURM_STEP, **captured.SLURM_PMI2},
        Place(2, 4, (2, 3), "node1", 15000 + 10 * 16, "Slurm"),
    ),
    "open mpi": (
        captured.OPEN_MPI,
        Place(1, 2, (1, 2), "127.0.0.1", port_of_text("478806017"), "Open MPI"),
    ),
    "mpich": (
        captured.MPICH,
        Place(1, 2, (1, 2), "127.0.0.1", port_of_text("2318"), "MPICH"),
    ),
    "open mpi in slurm": (
        captured.OPEN_MPI_IN_SLURM,
        Place(3, 4, (1, 2), "node01", port_of_text("1705050113"), "Open MPI"),
    ),
    "mpich in slurm": (
        captured.MPICH_IN_SLURM,
        Place(3, 4, (1, 2), "node01", 15000 + 4 * 16, "MPICH"),
    ),
    "kubeflow": (
        captured.KUBEFLOW,
        Place(1, 2, (0, 1), "job-node-0-0.job", 29500, "Kubeflow"),
    ),
    "skypilot": (
        captured.SKYPILOT,
        Place(
            1,
            2,
            (None, None),
            "10.0.0.4",
            port_of_text(captured.SKYPILOT["SKYPILOT_TASK_ID"]),
            "SkyPilot",
        ),
    ),
    "leader worker set": (
        captured.LEADER_WORKER_SET,
        Place(3, 4, (None, None), "vllm-0.vllm.default", 29500, "LeaderWorkerSet"),
    ),
    "indexed job": (
        captured.INDEXED_JOB,
        Place(2, 3, (None, None), "train-0.train", 29500, "indexed Job"),
    ),
    # One inside the other: the innermost starts the processes.
    "torchrun in srun": (
        {**captured.SLURM_STEP, **captured.TORCHRUN},
        Place(1, 2, (1, 2), "localhost", 37913, "torchrun"),
    ),
    "torchrun in a batch script": (
        {**captured.SLURM_BATCH, **captured.TORCHRUN},
        Place(1, 2, (1, 2), "localhost", 37913, "torchrun"),
    ),
    "torchrun in mpirun": (
        {**captured.OPEN_MPI_IN_SLURM, **captured.TORCHRUN},
        Place(1, 2, (1, 2), "localhost", 37913, "torchrun"),
    ),
    "torchrun in a pod": (
        {**captured.KUBEFLOW, **captured.TORCHRUN},
        Place(1, 2, (1, 2), "localhost", 37913, "torchrun"),
    ),
    "mpirun in a batch script of one node": (
        {**captured.SLURM_BATCH, **captured.OPEN_MPI},
        Place(1, 2, (1, 2), "127.0.0.1", port_of_text("478806017"), "Open MPI"),
    ),
    "mpirun in a pod": (
        {**captured.LEADER_WORKER_SET, **captured.OPEN_MPI},
        Place(1, 2, (1, 2), "127.0.0.1", port_of_text("478806017"), "Open MPI"),
    ),
    "open mpi in a step with pmi2": (
        {**captured.SLURM_STEP, **captured.SLURM_PMI2, **captured.OPEN_MPI},
        Place(1, 2, (1, 2), "127.0.0.1", port_of_text("478806017"), "Open MPI"),
    ),
    # What a person sets comes first, and may say a part only.
    "a meeting point by hand": (
        {**captured.SLURM_STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9000"},
        Place(2, 4, (2, 3), "10.0.0.1", 9000, "Slurm"),
    ),
    "a host by hand": (
        {**captured.SLURM_STEP, "MASTER_ADDR": "10.0.0.1"},
        Place(2, 4, (2, 3), "10.0.0.1", 15000 + 10 * 16, "Slurm"),
    ),
    "the same by hand": (
        {**captured.SLURM_STEP, "RANK": "2", "WORLD_SIZE": "4"},
        Place(2, 4, (2, 3), "node1", 15000 + 10 * 16, "Slurm"),
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_placement_is_read_from_each_launcher(case: str) -> None:
    environ, expected = PLACES[case]
    resolved = resolve(environ, launcher_pid=2318)
    local = (resolved.local_rank, resolved.local_world_size)
    assert (
        Place(
            resolved.require_number(Field.RANK, "RANK"),
            resolved.require_number(Field.WORLD_SIZE, "WORLD_SIZE"),
            local,
            resolved.host,
            resolved.port,
            resolved.launcher,
        )
        == expected
    )
    assert resolved.name == f"worker{expected.rank}"


def test_processes_of_a_step_share_one_meeting_point() -> None:
    """What differs between tasks must not go into the meeting point."""
    for task, node in ((0, 0), (3, 1)):
        environ = {
            **captured.SLURM_STEP,
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": f"node{node + 1}",
        }
        assert resolve(environ).require_address() == ("node1", 15160)


def test_mpirun_in_a_batch_script_has_one_meeting_point() -> None:
    """Some of its processes run inside of a step of Slurm, others outside."""
    on_the_first = {
        name: text
        for name, text in captured.OPEN_MPI_IN_SLURM.items()
        if "STEP" not in name
    }
    inside = resolve(captured.OPEN_MPI_IN_SLURM).require_address()
    assert resolve(on_the_first).require_address() == inside


@pytest.mark.parametrize("step", ["4294967291", "4294967290", ""])
def test_batch_script_is_not_one_of_its_tasks(step: str) -> None:
    resolved = resolve({**captured.SLURM_BATCH, "SLURM_STEP_ID": step})
    assert resolved.rank is None
    with pytest.raises(UsageError, match=r"job 10, but not in one .* by srun"):
        resolved.require_number(Field.RANK, "RANK")


def test_batch_script_of_a_single_task_is_that_task() -> None:
    environ = {**captured.SLURM_BATCH, "SLURM_NTASKS": "1", "SLURM_NPROCS": "1"}
    assert (resolve(environ).rank, resolve(environ).world_size) == (0, 1)


WITHOUT: Mapping[str, tuple[Mapping[str, str], str, Any]] = {
    "several processes in a pod": (
        {**captured.KUBEFLOW, "PET_NPROC_PER_NODE": "8", "JOB_COMPLETION_INDEX": ""},
        "rank is missing.*PET_NPROC_PER_NODE=8.*by torchrun",
        Field.RANK,
    ),
    "an elastic job": (
        {**captured.KUBEFLOW, "PET_NNODES": "1:4"},
        "world_size is missing.*PET_NNODES=1:4.*by torchrun",
        Field.WORLD_SIZE,
    ),
    "an indexed job": (
        {"JOB_COMPLETION_INDEX": "0"},
        "world_size is missing.*set WORLD_SIZE to its completions",
        Field.WORLD_SIZE,
    ),
    "no rank": ({}, "rank is missing: pass rank=..., or set RANK", Field.RANK),
    "several hosts": (
        {**captured.OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "8"},
        "env:// needs MASTER_ADDR .*-x MASTER_ADDR",
        None,
    ),
    "several hosts of MPICH": (
        {**captured.MPICH, "PMI_SIZE": "8"},
        "env:// needs MASTER_ADDR and MASTER_PORT .*-genv MASTER_ADDR",
        None,
    ),
    "no address": ({}, "env:// needs MASTER_ADDR and MASTER_PORT .*srun", None),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_missing_variable_is_reported_with_a_remedy(case: str) -> None:
    environ, words, field = WITHOUT[case]
    resolved = resolve(environ)

    def require() -> object:
        if field is None:
            return resolved.require_address()
        return resolved.require_number(field, field.value.upper())

    with pytest.raises(UsageError, match=words):
        require()


DISAGREEMENTS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "rank by hand and of a task": (
        {**captured.SLURM_STEP, "RANK": "0"},
        r"RANK=0 \(.*by hand\) and SLURM_PROCID=2 \(Slurm\) disagree on the rank",
    ),
    "size by hand and of a step": (
        {**captured.SLURM_STEP, "WORLD_SIZE": "8"},
        r"WORLD_SIZE=8 .* and SLURM_STEP_NUM_TASKS=4 \(Slurm\) disagree on the number",
    ),
    "rank by hand and of mpirun": (
        {**captured.OPEN_MPI, "RANK": "0"},
        r"RANK=0 .* and OMPI_COMM_WORLD_RANK=1 \(Open MPI\) disagree",
    ),
    "rank by hand and of MPICH": (
        {**captured.MPICH, "RANK": "0"},
        r"RANK=0 .* and PMI_RANK=1 \(MPICH\) disagree",
    ),
    "both of MPI": (
        {**captured.OPEN_MPI, **captured.MPICH, "PMI_RANK": "0"},
        r"OMPI_COMM_WORLD_RANK=1 .* and PMI_RANK=0 \(MPICH\) disagree",
    ),
    "local rank by hand": (
        {**captured.SLURM_STEP, "LOCAL_RANK": "0"},
        "LOCAL_RANK=0 .* and SLURM_LOCALID=2 .* on its host",
    ),
    "local size by hand": (
        {**captured.OPEN_MPI, "LOCAL_WORLD_SIZE": "3"},
        "LOCAL_WORLD_SIZE=3 .* and OMPI_COMM_WORLD_LOCAL_SIZE=2 .* on this host",
    ),
    "rank by hand and of a pod": (
        {**captured.KUBEFLOW, "RANK": "0"},
        r"RANK=0 .* and PET_NODE_RANK=1 \(Kubeflow\) disagree",
    ),
    "host by hand and of a pod": (
        {**captured.KUBEFLOW, "MASTER_ADDR": "a"},
        "MASTER_ADDR=a .* and PET_MASTER_ADDR=job-node-0-0.job .* the meeting point",
    ),
    "port by hand and of a pod": (
        {**captured.KUBEFLOW, "MASTER_PORT": "1"},
        "MASTER_PORT=1 .* and PET_MASTER_PORT=29500 .* the port of the meeting point",
    ),
    "two that speak of pods": (
        {**captured.KUBEFLOW, "JOB_COMPLETION_INDEX": "0"},
        r"PET_NODE_RANK=1 .* and JOB_COMPLETION_INDEX=0 \(indexed Job\) disagree",
    ),
    "a node and a group": (
        {**captured.SKYPILOT, **captured.LEADER_WORKER_SET},
        "SKYPILOT_NODE_RANK=1 .* and LWS_WORKER_INDEX=3",
    ),
    "Slurm's PMI and its step": (
        {**captured.SLURM_STEP, **captured.SLURM_PMI2, "PMI_RANK": "0"},
        "SLURM_PROCID=2 .* and PMI_RANK=0",
    ),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_contradicting_launchers_are_an_error_that_names_both(case: str) -> None:
    environ, words = DISAGREEMENTS[case]
    with pytest.raises(UsageError, match=words):
        resolve(environ)


def test_arguments_take_precedence_over_launcher_variables() -> None:
    environ, _ = DISAGREEMENTS["rank by hand and of a task"]
    resolved = resolve(environ, GivenPlace(rank=1, world_size=3, name="ps"))
    assert (resolved.rank, resolved.world_size, resolved.name) == (1, 3, "ps")
    assert resolved.values[Field.RANK].origin == "rank=1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "-1"),
        ("WORLD_SIZE", "two"),
        ("MASTER_PORT", "70000"),
        ("SLURM_PROCID", "0x1"),
        ("OMPI_COMM_WORLD_RANK", "1.5"),
        ("PMI_RANK", "\u0661"),
        ("LWS_GROUP_SIZE", "all"),
        ("JOB_COMPLETION_INDEX", "a"),
    ],
)
def test_non_numeric_variable_is_named(name: str, text: str) -> None:
    environ = {**captured.SLURM_STEP, name: text}
    with pytest.raises(UsageError, match=f"variable {name} must be a number"):
        resolve(environ)


@pytest.mark.parametrize(
    ("environ", "restart", "run"),
    [
        ({**captured.TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, 2, "79815e99-37dc"),
        ({**captured.SLURM_STEP, "SLURM_RESTART_COUNT": "1"}, 1, "10.0"),
        ({**captured.OPEN_MPI_IN_SLURM, "SLURM_RESTART_COUNT": "1"}, 1, "1705050113"),
        ({**captured.INDEXED_JOB, "JOBSET_RESTART_ATTEMPT": "3"}, 3, ""),
    ],
)
def test_restart_is_counted(environ: Mapping[str, str], restart: int, run: str) -> None:
    resolved = resolve(environ)
    assert resolved.restart == restart
    run_id = resolved.values.get(Field.RUN_ID)
    assert ("" if run_id is None else str(run_id.content)).startswith(run)


@pytest.mark.parametrize(
    ("more", "run"),
    [
        ({"ASYNCRPC_RUN_ID": "a"}, "a"),
        ({"ASYNCRPC_RUN_ID": "a", "TORCHELASTIC_RUN_ID": "b"}, "a"),
        ({"TORCHELASTIC_RUN_ID": "b"}, "b"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),  # torchrun's default, of all runs
        ({"ASYNCRPC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True"}, ""),
        ({}, ""),
    ],
)
def test_run_id_is_read_from_its_variables(more: Mapping[str, str], run: str) -> None:
    assert resolve({**captured.INDEXED_JOB, **more}).run_id == run


def test_launcher_of_asyncrpc_is_known_by_its_mark() -> None:
    environ = {**captured.TORCHRUN, "TORCHELASTIC_RUN_ID": "", "ASYNCRPC_LAUNCHER": "x"}
    assert resolve(environ).launcher == "asyncrpc run"
    assert resolve(environ).is_served
    in_a_task = resolve({**captured.SLURM_STEP, **environ})
    assert (in_a_task.launcher, in_a_task.rank) == ("asyncrpc run", 1)
    assert in_a_task.outer == ("Slurm",)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[08-10]", ["node08", "node09", "node10"]),
        (
            "a[01-02,7]b[1-2],c",
            [*["a01b1", "a01b2", "a02b1", "a02b2", "a7b1", "a7b2", "c"]],
        ),
        ("gpu-[1,3].cluster.org", ["gpu-1.cluster.org", "gpu-3.cluster.org"]),
        ("a , b,", ["a", "b"]),
    ],
)
def test_host_list_is_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a[1-2", "brackets that do not match"),
        ("a1-2]", "brackets that do not match"),
        ("a[[1]]", "brackets that do not match"),
        ("a[x]", "range 'x'"),
        ("a[]", "range ''"),
        ("a[3-1]", "empty or too long"),
        ("a[0-99999999]", "empty or too long"),
        ("a[0-999]b[0-999]", "more than 65536 hosts"),
    ],
)
def test_malformed_host_list_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        expand_hosts(text)


def test_empty_host_list_has_no_first_host() -> None:
    with pytest.raises(UsageError, match="has no host"):
        first_host(",")


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("3(x2),1", [3, 3, 1]), ("1(x2)", [1, 1])]
)
def test_task_counts_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "3(2)", "1(x999999)"])
def test_malformed_task_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand_counts(text)
