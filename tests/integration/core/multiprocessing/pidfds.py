"""Watch processes that are not our children, without polling."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def opened(pids: Sequence[int]) -> Iterator[list[int]]:
    """Yield a descriptor of each process; it becomes readable when that one ends."""
    with contextlib.ExitStack() as stack:
        pidfds = []
        for pid in pids:
            pidfds.append(os.pidfd_open(pid))
            stack.callback(os.close, pidfds[-1])
        yield pidfds


def have_ended(pidfds: Sequence[int], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    for pidfd in pidfds:
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([pidfd], [], [], left_s)[0]:
            return False
    return True
