"""The overview: rows of workers, totals, and the matrix of their links."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest

from asyncrpc.serving.dashboard.machine.overview import (
    BUSY_S,
    HISTORY_S,
    KEYS,
    MATRIX_MAX,
    MOMENTS_MAX,
    STATES,
    GroupHistory,
    Moment,
    matrix_of,
    moment_of,
    row_of,
    silent_row,
    state_of,
    totals_of,
)
from asyncrpc.serving.dashboard.machine.paging import Row
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX
from asyncrpc.tools.inspection.records import NoAnswer, Trouble
from asyncrpc.tools.inspection.summaries import UNKNOWN_BYTES
from tests.unit.serving.dashboard.machine.told import (
    HUGE,
    NO_NUMBERS,
    ODD_NAMES,
    as_sent,
    calls_a_second,
    done,
    link,
    rates,
    rows_of,
    summary,
)

SILENT = NoAnswer(Trouble.SILENT, "")
TOTALS = (
    "calls_made_per_s calls_served_per_s failed_per_s bytes_per_s memory_bytes "
    "references p99_s"
)
HISTORY = "at_s made_per_s p99_s memory_bytes"
CELL = "state in_flight calls_per_s bytes_per_s p50_s"


def totals(*rows: Row) -> dict[str, Any]:
    return done(totals_of(rows))[0]


# --- rows ----------------------------------------------------------------------------


def test_row_has_all_keys_with_each_number_in_its_place() -> None:
    summed_up = summary(
        pid=4,
        host="h",
        running_s=5.0,
        rates=rates(
            calls_a_second(10.0, failed=1.0, p99_s=0.5, nbytes=300.0),
            calls_a_second(20.0, failed=9.0, p99_s=9.0, nbytes=900.0),
        ),
        lag_s=0.01,
        memory_bytes=2000,
        slab_bytes=3000,
        references=6,
        tasks=7,
        calls_made=8,
        calls_served=9,
    )
    row = row_of("a", 3, summed_up)
    assert set(row) == set(KEYS)
    assert row == {
        "worker": "a",
        "rank": 3,
        "host": "h",
        "pid": 4,
        "state": "well",
        "since_s": 5.0,
        "made_per_s": 10.0,
        "served_per_s": 20.0,
        "failed_per_s": 1.0,  # of those that it made
        "p50_s": 0.25,
        "p99_s": 0.5,
        "bytes_per_s": 300.0,
        "lag_s": 0.01,
        "memory_bytes": 2000,
        "slab_bytes": 3000,
        "references": 6,
        "tasks": 7,
        "calls_under_way": 8,
    }


def test_unknown_values_are_null() -> None:
    row = row_of("a", -1, summary(memory_bytes=UNKNOWN_BYTES))
    assert not {"rank", "p50_s", "p99_s", "memory_bytes"} - {
        key for key in row if row[key] is None
    }


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_nonfinite_numbers_are_null_everywhere(value: float) -> None:
    bad = calls_a_second(value, failed=value, p99_s=value, nbytes=value)
    row = row_of("a", 0, summary(rates=rates(bad, bad), running_s=value, lag_s=value))
    floats = {
        *("since_s", "made_per_s", "served_per_s", "failed_per_s", "p50_s", "p99_s"),
        *("bytes_per_s", "lag_s"),
    }
    assert {key for key in KEYS if row[key] is None} == floats
    assert rows_of([totals(row)], TOTALS) == [(0.0, 0.0, 0.0, 0.0, 1000, 0, None)]
    as_sent({"rows": [row]})


@pytest.mark.parametrize(
    ("lag_s", "is_draining", "state"),
    [
        (0.0, False, "well"),
        (BUSY_S - 1e-9, False, "well"),
        (BUSY_S, False, "busy"),
        (math.inf, False, "busy"),
        (math.nan, False, "well"),
        (0.0, True, "draining"),
        (BUSY_S, True, "draining"),
    ],
)
def test_worker_state_follows_from_its_summary(
    lag_s: float, *, is_draining: bool, state: str
) -> None:
    assert state_of(summary(lag_s=lag_s, is_draining=is_draining)) == state


@pytest.mark.parametrize("trouble", list(Trouble))
def test_silent_worker_has_a_row_with_its_state_alone(trouble: Trouble) -> None:
    row = silent_row("a", 2, NoAnswer(trouble, "words"))
    assert set(row) == set(KEYS)
    assert {key: value for key, value in row.items() if value is not None} == {
        "worker": "a",
        "rank": 2,
        "state": STATES[trouble],
    }
    assert silent_row("a", -1, NoAnswer(trouble, ""))["rank"] is None


def test_odd_names_stay_text() -> None:
    rows = [row_of(name, 0, summary(host=name)) for name in ODD_NAMES]
    rows += [silent_row(name, 0, SILENT) for name in ODD_NAMES]
    assert as_sent({"rows": rows}) == {"rows": rows}


# --- totals --------------------------------------------------------------------------


def test_empty_group_has_zero_totals() -> None:
    assert totals() == totals(silent_row("a", 0, SILENT))
    assert totals()["memory_bytes"] == 0
    assert totals()["p99_s"] is None


def test_totals_are_sums_and_the_slowest_percentile() -> None:
    rows = [
        row_of(
            f"w{number}",
            number,
            summary(
                pid=number,
                rates=rates(
                    calls_a_second(1.0, failed=0.5, p99_s=p99_s, nbytes=10.0),
                    calls_a_second(2.0),
                ),
                references=number,
            ),
        )
        for number, p99_s in enumerate((0.1, math.nan, 0.3))
    ]
    sums = totals(*rows, silent_row("x", 9, SILENT))
    assert rows_of([sums], TOTALS) == [(3.0, 6.0, 1.5, 30.0, 3000, 3, 0.3)]


def test_memory_of_a_process_counts_once() -> None:
    def worker(name: str, host: str, pid: int, nbytes: int) -> Row:
        return row_of(name, 0, summary(host=host, pid=pid, memory_bytes=nbytes))

    sums = totals(
        worker("a", "h", 1, 100),
        worker("b", "h", 1, 100),
        worker("c", "h", 2, 1000),
        worker("d", "i", 1, 10_000),
        worker("e", "i", 3, UNKNOWN_BYTES),
    )
    assert sums["memory_bytes"] == 11_100


def test_huge_numbers_are_added_and_overflow_is_unknown() -> None:
    most = sys.float_info.max
    rows = [
        row_of(
            name,
            0,
            summary(
                pid=pid,
                memory_bytes=HUGE,
                references=HUGE,
                rates=rates(calls_a_second(most, nbytes=1e300), calls_a_second(1.0)),
            ),
        )
        for pid, name in enumerate("ab")
    ]
    sums = as_sent(totals(*rows))
    assert sums["memory_bytes"] == sums["references"] == 2 * HUGE
    assert sums["calls_made_per_s"] is None
    assert sums["calls_served_per_s"] == 2.0
    assert moment_of(1.0, sums) == Moment(1.0, None, None, 2 * HUGE)


@pytest.mark.parametrize("count", [0, 1, SLICE_MAX, 3 * SLICE_MAX + 1])
def test_totals_are_added_a_slice_at_a_time(count: int) -> None:
    row = row_of("a", 0, summary(references=1))
    sums, steps = done(totals_of([row] * count))
    assert sums["references"] == count
    assert steps == [SLICE_MAX] * (count // SLICE_MAX)


def test_history_keeps_three_of_the_totals() -> None:
    sums = {"calls_made_per_s": 1.0, "p99_s": 2.0, "memory_bytes": 3, "references": 4}
    assert moment_of(9.0, sums) == Moment(9.0, 1.0, 2.0, 3)


# --- the matrix ----------------------------------------------------------------------


def test_matrix_of_no_workers_is_empty() -> None:
    assert matrix_of([], {}, 0) == {"workers": [], "cells": [], "left_out": 0}


def test_lone_worker_has_one_empty_cell() -> None:
    matrix = matrix_of(["a"], {"a": [link("a")]}, 1)
    assert matrix == {"workers": ["a"], "cells": [[None]], "left_out": 0}


def test_matrix_rows_are_senders_and_columns_receivers() -> None:
    links = {
        "a": [link("b", in_flight=3), link("elsewhere")],
        "b": [link("a", is_broken=True, p50_s=math.nan)],
    }
    matrix = matrix_of(["b", "a", "silent"], links, 3)
    assert matrix["workers"] == ["b", "a", "silent"]
    cells = matrix["cells"]
    assert rows_of(cells[1][:1], CELL) == [("open", 3, 1.0, 2.0, 0.5)]
    assert cells[1][1:] == [None, None]
    assert cells[0][1]["state"] == "broken"
    assert cells[0][1]["p50_s"] is None
    assert cells[2] == [None] * 3


def test_last_of_two_links_to_a_peer_counts() -> None:
    links = {"a": [link("b", in_flight=1), link("b", in_flight=2)]}
    assert matrix_of(["a", "b"], links, 2)["cells"][0][1]["in_flight"] == 2


@pytest.mark.parametrize("count", [MATRIX_MAX - 1, MATRIX_MAX, MATRIX_MAX + 1, 200])
@pytest.mark.parametrize("more", [0, 800])
def test_matrix_shows_first_workers_and_counts_the_rest(count: int, more: int) -> None:
    names = [f"w{number}" for number in range(count)]
    links = {name: [link(other) for other in names] for name in names}
    matrix = matrix_of(names, links, count + more)
    size = min(count, MATRIX_MAX)
    assert matrix["workers"] == names[:size]
    assert [len(row) for row in matrix["cells"]] == [size] * size
    nothing = [at for at, row in enumerate(matrix["cells"]) if row[at] is None]
    assert nothing == list(range(size))  # the diagonal
    assert sum(cell is None for row in matrix["cells"] for cell in row) == size
    assert matrix["left_out"] == count + more - size


def test_shrunken_group_leaves_out_no_worker() -> None:
    assert matrix_of(["a", "b"], {}, 1)["left_out"] == 0


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_nonfinite_numbers_of_a_cell_are_null(value: float) -> None:
    odd = link("b", calls_per_s=value, bytes_per_s=value, p50_s=value)
    (_, cell), _ = as_sent(matrix_of(["a", "b"], {"a": [odd]}, 2))["cells"]
    assert rows_of([cell], CELL) == [("open", 0, None, None, None)]


def test_odd_names_lead_to_each_other() -> None:
    links = {name: [link(other) for other in ODD_NAMES] for name in ODD_NAMES}
    matrix = as_sent(matrix_of(ODD_NAMES, links, len(ODD_NAMES)))
    assert matrix["workers"] == list(ODD_NAMES)
    nothing = [cell for row in matrix["cells"] for cell in row if cell is None]
    assert len(nothing) == len(ODD_NAMES)


def moment(at_s: float, made_per_s: float | None = 1.0) -> Moment:
    return Moment(at_s, made_per_s, 0.5, 1000)


def times(history: GroupHistory) -> list[float]:
    return history.columns()["at_s"]


def test_new_history_has_empty_columns() -> None:
    assert rows_of([GroupHistory().columns()], HISTORY) == [([], [], [], [])]


def test_moments_are_listed_column_by_column() -> None:
    history = GroupHistory()
    history.add(Moment(1.0, 2.0, None, 3))
    history.add(Moment(4.0, None, 0.5, 6))
    columns = ([1.0, 4.0], [2.0, None], [None, 0.5], [3, 6])
    assert rows_of([history.columns()], HISTORY) == [columns]


def test_moments_older_than_the_history_are_forgotten() -> None:
    history = GroupHistory()
    for at_s in (0.0, 1.0, HISTORY_S):
        history.add(moment(at_s))
    assert times(history) == [0.0, 1.0, HISTORY_S]  # to the second
    history.add(moment(HISTORY_S + 1.0))
    assert times(history) == [1.0, HISTORY_S, HISTORY_S + 1.0]
    history.add(moment(10 * HISTORY_S))
    assert times(history) == [10 * HISTORY_S]


def test_number_of_moments_is_limited_to_the_newest() -> None:
    history = GroupHistory()
    for number in range(MOMENTS_MAX + 5):
        history.add(moment(number / 10))
    assert len(times(history)) == MOMENTS_MAX
    assert times(history)[0] == 0.5


@pytest.mark.parametrize(
    ("back_to", "left"), [(2.5, [1.0, 2.0]), (2.0, [1.0, 2.0]), (-5.0, [])]
)
def test_clock_set_back_removes_later_moments(
    back_to: float, left: list[float]
) -> None:
    history = GroupHistory()
    for at_s in (1.0, 2.0, 3.0, 4.0):
        history.add(moment(at_s))
    history.add(moment(back_to))
    assert times(history) == [*left, back_to]
