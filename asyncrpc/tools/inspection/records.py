"""What one worker tells of its tasks, threads and calls at one moment.

A `WorkerSnapshot` names tasks and threads by their index in `actors`, and calls by the
incarnations of both ends and a number that both ends know.  So `machine.graph` can join
the snapshots of a group.  Nothing here holds a value of the program.
"""

from __future__ import annotations

import enum
from typing import Annotated, NamedTuple

from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.core.services.schema import EnumName, Integer

UNKNOWN_S = -1.0
NO_ACTOR = -1

ActorIndex = Annotated[int, Integer(NO_ACTOR, 1 << 31, "the index of an actor, or -1")]


class ActorKind(enum.Enum):
    """What runs code."""

    TASK = "task"
    THREAD = "thread"


class StackFrame(NamedTuple):
    """One line of a stack."""

    function: str
    file: str
    line: int


class CallKey(NamedTuple):
    """One call, as both of its ends know it.

    Attributes:
        caller: incarnation of the worker that made it.
        callee: incarnation of the worker that serves it; 0 while it is not connected.
    """

    caller: int
    callee: int
    call_id: int


class Wait(NamedTuple):
    """What a task or thread waits for.

    Attributes:
        what: the same in words, as in "Lock `table`".
        for_s: seconds that it has waited; `UNKNOWN_S`.
        actors: the tasks and threads of this worker that could end the wait: for
            `TASKS` the tasks, all of which must end; for a lock its holders; for
            others those that refer to the object.
        is_sure: whether `actors` certainly are these; otherwise they may be.
        is_closed: whether only `actors` refer to the object, so that nothing else can
            end the wait.
        call: of `CALL`, `STREAM`, `CREDIT` and `INBOUND`: which one.
        members: of `ROUND` and `COLLECTIVE`: the names of all that must take part.
        calls: further calls, all of which must end.
        needs: labels of what must be done, on any worker: see `ObservedActor.does`.
    """

    kind: Annotated[WaitKind, EnumName(WaitKind)]
    what: str
    for_s: float = UNKNOWN_S
    actors: tuple[ActorIndex, ...] = ()
    is_sure: bool = True
    is_closed: bool = False
    call: CallKey | None = None
    members: tuple[str, ...] = ()
    calls: tuple[CallKey, ...] = ()
    needs: tuple[str, ...] = ()


class ObservedActor(NamedTuple):
    """A task or a thread.

    Attributes:
        name: of the task or thread.
        function: the innermost function of the program in it, for people.
        frames: its stack, the outermost first; without asyncrpc's own frames if it has
            frames of the program.
        is_internal: whether it belongs to asyncrpc and runs no code of the program.
        does: labels of what it does for others, such as its part of a backward pass.
    """

    kind: Annotated[ActorKind, EnumName(ActorKind)]
    name: str
    function: str
    frames: tuple[StackFrame, ...]
    wait: Wait
    is_internal: bool
    does: tuple[str, ...] = ()


class OutgoingCall(NamedTuple):
    """A call that this worker has made and that is not yet answered.

    Attributes:
        for_s: seconds since it was made.
    """

    key: CallKey
    to: str
    function: str
    for_s: float


class ServedCall(NamedTuple):
    """A call that this worker serves.

    Attributes:
        caller: name of the worker that made it.
        function: name of the function; empty if it could not be read.
        for_s: seconds since it arrived.
        actor: the task or thread that runs it; -1: none yet, or no longer.
        is_stream: whether it sends items.
        makes: the referenced value that it makes; empty for none.
        needs: the referenced value that it waits for; empty for none.
        holds_bytes: bytes of a large request, while they count against the limit.
    """

    key: CallKey
    caller: str
    function: str
    for_s: float
    actor: ActorIndex
    is_stream: bool
    makes: str = ""
    needs: str = ""
    holds_bytes: Annotated[int, Integer(0, 1 << 62, "a number of bytes")] = 0


class WorkerSnapshot(NamedTuple):
    """One worker at one moment.

    Attributes:
        rank: of the worker; -1 if it has none.
        blocked_for_s: seconds since its event loop last ran; 0 if it runs.
        loop_actor: the thread of its event loop; -1 if it is not listed.
        made: its calls that are not yet answered.
        left_out: how many actors and calls are not listed.
    """

    name: str
    rank: Annotated[int, Integer(-1, 1 << 31, "a rank, or -1")]
    incarnation: int
    pid: int
    host_id: str
    blocked_for_s: float
    loop_actor: ActorIndex
    actors: tuple[ObservedActor, ...]
    made: tuple[OutgoingCall, ...]
    served: tuple[ServedCall, ...]
    left_out: int = 0


class Trouble(enum.Enum):
    """Why a worker did not answer, or is stuck."""

    BLOCKED = "its event loop is blocked"
    HELD = "its interpreter is held by code in C"
    STOPPED = "its process is stopped"
    GONE = "its process is gone"
    SILENT = "it does not answer"


class NoAnswer(NamedTuple):
    """What is known of a worker that did not answer."""

    trouble: Annotated[Trouble, EnumName(Trouble)]
    words: str

    @property
    def text(self) -> str:
        """Both, for people."""
        words = f": {self.words}" if self.words else ""
        return f"{self.trouble.value}{words}"
