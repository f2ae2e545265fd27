"""One of two processes whose flight recorder keeps what happens, now and then.

A worker has no switch for it, so what notes an event is replaced by what does nothing,
and put back.  What was there at the start is nothing to Python's collector of cycles:
it is measured by `collector_side`, and would blur this.
"""

from __future__ import annotations

import gc
from typing import Any, Final

import asyncrpc
from asyncrpc.core.autograd.ends import PassEnds
from asyncrpc.core.autograd.segment_events import SegmentEvents
from asyncrpc.core.calls.inbound import ServedEnds
from asyncrpc.core.calls.outbound import CallEnds
from asyncrpc.core.rref.values import Values
from asyncrpc.core.trace.ring import EventRing
from asyncrpc.trace import FlightRecorder
from tests.bench.sides.on_and_off import run_side

# What makes events of calls and training steps.
_NOTES: Final = {
    (kind, name): getattr(kind, name)
    for kind, name in (
        (CallEnds, "note"),
        (ServedEnds, "note"),
        (SegmentEvents, "note"),
        (PassEnds, "_note_end"),
        (Values, "_note"),
    )
}


def _nothing(*_: Any, **__: Any) -> None:
    """Note nothing."""


def record(wanted: str) -> None:
    """Note events at this worker from now on, or do not."""
    gc.freeze()
    for (kind, name), note in _NOTES.items():
        setattr(kind, name, note if wanted == "on" else _nothing)
    recorder: FlightRecorder = asyncrpc.current_worker().parts.recorder
    for ring in vars(recorder).values():
        if isinstance(ring, EventRing):
            ring.record = ring._recent.append if wanted == "on" else _nothing  # noqa: SLF001


if __name__ == "__main__":
    run_side(record, __doc__)
