"""The summary of a worker in a few numbers, which the worker computes itself.

A group of a thousand workers is polled every few seconds.  So a summary is small
however much the worker does, and takes its loop less than a millisecond.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

from asyncrpc.core.services.schema import Count, Integer
from asyncrpc.tools.inspection.machine.rates import WorkerRates

LINKS_MAX: Final = 64  # of one worker; the busiest
UNKNOWN_BYTES: Final = -1


class LinkSummary(NamedTuple):
    """One link of a worker.

    Attributes:
        peer: name of the worker at the other end.
        is_broken: whether its connection has broken, and may come back.
        in_flight: calls over it that are not answered yet.
        calls_per_s: calls over it that ended in the last seconds.
        bytes_per_s: of their buffers, both ways.
        p50_s: median of their time; nan if there were none.
    """

    peer: str
    is_broken: bool
    in_flight: Count
    calls_per_s: float
    bytes_per_s: float
    p50_s: float


class WorkerSummary(NamedTuple):
    """One worker at one moment.

    Attributes:
        running_s: seconds since it was started.
        is_draining: whether its shutdown has begun.
        backward_p50_s: median of its part of backward passes; nan if there were none.
        step_p50_s: median of the optimizer steps that it asked for; nan likewise.
        lag_s: how long one iteration of its loop took just now.
        memory_bytes: of its process, which other workers may share; `UNKNOWN_BYTES`.
        slab_bytes: memory that it shares with peers of its host.
        tasks: of its event loop, at the last sample of them.
        calls_made: its calls that are not answered.
        links: the busiest.
    """

    pid: Count
    host: str
    running_s: float
    is_draining: bool
    rates: WorkerRates
    backward_p50_s: float
    step_p50_s: float
    lag_s: float
    memory_bytes: Annotated[int, Integer(-1, 1 << 62, "a number of bytes, or -1")]
    slab_bytes: Count
    references: Count
    tasks: Count
    calls_made: Count
    calls_served: Count
    links: list[LinkSummary]
    links_left_out: Count
