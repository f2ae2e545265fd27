"""`asyncrpc dump`, `timeline`, `top` and `refs`: what a group remembers, and holds."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrpc.cli.observing import (
    TROUBLE,
    add_observing,
    check_workers,
    plain,
    print_json,
    print_silent,
    print_table,
    silent_records,
)
from asyncrpc.cli.table import lines_of
from asyncrpc.clock import Clock, wall_ns
from asyncrpc.errors import UsageError
from asyncrpc.inspection.events import KIND_NAMES
from asyncrpc.inspection.group import GroupAnswers, view_of
from asyncrpc.inspection.machine.rates import (
    CallRates,
    by_function,
    rates_of,
)
from asyncrpc.inspection.machine.timeline import (
    WorkerEvents,
    beside_profile,
    timeline_of,
)
from asyncrpc.inspection.machine.wording import duration
from asyncrpc.inspection.messages import ReferenceSeen
from asyncrpc.inspection.observer import Observer
from asyncrpc.inspection.remembered import events_of, references_of
from asyncrpc.trace import RECENT_MAX

WINDOW_S: Final = 5.0  # that rates are over
EVERY_S: Final = 2.0
NS_PER_S: Final = 1_000_000_000
_MIB: Final = 1 << 20
_CLEAR: Final = "\x1b[H\x1b[2J"  # ANSI: to the upper left, and nothing below


def add_dump(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc dump`."""
    parser.description = (
        "Write all that a group tells into a file: the tasks, threads and calls of "
        "each worker, and its last events.  The exit code is 0 if all have told it, "
        "else 1."
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
        "is 0 if all have told theirs, else 1."
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


def add_top(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc top`."""
    parser.description = (
        f"Show how fast each worker of a group works, over the last {WINDOW_S:g} s, "
        "until Ctrl-C."
    )
    parser.add_argument(
        "--once", action="store_true", help="show it once, and do not go on"
    )
    parser.add_argument(
        "--functions", action="store_true", help="by function instead of by worker"
    )
    parser.add_argument(
        "--training",
        action="store_true",
        help="backward passes, optimizer steps and collectives instead of calls",
    )
    add_observing(parser, _top)


def add_refs(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc refs`."""
    parser.description = (
        "List the remote references of a group: who has the value, who holds it, and "
        "for how long."
    )
    parser.add_argument(
        "--max",
        type=int,
        default=50,
        metavar="N",
        help="the oldest N of each worker (default: 50)",
    )
    parser.add_argument(
        "--held", action="store_true", help="also as those see it that hold them"
    )
    add_observing(parser, _refs)


# --- dump and timeline ---------------------------------------------------------------


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


# --- top -----------------------------------------------------------------------------


async def _top(observer: Observer, address: str, given: argparse.Namespace) -> int:
    if given.json or given.once or not sys.stdout.isatty():
        found = await _ask_rates(observer, address, given)
        if given.json:
            print_json(_rates_record(found))
        else:
            print_table(list(_rates_rows(found, given)), "no worker is known")
            print_silent(found.silent)
        return TROUBLE if found.silent else 0
    while True:
        found = await _ask_rates(observer, address, given)
        lines = lines_of(list(_rates_rows(found, given)))
        lines += [
            f"{name} tells nothing: {one.trouble.value}"
            for name, one in sorted(found.silent.items())
        ]
        print(_CLEAR + "\n".join(lines), flush=True)
        await asyncio.sleep(EVERY_S)


async def _ask_rates(
    observer: Observer, address: str, given: argparse.Namespace
) -> GroupAnswers[WorkerEvents]:
    kinds = ["calls", "served", "passes", "steps", "collectives"]
    found = await events_of(observer, address, names=given.worker, kinds=kinds)
    check_workers(given.worker, found.members)
    return found


def _rates_rows(
    found: GroupAnswers[WorkerEvents], given: argparse.Namespace
) -> Iterator[tuple[str, ...]]:
    if given.functions:
        yield ("worker", "function", "calls/s", "failed/s", "p50", "p99")
        for name, one in sorted(found.answers.items()):
            functions = by_function(one.recent, window_s=WINDOW_S)
            ordered = sorted(functions.items(), key=lambda item: -item[1].per_s)
            for function, served in ordered:
                yield (name, function or "?", *_shown_rates(served))
        return
    rates = {
        name: rates_of(one.recent, window_s=WINDOW_S)
        for name, one in sorted(found.answers.items())
    }
    if given.training:
        yield ("worker", "passes/s", "steps/s", "collectives/s")
        for name, here in rates.items():
            trained = here.passes_per_s, here.steps_per_s, here.collectives_per_s
            yield (name, *map(_shown, trained))
        return
    yield (
        *("worker", "made/s", "failed/s", "p50", "p99", "MiB/s"),
        *("served/s", "p50", "p99"),
    )
    for name, here in rates.items():
        yield (
            name,
            *_shown_rates(here.made),
            _shown(here.made.bytes_per_s / _MIB),
            _shown(here.served.per_s),
            _shown_s(here.served.p50_s),
            _shown_s(here.served.p99_s),
        )


def _shown_rates(rates: CallRates) -> tuple[str, str, str, str]:
    return (
        _shown(rates.per_s),
        _shown(rates.failed_per_s),
        _shown_s(rates.p50_s),
        _shown_s(rates.p99_s),
    )


def _shown(number: float) -> str:
    if not number:
        return "-"
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"  # noqa: PLR2004


def _shown_s(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _rates_record(found: GroupAnswers[WorkerEvents]) -> dict[str, Any]:
    workers = {}
    for name, one in sorted(found.answers.items()):
        functions = by_function(one.recent, window_s=WINDOW_S)
        workers[name] = {
            **_numbers(rates_of(one.recent, window_s=WINDOW_S)),
            "functions": {key: _numbers(rates) for key, rates in functions.items()},
        }
    return {"workers": workers, "silent": silent_records(found.silent)}


def _numbers(rates: Any) -> dict[str, Any]:
    """Return rates as JSON has them, which knows no nan."""
    shown: dict[str, Any] = {}
    for name, value in rates._asdict().items():
        if isinstance(value, float):
            shown[name] = None if math.isnan(value) else value
        else:
            shown[name] = _numbers(value)
    return shown


# --- refs ----------------------------------------------------------------------------


async def _refs(observer: Observer, address: str, given: argparse.Namespace) -> int:
    if not 1 <= given.max <= RECENT_MAX:
        raise UsageError(f"--max must be from 1 to {RECENT_MAX}, not {given.max}")
    found = await references_of(
        observer, address, names=given.worker, oldest_max=given.max
    )
    check_workers(given.worker, found.members)
    listed = [
        (name, one)
        for name, seen in sorted(found.answers.items())
        for one in seen.references
        if one.is_owner or given.held
    ]
    left_out = {name: seen.left_out for name, seen in sorted(found.answers.items())}
    if given.json:
        print_json(
            {
                "references": [{**plain(one), "seen_by": name} for name, one in listed],
                "left_out": left_out,
                "silent": silent_records(found.silent),
            }
        )
    else:
        print_table(list(_reference_rows(listed)), "no value is referred to")
        for name, count in left_out.items():
            if count:
                print(f"{name} has {count} more; --max shows more of them")
        print_silent(found.silent)
    return TROUBLE if found.silent else 0


def _reference_rows(
    listed: Sequence[tuple[str, ReferenceSeen]],
) -> Iterator[tuple[str, ...]]:
    yield ("seen by", "owner", "value", "state", "age", "held by", "handles")
    for name, one in sorted(listed, key=lambda item: -item[1].age_s):
        value = one.type_name or f"#{one.rref_id.serial}"
        held_by = ", ".join(one.holders) or "-"
        yield (
            *(name, one.owner, value, one.state, duration(one.age_s)),
            *(held_by, str(one.handles)),
        )
