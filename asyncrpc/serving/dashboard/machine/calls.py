"""The open calls of a group, joined from both of their ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from asyncrpc.serving.dashboard.machine.answers import known_age
from asyncrpc.serving.dashboard.machine.paging import Row
from asyncrpc.tools.inspection.details import KEPT_BACK, CallSeen, CallsSeen
from asyncrpc.tools.inspection.machine.slices import Slices, let_go, parts_of
from asyncrpc.tools.inspection.records import CallKey

KEYS: Final = ("caller", "callee", "function", "call_id", "age_s", "state", "kind")
ON_ITS_WAY: Final = "on its way"
CALLEE_SILENT: Final = "sent; the callee tells nothing"
CALLER_SILENT: Final = "; its caller tells nothing"


def rows_of(told: Mapping[str, CallsSeen]) -> Slices[list[Row]]:
    """Return a row for each call, in slices.

    Args:
        told: the calls of the workers that have answered, by name.
    """
    made: dict[CallKey, tuple[str, CallSeen]] = {}
    served: dict[CallKey, tuple[str, CallSeen]] = {}
    for name, seen in told.items():
        for part in parts_of(seen.calls):
            for one in part:
                (served if one.is_served else made)[one.key] = name, one
            yield len(part)
    rows: list[Row] = []
    for keys in parts_of(made):
        for key in keys:
            caller, one = made[key]
            rows.append(
                _row(caller, one.other, one, _state(one, served.get(key), told))
            )
        yield len(keys)
    for keys in parts_of(served):
        for key in keys:
            if key in made:
                continue
            callee, one = served[key]
            # It may have been answered between the two looks.
            more = CALLER_SILENT if one.other not in told else ""
            rows.append(_row(one.other, callee, one, one.state + more))
        yield len(keys)
    yield from let_go(made)
    yield from let_go(served)
    return rows


def left_out_of(told: Iterable[CallsSeen]) -> int:
    """Return how many calls, counted at either end, the workers left out."""
    return sum(one.left_out for one in told)


def _state(
    made: CallSeen, there: tuple[str, CallSeen] | None, told: Mapping[str, Any]
) -> str:
    if there is not None:
        return there[1].state
    if made.state == KEPT_BACK:
        return KEPT_BACK
    return ON_ITS_WAY if made.other in told else CALLEE_SILENT


def _row(caller: str, callee: str, one: CallSeen, state: str) -> Row:
    return {
        "caller": caller,
        "callee": callee,
        "function": one.function or None,
        "call_id": one.key.call_id,
        "age_s": known_age(one.for_s),
        "state": state,
        "kind": "stream" if one.is_stream else "call",
    }
