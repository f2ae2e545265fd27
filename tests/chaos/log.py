"""Logs that survive SIGKILL: each line is one write to a file opened for appending.

A worker writes two.  `ran` has what ran on it:

    B call                                  a function has begun

`told` has what its own calls were, and what it was told of them and of its peers, in
the order in which it happened there.  `at` is in seconds of the host's monotonic clock,
which all processes share:

    I life                                  this worker's incarnation
    M call at since limit parties what      a call is made
    C call outcome at took end error text   that it has ended
    X call                                  given up: nobody is told
    L peer life at reason                   it has given up this life of a peer
    K peer life at                          that is here again
    F problem                               a finding, whatever becomes of the worker
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from asyncrpc import Outcome

RAN: Final = "ran"
TOLD: Final = "told"
MISTAKE: Final = "mistake"  # the first word of what a wrong call is

# The same in every process of a host, whatever its network namespace.
now_s: Final = time.monotonic


class End(enum.Enum):
    """How a call ended, as its caller sees it."""

    AS_EXPECTED = "expected"  # a right call returned; a wrong one raised its own error
    LATE = "late"  # its time was over
    LOST = "lost"  # a worker, a connection or a value is said to be gone
    STRANGE = "strange"  # anything else: a finding


class Log:
    def __init__(self, folder: Path, kind: str, name: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        path = folder / f"{name}.{os.getpid()}.{kind}"
        self._descriptor = os.open(path, flags, 0o600)

    def write(self, *words: object) -> None:
        """Append a line; once this returns the kernel has it."""
        line = " ".join(map(str, words)) + "\n"
        os.write(self._descriptor, line.encode(errors="backslashreplace"))

    def close(self) -> None:
        os.close(self._descriptor)


@dataclass(slots=True)
class Call:
    """All that is known of one call."""

    what: str = "?"  # its kind; of a wrong one, after the word `mistake`
    limit_s: float = 0.0  # what it was allowed, in seconds
    # The processes on which it ran, as often as it did.
    ran: list[str] = field(default_factory=list)
    # What its caller was told; None if it was told nothing.
    outcome: Outcome | None = None
    took_s: float = 0.0  # how long that took, of the time that the caller was running
    error: str = ""  # class of the error, or empty
    text: str = ""  # of the error, in short
    is_excused: bool = False  # the caller gave up, or died first
    caller: str = ""  # label of the process that made it
    # Names of the workers that it needs: its callee first.
    parties: tuple[str, ...] = ()
    since_s: float = 0.0  # when what it needs was made; it needs no link that is older
    begun_s: float = 0.0  # when it was made
    ended_s: float = 0.0  # when its caller was told
    end: End = End.AS_EXPECTED  # how it ended

    @property
    def kind(self) -> str:
        """What it was, if it was a mistake; else empty."""
        first, _, rest = self.what.partition(" ")
        return rest if first == MISTAKE else ""


@dataclass(frozen=True, slots=True)
class Loss:
    """One worker has given up one life of another."""

    by: str  # label of the process that did
    peer: str  # name of the worker that it gave up
    life: str  # the incarnation of that
    linked_s: float  # not before this the two were connected
    at_s: float  # when it was given up
    reason: str  # as the worker said


@dataclass(slots=True)
class Story:
    """What all logs of a run say."""

    calls: dict[str, Call] = field(default_factory=dict)  # by their numbers
    losses: list[Loss] = field(default_factory=list)  # in no order
    # Labels of processes, by their incarnations.
    lives: dict[str, str] = field(default_factory=dict)
    # What the workers have found themselves.
    findings: list[str] = field(default_factory=list)


def read_all(folder: Path, dead: set[str]) -> Story:
    """Read every log; what the processes `dead` were told does not matter."""
    story = Story()
    for path in sorted(folder.iterdir()):
        process, _, kind = path.name.rpartition(".")
        if kind not in (RAN, TOLD):
            continue
        back_s: dict[str, float] = {}  # when lives of peers were seen again
        for word, subject, *rest in _lines(path):
            match word:
                case "I":
                    story.lives[subject] = process
                case "F":
                    story.findings.append(" ".join([f"{process}:", subject, *rest]))
                case "L" | "K":
                    _take_peer(story, process, word, [subject, *rest], back_s)
                case _:
                    call = story.calls.setdefault(subject, Call())
                    _take(call, word, rest, process)
                    if kind == TOLD and process in dead and call.outcome is None:
                        call.is_excused = True
    return story


def _take_peer(
    story: Story, process: str, word: str, rest: list[str], back_s: dict[str, float]
) -> None:
    peer, life, at, *reason = rest
    if word == "K":
        back_s[life] = float(at)
    else:
        linked_s, why = back_s.get(life, 0.0), " ".join(reason)
        story.losses.append(Loss(process, peer, life, linked_s, float(at), why))


def _take(call: Call, word: str, rest: list[str], process: str) -> None:
    match word, rest:
        case "B", []:
            call.ran.append(process)
        case "M", [at, since, limit, parties, *what]:
            call.caller, call.parties = process, tuple(parties.split(","))
            call.begun_s, call.since_s = float(at), float(since)
            call.limit_s, call.what = float(limit), " ".join(what)
        case "C", [outcome, at, took, end, *error]:
            call.outcome, call.end = Outcome[outcome], End[end]
            call.ended_s, call.took_s = float(at), float(took)
            call.error, call.text = (error or [""])[0], " ".join(error[1:])
        case "X", []:
            call.is_excused = True
        case _:
            raise ValueError(f"a line that is none: {word} {rest}")


def _lines(path: Path) -> Iterator[list[str]]:
    text = path.read_text(encoding="utf-8")
    whole, _, _ = text.rpartition("\n")  # a killed process leaves half a line at most
    for line in filter(None, whole.split("\n")):
        yield line.split(" ")
