"""How fast a worker works, from its last events: calls a second, latencies, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncrpc.core.trace.events import OK, CallServed
from asyncrpc.core.trace.ring import RECENT_MAX
from asyncrpc.tools.inspection.events import RecentEvents, is_own


class CallRates(NamedTuple):
    """Calls of one kind in the last seconds.

    Attributes:
        per_s: how many ended, a second.
        p50_s: median of their time; nan if there were none.
        p99_s: 99th percentile of their time.
        bytes_per_s: of buffers, both ways.
    """

    per_s: float
    failed_per_s: float
    p50_s: float
    p99_s: float
    bytes_per_s: float


class WorkerRates(NamedTuple):
    """How fast a worker works.

    Attributes:
        passes_per_s: backward passes in which it took part.
        steps_per_s: optimizer steps that it asked for.
    """

    made: CallRates
    served: CallRates
    passes_per_s: float
    steps_per_s: float
    collectives_per_s: float


def rates_of(
    recent: RecentEvents, *, window_s: float, remembered_max: int = RECENT_MAX
) -> WorkerRates:
    """Return the rates over the last seconds, or over less if older events are gone."""

    def within(events: Sequence[Any]) -> tuple[Sequence[Any], float]:
        return _within(events, recent.now_s, window_s, remembered_max)

    calls, calls_s = within(recent.calls)
    served, served_s = within(recent.served)
    return WorkerRates(
        _calls(calls, calls_s, lambda call: call.at_s - call.began_s),
        _calls(served, served_s, lambda call: call.at_s - call.came_s),
        _rate(*within(recent.passes)),
        _rate(*within(recent.steps)),
        _rate(*within(recent.collectives)),
    )


def by_function(recent: RecentEvents, *, window_s: float) -> dict[str, CallRates]:
    """Return the rates of the calls that a worker served, by their functions."""
    served, over_s = _within(recent.served, recent.now_s, window_s, RECENT_MAX)
    by_name: dict[str, list[CallServed]] = {}
    for call in served:
        by_name.setdefault(call.function, []).append(call)
    return {
        name: _calls(calls, over_s, lambda call: call.at_s - call.came_s)
        for name, calls in by_name.items()
    }


def _within(
    events: Sequence[Any], now_s: float, window_s: float, remembered_max: int
) -> tuple[Sequence[Any], float]:
    """Return the events of the last seconds, and how many seconds they cover.

    The calls that look at the worker are left out: they are no work of the program.
    """
    since_s = now_s - window_s
    in_window = [event for event in events if event.at_s >= since_s]
    if len(events) >= remembered_max and len(in_window) == len(events):
        window_s = max(now_s - events[0].at_s, 1e-9)  # older ones are forgotten
    return [event for event in in_window if not is_own(event)], window_s


def _rate(events: Sequence[Any], over_s: float) -> float:
    return len(events) / over_s


def _calls(
    events: Sequence[Any], over_s: float, took_s: Callable[[Any], float]
) -> CallRates:
    times = sorted(map(took_s, events))
    nbytes = sum(
        getattr(event, "bytes_sent", 0) + getattr(event, "bytes_received", 0)
        for event in events
    )
    failed = sum(event.outcome != OK for event in events)
    return CallRates(
        len(events) / over_s,
        failed / over_s,
        percentile(times, 0.5),
        percentile(times, 0.99),
        nbytes / over_s,
    )


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Return the value at or below which a share of all lies; nan if there are none."""
    if not sorted_values:
        return math.nan
    place = math.ceil(share * len(sorted_values)) - 1
    return sorted_values[max(0, place)]
