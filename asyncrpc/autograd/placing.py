"""Gradients of tensors on devices: where they go, and in which thread.

Gradients travel by the host's memory, and are put where the tensor is that they are
for.  An exclusive device is not touched by the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from asyncrpc.autograd.functions import CrossingId
from asyncrpc.autograd.ports import Devices, Threads
from asyncrpc.autograd.state import ContextState

T = TypeVar("T")


async def at_their_devices(
    to: Devices,
    state: ContextState,
    arrived: Sequence[CrossingId],
    gradients: list[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Put gradients that have come where the tensors are that they are for."""
    wanted: dict[int, tuple[torch.Tensor, str]] = {}
    for index, (crossing, gradient) in enumerate(zip(arrived, gradients, strict=True)):
        devices = state.sent[crossing.message].devices
        if devices is not None and gradient is not None:
            wanted[index] = gradient, devices[crossing.position]
    if not wanted:
        return gradients
    placed = await to.placed(wanted)
    return [placed.get(index, one) for index, one in enumerate(gradients)]


async def on_devices_of(
    threads: Threads, tensors: Sequence[torch.Tensor], job: Callable[[], T]
) -> T:
    """Do what may compute with tensors: at once, unless a device is exclusive."""
    if not threads.pool.is_exclusive or all(one.is_cpu for one in tensors):
        return job()
    return await threads.run_in_thread(job)
