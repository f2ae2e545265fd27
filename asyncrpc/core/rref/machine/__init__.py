"""The lifetime of an RRef: which worker may free the value, and when.

Two machines.  `OwnerTable` lives beside the values: it counts, per incarnation, the
forks that were handed to it.  `UserTable` lives on every worker: one `Holding` per RRef
of another worker, however many handles share it.  Their methods take an event and
return its effects, in order; they do no I/O and know neither time nor chance.

    G1  Every fork that the owner counts comes back, or its holder is dead.
    G2  No holding is given back while a borrower relies on it.

Together: a value outlives every handle to it, and is freed once none is left.

What is asked of the network: between two workers, messages are *delivered* in order and
once, until one is declared lost at both; what was under way then is never fed.  Between
different pairs there is no order, and the body of a large message may be decoded long
after it was delivered.  Nothing here relies on the order of bodies.

A worker that was declared lost and lives is forgiven (`forgive`, on both tables): it
begins anew, and what was lost stays lost.

Source: PyTorch, "Remote Reference Protocol" (docs/source/rpc/rref.rst), whose forks
form a tree that the owner confirms edge by edge.  Here a reference lent to a third
worker is *borrowed*, and registered only if the borrower keeps it.  The protocol, with
its argument, is docs/reference/rref-protocol.md.
"""

from asyncrpc.core.rref.machine.effects import (
    Effect,
    FindOwner,
    Freed,
    HandlesApart,
    HandlesLost,
    LossCause,
    NotWanted,
    SendGone,
    SendLoanReturned,
    SendProbe,
    SendRegister,
    SendRegistered,
    SendRelease,
    SendSettled,
    ValueGone,
)
from asyncrpc.core.rref.machine.owner import EntryState, OwnerTable
from asyncrpc.core.rref.machine.user import (
    TRANSITIONS,
    Debt,
    Holding,
    HoldingEvent,
    HoldingState,
    UserTable,
)

__all__ = [
    "TRANSITIONS",
    "Debt",
    "Effect",
    "EntryState",
    "FindOwner",
    "Freed",
    "HandlesApart",
    "HandlesLost",
    "Holding",
    "HoldingEvent",
    "HoldingState",
    "LossCause",
    "NotWanted",
    "OwnerTable",
    "SendGone",
    "SendLoanReturned",
    "SendProbe",
    "SendRegister",
    "SendRegistered",
    "SendRelease",
    "SendSettled",
    "UserTable",
    "ValueGone",
]
