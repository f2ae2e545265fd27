"""What a task was found to wait for, before it goes into a snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.streams import StreamReceiver
from asyncrpc.tools.inspection.awaits import AwaitStep
from asyncrpc.tools.inspection.records import WaitKind


class Recognized(NamedTuple):
    """What is waited for.

    Attributes:
        what: the same in words; empty: as its kind says.
        subject: the object that is waited for; None if there is none to look for.
        tasks: the tasks that are waited for, all of them.
        call: the call or stream that is waited for.
        members: names of all that must take part.
        calls: further calls that are waited for, all of them.
        needs: labels of what must be done; see `records.Actor.does`.
        since_s: when the wait began, in the time of the loop; 0 if unknown.
    """

    kind: WaitKind
    what: str = ""
    subject: Any = None
    tasks: tuple[asyncio.Task[Any], ...] = ()
    call: CallFuture[Any] | StreamReceiver | None = None
    members: tuple[str, ...] = ()
    calls: tuple[CallFuture[Any], ...] = ()
    needs: tuple[str, ...] = ()
    since_s: float = 0.0


# Takes the step of a library's function that waits, and the step that called it;
# returns None if an inner step shows better what is waited for.
Recognize: TypeAlias = Callable[[AwaitStep, AwaitStep | None], Recognized | None]
