"""The overview: a row for each worker, their links, totals, and the last minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncrpc.serving.dashboard.machine.answers import known, known_age, known_bytes
from asyncrpc.serving.dashboard.machine.paging import Row
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX, Slices
from asyncrpc.tools.inspection.records import NoAnswer, Trouble
from asyncrpc.tools.inspection.summaries import LinkSummary, WorkerSummary

HISTORY_S: Final = 600.0
MOMENTS_MAX: Final = 600
MATRIX_MAX: Final = 32  # rows and columns
BUSY_S: Final = 0.1  # duration of one iteration of an event loop
STATES: Final[Mapping[Trouble, str]] = {
    Trouble.BLOCKED: "stalled",
    Trouble.HELD: "stalled",
    Trouble.STOPPED: "stopped",
    Trouble.GONE: "stopped",
    Trouble.SILENT: "silent",
}
KEYS: Final = (
    *("worker", "rank", "host", "pid", "state", "since_s", "made_per_s"),
    *("served_per_s", "failed_per_s", "p50_s", "p99_s", "bytes_per_s", "lag_s"),
    *("memory_bytes", "slab_bytes", "references", "tasks", "calls_under_way"),
)


class Moment(NamedTuple):
    """A group at one moment.

    Attributes:
        at_s: when, in seconds since 1970.
        made_per_s: calls that its workers made; None: beyond the range of numbers.
        p99_s: of the calls of the slowest worker; None: there were no calls.
    """

    at_s: float
    made_per_s: float | None
    p99_s: float | None
    memory_bytes: int


class GroupHistory:
    """Moments, the oldest first; those older than `HISTORY_S` are forgotten."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=MOMENTS_MAX)

    def add(self, moment: Moment) -> None:
        """Add a moment; drop later ones, which exist if the clock was set back."""
        while self._moments and self._moments[-1].at_s > moment.at_s:
            self._moments.pop()
        self._moments.append(moment)
        while self._moments[0].at_s < moment.at_s - HISTORY_S:
            self._moments.popleft()

    def columns(self) -> dict[str, list[Any]]:
        """Return the moments column by column."""
        return {
            name: [moment[place] for moment in self._moments]
            for place, name in enumerate(Moment._fields)
        }


def row_of(name: str, rank: int, summary: WorkerSummary) -> Row:
    """Return the row of a worker that has answered."""
    outgoing, served = summary.rates.made, summary.rates.served
    return {
        "worker": name,
        "rank": _rank(rank),
        "host": summary.host,
        "pid": summary.pid,
        "state": state_of(summary),
        "since_s": known_age(summary.running_s),
        "made_per_s": known(outgoing.per_s),
        "served_per_s": known(served.per_s),
        "failed_per_s": known(outgoing.failed_per_s),
        "p50_s": known(outgoing.p50_s),
        "p99_s": known(outgoing.p99_s),
        "bytes_per_s": known(outgoing.bytes_per_s),
        "lag_s": known(summary.lag_s),
        "memory_bytes": known_bytes(summary.memory_bytes),
        "slab_bytes": summary.slab_bytes,
        "references": summary.references,
        "tasks": summary.tasks,
        "calls_under_way": summary.calls_made,
    }


def state_of(summary: WorkerSummary) -> str:
    """Return the state of a worker that has answered."""
    if summary.is_draining:
        return "draining"
    return "busy" if summary.lag_s >= BUSY_S else "well"


def silent_row(name: str, rank: int, silent: NoAnswer) -> Row:
    """Return the row of a worker that has not answered."""
    row: dict[str, Any] = dict.fromkeys(KEYS)
    row |= {"worker": name, "rank": _rank(rank), "state": STATES[silent.trouble]}
    return row


def _rank(rank: int) -> int | None:
    return None if rank < 0 else rank


def totals_of(rows: Iterable[Row]) -> Slices[dict[str, Any]]:
    """Return the totals of all workers, in slices.

    Workers that share a process share its memory, which counts once.
    """
    sums = dict.fromkeys(("made", "served", "failed", "bytes"), 0.0)
    references, worst_s = 0, list[float]()
    processes: dict[tuple[Any, Any], int] = {}
    for place, row in enumerate(rows, 1):
        if not place % SLICE_MAX:
            yield SLICE_MAX
        if row["pid"] is None:  # it has not answered
            continue
        for name in sums:
            sums[name] += row[f"{name}_per_s"] or 0.0
        references += row["references"]
        processes[row["host"], row["pid"]] = row["memory_bytes"] or 0
        if row["p99_s"] is not None:
            worst_s.append(row["p99_s"])
    return {
        "calls_made_per_s": known(sums["made"]),
        "calls_served_per_s": known(sums["served"]),
        "failed_per_s": known(sums["failed"]),
        "bytes_per_s": known(sums["bytes"]),
        "memory_bytes": sum(processes.values()),
        "references": references,
        "p99_s": max(worst_s, default=None),
    }


def moment_of(at_s: float, totals: Mapping[str, Any]) -> Moment:
    """Return the part of a look that the history keeps."""
    calls_per_s, memory = totals["calls_made_per_s"], totals["memory_bytes"]
    return Moment(at_s, calls_per_s, totals["p99_s"], memory)


def matrix_of(
    shown: Sequence[str], links: Mapping[str, Sequence[LinkSummary]], total: int
) -> dict[str, Any]:
    """Return the links between workers: a row for each, a cell for each other."""
    names = list(shown[:MATRIX_MAX])
    cells = []
    for name in names:
        by_peer = {link.peer: link for link in links.get(name, ()) if link.peer != name}
        cells.append([_cell(by_peer.get(other)) for other in names])
    return {"workers": names, "cells": cells, "left_out": max(0, total - len(names))}


def _cell(link: LinkSummary | None) -> dict[str, Any] | None:
    if link is None:
        return None
    return {
        "state": "broken" if link.is_broken else "open",
        "in_flight": link.in_flight,
        "calls_per_s": known(link.calls_per_s),
        "bytes_per_s": known(link.bytes_per_s),
        "p50_s": known(link.p50_s),
    }
