"""What a worker holds of another worker's value."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any, Final

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.core.rref.machine import user
from tests.property.machines.spec import Machine

_OWNER: Final = Incarnation(2)
_RREF: Final = RRefId(Incarnation(1), 1)


class _OneHolding:
    """A table with one holding, which is led by hand.

    What brings the events about, and what follows from them, is tested with the
    protocol: tests/property/test_rref_protocol.py.
    """

    def __init__(self, build: ModuleType, start: str) -> None:
        self._table: Any = build.UserTable()
        state = build.HoldingState[start]
        self._holding = self._table._open(_RREF, _OWNER, state)  # noqa: SLF001

    @property
    def state(self) -> enum.Enum:
        """The holding's state."""
        current: enum.Enum = self._holding.state
        return current

    def on(self, event: enum.Enum) -> None:
        self._table._advance(_RREF, event)  # noqa: SLF001


HOLDING: Final = Machine(
    name="What a user holds",
    about="The references that this worker has to another worker's value, from the "
    "first to the last. The [RRef protocol](rref-protocol.md) describes the causes of "
    "each event.",
    source=user,
    states="HoldingState",
    starts=("PENDING", "BORROWED", "CONFIRMED"),
    begin=_OneHolding,
    meanings={
        "PENDING": "`remote()` made the reference here; the owner has not confirmed it",
        "BORROWED": "a third worker lent the reference; the owner does not count it",
        "REGISTERING": "this worker keeps the reference, and has asked the owner to "
        "count it",
        "CONFIRMED": "the owner counts the reference",
        "LOST": "the value is gone, or was never made",
        "RELEASED": "this worker has given the reference back",
        "CONFIRM": "the owner confirms the call of `remote()`",
        "REFUSE": "the owner refused the call of `remote()`, or it was never sent",
        "FORK": "the owner sends the reference to this worker",
        "LOAN": "a third worker lends the reference to this worker",
        "KEEP": "the call of the loan has ended and the reference is still in use, or "
        "the lender is lost",
        "REGISTERED": "the owner has counted the reference",
        "GONE": "the owner says that the value is gone",
        "LET_GO": "no handle and no message here refers to the value",
        "OWNER_LOST": "the owner is lost",
    },
    stories="""
a remote() runs: PENDING -CONFIRM-> CONFIRMED -LET_GO-> RELEASED -FORK-x
a remote() is refused: PENDING -REFUSE-> LOST -LET_GO-> RELEASED
the owner is faster than its confirmation:
    PENDING -FORK-> PENDING -LOAN-> PENDING -CONFIRM-> CONFIRMED
the owner of a remote() dies: PENDING -OWNER_LOST-> LOST -CONFIRM-x
a loan is used in a call: BORROWED -LOAN-> BORROWED -LET_GO-> RELEASED
a loan is kept: BORROWED -KEEP-> REGISTERING -REGISTERED-> CONFIRMED
a loan is kept, and too late: REGISTERING -GONE-> LOST
the owner sends it, too: BORROWED -FORK-> CONFIRMED -FORK-> CONFIRMED -LOAN-> CONFIRMED
more comes while the owner is asked:
    REGISTERING -FORK-> REGISTERING -LOAN-> REGISTERING -OWNER_LOST-> LOST
the owner of a loan dies:
    BORROWED -OWNER_LOST-> LOST -FORK-> LOST -LOAN-> LOST -OWNER_LOST-x
the owner dies: CONFIRMED -OWNER_LOST-> LOST
the owner is asked once: REGISTERING -KEEP-x
nothing is given back while the owner is asked: REGISTERING -LET_GO-x
nothing is given back before the owner has it: PENDING -LET_GO-x
""",
)
