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


def rows_of(answers: Mapping[str, CallsSeen]) -> Slices[list[Row]]:
    """Return a row for each call, in slices."""
    outgoing: dict[CallKey, tuple[str, CallSeen]] = {}
    served: dict[CallKey, tuple[str, CallSeen]] = {}
    for name, seen in answers.items():
        for part in parts_of(seen.calls):
            for call in part:
                (served if call.is_served else outgoing)[call.key] = name, call
            yield len(part)
    rows: list[Row] = []
    for keys in parts_of(outgoing):
        for key in keys:
            caller, call = outgoing[key]
            rows.append(
                _row(caller, call.other, call, _state(call, served.get(key), answers))
            )
        yield len(keys)
    for keys in parts_of(served):
        for key in keys:
            if key in outgoing:
                continue
            callee, call = served[key]
            # It may have been answered between the two looks.
            more = CALLER_SILENT if call.other not in answers else ""
            rows.append(_row(call.other, callee, call, call.state + more))
        yield len(keys)
    yield from let_go(outgoing)
    yield from let_go(served)
    return rows


def left_out_of(answers: Iterable[CallsSeen]) -> int:
    """Return how many calls, counted at either end, the workers left out."""
    return sum(seen.left_out for seen in answers)


def _state(
    call: CallSeen, there: tuple[str, CallSeen] | None, answers: Mapping[str, Any]
) -> str:
    if there is not None:
        return there[1].state
    if call.state == KEPT_BACK:
        return KEPT_BACK
    return ON_ITS_WAY if call.other in answers else CALLEE_SILENT


def _row(caller: str, callee: str, call: CallSeen, state: str) -> Row:
    return {
        "caller": caller,
        "callee": callee,
        "function": call.function or None,
        "call_id": call.key.call_id,
        "age_s": known_age(call.for_s),
        "state": state,
        "kind": "stream" if call.is_stream else "call",
    }
