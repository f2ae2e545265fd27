"""The messages of inspection; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.inspection.histories import CollectiveHistory
from asyncrpc.inspection.records import NoAnswer, WorkerSnapshot
from asyncrpc.runtime.messages import Request, message

SERVICE: Final = "inspection"


class SeenBeside(NamedTuple):
    """What is seen of another worker of the same host.

    Attributes:
        snapshot: of it; None if it tells nothing.
        no_answer: why it does not; None if it does.
        collectives: its last collectives; None if it tells nothing.
    """

    snapshot: WorkerSnapshot | None
    no_answer: NoAnswer | None
    collectives: CollectiveHistory | None


@message(SERVICE, "snapshot")
class TakeSnapshot(Request[WorkerSnapshot]):
    """Ask for the tasks, threads and calls of the receiver.

    Attributes:
        is_thorough: whether it is to find out what nobody can end.
    """

    is_thorough: bool


@message(SERVICE, "collectives")
class TellCollectives(Request[CollectiveHistory]):
    """Ask for the collectives of the receiver: the last ones, and those under way."""


@message(SERVICE, "beside")
class LookBeside(Request[SeenBeside]):
    """Ask for those of another worker of the receiver's host, whose loop is blocked.

    Attributes:
        incarnation: of that worker.
        addresses: where it listens.
    """

    incarnation: int
    addresses: list[str]
