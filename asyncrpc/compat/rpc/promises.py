"""The other end of a future that `rpc_async` returns.

Source: torch.futures.Future; `errors` has its treatment of errors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Any, Final, Protocol

import torch

from asyncrpc.compat.rpc import errors
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.loop.clock import now_s
from asyncrpc.core.loop.threads import thread_blocked

_Future: Any = torch._C.Future  # noqa: SLF001  (without a subclass's attributes)
_NO_VARIABLES: Final = Context()  # for calls without variables; others copy theirs


_wait: Final = _Future.wait


def _wait_as_blocked(future: torch.futures.Future[Any]) -> Any:
    """Wait for a future of torch's, as a thread that waits and does not run.

    So its pool runs others, and hooks give up the lock that a pass may need.
    """
    with thread_blocked():
        return _wait(future)


_Future.wait = _wait_as_blocked  # the class of what `rpc_async` returns


class PromisingAgent(Protocol):
    """The part of this process's agent that a promise uses."""

    def in_thread(self, job: Callable[[], Any], /) -> None:
        """Run a job in a thread that may block."""

    def rank_of(self, name: str, /) -> int:
        """Return the rank of a worker."""


class Promise:
    """Starts a call, and completes a torch future with its result.

    A result that arrives after the call's limit is a timeout, even if the loop was late
    because arguments were slow to pickle.

    The future completes in a thread of the worker, not on the loop: its callbacks may
    make other calls, and wait for them.

    Programs have thousands of promises at once, so each has as few objects as possible:
    Python's garbage collector visits them all, over and over.

    Attributes:
        future: the program's future.
    """

    __slots__ = (
        "_agent",
        "_begun_s",
        "_ended",
        "_limit_s",
        "_outcome",
        "_start",
        "future",
    )

    def __init__(
        self,
        agent: PromisingAgent,
        start: Callable[[], CallFuture[Any]],
        limit_s: float | None = None,
    ) -> None:
        self._agent = agent
        self._start: Callable[[], CallFuture[Any]] | None = start
        self._limit_s = limit_s
        self._begun_s = now_s()
        self._outcome: tuple[Any, BaseException | None] = None, None
        self._ended: torch.futures.Future[Any] = _Future([])
        self.future: torch.futures.Future[Any] = self._ended.then(self._unwrap)

    def _unwrap(self, done: torch.futures.Future[Any]) -> Any:
        value, error = done.value()
        if error is None:
            return value
        failed = errors.of_future(error, self._agent.rank_of).with_traceback(None)
        if isinstance(failed, RuntimeError):
            raise failed  # so that `wait_all` stops waiting for the others
        self.future._set_unwrap_func(errors.raised)  # noqa: SLF001
        return failed  # torch would make a RuntimeError of it

    def begin(self) -> None:
        """Start the call; on the loop."""
        start, self._start = self._start, None
        assert start is not None  # a promise is begun once
        start().add_done_callback(self._finish, context=_NO_VARIABLES)

    def begin_or_fail(self) -> None:
        """Start the call, on the loop; if that fails, the future has the error."""
        try:
            self.begin()
        except Exception as error:  # noqa: BLE001  (who waits gets it)
            self._end(None, error)

    def _finish(self, call: CallFuture[Any]) -> None:
        error = errors.of_ended(call)
        limit_s = self._limit_s
        if error is None and limit_s is not None and now_s() - self._begun_s > limit_s:
            error = errors.timed_out(limit_s)
        self._end(None if error is not None else call.result(), error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        """Complete the future, in a thread; on the loop."""
        self._outcome = value, error
        self._agent.in_thread(self._complete)

    def _complete(self) -> None:
        outcome, self._outcome = self._outcome, (None, None)
        self._ended.set_result(outcome)

    def fail_here(self, error: BaseException) -> None:
        """Complete the future with an error, in the calling thread."""
        self._ended.set_result((None, error))
