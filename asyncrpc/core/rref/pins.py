"""What a message with references relies on, until its receiver has answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrpc.core.ids import RRefId
from asyncrpc.core.rref.shared import Shared
from asyncrpc.core.services.ports import PeerLink

if TYPE_CHECKING:
    from asyncrpc.core.rref.codec import ReferenceCodec


class MessagePins:
    """What one sent message relies on; a `runtime.extensions.Pins`."""

    __slots__ = ("_at_home", "_codec", "_forks", "_link", "_loans")

    def __init__(self, codec: ReferenceCodec, link: PeerLink) -> None:
        self._codec = codec
        self._link = link
        self._forks: list[RRefId] = []  # counted at the owner, which is this worker
        self._loans: list[int] = []  # to be returned by the receiver
        self._at_home: list[Shared] = []  # sent to this worker itself

    def add_fork(self, rref_id: RRefId) -> None:
        """Count a fork of a value of ours that travels."""
        self._forks.append(rref_id)

    def add_loan(self, token: int) -> int:
        """Count a loan that travels; return its token."""
        self._loans.append(token)
        return token

    def add_at_home(self, shared: Shared) -> None:
        """Count a reference to this worker itself: its count travels with it."""
        self._at_home.append(shared)

    def on_sent(self) -> None:
        """Do nothing: the receiver returns its loans."""

    def undo(self) -> None:
        """Take the counts back: the message was not sent, or not to its end."""
        # The count of a lost peer went with it; an incarnation that came back has
        # another.
        forks = [] if self._link.is_lost else self._forks
        self._codec.undo(self._link.peer.incarnation, forks, self._loans)
        self._codec.drop_all(self._at_home)
        self._forks, self._loans, self._at_home = [], [], []
