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

For programs of the legacy profiler: `asyncrpc.compat.profiler_legacy`.

Source: torch.profiler, torch.autograd.profiler; torch.distributed.rpc for the names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler

from asyncrpc.compat.rpc.events import GatheringProfile, add_ranges
from asyncrpc.compat.rpc.gathering import Gatherer, Settings

__all__ = ["autograd_profile", "profile"]


class autograd_profile(GatheringProfile, profiler.profile):  # noqa: N801  (as torch's)
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
        found: Any = super().events()  # type: ignore[no-untyped-call]
        if self._gatherer is not None and self.profiler is not None:
            _add(self.profiler, self._gatherer)
            self._gatherer = None
        return found

    def key_averages(self, *args: Any, **kwargs: Any) -> Any:
        """Return the events, averaged by name; the arguments are torch's."""
        self.events()
        return super().key_averages(*args, **kwargs)


def _add(ended: profiler.profile, gatherer: Gatherer) -> None:
    """Add the gathered ranges to the events of a profiler."""
    results: Any = ended.kineto_results
    if results is not None:
        origin_us = results.trace_start_ns() / 1000
        add_ranges(ended._function_events, gatherer.ranges, origin_us)  # noqa: SLF001
