"""Every error asyncrpc raises, in one file, so that the hierarchy reads as one page.

Two questions place a class: who must act (the programmer, the peer, the operator), and
may the called function have run?  The second is `CallError.outcome`, the only thing a
retry policy may look at.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any, ClassVar, Final

__all__ = [
    "AlreadyStartedError",
    "AsyncRpcError",
    "AuthenticationError",
    "AutogradError",
    "BackwardFailedError",
    "BackwardTimeoutError",
    "BarrierBrokenError",
    "BarrierTimeoutError",
    "CallError",
    "CallKindError",
    "ClosedError",
    "ClusterError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "ConnectError",
    "ConnectionLostError",
    "DeadlineExceededError",
    "DecodeError",
    "EncodeError",
    "FrameTooLargeError",
    "GroupChangedError",
    "InvalidContextError",
    "LocalProtocolError",
    "MalformedError",
    "NoGradientPathError",
    "NotStartedError",
    "OptimizerError",
    "OutMismatchError",
    "Outcome",
    "OverloadedError",
    "OwnerLostError",
    "ProcessFailedError",
    "ProtocolError",
    "PublishError",
    "QuorumLostError",
    "RRefDeletedError",
    "RRefError",
    "RankLostError",
    "RefusedError",
    "RejectedError",
    "RemoteError",
    "RemoteProtocolError",
    "RendezvousTimeoutError",
    "TransportError",
    "UnansweredError",
    "UnknownWorkerError",
    "UsageError",
    "VersionMismatchError",
    "WorkerLostError",
    "WorkerStartError",
]


NAMES_SHOWN: Final = 64  # in the text of an error; a group may have thousands


class Outcome(enum.Enum):
    """Whether the called function ran, as far as the caller can know."""

    NOT_EXECUTED = "not executed"  # safe to retry, whatever the function does
    UNKNOWN = "unknown"  # retry only a function declared idempotent
    EXECUTED = "executed"  # a retry would run the function twice


class AsyncRpcError(Exception):
    """Base of everything asyncrpc raises; never raised itself."""

    code: ClassVar[str]  # its name on the wire: unique, never reused
    by_code: ClassVar[dict[str, type[AsyncRpcError]]] = {}

    def __init_subclass__(cls, *, code: str = "") -> None:
        super().__init_subclass__()
        if not code:  # a class made at run time for the type of a remote exception
            return
        if code in cls.by_code:
            raise TypeError(f"code {code!r} is already {cls.by_code[code].__name__}")
        cls.code = code
        cls.by_code[code] = cls

    def __reduce__(self) -> tuple[Callable[..., AsyncRpcError], tuple[Any, ...]]:
        return rebuild, (type(self), self.args, self.__dict__)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the text, and the remote traceback if any."""
        kind, text = escape(type(self).__name__), escape(str(self))
        remote = escape(getattr(self, "remote_traceback", ""))
        worker = escape(getattr(self, "worker", ""))
        head = f"<b>{kind}</b>: {text}"
        if not remote:
            return f"<div>{head}</div>"
        where = f"Traceback of worker {worker}" if worker else "Remote traceback"
        return (
            f"<div>{head}<details><summary>{where}</summary>"
            f'<pre style="background:transparent">{remote}</pre></details></div>'
        )


def rebuild(
    cls: type[AsyncRpcError], args: tuple[Any, ...], fields: dict[str, Any]
) -> AsyncRpcError:
    """Make an error again without its constructor, which has keyword-only arguments."""
    # BaseException by name, because TimeoutError inherits OSError.__init__, which takes
    # its arguments as errno and strerror.
    error = cls.__new__(cls)
    BaseException.__init__(error, *args)
    error.__dict__.update(fields)
    return error


# --- the programmer must act ---------------------------------------------------------


class UsageError(AsyncRpcError, code="usage"):
    """The program used asyncrpc wrongly; the message says what to do instead."""


class AlreadyStartedError(UsageError, code="usage.already_started"):
    """This worker, or the current worker, has already been started."""


class NotStartedError(UsageError, code="usage.not_started"):
    """No worker runs here, or it has been closed."""


class UnknownWorkerError(UsageError, code="usage.unknown_worker"):
    """No worker has this name or rank."""

    def __init__(self, name: str | int, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        listed = (
            ", ".join(repr(worker_name) for worker_name in self.known[:NAMES_SHOWN])
            or "none"
        )
        hidden = len(self.known) - NAMES_SHOWN
        more = f" and {hidden:,} more" if hidden > 0 else ""
        super().__init__(
            f"worker {name!r:.200} is unknown; known: {listed}{more}; if it has just "
            "joined, `await worker.find(name)` asks the others"
        )


class InvalidContextError(UsageError, code="usage.invalid_context"):
    """The autograd context does not exist here, or has ended."""


# --- a side broke the protocol -------------------------------------------------------


class ProtocolError(AsyncRpcError, code="protocol"):
    """A message broke the protocol; the subclasses say which side sent it."""


class LocalProtocolError(ProtocolError, code="protocol.local"):
    """This side was about to break the protocol: a bug in asyncrpc."""


class RemoteProtocolError(ProtocolError, code="protocol.remote"):
    """The peer broke the protocol; its message has been refused.

    After an error of the framing, the connection has been closed.
    """


class VersionMismatchError(RemoteProtocolError, code="protocol.remote.version"):
    """The peer speaks another version of the wire protocol."""


class FrameTooLargeError(RemoteProtocolError, code="protocol.remote.too_large"):
    """A length in a frame exceeds its limit."""


class MalformedError(RemoteProtocolError, code="protocol.remote.malformed"):
    """The bytes are not a valid frame, or a message has invalid content."""


# --- the world got in the way --------------------------------------------------------


class TransportError(AsyncRpcError, ConnectionError, code="transport"):
    """Bytes could not be moved."""


class ConnectError(TransportError, code="transport.connect"):
    """No connection could be made; nothing was sent."""


class RefusedError(ConnectError, code="transport.connect.refused"):
    """No process listens there: the worker has ended, or has not begun."""


class UnansweredError(ConnectError, code="transport.connect.unanswered"):
    """No address answered in time; a process may be there all the same."""


class AuthenticationError(ConnectError, code="transport.connect.authentication"):
    """The two ends could not prove to each other that they belong together."""


class ConnectionLostError(TransportError, code="transport.lost"):
    """The connection broke."""


class ClosedError(TransportError, code="transport.closed"):
    """This side has closed the connection or the worker."""


class RendezvousTimeoutError(AsyncRpcError, TimeoutError, code="rendezvous.timeout"):
    """Not every worker appeared in time.

    Attributes:
        missing: ranks or names of the workers that did not, as far as known.
    """

    def __init__(self, problem: str, *, missing: Iterable[str | int]) -> None:
        super().__init__(problem)
        self.missing = tuple(missing)


class ProcessFailedError(AsyncRpcError, code="process.failed"):
    """A launched process ended badly; the others have been stopped.

    Attributes:
        rank: index of the process.
        exit_code: its exit status; negative is the signal that killed it.
        remote_traceback: the traceback of the process, or an empty string.
    """

    def __init__(
        self, problem: str, *, rank: int, exit_code: int | None, remote_traceback: str
    ) -> None:
        super().__init__(problem)
        self.rank = rank
        self.exit_code = exit_code
        self.remote_traceback = remote_traceback


class ClusterError(AsyncRpcError, code="cluster"):
    """A cluster could not do what was asked of it; it goes on as it is."""


class WorkerStartError(ClusterError, code="cluster.start"):
    """A worker of a cluster did not start.

    Attributes:
        worker: its name.
        remote_traceback: of its process; empty if there is none.
    """

    def __init__(self, problem: str, *, worker: str, remote_traceback: str) -> None:
        super().__init__(problem)
        self.worker = worker
        self.remote_traceback = remote_traceback
        if remote_traceback:
            self.add_note(f"On worker {worker!r}:\n\n{remote_traceback}")


# --- one call failed -----------------------------------------------------------------


class CallError(AsyncRpcError, code="call"):
    """One remote call failed.

    Attributes:
        function: name of the function that was called; empty if not known yet.
        to: name of the worker that was called; empty if not known yet.
        outcome: whether the function ran.
    """

    def __init__(
        self,
        problem: str,
        *,
        function: str = "",
        to: str = "",
        outcome: Outcome = Outcome.UNKNOWN,
    ) -> None:
        super().__init__(problem)
        self.function = function
        self.to = to
        self.outcome = outcome

    @property
    def problem(self) -> str:
        """Return the text of the error, without the function and the worker."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        if not self.function and not self.to:
            return self.problem
        where = f"{self.function or 'a message'} on {self.to!r}"
        return f"{where}: {self.problem} (outcome: {self.outcome.value})"


class RemoteError(CallError, code="call.remote"):
    """The function raised.

    If the exception's class is available here, the error is an instance of both
    `RemoteError` and that class: catch either.

    Attributes:
        remote_type: qualified name of the exception's class.
        remote_message: text of the exception, from `str()` on its worker.
        remote_traceback: the traceback, formatted on that worker.
        worker: name of the worker that raised it (not `to`, if `to` called another).
        pid: process id of that worker.
    """

    remote_type: str
    remote_message: str
    remote_traceback: str
    worker: str
    pid: int


class DeadlineExceededError(CallError, TimeoutError, code="call.deadline"):
    """No response came in time; the function may or may not have run.

    Attributes:
        timeout_s: the time allowed, in seconds, counted from the call.
        outcome: `NOT_EXECUTED` if the request never left this worker, else `UNKNOWN`.
    """

    def __init__(
        self, *, function: str, to: str, outcome: Outcome, timeout_s: float
    ) -> None:
        has_begun = outcome is not Outcome.NOT_EXECUTED
        problem = "no response in" if has_begun else "it did not begin within"
        super().__init__(
            f"{problem} {timeout_s:g} s", function=function, to=to, outcome=outcome
        )
        self.timeout_s = timeout_s


class WorkerLostError(CallError, code="call.worker_lost"):
    """The called worker is gone, or cannot be reached."""


class RejectedError(CallError, code="call.rejected"):
    """The callee rejected the call: it is overloaded, draining, or forbids it."""


class OverloadedError(RejectedError, code="call.overloaded"):
    """Too much work is waiting already: the request was not run; it may be retried.

    Attributes:
        retry_after_s: seconds after which there should be room, from the rate at which
            work has finished recently.
    """

    def __init__(
        self,
        problem: str,
        *,
        retry_after_s: float,
        function: str = "",
        to: str = "",
        outcome: Outcome = Outcome.NOT_EXECUTED,
    ) -> None:
        super().__init__(problem, function=function, to=to, outcome=outcome)
        self.retry_after_s = retry_after_s


class CallKindError(RejectedError, code="call.kind"):
    """The function is called in a way that is not its kind's: the program is at fault.

    A generator needs `stream`, any other function `call`; it has not run.
    """


class EncodeError(CallError, code="call.encode"):
    """An argument or a result cannot be sent; the message says which and what to do."""


class DecodeError(CallError, code="call.decode"):
    """A value arrived but could not be rebuilt."""


class OutMismatchError(CallError, code="call.out_mismatch"):
    """The result does not fit into `out`, whose content is now undefined."""


# --- references, gradients, groups ---------------------------------------------------


class RRefError(AsyncRpcError, code="rref"):
    """A remote reference cannot be used."""


class OwnerLostError(RRefError, code="rref.owner_lost"):
    """The worker that held the value is gone, and the value with it.

    Attributes:
        worker: name of the owner.
        incarnation: the incarnation of that worker.
        reason: how the worker was lost.
    """

    def __init__(self, *, worker: str, incarnation: int, reason: str) -> None:
        super().__init__(
            f"the owner {worker!r} (incarnation {incarnation:016x}) is gone: {reason}"
        )
        self.worker = worker
        self.incarnation = incarnation
        self.reason = reason


class RRefDeletedError(RRefError, code="rref.deleted"):
    """The value was freed, or never existed here."""


class AutogradError(AsyncRpcError, RuntimeError, code="autograd"):
    """Distributed autograd failed, or cannot do this; torch raises a RuntimeError."""


class NoGradientPathError(AutogradError, code="autograd.no_path"):
    """A root does not require a gradient, so there is nothing to compute."""


class BackwardFailedError(AutogradError, code="autograd.backward_failed"):
    """A backward pass failed and was undone on every worker.

    Attributes:
        worker: name of the worker on which it failed.
        context_id: text of the context's id.
    """

    def __init__(self, problem: str, *, worker: str, context_id: str) -> None:
        super().__init__(problem)
        self.worker = worker
        self.context_id = context_id


class BackwardTimeoutError(
    BackwardFailedError, TimeoutError, code="autograd.backward_timeout"
):
    """A backward pass exceeded its timeout, and was undone on every worker.

    The text says what the pass was waiting for, and on which worker.
    """


class OptimizerError(AsyncRpcError, code="optimizer"):
    """A distributed optimizer refused or failed; the text says what was applied."""


class PublishError(AsyncRpcError, code="publish"):
    """A replica refused new weights; the text says what the replicas serve now.

    Attributes:
        refused: the reason of each replica that refused, by its name.
    """

    def __init__(self, problem: str, *, refused: Mapping[str, str]) -> None:
        super().__init__(problem)
        self.refused = dict(refused)


class BarrierBrokenError(AsyncRpcError, code="barrier.broken"):
    """A barrier failed for all workers that had not passed it; the next can be used.

    Attributes:
        number: number of the barrier, which this worker counts from 0.
        missing: names of workers that had not reached it, as far as known.
    """

    def __init__(self, problem: str, *, number: int, missing: Iterable[str]) -> None:
        super().__init__(problem)
        self.number = number
        self.missing = tuple(missing)


class BarrierTimeoutError(BarrierBrokenError, TimeoutError, code="barrier.timeout"):
    """Some workers did not reach the barrier within this worker's `timeout_s`."""


class CollectiveError(AsyncRpcError, code="collective"):
    """A collective failed, for every rank of the group that had not finished it.

    The next collective can be used, unless the class says otherwise.

    Attributes:
        ranks: names of the ranks that caused the failure: they called another
            collective, or with another shape, or gave it up.
    """

    def __init__(self, problem: str, *, ranks: Iterable[str] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class CollectiveTimeoutError(CollectiveError, TimeoutError, code="collective.timeout"):
    """A collective exceeded its timeout; `ranks` are those that did not begin it."""


class RankLostError(CollectiveError, code="collective.rank_lost"):
    """A worker of the group is gone: make a new group; reconfigure an elastic one."""


class QuorumLostError(CollectiveError, code="collective.quorum"):
    """Too few members of an elastic group are left, so it cannot continue here.

    The others may continue in another partition of the network.  `ranks` are the
    missing members.
    """


class GroupChangedError(CollectiveError, code="collective.group_changed"):
    """The group was closed or reconfigured, by this rank or another."""
