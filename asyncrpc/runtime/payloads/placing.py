"""Tensors in a worker's own slabs: sending one copies nothing."""

from __future__ import annotations

import concurrent.futures
import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncrpc.runtime.calls.futures import thread_blocked

if TYPE_CHECKING:
    from asyncrpc.runtime.parts import Parts


def empty(worker: Parts, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in shared memory, or a plain one; from any thread.

    Args:
        worker: whose slabs are used.
        shape: of the tensor.
        dtype: of the tensor.
    """
    sizes = [int(size) for size in shape]
    nbytes = math.prod(sizes) * dtype.itemsize
    if threading.get_ident() == worker.tasks.thread_id:
        memory = worker.memory.empty(nbytes)
    else:
        found: concurrent.futures.Future[memoryview | None] = (
            concurrent.futures.Future()
        )
        worker.loop.call_soon_threadsafe(
            lambda: found.set_result(worker.memory.empty(nbytes))
        )
        with thread_blocked():
            memory = found.result()
    if memory is None:
        return torch.empty(sizes, dtype=dtype)
    flat = torch.from_numpy(np.ndarray(nbytes, np.uint8, memory))
    return flat.view(dtype).view(sizes)
