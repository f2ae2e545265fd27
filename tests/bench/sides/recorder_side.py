"""One of two processes whose flight recorder keeps what happens, now and then.

A worker has no switch for it, so what notes an event is replaced by what does nothing,
and put back.  What was there at the start is nothing to Python's collector of cycles:
it is measured by `collector_side`, and would blur this.
"""

from __future__ import annotations

import gc
from typing import Any, Final

import asyncrpc
from asyncrpc.runtime.calls.ends import CallEnds, ServedEnds
from asyncrpc.trace import FlightRecorder
from asyncrpc.trace.ring import EventRing
from tests.bench.sides.on_and_off import run_side

_NOTES: Final = {kind: kind.note for kind in (CallEnds, ServedEnds)}


def _nothing(*_: Any) -> None:
    """Note nothing."""


def record(wanted: str) -> None:
    """Note events at this worker from now on, or do not."""
    gc.freeze()
    for kind, note in _NOTES.items():
        setattr(kind, "note", note if wanted == "on" else _nothing)  # noqa: B010
    recorder: FlightRecorder = asyncrpc.current_worker().parts.recorder
    for ring in vars(recorder).values():
        if isinstance(ring, EventRing):
            ring.record = ring._recent.append if wanted == "on" else _nothing  # noqa: SLF001


if __name__ == "__main__":
    run_side(record, __doc__)
