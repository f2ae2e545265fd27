"""What a message that carries references relies on, until its receiver has answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrpc.ids import Incarnation, RRefId, WorkerId
from asyncrpc.rref import machine as m

if TYPE_CHECKING:
    from asyncrpc.rref.travel import Travel


class Shared:
    """What all handles of this worker to one value share."""

    __slots__ = ("__weakref__", "error", "is_here", "owner", "rref_id")

    def __init__(self, rref_id: RRefId, owner: WorkerId, *, is_here: bool) -> None:
        self.rref_id = rref_id
        self.owner = owner
        self.is_here = is_here
        self.error: Exception | None = None  # why the value can no longer be had


class MessagePins:
    """What one message that was sent relies on; a `runtime.extensions.Pins`."""

    __slots__ = ("_at_home", "_by_order", "_forks", "_loans", "_service", "_to")

    def __init__(self, service: Travel, to: Incarnation) -> None:
        self._service = service
        self._to = to
        self._forks: list[RRefId] = []  # counted at the owner, who is this worker
        self._loans: list[int] = []  # to be returned by the receiver
        self._by_order: list[int] = []  # over as soon as the message is written
        self._at_home: list[Shared] = []  # sent to this worker itself

    def add_fork(self, rref_id: RRefId) -> None:
        """A fork of a value of ours travels."""
        self._forks.append(rref_id)

    def add_loan(self, loan: m.Loan) -> int:
        """A loan travels; return the token to send."""
        (self._loans if loan.needs_return else self._by_order).append(loan.token)
        return loan.token if loan.needs_return else 0

    def add_at_home(self, shared: Shared) -> None:
        """A reference goes to this worker itself: its count travels with it."""
        self._at_home.append(shared)

    def on_sent(self) -> None:
        """The last byte has been handed over: the link's order protects the rest."""
        self._service.end_loans(self._by_order)
        self._by_order = []

    def release(self, returned: list[int]) -> None:
        """The answer is here, with the loans that the receiver has returned."""
        self._service.take_back(self._to, returned)

    def undo(self) -> None:
        """The message was never sent, or not to its end: nobody has read it."""
        self._service.undo(self._to, self._forks, [*self._loans, *self._by_order])
        self._service.drop_all(self._at_home)
        self._forks, self._loans, self._by_order, self._at_home = [], [], [], []
