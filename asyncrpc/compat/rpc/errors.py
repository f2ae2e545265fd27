"""Errors of calls as torch raises them.

The text of a function's exception has the worker that raised it, its repr and its
traceback.  From a future or `rpc_sync` a ValueError or a TypeError keeps its type and
all others become RuntimeErrors; from `to_here` each keeps its type.  An error that the
function did not raise is a RuntimeError.

Source: torch.distributed.rpc.internal (`_run_function`, `_handle_exception`), and
torch's C++ futures, which know only these two types of Python exceptions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from asyncrpc.errors import (
    AsyncRpcError,
    DeadlineExceededError,
    DecodeError,
    EncodeError,
    RemoteError,
)

_KEPT: Final = (ValueError, TypeError)
_NO_CODE: Final = (
    "Default RPC pickler does not serialize function code: make sure that the callee "
    "can import the function under the same name"
)
NOT_INITIALIZED: Final = (
    "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
)
NO_AGENT: Final = (
    "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by "
    "calling `rpc.init_rpc`)?"
)
NOT_MADE: Final = (
    "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the "
    "owner node does not exist."
)
_NO_SCHEMA: Final = (
    "Overloaded torch operator invoked from Python failed to match any schema:"
)

RankOf = Callable[[str], int]


def of_ended(call: asyncio.Future[Any]) -> BaseException | None:
    """Return the error of a call; None if it has not failed."""
    if call.cancelled():
        return RuntimeError("the call was cancelled: RPC has been shut down here")
    return call.exception()


def timed_out(timeout_s: float) -> RuntimeError:
    """Return the error of a call that took too long."""
    return RuntimeError(
        f"RPCErr:1:RPC ran for more than set timeout ({timeout_s * 1000:.0f} ms) and "
        "will now be marked with an error"
    )


def original_of(error: RemoteError, rank_of: RankOf) -> Exception:
    """Return the exception of a function, made again from its text, as torch does."""
    where = f"WorkerInfo(id={rank_of(error.worker)}, name={error.worker})"
    kind = getattr(type(error), "remote_class", None)
    shown = _repr(error).replace("\\n", "\n")
    text = f"On {where}:\n{shown}\n{error.remote_traceback}"
    if kind is None or not issubclass(kind, Exception):
        return RuntimeError(text)
    if issubclass(kind, AsyncRpcError):
        return _plain(error, text)
    try:
        original: Exception = kind(text)
    except Exception as problem:  # noqa: BLE001  (constructors take what they like)
        return RuntimeError(
            f"Failed to create original exception type. Error msg was {problem} "
            f"Original exception on remote side was {text}"
        )
    return original


def _plain(error: RemoteError, text: str) -> Exception:
    """Return the exception for an error of asyncrpc at the callee."""
    if isinstance(error, DecodeError):
        return RuntimeError(f"{text}\n{_NO_CODE}")
    if isinstance(error, DeadlineExceededError):
        return timed_out(error.timeout_s)
    return RuntimeError(text)


def _repr(error: RemoteError) -> str:
    name = error.remote_type.rpartition(".")[2].rpartition(":")[2]
    args = error.args if getattr(type(error), "remote_class", None) else ()
    inside = ", ".join(map(repr, args)) if args else repr(error.remote_message)
    return f"{name}({inside})"


def of_call(error: BaseException, rank_of: RankOf) -> BaseException:
    """Return the exception that `to_here` raises for an error of asyncrpc."""
    match error:
        case RemoteError():
            return original_of(error, rank_of)
        case DeadlineExceededError():
            return timed_out(error.timeout_s)
        case EncodeError(__cause__=Exception() as cause):
            return _of_argument(cause, rank_of)
        case DecodeError():
            return RuntimeError(f"{error}\n{_NO_CODE}")
        case AsyncRpcError():
            return RuntimeError(str(error))
        case _:
            return error


def _of_argument(cause: Exception, rank_of: RankOf) -> BaseException:
    """Return the exception for an argument that cannot be sent."""
    if isinstance(cause, DeadlineExceededError):
        return RuntimeError(NOT_MADE)  # a reference to a value that was never made
    return of_call(cause, rank_of)


def of_future(error: BaseException, rank_of: RankOf) -> BaseException:
    """Return the exception that a future or `rpc_sync` raises for an asyncrpc error."""
    translated = of_call(error, rank_of)
    if not isinstance(error, RemoteError):
        return translated
    if _is_of_operator(error):
        is_refused = isinstance(translated, TypeError)
        text = error.remote_message
        return RuntimeError(f"{_NO_SCHEMA}\n{text}" if is_refused else text)
    text = f"{type(translated).__name__}: {translated}"
    for kind in _KEPT:
        if isinstance(translated, kind):
            return kind(text)
    return RuntimeError(text)


def _is_of_operator(error: RemoteError) -> bool:
    """Return whether one of torch's operators has raised, or refused its arguments.

    The callee calls them in C++; only their text comes back.
    """
    last = error.remote_traceback.rpartition('  File "')[2]
    if "asyncrpc/core/calls/inbound.py" not in last:
        return False  # Python frames are above ours
    kind = getattr(type(error), "remote_class", None)
    is_refusal = "combination of arguments" in error.remote_message
    return kind is RuntimeError or (kind is TypeError and is_refusal)


def raised(error: BaseException) -> Any:
    """Raise an error without the frames that it came through."""
    try:
        raise error.with_traceback(None) from None
    finally:
        del error  # its traceback has this frame: a cycle would hold RRefs
