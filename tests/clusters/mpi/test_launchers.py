"""Workers under mpirun: groups stay apart, wrong variables are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.mpi.launchers import LAUNCHERS, ended, python, started

TELL = """
import os, sys
import asyncrpc

async def main():
    async with asyncrpc.Worker() as worker:
        rank = (worker.rank + 1) % worker.world_size
        value = await worker.peer(rank).call(os.getenv, "GROUP_OF_TEST")
        mine = os.environ["GROUP_OF_TEST"]
        line = f"{worker.name} of {worker.world_size}: {mine} hears {value}\\n"
        os.write(1, line.encode())  # whole: all write to one pipe
        await worker.barrier()

asyncrpc.run(main())
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    written = tmp_path / "tell.py"
    written.write_text(TELL)
    return str(written)


def test_groups_started_at_once_on_a_host_stay_apart(script: str) -> None:
    """Two of each launcher."""
    groups = {
        f"{launcher}-{number}": launcher for launcher in LAUNCHERS for number in "ab"
    }
    running = {
        group: started(
            launcher, "-n", "2", *python(script), environ={"GROUP_OF_TEST": group}
        )
        for group, launcher in groups.items()
    }
    for group, process in running.items():
        code, said, errors = ended(process)
        assert code == 0, errors
        assert sorted(said.splitlines()) == [
            f"worker{rank} of 2: {group} hears {group}" for rank in range(2)
        ]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_shell_may_be_between_the_launcher_and_the_program(
    launcher: str, script: str
) -> None:
    """MPICH's processes know their run by its launcher, not by their parent."""
    line = f"true; {' '.join(python(script))}; exit $?"
    process = started(
        launcher, "-n", "2", "sh", "-c", line, environ={"GROUP_OF_TEST": "g"}
    )
    code, said, errors = ended(process)
    assert code == 0, errors
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize(
    ("launcher", "variable"),
    [(LAUNCHERS[0], "OMPI_COMM_WORLD_RANK="), (LAUNCHERS[1], "PMI_RANK=")],
)
def test_a_variable_that_is_left_over_is_named(
    launcher: str, variable: str, script: str
) -> None:
    left_over = {"RANK": "7", "GROUP_OF_TEST": "g"}
    process = started(launcher, "-n", "2", *python(script), environ=left_over)
    code, _, errors = ended(process)
    assert code != 0
    assert "RANK=7 (torchrun's variables, set by hand) and" in errors
    assert variable in errors
    assert "disagree on the rank of this process" in errors
