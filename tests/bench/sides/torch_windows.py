"""The same as `windows`, with torch: its processes do not import asyncrpc."""

from __future__ import annotations

import time
from collections import deque
from functools import partial

from torch.distributed import rpc

from tests.bench import workloads as w

LEAD_IN_S = 0.1  # until all callers are at work; these answers do not count


def torch_window(seconds: float) -> float:
    """Call from this process with torch; return the answers per second."""
    start = partial(rpc.rpc_async, w.CALLEE, w.nothing)
    start().wait()
    calls = deque(start() for _ in range(w.OUTSTANDING_EACH))
    begin_s = time.perf_counter() + LEAD_IN_S
    count, now_s = 0, 0.0
    while now_s < begin_s + seconds:
        calls.popleft().wait()
        calls.append(start())
        now_s = time.perf_counter()
        count += now_s >= begin_s
    for call in calls:
        call.wait()
    return count / seconds
