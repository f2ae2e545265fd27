"""torch's profilers, whose events are also those of the callees of `asyncrpc.compat`.

    from asyncrpc.compat.profiling import profile

    with profile() as found:
        rpc.rpc_sync("ps", step, (x,))
    print(found.key_averages().table())

A call is shown as `rpc_sync#step(trainer -> ps)`; the events of its function at the
callee, as `rpc_sync#step(trainer -> ps)#remote_op: aten::mul` and so on, with the
callee's rank as `node_id`.  A function's own calls are shown the same way.

The profilers gather the calls of their thread, and the calls that their functions make,
if a call ends before the profiler does.  The events of `remote()` are complete when
`rref._get_profiling_future()` is done.  Events of a callee are lost if its call fails.
Traces that torch writes itself (`export_chrome_trace`) have only the calls.

Source: torch.profiler, torch.autograd.profiler; torch.distributed.rpc for the names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler, profiler_legacy
from torch.autograd.profiler_util import EventList, FunctionEvent

from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc.gathering import Gatherer, Range, Settings, start_of

__all__ = ["autograd_profile", "legacy_profile", "profile"]

_autograd: Any = torch.autograd
_parse: Any = profiler_legacy._parse_legacy_records  # noqa: SLF001


class _GatheringProfile:
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


class autograd_profile(_GatheringProfile, profiler.profile):  # noqa: N801  (as torch's)
    """`torch.autograd.profiler.profile`, with the events of callees.

    Its `function_events`, `key_averages` and `table` include them.

    Source: torch.autograd.profiler.profile.
    """

    def __exit__(
        self, exc_type: object, exc_val: object, exc_tb: object
    ) -> bool | None:
        """End it."""
        if self.enabled:
            self._gatherer.end()
        ended: bool | None = super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]
        return ended

    def _ensure_function_events(self) -> None:
        is_new = self._function_events is None
        super()._ensure_function_events()  # type: ignore[no-untyped-call]
        if is_new:
            _add(self, self._gatherer)


class legacy_profile(_GatheringProfile, profiler_legacy.profile):  # noqa: N801  (as torch's)
    """`torch.autograd.profiler_legacy.profile`, with the events of callees.

    `asyncrpc.compat.install` replaces that class by this one.

    Source: torch.autograd.profiler_legacy.profile.
    """

    def __exit__(
        self, exc_type: object, exc_val: object, exc_tb: object
    ) -> bool | None:
        """Stop profiling, and set `function_events`."""
        if not self.enabled:
            return None
        self._gatherer.end()
        if self.use_cuda:
            torch.accelerator.synchronize()
        records = _autograd._disable_profiler_legacy()  # noqa: SLF001
        events: Any = EventList(  # type: ignore[no-untyped-call]
            _parse(records),
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
            with_flops=self.with_flops,
        )
        events._build_tree()  # noqa: SLF001
        _add_ranges(events, self._gatherer.ranges, start_of(records).start_us())
        self.function_events = events
        return False


class profile(torch.profiler.profile):  # noqa: N801  (as torch's)
    """`torch.profiler.profile`, with the events of callees.

    Its `events` and `key_averages` include them.

    Source: torch.profiler.profile.
    """

    _gatherer: Gatherer | None = None

    def start_trace(self) -> None:
        """Start recording."""
        super().start_trace()
        self._gatherer = Gatherer(Settings.of(self))
        self._gatherer.begin()

    def stop_trace(self) -> None:
        """End recording."""
        if self._gatherer is not None:
            self._gatherer.end()
        super().stop_trace()
        ended = self.profiler
        if ended is not None and ended._function_events is not None:  # noqa: SLF001
            self.events()  # accumulate them: the ranges that follow belong to the next

    def events(self) -> Any:
        """Return the events, including those of callees."""
        events: Any = super().events()  # type: ignore[no-untyped-call]
        if self._gatherer is not None and self.profiler is not None:
            _add(self.profiler, self._gatherer)
            self._gatherer = None
        return events

    def key_averages(self, *args: Any, **kwargs: Any) -> Any:
        """Return the events, averaged by name; the arguments are torch's."""
        self.events()
        return super().key_averages(*args, **kwargs)


def _add(ended: profiler.profile, gatherer: Gatherer) -> None:
    """Add the gathered ranges to the events of a profiler."""
    results: Any = ended.kineto_results
    if results is not None:
        origin_us = results.trace_start_ns() / 1000
        _add_ranges(ended._function_events, gatherer.ranges, origin_us)  # noqa: SLF001


def _add_ranges(events: Any, ranges: list[Range], origin_us: float) -> None:
    """Add gathered ranges to the events of a profiler, and set the rank of all events.

    Args:
        events: events of a profiler, with their tree; afterwards sorted by time.
    """
    if agents.is_set():
        for event in events:
            if not event.is_remote:
                event.node_id = agents.current().rank
    if not ranges:
        return
    # torch builds trees of adjacent events: those of one thread of one rank.
    ordered = sorted(ranges, key=lambda remote_range: remote_range.rank)
    remote_events = [_event(remote_range, origin_us) for remote_range in ordered]
    remote: Any = EventList(remote_events)  # type: ignore[no-untyped-call]
    remote._build_tree()  # noqa: SLF001
    events.extend(remote)
    events.sort(key=lambda event: (event.time_range.start, -event.time_range.end))


def _event(remote_range: Range, origin_us: float) -> FunctionEvent:
    return FunctionEvent(  # type: ignore[no-untyped-call]
        id=0,
        node_id=remote_range.rank,
        name=remote_range.name,
        trace_name=remote_range.name,
        thread=remote_range.thread,
        start_us=remote_range.start_us - origin_us,
        end_us=remote_range.end_us - origin_us,
        fwd_thread=remote_range.fwd_thread,
        input_shapes=remote_range.shapes,
        stack=list(remote_range.stack),
        scope=remote_range.scope,
        cpu_memory_usage=remote_range.memory_bytes,
        is_async=remote_range.is_async,
        is_remote=True,
        sequence_nr=remote_range.sequence_nr,
        is_legacy=True,
        flops=remote_range.flops,
    )
