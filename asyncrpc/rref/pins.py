"""What a message that carries references relies on, until its receiver has answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncrpc.ids import RRefId, WorkerId
from asyncrpc.serde.dismantling import assemble, dismantle

if TYPE_CHECKING:
    from asyncrpc.rref.travel import Travel
    from asyncrpc.runtime.calls.futures import CallFuture
    from asyncrpc.runtime.ports import PeerLink


class Shared:
    """What all handles of this worker to one value share.

    Attributes:
        rref_id: of the value.
        owner: the worker that has it.
        is_here: whether that is this worker.
        error: why the value can no longer be had.
        is_apart: whether the tables count these handles no more, which are lost.
        made_s: when the first of them was made, on the loop's clock.
        call: that makes the value, if it was made here and is under way.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "error",
        "is_apart",
        "is_here",
        "made_s",
        "owner",
        "rref_id",
    )

    def __init__(
        self, rref_id: RRefId, owner: WorkerId, *, is_here: bool, made_s: float
    ) -> None:
        self.rref_id = rref_id
        self.owner = owner
        self.is_here = is_here
        self.made_s = made_s
        self.is_apart = False
        self.error: Exception | None = None
        self.call: CallFuture[Any] | None = None

    def check(self) -> None:
        """Raise a copy of why the value can no longer be had, if so."""
        if self.error is not None:
            raise copy_of(self.error)


def copy_of(error: BaseException) -> BaseException:
    """Return an error like one that is kept, to be raised.

    Raising the one that is kept would hang frames on it, and a frame may hold the very
    handle whose finalizer keeps the error.
    """
    try:
        copy = assemble(type(error), dismantle(error))
        copy.__cause__, copy.__context__ = error.__cause__, error.__context__
        copy.__suppress_context__ = error.__suppress_context__
        return copy.with_traceback(error.__traceback__)
    except BaseException:  # noqa: BLE001  (its own code: there is no other like it)
        return error


class MessagePins:
    """What one message that was sent relies on; a `runtime.extensions.Pins`."""

    __slots__ = ("_at_home", "_forks", "_link", "_loans", "_service")

    def __init__(self, service: Travel, link: PeerLink) -> None:
        self._service = service
        self._link = link
        self._forks: list[RRefId] = []  # counted at the owner, who is this worker
        self._loans: list[int] = []  # to be returned by the receiver
        self._at_home: list[Shared] = []  # sent to this worker itself

    def add_fork(self, rref_id: RRefId) -> None:
        """A fork of a value of ours travels."""
        self._forks.append(rref_id)

    def add_loan(self, token: int) -> int:
        """A loan travels; return its token."""
        self._loans.append(token)
        return token

    def add_at_home(self, shared: Shared) -> None:
        """A reference goes to this worker itself: its count travels with it."""
        self._at_home.append(shared)

    def on_sent(self) -> None:
        """Do nothing: the receiver returns what it was lent."""

    def undo(self) -> None:
        """The message was never sent, or not to its end: nobody has read it."""
        # The count of a lost peer went with it; one that came back has another.
        forks = [] if self._link.is_lost else self._forks
        self._service.undo(self._link.peer.incarnation, forks, self._loans)
        self._service.drop_all(self._at_home)
        self._forks, self._loans, self._at_home = [], [], []
