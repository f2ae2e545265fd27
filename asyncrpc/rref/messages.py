"""The protocol's own messages: docs/reference/rref-protocol.md says what they mean."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.ids import RRefId
from asyncrpc.runtime.messages import Notice, message
from asyncrpc.runtime.schema import Positive, Spread

SERVICE: Final = "rref"


@message(SERVICE, "register")
class Register(Notice):
    """User to owner: count me."""

    rref_id: Spread[RRefId]


@message(SERVICE, "registered")
class Registered(Notice):
    """Owner to user: you are counted, one fork more."""

    rref_id: Spread[RRefId]


@message(SERVICE, "gone")
class Gone(Notice):
    """Owner to user: the value does not exist, and never will."""

    rref_id: Spread[RRefId]


@message(SERVICE, "probe")
class Probe(Notice):
    """Owner to creator: I heard of this early; tell me if no remote() will come."""

    rref_id: Spread[RRefId]


@message(SERVICE, "settled")
class Settled(Notice):
    """Creator to owner: no remote() will come; you have had it, or never will."""

    rref_id: Spread[RRefId]


class Released(NamedTuple):
    """Forks of one value that come back to its owner."""

    rref_id: Spread[RRefId]
    forks: Positive


@message(SERVICE, "release")
class Release(Notice):
    """User to owner: so many forks come back."""

    released: list[Released]


@message(SERVICE, "returned")
class Returned(Notice):
    """Borrower to lender: I no longer rely on you."""

    tokens: list[int]
