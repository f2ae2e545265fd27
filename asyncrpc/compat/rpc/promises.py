"""The other end of a future that `rpc_async` returns.

Source: torch.futures.Future; what it makes of errors is in `errors`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from asyncrpc.clock import now_s
from asyncrpc.compat.rpc import errors
from asyncrpc.runtime.calls.futures import CallFuture


class PromisingAgent(Protocol):
    """What a promise uses of the agent of this process."""

    def in_thread(self, job: Callable[[], Any], /) -> None:
        """Run a job in a thread that may block."""

    def rank_of(self, name: str, /) -> int:
        """Return the rank of a worker."""


class Promise:
    """Completes a future of torch's with the end of a call.

    A result that comes after the call's limit is a timeout, however late the loop came
    to look: arguments that are slow to pickle hold it up.

    In a thread of the worker's, not on the loop: what waits for the future may call on,
    and wait for that.

    Attributes:
        future: for the program.
    """

    def __init__(self, agent: PromisingAgent, limit_s: float | None = None) -> None:
        self._agent = agent
        self._limit_s = limit_s
        self._begun_s = now_s()
        self._ended: torch.futures.Future[Any] = torch.futures.Future()
        self.future: torch.futures.Future[Any] = self._ended.then(self._unwrap)

    def _unwrap(self, done: torch.futures.Future[Any]) -> Any:
        value, error = done.value()
        if error is None:
            return value
        failed = errors.of_future(error, self._agent.rank_of).with_traceback(None)
        if isinstance(failed, RuntimeError):
            raise failed  # so that `wait_all` does not wait for the others
        self.future._set_unwrap_func(errors.raised)  # noqa: SLF001
        return failed  # torch would make a RuntimeError of it

    def follow(self, call: CallFuture[Any]) -> None:
        """Complete the future when a call ends; on the loop."""
        call.add_done_callback(self._finish)

    def _finish(self, call: CallFuture[Any]) -> None:
        error = errors.of_ended(call)
        limit_s = self._limit_s
        if error is None and limit_s is not None and now_s() - self._begun_s > limit_s:
            error = errors.timed_out(limit_s)
        if error is not None:
            self.fail(error)
            return
        outcome = call.result(), None
        self._agent.in_thread(lambda: self._ended.set_result(outcome))

    def fail(self, error: BaseException) -> None:
        """Complete the future with an error; on the loop."""
        outcome = None, error
        self._agent.in_thread(lambda: self._ended.set_result(outcome))

    def fail_here(self, error: BaseException) -> None:
        """Complete the future with an error; in the thread that is to have it."""
        self._ended.set_result((None, error))
