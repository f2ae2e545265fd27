"""torch's legacy profiler, whose events are also those of the callees.

As with torch's own RPC, a call under this profiler brings the ranges of its function,
as `<name of the call>#remote_op: <name>`, `is_remote`, with the callee's rank as
`node_id`.  Events of this process have its own rank.

Source: torch.autograd.profiler_legacy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList

from asyncrpc.compat.rpc.events import GatheringProfile, add_ranges
from asyncrpc.compat.rpc.gathering import start_of

__all__ = ["profile"]

_autograd: Any = torch.autograd
_parse: Any = profiler_legacy._parse_legacy_records  # noqa: SLF001


class profile(GatheringProfile, profiler_legacy.profile):  # noqa: N801  (torch's name)
    """Profile this thread, and the functions that its calls run elsewhere.

    For programs of `torch.autograd.profiler_legacy.profile`; `asyncrpc.compat.install`
    replaces that class by this one.  Other programs use
    `asyncrpc.compat.profiling.profile`.  Without calls it does what torch's does.

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
        add_ranges(events, self._gatherer.ranges, start_of(records).start_us())
        self.function_events = events
        return False
