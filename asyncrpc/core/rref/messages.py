"""The protocol's own messages: docs/reference/rref-protocol.md says what they mean."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.core.ids import RRefId
from asyncrpc.core.services.schema import Notice, Positive, Spread, message

SERVICE: Final = "rref"


@message(
    SERVICE, "register", about="the sender, as a holder of a value of the receiver"
)
class Register(Notice):
    """User to owner: count me."""

    rref_id: Spread[RRefId]


@message(
    SERVICE, "registered", about="a value of the sender that the receiver asked to hold"
)
class Registered(Notice):
    """Owner to user: you are counted, one fork more."""

    rref_id: Spread[RRefId]


@message(SERVICE, "gone", about="a value of the sender that the receiver asked to hold")
class Gone(Notice):
    """Owner to user: the value does not exist, and never will."""

    rref_id: Spread[RRefId]


@message(SERVICE, "probe", about="a value that the receiver is to make at the sender")
class Probe(Notice):
    """Owner to creator: I heard of this early; tell me if no remote() will come."""

    rref_id: Spread[RRefId]


@message(SERVICE, "settled", about="a value that the sender is to make at the receiver")
class Settled(Notice):
    """Creator to owner: no remote() will come; you have had it, or never will."""

    rref_id: Spread[RRefId]


class Released(NamedTuple):
    """Forks of one value that come back to its owner."""

    rref_id: Spread[RRefId]
    forks: Positive


@message(SERVICE, "release", about="forks that the receiver has given to the sender")
class Release(Notice):
    """User to owner: so many forks come back."""

    released: list[Released]


@message(SERVICE, "returned", about="loans of the receiver to the sender")
class Returned(Notice):
    """Borrower to lender: I no longer rely on you."""

    tokens: list[int]
