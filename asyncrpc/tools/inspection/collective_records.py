"""What a worker tells of its collectives, in the form that is sent."""

from __future__ import annotations

from typing import Final, NamedTuple

from asyncrpc.core.services.schema import Count, Number
from asyncrpc.tools.inspection.records import StackFrame

CLOSED: Final = -1
UNDER_WAY: Final = 0


class KnownGroup(NamedTuple):
    """A group of collectives, as one of its ranks knows it.

    Attributes:
        group_id: the number by which its ranks know it.
        members: names of the workers, by rank.
        begun: how many collectives this worker has begun in it; `CLOSED`.
    """

    group_id: int
    label: str
    members: tuple[str, ...]
    begun: Number


class NotedCollective(NamedTuple):
    """A collective that this worker has begun.

    Attributes:
        group: the index of its group in `CollectiveHistory.groups`.
        number: of the collective in its group, from 0.
        dtype: of the tensor; empty if ranks may differ.
        shape: of the tensor; None if ranks may differ.
        began_ns: when this worker began it, in nanoseconds since 1970.
        ended_ns: when it ended here, likewise; `UNDER_WAY`.
        outcome: how it ended; empty while it is under way.
        frames: of the task that waits in it, the innermost first; empty if the task is
            unknown, or the collective has ended.
    """

    group: Count
    number: Count
    operation: str
    dtype: str
    shape: tuple[Count, ...] | None
    began_ns: int
    ended_ns: int
    outcome: str
    frames: tuple[StackFrame, ...]


class CollectiveHistory(NamedTuple):
    """The collectives of one worker.

    Attributes:
        rank: of the worker; -1 if it has none.
        groups: the groups of these collectives, and all other groups open here.
        collectives: in the order in which they began here.
        is_whole: whether all collectives that ever ended here are listed.
    """

    name: str
    rank: Number
    pid: int
    groups: tuple[KnownGroup, ...]
    collectives: tuple[NotedCollective, ...]
    is_whole: bool
