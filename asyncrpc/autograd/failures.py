"""How `backward` reports an error that ended its pass, on any worker.

An error of a hook's may say of itself what is wrong, or raise when it is looked at: so
it is judged by its type alone.
"""

from __future__ import annotations

from typing import Any

from asyncrpc.errors import AutogradError, BackwardFailedError, CallError, RemoteError
from asyncrpc.ids import ContextId
from asyncrpc.serde import words_of


def is_told(error: BaseException) -> bool:
    """Return whether `backward` reports an error in its own words.

    Not of what ends a program, or a task; nor of ours, if it arose here.
    """
    kind = type(error)
    is_ours = issubclass(kind, AutogradError) and not issubclass(kind, RemoteError)
    return issubclass(kind, Exception) and not is_ours


def failed(
    name: str, context_id: ContextId, error: BaseException
) -> BackwardFailedError:
    """Return what `backward` raises instead of an error.

    Args:
        name: of the worker that began the pass.
        context_id: of its context.
        error: what ended it.
    """
    worker, text, kind = name, words_of(error), type(error)
    told: Any = error
    if issubclass(kind, RemoteError) and "worker" in told.__dict__:
        worker = told.worker
        text = f"{told.remote_type}: {told.remote_message}"
    elif issubclass(kind, CallError):  # it is lost, or would not answer
        worker = told.to or worker
    return BackwardFailedError(
        f"Error on worker {worker!r}: {text}",
        worker=worker,
        context_id=str(context_id),
    )
