"""What a cluster shows of itself: a line of text, and a table in a notebook.

It asks no worker: what it shows is known to the program, or to this host.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Final

from asyncrpc.api import Worker
from asyncrpc.clusters import machine as m
from asyncrpc.clusters.code.service import SERVICE as CODE_SERVICE
from asyncrpc.clusters.opening import OpenedCluster
from asyncrpc.clusters.roster import ClusterWorker
from asyncrpc.clusters.service import SERVICE
from asyncrpc.core.html import Cell, State, Tone, panel
from asyncrpc.extend import host_of
from asyncrpc.tools.checkup.machine.resources import size_of

RATE_WINDOW_S: Final = 5.0
EVENTS_MAX: Final = 2_000  # the newest calls, of which the rates are made
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_COLUMNS: Final = ("worker", "state", "pid", "host", "memory", "calls/s")
_NOTE: Final = f"calls/s: of this program, in the last {RATE_WINDOW_S:g} s"
_STATES: Final = m.ClusterWorkerState
_TONES: Final[Mapping[m.ClusterWorkerState, Tone]] = {
    _STATES.RUNNING: "good",
    _STATES.STARTING: "busy",
    _STATES.WAITING: "busy",
    _STATES.STOPPING: "busy",
    _STATES.ENDED: "off",
}


def summary_of(count: int, opened: OpenedCluster | None) -> str:
    """Return the state of a cluster in a few words.

    Args:
        count: of the workers that it starts with.
        opened: None: the cluster has not been entered.
    """
    if opened is None:
        return f"{_workers(count)}, not entered"
    if opened.worker.is_closed:
        return "ended"
    roster = opened.roster
    return f"{_workers(len(roster.names))}, {len(roster.running)} running"


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def cluster_html(name: str, summary: str, opened: OpenedCluster | None) -> str:
    """Return a table of the workers of a cluster."""
    title = f"Cluster {name!r}"
    if opened is None or opened.worker.is_closed:
        return panel(title, summary)
    worker, roster = opened.worker, opened.roster
    rates = _calls_per_s(worker)
    rows = [_row(member, rates) for member in roster.members.values()]
    return panel(title, summary, columns=_COLUMNS, rows=rows, note=_NOTE)


def _calls_per_s(worker: Worker) -> dict[str, float]:
    """Return how many calls of the program each worker has answered lately."""
    recorder = host_of(worker).recorder
    now_s = recorder.now_s()
    ended = recorder.calls.newest(now_s - RATE_WINDOW_S, EVENTS_MAX)
    over_s = RATE_WINDOW_S
    if len(ended) == EVENTS_MAX:  # older ones were not read
        over_s = max(now_s - ended[0].at_s, 1e-9)
    own = (f"{SERVICE}.", f"{CODE_SERVICE}.")  # not of the program
    counts = Counter(c.to.name for c in ended if not c.function.startswith(own))
    return {name: count / over_s for name, count in counts.items()}


def _row(member: ClusterWorker, rates: Mapping[str, float]) -> list[Cell]:
    state = member.machine.state
    is_bad = state is _STATES.ENDED and bool(member.why)
    tone = "bad" if is_bad else _TONES[state]
    process = member.process
    pid = None
    if process is not None and process.pid.done() and not process.ended.done():
        pid = process.pid.result()
    is_here = member.host is not None and not member.host.name
    return [
        member.name,
        State(state.value, tone, "" if member.is_running else member.why),
        None if pid is None else str(pid),
        None if member.host is None else member.host.name or os.uname().nodename,
        _memory_of(pid) if is_here and pid is not None else None,
        rates.get(member.name, 0.0) if member.is_running else None,
    ]


def _memory_of(pid: int) -> str | None:
    """Return the resident memory of a process of this host."""
    try:  # the kernel answers at once, so the loop may ask
        descriptor = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it has ended
        return None
    try:
        pages = os.read(descriptor, 256).split()[1]
    except (OSError, IndexError):  # likewise
        return None
    finally:
        os.close(descriptor)
    return size_of(int(pages) * _PAGE_BYTES)
