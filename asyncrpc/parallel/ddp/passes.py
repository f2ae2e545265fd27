"""One backward pass, between the thread that runs it and the loop that reduces.

Autograd's thread reports which buckets are full; the loop reduces them meanwhile, one
after the other; at the end the thread waits for the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from asyncrpc.core.calls.context import PassPart
from asyncrpc.core.loop.clock import now_s
from asyncrpc.extend import WaitDescription, WaitKind, waits
from asyncrpc.parallel.ddp.buckets import Buckets
from asyncrpc.parallel.ddp.machine import Readiness

if TYPE_CHECKING:
    from asyncrpc.core.loop.threads import ThreadPool


class PassConfig(NamedTuple):
    """The terms on which the ranks have agreed for a pass.

    Attributes:
        memory: of the buckets, uint8.
        scale: the factor of gradients on their way into a bucket.
        present: the ranks that have an input; the others take buffers, and the order
            of gradients, from the first of them.
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
        readiness: which gradients have come; changed only by the thread of the pass,
            and before it begins.
        terms: the terms on which the ranks have agreed.
        is_plain: whether autograd began the pass by itself.
        results: the reduced gradients, by bucket.
        used: whether each parameter was used here, and then how many ranks have used
            it; None: not needed.
        wants_order: whether to record the order in which gradients come.
        order: at the end, the order of rank `root`.
        sparse: gradients by number of their parameter.
        undefined: numbers of parameters that autograd has reached without a gradient.
        late: numbers of gradients that are there, and enter their buckets when autograd
            has ended: those of devices that compute on demand.
        keeps_graph: whether the graph of the pass is kept for another one.
        part: the distributed pass that it ends with; None: it ends with autograd.
        error: the error that the pass failed with.
        communication_s: seconds in which something was sent or received.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: ThreadPool,
        buckets: Buckets,
        readiness: Readiness,
        terms: PassConfig,
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
        self.undefined: list[int] = []
        self.late: list[int] = []
        self.keeps_graph = False
        self.part: PassPart | None = None
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
        """Report how many buckets are full: the loop may reduce them."""
        self._loop.call_soon_threadsafe(self._on_full, full)

    def finish(self) -> float:
        """Report that all gradients are there, and wait until all are reduced."""
        begun_s = now_s()
        self._loop.call_soon_threadsafe(self.on_over)
        self.wait_ended()
        self.check()
        return now_s() - begun_s

    @waits(
        lambda at: WaitDescription(
            WaitKind.REDUCTION,
            "the reduction of its gradients",
            tasks=() if at["self"].task is None else (at["self"].task,),
        )
    )
    def wait_ended(self) -> None:
        """Wait until nothing more is sent or received for the pass."""
        with self._pool.blocked():
            self._done.wait()

    def give_up(self, error: BaseException) -> None:
        """Fail the pass, unless it has failed already; from any thread."""
        self.error = self.error or error
        self._loop.call_soon_threadsafe(self._cancel)

    def check(self) -> None:
        """Raise if the pass has failed."""
        if self.error is not None:
            raise self.error

    # --- on the loop -----------------------------------------------------------------

    @property
    def is_ended(self) -> bool:
        """Return whether nothing more is sent or received for the pass."""
        return self._done.is_set()

    def end(self, error: BaseException | None) -> None:
        """End the pass: all gradients are reduced, or no more will be."""
        self.error = self.error or error
        self._done.set()

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """Return a context whose time counts as communication."""
        begun_s = now_s()
        yield
        self.communication_s += now_s() - begun_s

    def wait_now(self, bucket: int | None) -> WaitDescription:
        """Describe what the loop waits for: gradients, which a thread computes."""
        total = len(self.results)
        which = "all gradients" if bucket is None else f"bucket {bucket + 1} of {total}"
        return WaitDescription(WaitKind.THREADS, f"{which} of a backward pass", self)

    @waits(lambda at: at["self"].wait_now(at["bucket"]))
    async def wait_full(self, bucket: int) -> None:
        """Wait until a bucket is full."""
        while self._full <= bucket:
            await self._wait()

    @waits(lambda at: at["self"].wait_now(None))
    async def wait_over(self) -> None:
        """Wait until the thread has nothing more to add."""
        while not self._is_over:
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter  # the thread reports each end; `give_up` cancels this
        finally:
            self._waiter = None

    def _on_full(self, full: int) -> None:
        self._full = full
        self._wake()

    def on_over(self) -> None:
        """Note that the thread has nothing more to add."""
        self._is_over = True
        self._wake()

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
