"""`asyncrpc timeline`: what a group did, drawn as tracks and arrows by a viewer."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from asyncrpc.core.loop.clock import NS_PER_S, Clock, wall_ns
from asyncrpc.errors import UsageError
from asyncrpc.tools.cli.observing import (
    TROUBLE,
    add_observing,
    check_group,
    print_json,
    print_silent,
    silent_records,
)
from asyncrpc.tools.inspection.events import KIND_NAMES
from asyncrpc.tools.inspection.group_answers import events_of
from asyncrpc.tools.inspection.machine.profiles import (
    calls_apart,
    first_free_number,
    shift_to_profile,
)
from asyncrpc.tools.inspection.machine.spans import WorkerEvents
from asyncrpc.tools.inspection.machine.timeline import (
    US_PER_S,
    Timeline,
)
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.trace import RECENT_MAX

_WRITTEN_AT_ONCE: Final = 1000  # events
_NAMES_MAX: Final = 3  # of workers in one line


def add_timeline(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc timeline`."""
    parser.description = (
        "Write the last events of a group as a timeline for ui.perfetto.dev or "
        "Chrome's about:tracing: a track for each task, arrows from calls to functions "
        "and from gradient to gradient.  The exit code is 0 if all have answered, else "
        "1.  With --json, a summary of the file is printed as JSON."
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="timeline.json",
        help="where to, compressed if it ends in .gz (default: timeline.json)",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="add it to a trace that torch's profiler has exported"
        " (export_chrome_trace)",
    )
    add_observing(parser, _timeline)


async def _timeline(
    observer: Observer, address: str, arguments: argparse.Namespace
) -> int:
    profile = await asyncio.to_thread(_profile, arguments.profile)
    with _progress() as show:
        group_answers = await events_of(
            observer, address, names=arguments.worker, on_answer=show.note_answer
        )
        check_group(arguments, group_answers.members)
        workers = sorted(group_answers.answers.values(), key=_by_rank)
        zero_s = min((_first_s(events) for events in workers), default=0.0)
        # The wall clock at the zero of the reader's clock.
        zero_wall_ns = wall_ns() - round((Clock().now_s() - zero_s) * NS_PER_S)
        timeline = _timeline_of(workers, zero_s, profile, zero_wall_ns)
        await asyncio.to_thread(_write, arguments.output, timeline, profile, show)
    if arguments.json:
        silent = silent_records(group_answers.silent)
        print_json(
            {**_record(arguments.output, timeline, len(workers)), "silent": silent}
        )
        return TROUBLE if group_answers.silent else 0
    print(f"{arguments.output}: {_summary(timeline, len(workers))}", file=sys.stderr)
    for line in _left_out(timeline):
        print(line, file=sys.stderr)
    print_silent(group_answers.silent)
    return TROUBLE if group_answers.silent else 0


def _timeline_of(
    workers: Sequence[WorkerEvents],
    zero_s: float,
    profile: Mapping[str, Any] | None,
    zero_wall_ns: int,
) -> Timeline:
    if profile is None:
        return Timeline(workers, zero_s=zero_s)
    return Timeline(
        workers,
        zero_s=zero_s,
        first=first_free_number(profile["traceEvents"]),
        shift_ns=shift_to_profile(profile, zero_wall_ns=zero_wall_ns),
    )


def _by_rank(events: WorkerEvents) -> tuple[bool, int, str]:
    return events.rank < 0, events.rank, events.worker.name


def _first_s(events: WorkerEvents) -> float:
    """Return when the first event of a worker began, by our clock."""
    began = [
        getattr(event, "began_s", event.at_s)
        for kind in KIND_NAMES
        for event in getattr(events.recent, kind)
    ]
    return min(began, default=events.recent.now_s) + events.offset_s


def _profile(path: str | None) -> dict[str, Any] | None:
    """Return the trace that torch's profiler has exported; None without a path."""
    if path is None:
        return None
    try:
        with _opened(path, "r") as file:
            trace = json.load(file)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--profile {path} cannot be read: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise UsageError(
            f"--profile {path} is not a trace of torch's profiler: it has no "
            "traceEvents"
        )
    return {**trace, "traceEvents": calls_apart(trace["traceEvents"])}


# --- writing -------------------------------------------------------------------------


def _opened(path: str, mode: str) -> IO[str]:
    if path.endswith(".gz"):
        return gzip.open(path, f"{mode}t", encoding="utf-8")  # type: ignore[return-value]
    return Path(path).open(mode, encoding="utf-8")


def _write(
    path: str, timeline: Timeline, profile: Mapping[str, Any] | None, show: _Progress
) -> None:
    """Write a timeline, together with a profile if there is one, event by event."""
    head = {"displayTimeUnit": "ms", **(profile or {})}
    before = head.pop("traceEvents", ())
    try:
        with _opened(path, "w") as file:
            # The other fields first: they have the time from which the profile counts.
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            between = ""
            for text in _texts([before, show.shown(timeline.events())]):
                file.write(between + text)
                between = ",\n"
            file.write("\n]}\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error


def _texts(parts: Iterable[Iterable[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield events as JSON, many in one text."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    texts: list[str] = []
    for events in parts:
        for event in events:
            texts.append(encode(event))
            if len(texts) == _WRITTEN_AT_ONCE:
                yield ",\n".join(texts)
                texts.clear()
    if texts:
        yield ",\n".join(texts)


# --- what is printed -----------------------------------------------------------------


def _summary(timeline: Timeline, workers: int) -> str:
    error_s = timeline.error_s
    clocks = f"clocks to within {error_s * US_PER_S:.0f} us" if error_s else "one clock"
    return (
        f"{_counted(workers, 'worker')}, {_counted(timeline.spans, 'span')}, "
        f"{_counted(timeline.arrows, 'arrow')}, {clocks}; open it in ui.perfetto.dev"
    )


def _record(path: str, timeline: Timeline, workers: int) -> dict[str, Any]:
    """Return the summary for JSON, with what is missing."""
    return {
        "file": path,
        "workers": workers,
        "spans": timeline.spans,
        "arrows": timeline.arrows,
        "clock_error_s": timeline.error_s,
        "backwards_s": timeline.backwards_s,
        "full": list(timeline.full),
        "calls_alone": timeline.calls_alone,
    }


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _left_out(timeline: Timeline) -> Iterator[str]:
    """Yield what is missing from a timeline, and what is wrong in it."""
    if timeline.full:
        names = ", ".join(timeline.full[:_NAMES_MAX])
        if len(timeline.full) > _NAMES_MAX:
            names += f" and {len(timeline.full) - _NAMES_MAX} more"
        yield f"only the last {RECENT_MAX:,} events of a kind are kept: {names}"
    if timeline.calls_alone:
        calls = _counted(timeline.calls_alone, "call")
        yield f"without an arrow, as only one end is known: {calls}"
    if timeline.backwards_s > timeline.error_s:
        wrong_us = timeline.backwards_s * US_PER_S
        yield (
            f"the clocks differ by {wrong_us:.0f} us or more: by them, a call was "
            "served before it was made, or after it was answered"
        )


class _Progress:
    """Shows the progress on a terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._answered = self._written = 0

    def note_answer(self) -> None:
        """Note that one more worker has answered."""
        self._answered += 1
        self._show(f"{_counted(self._answered, 'worker')} answered")

    def shown(self, events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield events, and show whose they are."""
        for event in events:
            if event["name"] == "process_name":
                self._written += 1
                self._show(f"writing worker {self._written:,} of {self._answered:,}")
            yield event

    def _show(self, text: str) -> None:
        if self._is_shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the progress from the terminal."""
        self._show("")


@contextmanager
def _progress() -> Iterator[_Progress]:
    show = _Progress()
    try:
        yield show
    finally:
        show.clear()
