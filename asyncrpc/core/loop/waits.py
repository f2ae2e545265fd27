"""What a function waits for, and what is done in it: declared beside the function.

    @waits(lambda at: WaitDescription(WaitKind.TURN, "its turn", at["self"]))
    async def take(self, keys: Set[int]) -> int: ...

Nothing is recorded while the function runs: whoever looks at a task or a thread finds
the code of its frames, and asks the declaration, which sees the function's variables.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from asyncrpc.core.arguments import check_callable

F = TypeVar("F", bound=Callable[..., Any])


class WaitKind(enum.Enum):
    """What a task or thread waits for."""

    RUNS = "nothing: it runs, or is about to"
    CALL = "the answer of a call"
    STREAM = "an item of a stream"
    CREDIT = "room at the consumer of a stream"
    TASKS = "the end of other tasks"
    LOCK = "a lock"
    SEMAPHORE = "a semaphore"
    CONDITION = "a condition"
    EVENT = "an event"
    ITEM = "an item of a queue"
    ROOM = "room in a queue"
    WORK = "the end of the work that a queue has handed out"
    BARRIER = "a barrier of this process"
    ROUND = "other members: a barrier, a rendezvous or the end of the group"
    COLLECTIVE = "other ranks of a collective"
    BACKWARD = "its backward pass on other workers"
    REDUCTION = "the reduction of its gradients"
    TURN = "its turn to change parameters"
    INBOUND = "room for a large request at the callee"
    IN_FLIGHT = "calls in flight"
    DEVICE = "the device lock"
    THREADS = "a thread"
    SLEEP = "time"
    SOCKET = "a socket or a pipe"
    FUTURE = "a future"


class WaitDescription(NamedTuple):
    """What a task or thread waits for.

    Attributes:
        what: the same in words; empty: as its kind says.
        subject: the object that is waited for; tasks and threads that work for it, see
            `works_for`, can end the wait.  None if there is none to look for.
        tasks: the `asyncio.Task`s that are waited for, all of them.
        threads: idents of the threads that are waited for.
        call: the call or stream that is waited for.
        calls: further calls that are waited for, all of them.
        is_part: returns whether another call of this worker is waited for as well.
        members: names of all that must take part.
        needs: labels of what must be done, on any worker; see `does`.
        since_s: when the wait began, in the time of the loop; 0 if unknown.
    """

    kind: WaitKind
    what: str = ""
    subject: Any = None
    tasks: tuple[Any, ...] = ()
    threads: tuple[int, ...] = ()
    call: Any = None
    calls: tuple[Any, ...] = ()
    is_part: Callable[[Any], bool] | None = None
    members: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    since_s: float = 0.0


Variables: TypeAlias = Mapping[str, Any]


@dataclass(slots=True)
class Declaration:
    """What is declared of one function; each takes its variables.

    Attributes:
        waits: returns what it waits for; None if a function that it calls shows that
            better.
        work: returns the object that it works for.
        does: returns the label of what is done while it runs.
    """

    waits: Callable[[Variables], WaitDescription | None] | None = None
    work: Callable[[Variables], object] | None = None
    does: Callable[[Variables], str] | None = None


# Filled at import, by the decorators below.
_DECLARATIONS: Final[dict[CodeType, Declaration]] = {}


def declaration_of(code: CodeType | None) -> Declaration | None:
    """Return what is declared of the function with this code."""
    return None if code is None else _DECLARATIONS.get(code)


def waits(describe: Callable[[Variables], WaitDescription | None]) -> Callable[[F], F]:
    """Declare what a function waits for, a coroutine function or one of a thread.

    Args:
        describe: is given the variables of the function by name; it runs while somebody
            looks, in a thread of its own.

    Raises:
        UsageError: `describe` cannot be called.
    """
    check_callable("describe", describe)

    def declare(function: F) -> F:
        _declaration(function).waits = describe
        return function

    return declare


def works_for(find: Callable[[Variables], object]) -> Callable[[F], F]:
    """Declare which object a function works for, such as a call that it serves.

    Raises:
        UsageError: `find` cannot be called.
    """
    check_callable("find", find)

    def declare(function: F) -> F:
        _declaration(function).work = find
        return function

    return declare


def does(label: Callable[[Variables], str]) -> Callable[[F], F]:
    """Declare what is done while a function runs, for workers that need it.

    Raises:
        UsageError: `label` cannot be called.
    """
    check_callable("label", label)

    def declare(function: F) -> F:
        _declaration(function).does = label
        return function

    return declare


def _declaration(function: Callable[..., Any]) -> Declaration:
    code: CodeType = inspect.unwrap(function).__code__
    return _DECLARATIONS.setdefault(code, Declaration())
