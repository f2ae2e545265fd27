"""How a program enters a cluster and leaves it: by a block, or over many cells.

A block ends what it has started.  What `await` has started outlasts its task, as the
worker of `init_rpc` does; `close` ends it, or the next `await` for the same subject: a
cell of a notebook that runs again replaces what it has started.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from asyncrpc.api import Worker
from asyncrpc.core.loop.loops import check_loop
from asyncrpc.core.worker import leave_running, workers_left_running
from asyncrpc.errors import AlreadyStartedError, NotStartedError


class ProgramWorker(Worker):
    """The worker of a program that has a cluster.

    Attributes:
        cluster: the program's.
    """

    cluster: ClusterLifetime


class ClusterLifetime:
    """The life of a cluster in its program; `_enter` starts it.

    Attributes:
        name: of the program's own worker.
    """

    name: str
    _contact: str | tuple[str, ...]
    _stack: AsyncExitStack
    _driver: ProgramWorker | None

    async def __aenter__(self) -> Self:
        """Start the workers; return once all can be called.

        Raises:
            WorkerStartError: a worker did not start; the error has its traceback.
            AlreadyStartedError: the cluster has been entered before.
            UsageError: no event loop runs here, or this is not Linux.

        Cancellation:
            What was started is ended.
        """
        self._check_is_new()
        try:
            await self._enter()
        except BaseException as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def _enter(self) -> None:
        raise NotImplementedError

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers, and the program's own."""
        await self._stack.__aexit__(kind, error, traceback)

    def __await__(self) -> Generator[Any, None, Self]:
        """Start the workers without a block, for the cells of a notebook.

        They run until `close`, or the end of the program.  A cluster of the same name,
        or joined at the same place, that an earlier `await` has left running on this
        event loop is closed first: so a cell that runs again replaces what it started.

        Raises:
            WorkerStartError: a worker did not start; the error has its traceback.
            AlreadyStartedError: the cluster has been entered before.
            UsageError: no event loop runs here, or this is not Linux.

        Cancellation:
            What was started is ended.

        Example:
            >>> cluster = await asyncrpc.Cluster(4)
            >>> await cluster.close()
        """
        return self._start().__await__()

    async def _start(self) -> Self:
        self._check_is_new()
        for worker in workers_left_running():
            if isinstance(worker, ProgramWorker):
                former = worker.cluster
                if former.subject == self.subject:
                    await former.close()
        await self.__aenter__()
        leave_running(self.worker)
        return self

    async def close(self) -> None:
        """End the workers and the program's own, as the end of a block does.

        Idempotent.  Workers that are kept, and those of others, stay.

        Raises:
            UsageError: another event loop runs here.

        Cancellation:
            They end all the same, calls in flight at once.
        """
        if self._driver is not None:
            check_loop("Cluster.close", self._driver.loop, f"the cluster {self.name!r}")
        await self._stack.aclose()

    def _check_is_new(self) -> None:
        if self._driver is not None:
            raise AlreadyStartedError(
                f"the cluster {self.name!r} has been entered before; make another"
            )

    @property
    def subject(self) -> str | tuple[str, ...]:
        """Internal: what it is a cluster of; those of one replace one another."""
        return self._contact or (self.name,)

    @property
    def worker(self) -> Worker:
        """The program's own worker.

        Raises:
            NotStartedError: the cluster has not been entered.
        """
        if self._driver is None:
            raise NotStartedError(f"the cluster {self.name!r} must be entered first")
        return self._driver
