"""How `backward` reports an error that ended its pass, on any worker.

A hook's error may describe itself wrongly, or raise when it is inspected: so it is
judged by its type alone.
"""

from __future__ import annotations

from typing import Any

from asyncrpc.core.ids import ContextId
from asyncrpc.core.serde import words_of
from asyncrpc.errors import AutogradError, BackwardFailedError, CallError, RemoteError


def is_reported(error: BaseException) -> bool:
    """Return whether `backward` reports an error in its own words.

    It does not for errors that end a program or a task; nor for ours, if they arose
    here.
    """
    kind = type(error)
    is_ours = issubclass(kind, AutogradError) and not issubclass(kind, RemoteError)
    return issubclass(kind, Exception) and not is_ours


def failed(
    name: str, context_id: ContextId, error: BaseException
) -> BackwardFailedError:
    """Return the error that `backward` raises in place of another."""
    worker, text, kind = name, words_of(error), type(error)
    original: Any = error
    if issubclass(kind, RemoteError) and "worker" in original.__dict__:
        worker = original.worker
        text = f"{original.remote_type}: {original.remote_message}"
    elif issubclass(kind, CallError):  # the worker is lost, or did not answer
        worker = original.to or worker
    return BackwardFailedError(
        f"Error on worker {worker!r}: {text}",
        worker=worker,
        context_id=str(context_id),
    )
