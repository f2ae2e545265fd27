"""`asyncrpc dump` and `timeline`: what a group remembers, written to a file."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrpc.cli.observing import (
    TROUBLE,
    add_observing,
    check_workers,
    plain,
    print_json,
    print_silent,
    silent_records,
)
from asyncrpc.clock import NS_PER_S, Clock, wall_ns
from asyncrpc.errors import UsageError
from asyncrpc.inspection.events import KIND_NAMES
from asyncrpc.inspection.group import view_of
from asyncrpc.inspection.group_answers import events_of
from asyncrpc.inspection.machine.timeline import (
    WorkerEvents,
    beside_profile,
    timeline_of,
)
from asyncrpc.inspection.observer import Observer


def add_dump(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc dump`."""
    parser.description = (
        "Write all that a group tells into a file: the tasks, threads and calls of "
        "each worker, and its last events.  It is JSON with --json and without.  The "
        "exit code is 0 if all have told it, else 1."
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to (default: the standard output)",
    )
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        choices=KIND_NAMES,
        help="only these events; may be repeated",
    )
    add_observing(parser, _dump)


def add_timeline(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc timeline`."""
    parser.description = (
        "Write the last events of a group as a timeline for ui.perfetto.dev or "
        "Chrome's about:tracing, with arrows from calls to functions.  The exit code "
        "is 0 if all have told theirs, else 1.  With --json, what was written is told "
        "as JSON."
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="timeline.json",
        help="where to (default: timeline.json)",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="add it to what torch's profiler has exported (export_chrome_trace)",
    )
    add_observing(parser, _timeline)


async def _dump(observer: Observer, address: str, given: argparse.Namespace) -> int:
    view = await view_of(observer, address, names=given.worker, is_thorough=False)
    check_workers(given.worker, view.members)
    found = await events_of(observer, address, names=given.worker, kinds=given.kind)
    silent = {**found.silent, **view.silent}
    record = {
        "workers": {
            name: {
                "snapshot": plain(view.snapshots.get(name)),
                "events": _events_record(found.answers.get(name)),
            }
            for name in sorted({*view.snapshots, *found.answers})
        },
        "silent": silent_records(silent),
    }
    await asyncio.to_thread(_write, given.output, record)
    print_silent(silent)
    return TROUBLE if silent else 0


def _events_record(found: WorkerEvents | None) -> Any:
    if found is None:
        return None
    clock = {"offset_s": found.offset_s, "error_s": found.error_s}
    return {"clock": clock, **plain(found.recent)}


async def _timeline(observer: Observer, address: str, given: argparse.Namespace) -> int:
    profile = await asyncio.to_thread(_profile, given.profile)
    found = await events_of(observer, address, names=given.worker)
    check_workers(given.worker, found.members)
    workers = [found.answers[name] for name in sorted(found.answers)]
    zero_s = min((_first_s(one) for one in workers), default=0.0)
    events = timeline_of(workers, zero_s=zero_s)
    # What the reader's clock showed at a moment of the wall's.
    zero_wall_ns = wall_ns() - round((Clock().now_s() - zero_s) * NS_PER_S)
    record = beside_profile(events, profile, zero_wall_ns=zero_wall_ns)
    await asyncio.to_thread(_write, given.output, record)
    spans = sum(one["ph"] == "X" for one in events)
    arrows = sum(one["ph"] == "f" for one in events)
    error_s = max((one.error_s for one in workers), default=0.0)
    if given.json:
        told = {"file": given.output, "workers": len(workers), "spans": spans}
        told |= {"arrows": arrows, "clock_error_s": error_s}
        print_json({**told, "silent": silent_records(found.silent)})
        return TROUBLE if found.silent else 0
    clocks = f"clocks to within {error_s * 1e6:.0f} us" if error_s else "one clock"
    print(
        f"{given.output}: {len(workers)} workers, {spans} spans, {arrows} arrows, "
        f"{clocks}; open it in ui.perfetto.dev",
        file=sys.stderr,
    )
    print_silent(found.silent)
    return TROUBLE if found.silent else 0


def _first_s(one: WorkerEvents) -> float:
    """Return when the first event of a worker began, by our clock."""
    began = [
        getattr(event, "began_s", event.at_s)
        for kind in KIND_NAMES
        for event in getattr(one.recent, kind)
    ]
    return min(began, default=one.recent.now_s) + one.offset_s


def _profile(path: str | None) -> dict[str, Any]:
    """Return what torch's profiler has exported, or an empty trace.

    Raises:
        UsageError: the file cannot be read, or is no such trace.
    """
    if path is None:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--profile {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise UsageError(
            f"--profile {path} is no trace of torch's profiler: it has no traceEvents"
        )
    return found


def _write(path: str | None, record: Mapping[str, Any]) -> None:
    if path is None:
        print(json.dumps(record))
        return
    try:
        Path(path).write_text(json.dumps(record))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
