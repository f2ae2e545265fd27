"""Ranges of callees as events of torch's profilers.

Source: torch.autograd.profiler_util.
"""

from __future__ import annotations

from typing import Any

from torch.autograd.profiler_util import EventList, FunctionEvent

from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc.gathering import Gatherer, Range, Settings


class GatheringProfile:
    """A mixin for torch's profilers, which gathers events of callees.

    It comes before torch's class in a list of bases.
    """

    _gatherer: Gatherer

    def __init__(
        self,
        enabled: bool = True,  # noqa: FBT001, FBT002  (torch's signature)
        **settings: Any,
    ) -> None:
        super().__init__(enabled, **settings)  # type: ignore[call-arg]

    def _start_trace(self) -> None:
        super()._start_trace()  # type: ignore[misc]
        self._gatherer = Gatherer(Settings.of(self))
        self._gatherer.begin()


def add_ranges(events: Any, ranges: list[Range], origin_us: float) -> None:
    """Add gathered ranges to the events of a profiler, and set the rank of all events.

    Args:
        events: events of a profiler, with their tree; afterwards sorted by time.
        ranges: ranges of callees.
        origin_us: microseconds from the epoch to the profiler's start.
    """
    if agents.is_set():
        for event in events:
            if not event.is_remote:
                event.node_id = agents.current().rank
    if not ranges:
        return
    # torch builds trees of adjacent events: those of one thread of one rank.
    ordered = sorted(ranges, key=lambda one: one.rank)
    remote: Any = EventList([_event(one, origin_us) for one in ordered])  # type: ignore[no-untyped-call]
    remote._build_tree()  # noqa: SLF001
    events.extend(remote)
    events.sort(key=lambda one: (one.time_range.start, -one.time_range.end))


def _event(one: Range, origin_us: float) -> FunctionEvent:
    return FunctionEvent(  # type: ignore[no-untyped-call]
        id=0,
        node_id=one.rank,
        name=one.name,
        trace_name=one.name,
        thread=one.thread,
        start_us=one.start_us - origin_us,
        end_us=one.end_us - origin_us,
        fwd_thread=one.fwd_thread,
        input_shapes=one.shapes,
        stack=list(one.stack),
        scope=one.scope,
        cpu_memory_usage=one.memory_bytes,
        is_async=one.is_async,
        is_remote=True,
        sequence_nr=one.sequence_nr,
        is_legacy=True,
        flops=one.flops,
    )
