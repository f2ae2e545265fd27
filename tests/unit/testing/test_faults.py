"""A fault strikes the process that is named, where it is named, and no other."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys

import pytest

from asyncrpc.errors import UsageError
from asyncrpc.testing.faults import FaultScript, InjectedError


def test_fault_strikes_the_named_point_only() -> None:
    faults = FaultScript()
    faults.at(rank=2, step=5).fail("disk full")
    faults.reached(rank=2, step=4)
    faults.reached(rank=1, step=5)
    with pytest.raises(InjectedError, match="disk full"):
        faults.reached(rank=2, step=5)


def test_fault_script_can_be_pickled() -> None:
    faults = FaultScript()
    faults.at(rank=0, step=0).fail("there too")
    with pytest.raises(InjectedError, match="there too"):
        pickle.loads(pickle.dumps(faults)).reached(rank=0, step=0)


def test_point_has_one_fault_at_most() -> None:
    faults = FaultScript()
    faults.at(rank=0, step=1).kill()
    with pytest.raises(UsageError, match="rank 0 already has a fault at step 1"):
        faults.at(rank=0, step=1)


@pytest.mark.parametrize(
    ("fault", "status"), [("kill()", -signal.SIGKILL), ("exit(3)", 3)]
)
def test_process_ends_as_its_script_says(fault: str, status: int) -> None:
    program = (
        "from asyncrpc.testing.faults import FaultScript as Script\n"
        f"script = Script(); script.at(rank=0, step=0).{fault}\n"
        "script.reached(rank=0, step=0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=300)
    assert ended.returncode == status
