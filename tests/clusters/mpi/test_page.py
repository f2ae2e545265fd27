"""What docs/how-to/run-on-mpi.md shows runs under both launchers, as shown."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.clusters.mpi.launchers import LAUNCHERS, ROOT, ended, started
from tests.ports import free_port

PAGE = (ROOT / "docs/how-to/run-on-mpi.md").read_text("utf-8")
PROGRAM = re.compile(r"^```python no-run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(
    r"^\$ (mpirun -n 4 python squares.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (source,) = PROGRAM.findall(PAGE)
    written = tmp_path / "squares.py"
    written.write_text(source)
    return written


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_program_runs_by_the_command_that_is_shown(
    launcher: str, script: Path
) -> None:
    command, output = SHOWN.findall(PAGE)[0]
    words = command.replace("python", sys.executable).split()
    words[words.index("squares.py")] = str(script)
    code, said, errors = ended(started(launcher, *words[1:]))
    assert (code, said) == (0, output), errors


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_meeting_point_is_given_as_shown(launcher: str, script: Path) -> None:
    """The hosts are one here; the variables are taken all the same."""
    kind = "# Open MPI" if "openmpi" in launcher else "# MPICH"
    (line,) = (text for text in PAGE.splitlines() if text.endswith(kind))
    command = line.removeprefix("$ mpirun ").partition("  #")[0]
    for shown, here in (
        ("node1", "127.0.0.1"),
        ("29500", str(free_port())),
        ("python", sys.executable),
        ("squares.py", str(script)),
    ):
        command = command.replace(shown, here)
    secret = {"ASYNCRPC_SECRET": "of the test, which is long enough"}
    code, said, errors = ended(started(launcher, *command.split(), environ=secret))
    assert code == 0, errors
    assert said.splitlines()[-1] == "worker3 of 4: 9"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_doctor_names_the_launcher(launcher: str) -> None:
    assert "`mpirun -n 1 asyncrpc doctor`" in PAGE
    doctor = (sys.executable, "-m", "asyncrpc", "doctor", "--json")
    code, said, errors = ended(started(launcher, "-n", "1", *doctor))
    assert code == 0, said + errors
    report = json.loads(said)
    name = {"mpirun.openmpi": "Open MPI", "mpirun.mpich": "MPICH"}[launcher]
    assert (report["launcher"], report["problems"]) == (name, [])
    values = {entry["field"]: entry["value"] for entry in report["values"]}
    assert (values["rank"], values["world_size"], values["host"]) == (0, 1, "127.0.0.1")


def test_mpi_launchers_are_installed() -> None:
    """`tests/clusters/install.sh` installs them."""
    assert all(shutil.which(launcher) for launcher in LAUNCHERS)
