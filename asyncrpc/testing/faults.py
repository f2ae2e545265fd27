"""Faults in real processes, as a script that reads like sentences.

    faults = FaultScript()
    faults.at(rank=2, step=5).kill()
    faults.at(rank=0, step=7).fail("disk full")

Pass the script to every process (it can be pickled) and call `reached` at each step:
the named process acts on itself there, at a point of the program and not of time.
For faults of a network, see `testing.network`.
"""

from __future__ import annotations

import enum
import os
import signal
from dataclasses import dataclass

from asyncrpc.errors import UsageError


class InjectedError(Exception):
    """Raised by a process because its fault script says so."""


class _FaultKind(enum.Enum):
    KILL = "kill"
    STOP = "stop"
    EXIT = "exit"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one rank at one step."""

    kind: _FaultKind
    code: int = 0
    message: str = ""

    def strike(self) -> None:
        """Inject the fault into this process."""
        match self.kind:
            case _FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case _FaultKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case _FaultKind.EXIT:
                os._exit(self.code)
            case _FaultKind.FAIL:
                raise InjectedError(self.message)


class FaultScript:
    """Which faults happen in which processes, and at which steps."""

    def __init__(self) -> None:
        self._faults: dict[tuple[int, int], Fault] = {}

    def at(self, *, rank: int, step: int) -> Point:
        """Name a point: the process of this rank, when it reaches this step."""
        if (rank, step) in self._faults:
            raise UsageError(f"rank {rank} already has a fault at step {step}")
        return Point(self._faults, (rank, step))

    def reached(self, *, rank: int, step: int) -> None:
        """Note that the process of this rank is at this step, and inject its fault."""
        fault = self._faults.get((rank, step))
        if fault is not None:
            fault.strike()


@dataclass(frozen=True, slots=True)
class Point:
    """A place in the program of one process, for which to choose a fault."""

    _faults: dict[tuple[int, int], Fault]
    _where: tuple[int, int]

    def kill(self) -> None:
        """Send SIGKILL: gone at once, nothing is cleaned up."""
        self._faults[self._where] = Fault(_FaultKind.KILL)

    def stop(self) -> None:
        """Send SIGSTOP: the process is there, but silent, until it gets SIGCONT."""
        self._faults[self._where] = Fault(_FaultKind.STOP)

    def exit(self, code: int) -> None:
        """Leave with this status, without cleaning up."""
        self._faults[self._where] = Fault(_FaultKind.EXIT, code=code)

    def fail(self, message: str) -> None:
        """Raise `InjectedError`."""
        self._faults[self._where] = Fault(_FaultKind.FAIL, message=message)
