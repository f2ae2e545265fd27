"""The events of a worker, one class for each kind.

The first field of each is `at_s`, when it was noted.  An `outcome` is `OK`,
"cancelled", or the name of the class of the error.

A `task` is the name of a task or a thread; or the `call_label` of a call, if it belongs
to the function of a call that this worker served; or empty: no task.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias, get_args

from asyncrpc.core.ids import ContextId, MessageId, RRefId, WorkerId

OK: Final = "ok"
"""The `outcome` of an operation that succeeded."""
CANCELLED: Final = "cancelled"
"""The `outcome` of an operation that was cancelled."""
MESSAGES_MAX: Final = 32  # named by one backward segment at each end


class CallEnded(NamedTuple):
    """A call that this worker made has ended; requests to services count as calls.

    Attributes:
        at_s: when the answer was read, or the caller gave up.
        began_s: when it was made.
        to: the callee.
        function: name of the function.
        call_id: of the connection to the callee; 0: it was never sent.
        outcome: how it ended.
        bytes_sent: of buffers (tensors, arrays, long byte strings) of the request.
        bytes_received: of buffers of the answer.
        task: that made it.
    """

    at_s: float
    began_s: float
    to: WorkerId
    function: str
    call_id: int
    outcome: str
    bytes_sent: int
    bytes_received: int
    task: str


class CallServed(NamedTuple):
    """A call that this worker served has ended.

    Attributes:
        at_s: when it was answered, or given up.
        came_s: when its request had been received.
        began_s: when its function began; until then it waited for a thread.
        caller: the worker that made it.
        function: name of the function; empty if it could not be read.
        call_id: as at the caller.
        outcome: how it ended.
    """

    at_s: float
    came_s: float
    began_s: float
    caller: WorkerId
    function: str
    call_id: int
    outcome: str


class StreamReceived(NamedTuple):
    """A stream that this worker asked for has ended.

    Attributes:
        at_s: when its last item had come, or the consumer left.
        began_s: when it was asked for.
        to: the producer.
        function: name of the generator.
        call_id: of the connection to the producer.
        outcome: how it ended.
        items: how many have come.
        task: that asked for it.
    """

    at_s: float
    began_s: float
    to: WorkerId
    function: str
    call_id: int
    outcome: str
    items: int
    task: str


class StreamSent(NamedTuple):
    """A stream that this worker produced has ended.

    Attributes:
        at_s: when its end was sent, or it was given up.
        came_s: when it was asked for.
        caller: the consumer.
        function: name of the generator.
        call_id: as at the consumer.
        outcome: how it ended.
        items: how many were sent.
    """

    at_s: float
    came_s: float
    caller: WorkerId
    function: str
    call_id: int
    outcome: str
    items: int


class ReferenceChanged(NamedTuple):
    """A referenced value of this worker was made, could not be made, or was freed.

    Attributes:
        at_s: when.
        rref_id: of the value.
        change: "made", "failed" or "freed".
    """

    at_s: float
    rref_id: RRefId
    change: str


class BackwardPassEnded(NamedTuple):
    """A distributed backward pass has ended for this worker.

    Attributes:
        at_s: when its gradients were committed or dropped here.
        began_s: when this worker began to take part.
        context_id: in which it ran.
        root: name of the worker that began it.
        is_committed: whether its gradients count.
        pass_number: of the worker that began it.
        task: that began it here; empty: another worker began it.
    """

    at_s: float
    began_s: float
    context_id: ContextId
    root: str
    is_committed: bool
    pass_number: int
    task: str


class BackwardSegmentEnded(NamedTuple):
    """A part of this worker's graph has run in a backward pass.

    Gradients enter it for tensors that this worker has sent in a message, and leave it
    for tensors that it has received in one; both workers know the message by its id.

    Attributes:
        at_s: when.
        began_s: when all of its gradients were there.
        context_id: of the pass.
        root: name of the worker that began the pass.
        pass_number: of that worker.
        nodes: of the graph.
        fed_by: the messages whose tensors' gradients entered, `MESSAGES_MAX` at most.
        feeds: the messages whose tensors' gradients left, with the same limit.
        left_out: how many messages are in neither, as there were too many.
        outcome: how it ended.
    """

    at_s: float
    began_s: float
    context_id: ContextId
    root: str
    pass_number: int
    nodes: int
    fed_by: tuple[MessageId, ...]
    feeds: tuple[MessageId, ...]
    left_out: int
    outcome: str


class OptimizerStepEnded(NamedTuple):
    """A step of a distributed optimizer that this worker asked for has ended.

    Attributes:
        at_s: when.
        began_s: when it was asked for.
        optimizer: name of its class.
        owners: names of the workers that have its parameters.
        outcome: `OK`, "skipped" if no worker applied it, or as in other events.
        task: that took it.
    """

    at_s: float
    began_s: float
    optimizer: str
    owners: tuple[str, ...]
    outcome: str
    task: str


class CollectiveEnded(NamedTuple):
    """A collective has ended for this worker.

    Attributes:
        at_s: when.
        began_s: when this worker began it.
        group: the group, as in errors.
        operation: name of the operation.
        number: of the collective in its group, from 0.
        rank: of this worker in the group.
        members: names of the workers of the group, by rank.
        dtype: of the tensor; empty if ranks may differ.
        shape: of the tensor; None if ranks may differ.
        outcome: how it ended.
        group_id: the number by which the ranks of the group know it.
        task: that began it.
    """

    at_s: float
    began_s: float
    group: str
    operation: str
    number: int
    rank: int
    members: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] | None
    outcome: str
    group_id: int
    task: str


class BucketReduced(NamedTuple):
    """A bucket of gradients has been reduced over the ranks of a DDP module.

    Attributes:
        at_s: when.
        began_s: when it was full.
        bucket: its index, from 0.
        nbytes: of its gradients; 0 if they are sparse.
        task: that reduced it.
    """

    at_s: float
    began_s: float
    bucket: int
    nbytes: int
    task: str


class LinkChanged(NamedTuple):
    """A connection to a peer was opened, has broken, was resumed, or has ended.

    Attributes:
        at_s: when.
        peer: the worker at the other end.
        change: "opened", "broken", "resumed" or "ended".
        reason: why it ended; empty for others.
    """

    at_s: float
    peer: WorkerId
    change: str
    reason: str


class MembershipChanged(NamedTuple):
    """What this worker knows of a member has changed.

    Attributes:
        at_s: when.
        member: the member.
        change: "joined", "left", "lost", "restarted" or "back".
    """

    at_s: float
    member: WorkerId
    change: str


class MemoryChanged(NamedTuple):
    """This worker has taken memory for payloads from the system, or given it back.

    Attributes:
        at_s: when.
        what: "slab": memory shared with peers of the host; "peer's slab": that of a
            peer, mapped here.
        change: "taken" or "returned".
        nbytes: of it.
    """

    at_s: float
    what: str
    change: str
    nbytes: int


TraceEvent: TypeAlias = (
    CallEnded
    | CallServed
    | StreamReceived
    | StreamSent
    | ReferenceChanged
    | BackwardPassEnded
    | BackwardSegmentEnded
    | OptimizerStepEnded
    | CollectiveEnded
    | BucketReduced
    | LinkChanged
    | MembershipChanged
    | MemoryChanged
)
"""An event of a worker, of any kind."""

KINDS: Final[tuple[type[TraceEvent], ...]] = get_args(TraceEvent)
"""The classes of all events, in the order of `TraceEvent`."""


def outcome_of(error: BaseException | None) -> str:
    """Return the outcome of an operation that raised `error`, or nothing."""
    if error is None:
        return OK
    # By its type: an error's own attributes may lie.
    kind = type(error)
    return CANCELLED if kind.__name__ == "CancelledError" else kind.__name__


def call_label(call_id: int, caller: str) -> str:
    """Return the label of a call, unique among the calls that its callee serves.

    Args:
        call_id: of the connection.
        caller: name of the worker that made it.
    """
    return f"call {call_id} of {caller}"
