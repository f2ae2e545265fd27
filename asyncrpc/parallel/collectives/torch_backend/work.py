"""The object that torch gets for each collective: a wait, a query, or a future.

It ends on the event loop; threads of the program, or of torch, wait for it.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import DistBackendError, Work

from asyncrpc.errors import AsyncRpcError, ClosedError, UsageError

if TYPE_CHECKING:
    from asyncrpc.parallel.collectives.torch_backend.rank_runtime import RankRuntime
    from asyncrpc.parallel.collectives.torch_backend.staged import StagedTensors

_NO_LIMIT: Final = timedelta(0)  # torch's default


class CollectiveWork(Work):
    """A running collective, or several that were begun together.

    Tensors on devices are filled when a thread first asks for them or for its end, in
    that thread: by `wait`, `is_completed`, `is_success`, `result` or a future.

    Attributes:
        what: its name, for errors.

    Source: torch.distributed.Work.
    """

    _staged: StagedTensors | None = None
    _landing: threading.Lock | None = None

    def __init__(
        self,
        operation: str,
        tensors: list[torch.Tensor],
        home: RankRuntime,
        staged: StagedTensors,
    ) -> None:
        super().__init__()
        self.operation = operation
        self._tensors = tensors
        self._home = home
        if staged.is_to_be_put_back:
            self._staged = staged
            self._landing = threading.Lock()
        # A lock: the cheapest thing that one thread can wait for and another release.
        self._ended = threading.Lock()
        self._ended.acquire()
        self._guard = threading.Lock()
        self._is_done = False
        self._is_told = False  # the future is complete
        self._error: BaseException | None = None
        self._sender = -1
        self._promise: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None

    # --- ending, on the loop ---------------------------------------------------------

    def end(self, error: BaseException | None, sender: int = -1) -> None:
        """End it, with or without an error; later calls do nothing.

        Args:
            error: why it failed; None: it ended well.
        """
        with self._guard:
            if self._is_done:
                return
            self._error = error
            self._sender = sender
            self._is_done = True
            is_awaited = self._promise is not None
        self._ended.release()
        if not is_awaited:
            self._home.forget(self)
            return
        # Callbacks are the program's code: it may wait for other work, and the
        # loop must not.
        try:
            self._home.run_in_thread(self.tell)
        except AsyncRpcError:
            self.tell()

    def tell(self) -> None:
        """Complete the future; idempotent.  What is chained to it runs here."""
        with self._guard:
            promise, self._is_told = None if self._is_told else self._promise, True
        if promise is not None:
            promise.set_result(None)
        self._home.forget(self)

    # --- what torch asks -------------------------------------------------------------

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""
        if self._is_done and self._staged is not None:
            self._land()
        return self._is_done

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what `wait` would raise; None: nothing, or it has not ended."""
        return None if self._error is None else error_for_torch(self._error)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block this thread until it has ended, and fill tensors on devices.

        Args:
            timeout: the time limit; 0: none.  The collective itself goes on.
        """
        self._wait_for_end(timeout)
        if self._staged is not None:
            self._land()
        if self._error is not None:
            raise error_for_torch(self._error) from self._error
        return True

    def _wait_for_end(self, timeout: timedelta) -> None:
        if not self._is_done:
            if self._home.is_on_loop():
                raise RuntimeError(
                    f"{self.operation} cannot be waited for in the thread of "
                    "asyncrpc's event loop, in which it ends"
                )
            limit_s = timeout.total_seconds() if timeout > _NO_LIMIT else -1
            if not self._ended.acquire(timeout=limit_s):
                raise RuntimeError(
                    f"{self.operation} has not ended in {limit_s:g} s; it continues"
                )
            self._ended.release()  # other threads may wait

    def _land(self) -> None:
        """Fill the tensors on devices, once; other threads that ask meanwhile wait."""
        assert self._landing is not None
        with self._landing:
            staged = self._staged
            if staged is not None and self._error is None:
                try:
                    staged.put_back()
                except Exception as error:  # noqa: BLE001  (`wait` raises it)
                    self._error = error
            self._staged = None

    def synchronize(self) -> None:
        """Wait for it; its tensors are filled then, for every stream."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it fills."""
        if not self._is_done:
            raise RuntimeError(f"{self.operation} has not ended: wait for it first")
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that a received tensor came from; -1: not a `recv`."""
        return self._sender

    _source_rank = source_rank  # torch.distributed.recv asks by this name

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors.

        Callbacks of the future run in a thread, and may wait for other work.  Where
        only the program's threads may use a device, this thread waits: the future is
        complete when this returns.
        """
        staged = self._staged
        if staged is not None and staged.is_exclusive:
            self._wait_for_end(_NO_LIMIT)
            self._land()
        with self._guard:
            if self._future is None:
                promise: torch.futures.Future[None] = torch.futures.Future()
                # torch's C++ code takes an exception that Python sets for a value; an
                # exception raised in a chained function is an error to both.
                self._future = promise.then(self._outcome)
                self._promise = promise
            future, is_late = self._future, self._is_done
        if is_late:
            self.tell()
        return future

    def _outcome(self, _promise: torch.futures.Future[None]) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def __repr__(self) -> str:
        state = "under way"
        if self._is_done:
            state = "done" if self._error is None else f"failed: {self._error}"
        return f"<{type(self).__name__} {self.operation}, {state}>"


def error_for_torch(error: BaseException) -> BaseException:
    """Return the error that torch's users expect in place of asyncrpc's.

    An error that blames the caller becomes a ValueError; any other a DistBackendError,
    which is a RuntimeError.
    """
    if isinstance(error, UsageError):
        return ValueError(str(error))
    if isinstance(error, AsyncRpcError):
        return DistBackendError(f"{type(error).__name__}: {error}")
    return error


def destroyed(operation: str) -> AsyncRpcError:
    """Return the error of work whose process group is destroyed before it ends."""
    return ClosedError(f"the process group was destroyed here before {operation} ended")
