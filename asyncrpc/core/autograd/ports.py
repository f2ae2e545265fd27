"""What autograd and the optimizers need of their worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.loop.threads import YieldingLock

T = TypeVar("T")


class Pool(Protocol):
    """The threads of a worker.

    Attributes:
        locks: what a thread gives up while it waits for a call.
    """

    locks: list[YieldingLock]

    @property
    def runs_here(self) -> bool:
        """Return whether jobs run on the loop itself, as in a simulation."""

    @property
    def is_exclusive(self) -> bool:
        """Return whether a device is exclusive, so that the loop must not touch it."""


class Threads(Protocol):
    """How jobs run in the threads of a worker."""

    @property
    def pool(self) -> Pool:
        """The threads."""

    def run_in_thread(self, job: Callable[[], T], /) -> asyncio.Future[T]:
        """Run `job` in a thread; called on the loop."""


class Devices(Protocol):
    """How tensors get to devices."""

    def placed(
        self, wanted: dict[int, tuple[torch.Tensor, str]], /
    ) -> Awaitable[dict[int, torch.Tensor]]:
        """Move tensors of the host to their devices."""


class PassSteps(Protocol):
    """The steps of optimizers that follow backward passes."""

    async def step_after_pass(
        self, maker: WorkerId, content: list[Any], /
    ) -> list[Any] | None:
        """Take a step that came with the last gradients; return its answer."""

    def vote_after_pass(
        self,
        maker: Incarnation,
        serial: int,
        gathered: Mapping[torch.Tensor, torch.Tensor],
        /,
    ) -> bool | None:
        """Vote on a step: return whether it cannot raise with these gradients.

        None: this worker has no part of the optimizer.
        """
