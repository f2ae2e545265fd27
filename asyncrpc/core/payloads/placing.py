"""Tensors in a worker's own slabs: sending one copies nothing."""

from __future__ import annotations

import concurrent.futures
import math
import threading
from asyncio import AbstractEventLoop
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from asyncrpc.core.loop.threads import thread_blocked


class Memory(Protocol):
    """The slabs of a worker."""

    def empty(self, nbytes: int) -> memoryview | None:
        """Return memory in a slab; None if there is no room."""


class LoopOwner(Protocol):
    """The thread of a worker's event loop."""

    loop: AbstractEventLoop
    thread_id: int


def empty(
    memory: Memory, thread: LoopOwner, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor in shared memory, or a plain one; from any thread."""
    sizes = [int(size) for size in shape]
    nbytes = math.prod(sizes) * dtype.itemsize
    if threading.get_ident() == thread.thread_id:
        view = memory.empty(nbytes)
    else:
        allocated: concurrent.futures.Future[memoryview | None] = (
            concurrent.futures.Future()
        )
        thread.loop.call_soon_threadsafe(
            lambda: allocated.set_result(memory.empty(nbytes))
        )
        with thread_blocked():
            view = allocated.result()
    if view is None:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    flat = torch.from_numpy(np.ndarray(nbytes, np.uint8, view))
    return flat.view(dtype).view(sizes)
