"""Calls that have been started, and wait for what they need before they are sent.

A call to a peer that is not connected yet waits for the connection; one whose arguments
are large, or on devices, for them to be packed.  Whatever goes wrong meanwhile fails
the call, and says that it has not been executed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    DeadlineExceededError,
    Outcome,
    WorkerLostError,
)


class UnsentCalls:
    """The calls of one worker that wait, counted."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def waiting(
        self, call: CallFuture[Any], deadline: Deadline | None, until: str
    ) -> Iterator[None]:
        """Count a call for as long as the block runs; what that raises fails the call.

        Not an asynchronous generator: see `DialTurns.one`.

        Args:
            deadline: of the call; a TimeoutError in the block says that it has passed.
        """
        self.count += 1
        try:
            yield
        except AsyncRpcError as error:
            if isinstance(error, CallError):
                error.function, error.to = call.function, call.to
            # Without its traceback: its frames keep the call and its arguments.
            call.fail(error.with_traceback(None))
        except TimeoutError:
            allowed_s = 0.0 if deadline is None else deadline.allowed_s
            call.fail(never_sent(call.function, call.to, allowed_s))
        except asyncio.CancelledError:
            call.fail(
                WorkerLostError(
                    f"this worker was shut down before {until}",
                    function=call.function,
                    to=call.to,
                    outcome=Outcome.NOT_EXECUTED,
                )
            )
            raise
        except Exception as error:  # noqa: BLE001  (a value's own code; the caller's)
            call.fail(error)
        finally:
            self.count -= 1


def never_sent(function: str, to: str, allowed_s: float) -> DeadlineExceededError:
    """Return the error about a call whose deadline passed before it was sent."""
    return DeadlineExceededError(
        function=function, to=to, outcome=Outcome.NOT_EXECUTED, timeout_s=allowed_s
    )
