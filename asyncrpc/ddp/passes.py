"""One backward pass, between the thread that runs it and the loop that reduces.

Autograd's thread says which buckets are full; the loop reduces them meanwhile, one
after the other; in the end the thread waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from asyncrpc.clock import now_s
from asyncrpc.ddp.buckets import Buckets
from asyncrpc.ddp.machine import Readiness

if TYPE_CHECKING:
    from asyncrpc.runtime.threads import ThreadPool


class Terms(NamedTuple):
    """What the ranks have agreed on for a pass.

    Attributes:
        memory: of the buckets, uint8.
        scale: what gradients are multiplied with on their way into a bucket.
        present: the ranks that have an input; the others take buffers, and the order
            of gradients, from the first.
        is_alone: there is one rank and no hook: gradients are their own mean, and those
            of devices stay there.
    """

    memory: torch.Tensor
    scale: float
    present: Sequence[int]
    is_alone: bool

    @property
    def root(self) -> int:
        """The rank that the others take from."""
        return self.present[0]


class Backward:
    """One backward pass at one rank.

    Attributes:
        buckets: that it fills.
        readiness: which gradients have come; changed by the thread of the pass only,
            and before it begins.
        terms: what the ranks have agreed on.
        is_plain: autograd began it, by itself.
        results: what has been reduced, by bucket.
        used: whether each parameter was used here, and then how many ranks have used
            it; None: nobody asks.
        wants_order: whether the order in which gradients come is to be known.
        order: that of rank `root`, in the end.
        sparse: gradients by number of their parameter.
        late: numbers of gradients that are there, and are put into their buckets when
            autograd has ended: those of devices that compute when they are asked to.
        error: why it has failed.
        communication_s: seconds in which something was sent or received.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: ThreadPool,
        buckets: Buckets,
        readiness: Readiness,
        terms: Terms,
        *,
        is_plain: bool,
    ) -> None:
        self.buckets = buckets
        self.readiness = readiness
        self.terms = terms
        self.is_plain = is_plain
        self.results: list[torch.Tensor | None] = [None] * len(buckets.numbers)
        self.used: torch.Tensor | None = None
        self.wants_order = False
        self.order: list[int] | None = None
        self.sparse: dict[int, torch.Tensor] = {}
        self.late: list[int] = []
        self.error: BaseException | None = None
        self.communication_s = 0.0
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._pool = pool
        self._full = readiness.reduced  # buckets, as the loop knows
        self._is_over = False  # the thread has nothing more to add, as the loop knows
        self._waiter: asyncio.Future[None] | None = None
        self._done = threading.Event()

    # --- from the thread -------------------------------------------------------------

    def tell(self, full: int) -> None:
        """Say how many buckets are full: the loop may reduce them."""
        self._loop.call_soon_threadsafe(self._on_full, full)

    def finish(self) -> float:
        """Say that all is there, and wait until all is reduced.

        Returns:
            For how many seconds it waited.

        Raises:
            BaseException: what has failed.
        """
        begun_s = now_s()
        self._loop.call_soon_threadsafe(self.on_over)
        self.wait_ended()
        self.check()
        return now_s() - begun_s

    def wait_ended(self) -> None:
        """Wait until nothing is sent or received for it any more."""
        with self._pool.blocked():
            self._done.wait()

    def give_up(self, error: BaseException) -> None:
        """Let it fail, unless it has; from any thread."""
        self.error = self.error or error
        self._loop.call_soon_threadsafe(self._cancel)

    def check(self) -> None:
        """Raise if it has failed: there is no use in going on.

        Raises:
            BaseException: what has failed.
        """
        if self.error is not None:
            raise self.error

    # --- on the loop -----------------------------------------------------------------

    @property
    def is_ended(self) -> bool:
        """Whether nothing is sent or received for it any more."""
        return self._done.is_set()

    def end(self, error: BaseException | None) -> None:
        """All is reduced, or nothing more will be."""
        self.error = self.error or error
        self._done.set()

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """Return a context whose time is counted."""
        begun_s = now_s()
        yield
        self.communication_s += now_s() - begun_s

    async def wait_full(self, bucket: int) -> None:
        """Wait until a bucket is full."""
        while self._full <= bucket:
            await self._wait()

    async def wait_over(self) -> None:
        """Wait until the thread has nothing more to add."""
        while not self._is_over:
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter  # the thread tells of each end; `give_up` cancels this
        finally:
            self._waiter = None

    def _on_full(self, full: int) -> None:
        self._full = full
        self._wake()

    def on_over(self) -> None:
        """The thread has nothing more to add."""
        self._is_over = True
        self._wake()

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
