"""What a task is found to wait for, before it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from asyncrpc.inspection.awaits import AwaitStep
from asyncrpc.inspection.records import WaitKind
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.streams import StreamReceiver


class Recognized(NamedTuple):
    """What is waited for.

    Attributes:
        kind: of what.
        what: it in words; empty: by its kind.
        subject: the object that is waited for; None if there is none to look for.
        tasks: those that are waited for, all of them.
        call: the call or stream that is waited for.
        members: names of all that have to come.
        calls: further calls that are waited for, all of them.
        needs: labels of what has to be done; see `records.Actor.does`.
        since_s: since when, in the time of the loop, where that is known; else 0.
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


# Given the step of a library's function that waits, and the step that called it; None:
# what it waits for is told by what is inside of it.
Recognize: TypeAlias = Callable[[AwaitStep, AwaitStep | None], Recognized | None]
