"""Logs that survive SIGKILL: each line is one write to a file opened for appending.

A worker writes two.  `ran` has what ran on it; `told` what its own calls were and what
it was told of them:

    B call              a function has begun             (ran)
    M call limit what   a call is made                   (told)
    C call outcome took error                            (told)
    X call              given up: nobody is told         (told)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from asyncrpc import Outcome

RAN: Final = "ran"
TOLD: Final = "told"


class Log:
    """One file of one process."""

    def __init__(self, folder: Path, kind: str, name: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        path = folder / f"{name}.{os.getpid()}.{kind}"
        self._descriptor = os.open(path, flags, 0o600)

    def write(self, *words: object) -> None:
        """Append a line; once this returns the kernel has it."""
        line = " ".join(map(str, words)) + "\n"
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """End it."""
        os.close(self._descriptor)


@dataclass(slots=True)
class Call:
    """All that is known of one call.

    Attributes:
        what: its kind and its callee.
        limit_s: what it was allowed, in seconds.
        ran: the processes on which it ran, as often as it did.
        outcome: what its caller was told; None if it was told nothing.
        took_s: how long that took, of the time that the caller was running.
        error: class of the error, or empty.
        is_excused: the caller gave up, or died first.
    """

    what: str = "?"
    limit_s: float = 0.0
    ran: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    took_s: float = 0.0
    error: str = ""
    is_excused: bool = False


def read_all(folder: Path, dead: set[str]) -> dict[str, Call]:
    """Read every log; what the processes `dead` were told does not matter."""
    calls: dict[str, Call] = {}
    for path in sorted(folder.iterdir()):
        process, _, kind = path.name.rpartition(".")
        if kind not in (RAN, TOLD):
            continue
        for word, call_id, *rest in _lines(path):
            call = calls.setdefault(call_id, Call())
            _take(call, word, rest, process)
            if kind == TOLD and process in dead and call.outcome is None:
                call.is_excused = True
    return calls


def _take(call: Call, word: str, rest: list[str], process: str) -> None:
    match word, rest:
        case "B", []:
            call.ran.append(process)
        case "M", [limit, *what]:
            call.limit_s, call.what = float(limit), " ".join(what)
        case "C", [outcome, took, *error]:
            call.outcome, call.took_s = Outcome[outcome], float(took)
            call.error = " ".join(error)
        case "X", []:
            call.is_excused = True
        case _:
            raise ValueError(f"a line that is none: {word} {rest}")


def _lines(path: Path) -> Iterator[list[str]]:
    text = path.read_text(encoding="utf-8")
    whole, _, _ = text.rpartition("\n")  # a killed process leaves half a line at most
    for line in whole.splitlines():
        yield line.split()
