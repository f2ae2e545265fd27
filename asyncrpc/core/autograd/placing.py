"""Gradients of tensors on devices: where they go, and in which thread.

Gradients travel through host memory, and are moved to the devices of their tensors.
The event loop touches neither an exclusive device nor a subclass of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from asyncrpc.core.autograd.functions import CrossingId
from asyncrpc.core.autograd.state import ContextState
from asyncrpc.core.autograd.torch_only import is_plain, without_functions
from asyncrpc.core.devices.staging import Devices
from asyncrpc.core.parts import Parts

T = TypeVar("T")


async def at_their_devices(
    to: Devices,
    state: ContextState,
    arrived: Sequence[CrossingId],
    gradients: list[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Move arrived gradients to the devices of their tensors."""
    wanted: dict[int, tuple[torch.Tensor, str]] = {}
    for index, (crossing, gradient) in enumerate(zip(arrived, gradients, strict=True)):
        devices = state.sent[crossing.message].devices
        if devices is not None and gradient is not None:
            wanted[index] = gradient, devices[crossing.position]
    if not wanted:
        return gradients
    placed = await to.placed(wanted)
    return [placed.get(index, gradient) for index, gradient in enumerate(gradients)]


async def on_devices_of(
    worker: Parts, tensors: Sequence[torch.Tensor], job: Callable[[], T]
) -> T:
    """Run a job on tensors: at once, if the event loop may touch all of them."""
    is_exclusive = worker.pool.is_exclusive
    with without_functions():
        is_here = all(
            is_plain(tensor) and (tensor.is_cpu or not is_exclusive)
            for tensor in tensors
        )
    if is_here:
        return job()
    return await worker.run_in_thread(job)
