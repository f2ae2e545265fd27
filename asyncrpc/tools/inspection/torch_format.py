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

from asyncrpc.tools.inspection.collective_records import (
    CLOSED,
    UNDER_WAY,
    CollectiveHistory,
    KnownGroup,
    NotedCollective,
)
from asyncrpc.trace import OK

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
    """
    taking_part = {
        name
        for history in histories
        for group in history.groups
        for name in group.members
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
        for collective in history.collectives:
            group_id = history.groups[collective.group].group_id
            begun[group_id] = max(begun.get(group_id, 0), collective.number + 1)
    return [
        history._replace(
            collectives=tuple(
                collective
                for collective in history.collectives
                if collective.number
                < begun.get(history.groups[collective.group].group_id, 0)
            )
        )
        for history in histories
    ]


def torch_dumps(
    histories: Sequence[CollectiveHistory], ranks: Mapping[str, int]
) -> dict[int, dict[str, Any]]:
    """Return the dump of each worker, by its global rank.

    Args:
        ranks: the global rank of each worker, by name; other workers get no dump.
    """
    floors = _floors(histories)
    dumped = [history for history in histories if history.name in ranks]
    return {
        ranks[history.name]: _dump(history, ranks, floors)
        for history in sorted(dumped, key=lambda history: ranks[history.name])
    }


# --- what all ranks remember ---------------------------------------------------------


def _floors(histories: Sequence[CollectiveHistory]) -> dict[int, float]:
    """Return for each group the first number since which no rank has forgotten any."""
    members = {
        group.group_id: set(group.members)
        for history in histories
        for group in history.groups
    }
    return {
        group_id: max(
            _floor(history, group_id) for history in histories if history.name in names
        )
        for group_id, names in members.items()
    }


def _floor(history: CollectiveHistory, group_id: int) -> float:
    """Return the first number since which a worker has forgotten no collective.

    It is infinite if the worker does not know the group.
    """
    if history.is_whole:
        return 0
    places = [group.group_id for group in history.groups]
    if group_id not in places:
        return math.inf
    place = places.index(group_id)
    numbers = {
        collective.number
        for collective in history.collectives
        if collective.group == place
    }
    floor = history.groups[place].begun
    if floor == CLOSED:
        floor = max(numbers, default=-1) + 1
    while floor - 1 in numbers:
        floor -= 1
    return floor


def _is_kept(collective: NotedCollective, floor: float) -> bool:
    """Return whether a collective is dumped.

    It is from the floor on.  If a rank does not know the group, the floor is infinite,
    and only collectives under way are dumped.
    """
    is_under_way = collective.ended_ns == UNDER_WAY
    return collective.number >= floor or (math.isinf(floor) and is_under_way)


# --- the format ----------------------------------------------------------------------


def _dump(
    history: CollectiveHistory,
    ranks: Mapping[str, int],
    floors: Mapping[int, float],
) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []
    for collective in history.collectives:
        group = history.groups[collective.group]
        if _is_kept(collective, floors[group.group_id]):
            entries.append(_entry(len(entries), collective, group))
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
    mine = [
        collective for collective in history.collectives if collective.group == place
    ]
    begun = max((collective.number for collective in mine), default=-1)
    done = max(
        (collective.number for collective in mine if _state(collective) == COMPLETED),
        default=-1,
    )
    return {
        "last_enqueued_collective": begun,
        "last_started_collective": begun,
        "last_completed_collective": done,
    }


def _state(collective: NotedCollective) -> str:
    return COMPLETED if collective.outcome == OK else STARTED


def _entry(
    place: int, collective: NotedCollective, group: KnownGroup
) -> dict[str, Any]:
    """Return a collective as an entry of torch's recorder.

    `record_id` is its index in the dump: torch's tools use it to drop what a rank has
    forgotten, which is already done here.
    """
    ended_ns = collective.ended_ns or None
    operation = _OPERATIONS.get(collective.operation, collective.operation)
    entry: dict[str, Any] = {
        "frames": [
            {"name": frame.function, "filename": frame.file, "line": frame.line}
            for frame in collective.frames
        ],
        "record_id": place,
        "pg_id": collective.group,
        "process_group": (_name(group), group.label),
        "collective_seq_id": collective.number,
        "p2p_seq_id": 0,
        "op_id": collective.number,
        "profiling_name": f"{BACKEND}:{operation}",
        "time_created_ns": collective.began_ns,
        **_sizes(collective),
        "state": _state(collective),
        "time_discovered_started_ns": collective.began_ns,
        "time_discovered_completed_ns": ended_ns,
        "retired": ended_ns is not None,
        "timeout_ms": 0,
        "is_p2p": False,
        "asyncrpc_outcome": collective.outcome,
    }
    if ended_ns is not None:
        entry["duration_ms"] = (ended_ns - collective.began_ns) / _NS_PER_MS
    return entry


def _sizes(collective: NotedCollective) -> dict[str, Any]:
    """Return the input and output sizes and dtypes of a collective.

    The tools of torch compare them over the ranks, and for some operations products.
    """
    dtypes = [_dtype(collective.dtype)] if collective.dtype else []
    into: Sizes = [list(collective.shape)] if collective.shape is not None else []
    out = into
    if collective.operation == "reduce_scatter" and collective.shape is not None:
        # Its shape lists the elements of each rank; torch only knows equal parts.
        if len(set(collective.shape)) == 1:
            into, out = [[sum(collective.shape)]], [[collective.shape[0]]]
        else:
            into = out = _UNKNOWN_SIZES
    elif collective.shape is None and dtypes:
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
