"""Tensors in a worker's own slabs: sending one copies nothing."""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections.abc import Sequence

import numpy as np
import torch

from asyncrpc.core.loop.tasks import Tasks
from asyncrpc.core.loop.threads import thread_blocked
from asyncrpc.core.payloads.sharing import Sharing


def empty(
    memory: Sharing, tasks: Tasks, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor in shared memory, or a plain one; from any thread."""
    sizes = [int(size) for size in shape]
    nbytes = math.prod(sizes) * dtype.itemsize
    if threading.get_ident() == tasks.thread_id:
        view = memory.empty(nbytes)
    else:
        allocated: concurrent.futures.Future[memoryview | None] = (
            concurrent.futures.Future()
        )
        tasks.loop.call_soon_threadsafe(
            lambda: allocated.set_result(memory.empty(nbytes))
        )
        with thread_blocked():
            view = allocated.result()
    if view is None:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    flat = torch.from_numpy(np.ndarray(nbytes, np.uint8, view))
    return flat.view(dtype).view(sizes)
