"""The worker that the code of a task or a thread belongs to."""

from __future__ import annotations

from asyncrpc.errors import NotStartedError
from asyncrpc.runtime.calls.context import current_worker_var
from asyncrpc.runtime.worker import Worker


def current_worker() -> Worker:
    """Return the worker of this task or thread.

    Raises:
        NotStartedError: there is none: enter a `Worker`, or call `init_rpc`.
    """
    worker: Worker | None = current_worker_var.get()
    if worker is None or worker.is_closed:
        raise NotStartedError(
            "there is no running worker here; use `async with asyncrpc.Worker(...)` or "
            "`await asyncrpc.init_rpc(...)` first"
        )
    return worker
