"""The messages between replicas and their routers, and the note beside an answer.

A router asks each replica once how it is (`WatchReplica`); from then on the replica
tells what has changed (`ReplicaNews`), and with every answer its load (`AnswerNote`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from asyncrpc.runtime.messages import Request, message

SERVICE: Final = "replicas"
_NOTE_FIELDS: Final = 3


class ReplicaStatement(NamedTuple):
    """What a replica says of itself.

    Attributes:
        is_ready: whether it takes calls.
        is_draining: whether it takes no further calls.
        age_s: seconds for which it has been ready.
        load: calls that it works on, or what its program counts in place of them.
        weight: its share of the calls, relative to other replicas.
        canary: which share of the calls canaries get; 0: it is not a canary.
        version: of its weights; None: it has none.
    """

    is_ready: bool
    is_draining: bool
    age_s: float
    load: float
    weight: float
    canary: float
    version: int | None


@message(SERVICE, "watch")
class WatchReplica(Request[ReplicaStatement | None]):
    """Ask a replica how it is, and for its news from now on.

    The answer is None of a worker that says nothing of itself.
    """


@message(SERVICE, "news")
class ReplicaNews(Request[None]):
    """What has changed of a replica.

    If it drains, it is answered when no call of the router is there any more, and none
    can come: what was sent before the answer has been answered.
    """

    statement: ReplicaStatement


class AnswerNote(NamedTuple):
    """What a replica tells beside an answer.

    Attributes:
        load: calls that it works on, this one not included.
        is_draining: whether it takes no further calls.
        version: of the weights that made the answer; None: its function did not say.
    """

    load: float
    is_draining: bool
    version: int | None


def read_note(found: Any) -> AnswerNote | None:
    """Return the note that came beside an answer; None: it is none that can be read.

    Args:
        found: as a peer sent it, unchecked; what follows the known fields is ignored.
    """
    if type(found) is not list or len(found) < _NOTE_FIELDS:
        return None
    load, is_draining, version = found[:_NOTE_FIELDS]
    is_load = type(load) in (int, float) and load >= 0
    if not is_load or type(is_draining) is not bool:
        return None
    if version is not None and type(version) is not int:
        return None
    return AnswerNote(float(load), is_draining, version)
