"""The messages between replicas and their routers, and the note beside an answer.

A router asks each replica once for its state (`WatchReplica`); from then on the replica
reports changes (`ReplicaNews`), and with every answer its load (`AnswerNote`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from asyncrpc.extend import Request, message

SERVICE: Final = "replicas"
_NOTE_FIELDS: Final = 3


class ReplicaStatement(NamedTuple):
    """The state of a replica.

    Attributes:
        is_ready: whether it takes calls.
        is_draining: whether it takes no further calls.
        age_s: seconds for which it has been ready.
        load: calls that it works on, or the number that its program returns instead.
        weight: its share of the calls, relative to other replicas.
        canary: share of the calls that canaries get; 0: it is not a canary.
        version: of its weights; None: it has none.
    """

    is_ready: bool
    is_draining: bool
    age_s: float
    load: float
    weight: float
    canary: float
    version: int | None


@message(SERVICE, "watch", about="the receiver, and the sender as a router of it")
class WatchReplica(Request[ReplicaStatement | None]):
    """Ask a replica for its state, and for its news from now on.

    A worker that is not a replica answers None.
    """


@message(SERVICE, "news", about="the sender, as a replica")
class ReplicaNews(Request[None]):
    """The new state of a replica.

    If the replica drains, the router answers when it has no more calls there: all calls
    that it sent before the answer have been answered, and it sends no others.
    """

    statement: ReplicaStatement


class AnswerNote(NamedTuple):
    """What a replica reports with an answer.

    Attributes:
        load: calls that it works on, not including this one.
        is_draining: whether it takes no further calls.
        version: of the weights that made the answer; None: its function did not tell.
    """

    load: float
    is_draining: bool
    version: int | None


def read_note(note: Any) -> AnswerNote | None:
    """Return the note that came with an answer; None: it is not a valid note.

    Args:
        note: as a peer sent it, unchecked; further fields are ignored.
    """
    if type(note) is not list or len(note) < _NOTE_FIELDS:
        return None
    load, is_draining, version = note[:_NOTE_FIELDS]
    is_load = type(load) in (int, float) and load >= 0
    if not is_load or type(is_draining) is not bool:
        return None
    if version is not None and type(version) is not int:
        return None
    return AnswerNote(float(load), is_draining, version)
