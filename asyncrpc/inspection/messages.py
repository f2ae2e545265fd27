"""The messages of inspection; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.inspection.records import WorkerSnapshot
from asyncrpc.runtime.messages import Request, message

SERVICE: Final = "inspection"


class SeenBeside(NamedTuple):
    """What is seen of another worker of the same host.

    Attributes:
        snapshot: of it; None if it tells nothing.
        trouble: name of a `Trouble`: why it does not; empty if it does.
        words: more on that.
    """

    snapshot: WorkerSnapshot | None
    trouble: str = ""
    words: str = ""


@message(SERVICE, "snapshot")
class TakeSnapshot(Request[WorkerSnapshot]):
    """Ask for the tasks, threads and calls of the receiver.

    Attributes:
        is_thorough: whether it is to find out what nobody can end.
    """

    is_thorough: bool


@message(SERVICE, "beside")
class LookBeside(Request[SeenBeside]):
    """Ask for those of another worker of the receiver's host, whose loop is blocked.

    Attributes:
        incarnation: of that worker.
        addresses: where it listens.
    """

    incarnation: int
    addresses: list[str]
