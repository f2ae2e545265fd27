"""Histories of collectives as dumps of torch's flight recorder.

From them `torchfrtrace` finds the ranks that are missing from a collective, or that run
another one.

There is one dump for each rank: a dictionary of plain data.  It holds what the tools of
torch read, in their terms:

    here                        there
    a group                     a process group; its name is the number of the group
    a worker                    a global rank: its rank, see `global_ranks`
    the number of a collective  `collective_seq_id`, from 0, as in errors of asyncrpc
    under way, or failed        the state "started"; torch has none for a failure
    ended well                  the state "completed"

Calls and point-to-point messages are left out: `torchfrtrace` refuses operations that
it does not know, and takes a message between two of several ranks for a collective that
the others have missed.  It does not compare roots and reductions.

Ranks forget their oldest collectives.  A collective that one rank has forgotten is left
out of all dumps, so that the tools do not take it for one that this rank has missed.

Source: torch/distributed/flight_recorder/components of torch 2.13, and
torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from asyncrpc.core.trace.events import OK
from asyncrpc.tools.inspection.collective_records import (
    CLOSED,
    UNDER_WAY,
    CollectiveHistory,
    KnownGroup,
    NotedCollective,
)

VERSION: Final = "2.10"  # of the format, as torch 2.13 writes it
BACKEND: Final = "gloo"  # torch's tools do not know a backend named asyncrpc
STARTED: Final = "started"
COMPLETED: Final = "completed"
_NS_PER_MS: Final = 1_000_000
_UNKNOWN_SIZES: Final = [[0]]  # ranks may differ; the product 0 fits any sizes
# Operations that have another name in torch.
_OPERATIONS: Final = {
    "open": "split",  # all agree on the path of a new group
    "empty": "new_window",  # memory that all ranks see
}
_DTYPES: Final = {
    "bool": "Bool",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}

Sizes = list[list[int]]


def global_ranks(
    known: Mapping[str, int], histories: Iterable[CollectiveHistory]
) -> dict[str, int]:
    """Return the rank of each worker in dumps: its own, or its place among the names.

    Args:
        known: ranks of workers, by name; -1: no rank.

    Returns:
        Ranks by name.  Workers without a rank are left out if they are in no group.
    """
    taking_part = {
        name for one in histories for group in one.groups for name in group.members
    }
    ranks = {name: rank for name, rank in known.items() if rank >= 0}
    if taking_part <= ranks.keys() and len(set(ranks.values())) == len(ranks):
        return ranks
    return {name: place for place, name in enumerate(sorted({*known, *taking_part}))}


def began_before(
    histories: Iterable[CollectiveHistory], earlier: Iterable[CollectiveHistory]
) -> list[CollectiveHistory]:
    """Return histories without collectives that no rank had begun at an earlier look.

    Ranks are looked at one after the other.  If one of them began a collective in the
    meantime, the ranks that were looked at before would seem to have missed it.
    """
    begun: dict[int, int] = {}
    for history in earlier:
        for one in history.collectives:
            group_id = history.groups[one.group].group_id
            begun[group_id] = max(begun.get(group_id, 0), one.number + 1)
    return [
        history._replace(
            collectives=tuple(
                one
                for one in history.collectives
                if one.number < begun.get(history.groups[one.group].group_id, 0)
            )
        )
        for history in histories
    ]


def torch_dumps(
    histories: Sequence[CollectiveHistory], ranks: Mapping[str, int]
) -> dict[int, dict[str, Any]]:
    """Return the dump of each worker, by its global rank.

    Args:
        histories: one of each worker that could be looked at.
        ranks: the global rank of each worker, by name; other workers get no dump.
    """
    floors = _floors(histories)
    dumped = [one for one in histories if one.name in ranks]
    return {
        ranks[one.name]: _dump(one, ranks, floors)
        for one in sorted(dumped, key=lambda one: ranks[one.name])
    }


# --- what all ranks remember ---------------------------------------------------------


def _floors(histories: Sequence[CollectiveHistory]) -> dict[int, float]:
    """Return for each group the first number since which no rank has forgotten any."""
    members = {
        group.group_id: set(group.members) for one in histories for group in one.groups
    }
    return {
        group_id: max(_floor(one, group_id) for one in histories if one.name in names)
        for group_id, names in members.items()
    }


def _floor(history: CollectiveHistory, group_id: int) -> float:
    """Return the first number since which a worker has forgotten no collective.

    It is infinite if the worker does not know the group.
    """
    if history.is_whole:
        return 0
    places = [one.group_id for one in history.groups]
    if group_id not in places:
        return math.inf
    place = places.index(group_id)
    numbers = {one.number for one in history.collectives if one.group == place}
    floor = history.groups[place].begun
    if floor == CLOSED:
        floor = max(numbers, default=-1) + 1
    while floor - 1 in numbers:
        floor -= 1
    return floor


def _is_kept(one: NotedCollective, floor: float) -> bool:
    """Return whether a collective is dumped.

    It is from the floor on.  If a rank does not know the group, the floor is infinite,
    and only collectives under way are dumped.
    """
    is_under_way = one.ended_ns == UNDER_WAY
    return one.number >= floor or (math.isinf(floor) and is_under_way)


# --- the format ----------------------------------------------------------------------


def _dump(
    history: CollectiveHistory,
    ranks: Mapping[str, int],
    floors: Mapping[int, float],
) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for one in history.collectives:
        group = history.groups[one.group]
        if _is_kept(one, floors[group.group_id]):
            entries.append(_entry(len(entries), one, group))
    return {
        "version": VERSION,
        "rank": ranks[history.name],
        "host_name": history.name,
        "pid": history.pid,
        "comm_lib_version": "asyncrpc",
        "pg_config": {
            _name(group): {
                "name": _name(group),
                "desc": group.label,
                "ranks": str([ranks[name] for name in group.members]),
            }
            for group in history.groups
        },
        "pg_status": {
            str(place): _status(history, place) for place in range(len(history.groups))
        },
        "entries": entries,
    }


def _name(group: KnownGroup) -> str:
    return f"{group.group_id:016x}"


def _status(history: CollectiveHistory, place: int) -> dict[str, int]:
    mine = [one for one in history.collectives if one.group == place]
    begun = max((one.number for one in mine), default=-1)
    done = max((one.number for one in mine if _state(one) == COMPLETED), default=-1)
    return {
        "last_enqueued_collective": begun,
        "last_started_collective": begun,
        "last_completed_collective": done,
    }


def _state(one: NotedCollective) -> str:
    return COMPLETED if one.outcome == OK else STARTED


def _entry(place: int, one: NotedCollective, group: KnownGroup) -> dict[str, Any]:
    """Return a collective as an entry of torch's recorder.

    `record_id` is its index in the dump: torch's tools use it to drop what a rank has
    forgotten, which is already done here.
    """
    ended_ns = one.ended_ns or None
    entry: dict[str, Any] = {
        "frames": [
            {"name": frame.function, "filename": frame.file, "line": frame.line}
            for frame in one.frames
        ],
        "record_id": place,
        "pg_id": one.group,
        "process_group": (_name(group), group.label),
        "collective_seq_id": one.number,
        "p2p_seq_id": 0,
        "op_id": one.number,
        "profiling_name": f"{BACKEND}:{_OPERATIONS.get(one.operation, one.operation)}",
        "time_created_ns": one.began_ns,
        **_sizes(one),
        "state": _state(one),
        "time_discovered_started_ns": one.began_ns,
        "time_discovered_completed_ns": ended_ns,
        "retired": ended_ns is not None,
        "timeout_ms": 0,
        "is_p2p": False,
        "asyncrpc_outcome": one.outcome,
    }
    if ended_ns is not None:
        entry["duration_ms"] = (ended_ns - one.began_ns) / _NS_PER_MS
    return entry


def _sizes(one: NotedCollective) -> dict[str, Any]:
    """Return the input and output sizes and dtypes of a collective.

    The tools of torch compare them over the ranks, and for some operations products.
    """
    dtypes = [_dtype(one.dtype)] if one.dtype else []
    into: Sizes = [list(one.shape)] if one.shape is not None else []
    out = into
    if one.operation == "reduce_scatter" and one.shape is not None:
        # Its shape lists the elements of each rank; torch only knows equal parts.
        if len(set(one.shape)) == 1:
            into, out = [[sum(one.shape)]], [[one.shape[0]]]
        else:
            into = out = _UNKNOWN_SIZES
    elif one.shape is None and dtypes:
        into = out = _UNKNOWN_SIZES
    return {
        "input_sizes": into,
        "input_dtypes": dtypes,
        "output_sizes": out,
        "output_dtypes": dtypes,
    }


def _dtype(name: str) -> str:
    """Return torch's internal name of a dtype: `Float` for `torch.float32`."""
    short = name.removeprefix("torch.")
    return _DTYPES.get(short, short)
