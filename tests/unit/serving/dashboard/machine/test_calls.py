"""Calls under way: what each end says, joined."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from asyncrpc.serving.dashboard.machine.calls import (
    CALLEE_SILENT,
    CALLER_SILENT,
    KEYS,
    ON_ITS_WAY,
    left_out_of,
    rows_of,
)
from asyncrpc.serving.dashboard.machine.paging import Row
from asyncrpc.tools.inspection.details import (
    KEPT_BACK,
    RUNS,
    SENT,
    WAITS_FOR_THREAD,
    WAITS_FOR_VALUE,
    CallsSeen,
)
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX
from tests.unit.serving.dashboard.machine.told import (
    HUGE,
    NO_NUMBERS,
    ODD_NAMES,
    as_sent,
    call,
    calls,
    done,
)

OF_CALLEE = (RUNS, WAITS_FOR_THREAD, WAITS_FOR_VALUE)


def rows(reports: dict[str, CallsSeen]) -> list[Row]:
    return done(rows_of(reports))[0]


def served(number: int, caller: str, state: str = RUNS, **fields: Any) -> Any:
    return call(number, caller, is_served=True, state=state, **fields)


def state_of(reports: dict[str, CallsSeen]) -> str:
    (row,) = rows(reports)
    assert (row["caller"], row["callee"]) == ("a", "b")
    state: str = row["state"]
    return state


def test_empty_group_has_no_rows() -> None:
    assert done(rows_of({})) == ([], [])
    assert rows({"a": calls(), "b": calls()}) == []


@pytest.mark.parametrize(
    ("at_caller", "at_callee"),
    list(product((SENT, KEPT_BACK, None, "silent"), (*OF_CALLEE, None, "silent"))),
)
def test_call_state_comes_from_the_end_that_knows(
    at_caller: str | None, at_callee: str | None
) -> None:
    """Each end says what it knows, does not have the call, or is silent."""
    reports: dict[str, CallsSeen] = {}
    if at_caller != "silent":
        reports["a"] = calls(*[call(1, "b", state=at_caller)] if at_caller else [])
    if at_callee != "silent":
        reports["b"] = calls(*[served(1, "a", at_callee)] if at_callee else [])
    is_made, is_served = at_caller in (SENT, KEPT_BACK), at_callee in OF_CALLEE
    if not is_made and not is_served:
        assert rows(reports) == []
    elif is_made and is_served:
        assert state_of(reports) == at_callee  # it has come there
    elif is_served:
        more = CALLER_SILENT if at_caller == "silent" else ""  # or it was answered
        assert state_of(reports) == f"{at_callee}{more}"
    elif at_caller == KEPT_BACK:
        assert state_of(reports) == KEPT_BACK
    else:
        assert state_of(reports) == (
            CALLEE_SILENT if at_callee == "silent" else ON_ITS_WAY
        )


def test_row_has_all_keys_with_values_of_the_caller() -> None:
    reports = {
        "a": calls(call(1, "b", function="mine", for_s=4.0)),
        "b": calls(served(1, "a", function="theirs", for_s=3.0)),
    }
    (row,) = rows(reports)
    assert set(row) == set(KEYS)
    assert row == {
        "caller": "a",
        "callee": "b",
        "function": "mine",
        "call_id": 1,
        "age_s": 4.0,
        "state": RUNS,
        "kind": "call",
    }


@pytest.mark.parametrize(("is_stream", "kind"), [(True, "stream"), (False, "call")])
def test_streams_have_their_own_kind(*, is_stream: bool, kind: str) -> None:
    (row,) = rows({"a": calls(call(1, "b", is_stream=is_stream))})
    (here,) = rows({"b": calls(served(1, "a", is_stream=is_stream))})
    assert row["kind"] == here["kind"] == kind


@pytest.mark.parametrize("age_s", [-1.0, *NO_NUMBERS])
def test_nonfinite_age_is_null(age_s: float) -> None:
    (row,) = rows({"a": calls(call(1, "b", for_s=age_s))})
    assert row["age_s"] is None


def test_function_without_a_name_is_null() -> None:
    (row,) = rows({"a": calls(call(1, "b", function=""))})
    assert row["function"] is None


def test_calls_are_identified_by_both_incarnations_and_number() -> None:
    first = call(1, "b")
    others = [
        first,
        first._replace(key=first.key._replace(call_id=2)),
        first._replace(key=first.key._replace(caller=5)),
        first._replace(key=first.key._replace(callee=5)),
        first._replace(key=first.key._replace(caller=HUGE, callee=HUGE, call_id=HUGE)),
    ]
    assert len(rows({"a": calls(*others)})) == len(others)


def test_worker_may_call_itself() -> None:
    (row,) = rows({"a": calls(call(1, "a"), served(1, "a"))})
    assert (row["caller"], row["callee"], row["state"]) == ("a", "a", RUNS)


def test_odd_names_stay_text() -> None:
    reports = {
        name: calls(
            call(number, name, function=name), served(-number - 1, name, state=name)
        )
        for number, name in enumerate(ODD_NAMES)
    }
    joined = rows(reports)
    assert as_sent({"rows": joined}) == {"rows": joined}
    assert {row["caller"] for row in joined} == set(ODD_NAMES)


@pytest.mark.parametrize("count", [1, SLICE_MAX, 2 * SLICE_MAX + 1])
def test_rows_are_joined_a_slice_at_a_time(count: int) -> None:
    reports = {
        "a": calls(*(call(number, "b") for number in range(count))),
        "b": calls(*(served(number, "a") for number in range(count))),
        "c": calls(*(served(-number - 1, "x") for number in range(count))),
    }
    joined, steps = done(rows_of(reports))
    assert len(joined) == 2 * count
    assert max(steps) <= SLICE_MAX
    # Each is told, looked at by its caller or its callee, and let go of.
    assert sum(steps) == 3 * count + 3 * count + 3 * count


def test_unreported_calls_are_counted() -> None:
    assert left_out_of([]) == 0
    assert left_out_of([calls(left_out=3), calls(), calls(left_out=HUGE)]) == HUGE + 3
