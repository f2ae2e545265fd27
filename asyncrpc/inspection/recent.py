"""Takes what a worker remembers from its flight recorder."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrpc.clock import wall_ns
from asyncrpc.errors import UsageError
from asyncrpc.inspection.events import KIND_NAMES, RecentEvents
from asyncrpc.trace import RECENT_MAX, FlightRecorder


def recent_events(
    recorder: FlightRecorder, kinds: Sequence[str] = (), newest_max: int = RECENT_MAX
) -> RecentEvents:
    """Return what a worker remembers.

    Args:
        recorder: of the worker.
        kinds: fields of `RecentEvents`; empty: all.
        newest_max: events of each kind, the newest.

    Raises:
        UsageError: there is no such kind.

    Thread safety: from any thread.
    """
    unknown = [one for one in kinds if one not in KIND_NAMES]
    if unknown:
        raise UsageError(
            f"there are no events {unknown[0]!r}; there are {', '.join(KIND_NAMES)}"
        )
    wanted = kinds or KIND_NAMES
    found = {
        name: getattr(recorder, name).recent[-newest_max:] if name in wanted else []
        for name in KIND_NAMES
    }
    return RecentEvents(recorder.now_s(), wall_ns(), **found)
