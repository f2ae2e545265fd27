"""What was broken in a run, between whom, and from when to when.

What a fault explains is asked of its causes, not of the clock alone.  A life that was
given up was killed; or two workers could not hear each other for so long that one may
give up the other, and the link that was lost is one that they had then.  A cut explains
nothing: a link is resumed, and a dial is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Final

# Within this after one silence has ended, another goes on with it: a connection that
# broke is dialed again after at most so long.
APART_S: Final = 2.0
CUT: Final = "cut"
START: Final = "start"  # the first of a worker: who is called before is not there yet


@dataclass(eq=False, slots=True)
class Fault:
    kind: str  # such as `SIGKILL` or `partition, long`
    names: frozenset[str]  # of one worker, or of the two that are parted
    begun_s: float  # not after this, by the host's monotonic clock
    ended_s: float = inf  # not before that
    life: str = ""  # label of the process that was killed; else empty

    @property
    def is_silence(self) -> bool:
        return self.kind.startswith(("SIGSTOP", "partition"))

    @property
    def is_down(self) -> bool:
        return bool(self.life) or self.kind == START

    def touches(self, worker: str, other: str) -> bool:
        return self.names <= {worker, other}

    def overlaps(self, begun_s: float, ended_s: float) -> bool:
        """Say whether it lasts at some time between these two."""
        return self.begun_s <= ended_s and begun_s <= self.ended_s


@dataclass(slots=True)
class History:
    silence_s: float  # shorter ones make no worker give up another
    dial_s: float  # how long one attempt to connect may take
    # In the order of their beginnings.
    faults: list[Fault] = field(default_factory=list)
    left_s: float = inf  # when the workers were told to leave

    def begin(
        self, kind: str, *names: str, at_s: float, life: str = ""
    ) -> Callable[[float], None]:
        """Enter a fault; return what enters its end."""
        fault = Fault(kind, frozenset(names), at_s, life=life)
        self.faults.append(fault)

        def end(at_s: float) -> None:
            fault.ended_s = at_s

        return end

    def killed(self, life: str, by_s: float) -> bool:
        return any(
            fault.life == life and fault.begun_s <= by_s for fault in self.faults
        )

    def stopped(self, name: str, begun_s: float, ended_s: float) -> bool:
        """Say whether a worker's process was stopped, at some time between."""
        return any(
            fault.kind.startswith("SIGSTOP")
            and name in fault.names
            and fault.overlaps(begun_s, ended_s)
            for fault in self.faults
        )

    def parted(self, worker: str, other: str, begun_s: float, ended_s: float) -> bool:
        """Say whether two workers were silent for too long, at some time between."""
        return any(
            end - begin >= self.silence_s and begin <= ended_s and begun_s <= end
            for begin, end in self._silences(worker, other)
        )

    def disturbed(
        self, worker: str, other: str, begun_s: float, ended_s: float
    ) -> bool:
        """Say whether there was any fault between two workers, at some time between."""
        return any(
            fault.touches(worker, other) and fault.overlaps(begun_s, ended_s)
            for fault in self.faults
        )

    def unreachable(
        self, worker: str, other: str, begun_s: float, ended_s: float
    ) -> bool:
        """Say whether a dial that ended between may have failed for a fault.

        A dial that began before, and meets silence, fails late; one that meets nobody,
        at once.
        """
        return any(
            (fault.is_silence or fault.is_down)
            and fault.touches(worker, other)
            and fault.overlaps(begun_s - self.dial_s * fault.is_silence, ended_s)
            for fault in self.faults
        )

    def lines(self) -> list[str]:
        """Return one line for each fault, to be read beside the logs."""
        return [
            f"{fault.begun_s:.2f} to {fault.ended_s:.2f} {fault.kind}: "
            f"{', '.join(sorted(fault.names))} {fault.life}"
            for fault in self.faults
        ]

    def _silences(self, worker: str, other: str) -> Iterator[tuple[float, float]]:
        """Return from when to when two workers could not hear each other."""
        begin = end = -inf
        for fault in sorted(self.faults, key=lambda fault: fault.begun_s):
            if not (fault.is_silence and fault.touches(worker, other)):
                continue
            if fault.begun_s > end + APART_S:
                yield begin, end
                begin = fault.begun_s
            end = max(end, fault.ended_s)
        yield begin, end
