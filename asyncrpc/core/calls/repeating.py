"""Calls that may be made again: only of functions declared idempotent.

A call whose worker is lost, or drains, is made again after a pause, to the worker that
has the name then: the same one after a partition, or one restarted in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asyncrpc.core.arguments import set_mark
from asyncrpc.errors import CallError, Outcome, RejectedError, WorkerLostError

if TYPE_CHECKING:
    from asyncrpc.core.calls.futures import CallFuture

F = TypeVar("F", bound=Callable[..., Any])

IDEMPOTENT_ATTRIBUTE: Final = "__asyncrpc_idempotent__"
# Ten attempts take 0.05 + 0.1 + ... = 14 s, longer than the default `lost_after_s`.
ATTEMPTS_MAX: Final = 10
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 3.2


def idempotent(function: F) -> F:
    """Declare that running a function twice does no more than running it once.

    Then a call of it whose worker is lost is made again, until it succeeds, its
    deadline passes, or it has been tried 10 times.  No other call is ever made twice.
    For a function of a library use `peer.using(idempotent=True)`.

    Raises:
        UsageError: `function` is not a function, or is a builtin.

    Example:
        >>> @asyncrpc.idempotent
        ... def read(key: str) -> bytes:
        ...     return table[key]
    """
    set_mark("function", function, IDEMPOTENT_ATTRIBUTE, True)  # noqa: FBT003  (a mark)
    return function


def is_idempotent(function: Callable[..., Any]) -> bool:
    """Return whether a function has been declared idempotent."""
    try:
        return getattr(function, IDEMPOTENT_ATTRIBUTE, False) is True
    except Exception:  # noqa: BLE001  (its own code; to describe it says what is wrong)
        return False


async def repeat(call: CallFuture[Any], make: Callable[[], CallFuture[Any]]) -> None:
    """Make attempts until one has a final outcome; complete `call` with that."""
    pause_s = FIRST_PAUSE_S
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            call.succeed(await make())
        except asyncio.CancelledError:
            call.fail(_cut_off(call))  # unless it was the caller who gave up
            raise
        except (WorkerLostError, RejectedError) as error:
            if attempt == ATTEMPTS_MAX or error.outcome is Outcome.EXECUTED:
                call.fail(error)
        except Exception as error:  # noqa: BLE001  (the caller's)
            call.fail(error)
        if call.done():
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


def _cut_off(call: CallFuture[Any]) -> CallError:
    return WorkerLostError(
        "this worker was shut down before the call succeeded",
        function=call.function,
        to=call.to,
    )
