"""The collectives of a group, joined from all of their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrpc.serving.dashboard.machine.paging import Row
from asyncrpc.tools.inspection.collective_records import (
    CLOSED,
    UNDER_WAY,
    CollectiveHistory,
    KnownGroup,
    NotedCollective,
)
from asyncrpc.tools.inspection.machine.slices import (
    Slices,
    let_go,
    parts_of,
    weighed_parts,
)
from asyncrpc.tools.inspection.machine.wording import place_of

KEYS: Final = (
    *("group", "sequence", "kind", "state", "came", "missing", "age_s", "took_s"),
    *("bytes", "ranks"),
)
RANKS_MAX: Final = 64  # in a row
BYTES_MAX: Final = 1 << 63  # of a tensor; more is an error of the reporting worker
_NS_PER_S: Final = 1e9
_OK: Final = "ok"
# Bytes of an element; unknown for other types.
_SIZES: Final = {
    **dict.fromkeys(("float64", "int64", "complex64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    "complex128": 16,
}


@dataclass(slots=True)
class _Joined:
    """One collective, as its ranks know it.

    Attributes:
        noted: by rank.
    """

    group: KnownGroup
    number: int
    noted: dict[int, NotedCollective] = field(default_factory=dict)


def rows_of(answers: Mapping[str, CollectiveHistory], now_ns: int) -> Slices[list[Row]]:
    """Return a row for each collective, in slices."""
    joined: dict[tuple[int, int], _Joined] = {}
    begun: dict[tuple[int, int], int] = {}  # by group and rank
    for history in answers.values():
        ranks = list[int]()
        for groups, weight in weighed_parts(history.groups, _size_of):
            for group in groups:
                rank = _rank_in(group, history.name)
                begun[group.group_id, rank] = group.begun
                ranks.append(rank)
            yield weight
        for part in parts_of(history.collectives):
            for collective in part:
                if collective.group >= len(ranks):  # an error: its group is not listed
                    continue
                group = history.groups[collective.group]
                key = group.group_id, collective.number
                entry = joined.setdefault(key, _Joined(group, collective.number))
                entry.noted[ranks[collective.group]] = collective
            yield len(part)
    rows = []
    # A row reads all ranks, so a few rows of a large group make a slice.
    for some, weight in weighed_parts(
        joined.values(), lambda entry: _size_of(entry.group)
    ):
        rows += [_row(entry, answers, begun, now_ns) for entry in some]
        yield weight
    yield from let_go(joined)
    yield from let_go(begun)
    return rows


def _size_of(group: KnownGroup) -> int:
    return len(group.members)


def _rank_in(group: KnownGroup, name: str) -> int:
    return group.members.index(name) if name in group.members else -1


def _row(
    entry: _Joined,
    answers: Mapping[str, Any],
    begun: Mapping[tuple[int, int], int],
    now_ns: int,
) -> Row:
    came, missing, unknown = list[int](), list[int](), list[int]()
    for rank, name in enumerate(entry.group.members):
        known = begun.get((entry.group.group_id, rank), CLOSED)
        if rank in entry.noted or known > entry.number:
            came.append(rank)
        elif name in answers and known != CLOSED:
            missing.append(rank)
        else:
            unknown.append(rank)
    first = next(iter(entry.noted.values()))
    is_under_way = any(it.ended_ns == UNDER_WAY for it in entry.noted.values())
    began_ns = min(it.began_ns for it in entry.noted.values())
    ended_ns = max(it.ended_ns for it in entry.noted.values())
    waits = [
        it for it in entry.noted.values() if it.ended_ns == UNDER_WAY and it.frames
    ]
    return {
        "group": entry.group.label,
        "sequence": entry.number,
        "kind": first.operation,
        "state": "under way" if is_under_way else _outcome(entry),
        "came": came[:RANKS_MAX],
        "missing": missing[:RANKS_MAX],
        "unknown": unknown[:RANKS_MAX],
        "ranks": len(entry.group.members),
        "ranks_left_out": sum(
            max(0, len(ranks) - RANKS_MAX) for ranks in (came, missing, unknown)
        ),
        "workers": list(entry.group.members[:RANKS_MAX]),
        "age_s": max(0.0, (now_ns - began_ns) / _NS_PER_S),
        "took_s": None if is_under_way else (ended_ns - began_ns) / _NS_PER_S,
        "bytes": _bytes(first),
        "at": place_of(waits[0].frames[0]) if waits else None,
    }


def _outcome(entry: _Joined) -> str:
    """Return how a collective ended: well if it did at all ranks that answered."""
    outcomes = [it.outcome for it in entry.noted.values()]
    return next((it for it in outcomes if it != _OK), _OK)


def _bytes(collective: NotedCollective) -> int | None:
    size = _SIZES.get(collective.dtype.removeprefix("torch."))
    if size is None or collective.shape is None:
        return None
    nbytes = size
    for length in collective.shape:
        nbytes = min(nbytes * length, BYTES_MAX)
    return nbytes if nbytes < BYTES_MAX else None
