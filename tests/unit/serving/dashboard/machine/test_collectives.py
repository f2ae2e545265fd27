"""Collectives: what all ranks say, joined."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from asyncrpc.serving.dashboard.machine.collectives import KEYS, RANKS_MAX, rows_of
from asyncrpc.serving.dashboard.machine.paging import Row
from asyncrpc.tools.inspection.collective_records import CLOSED, CollectiveHistory
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX
from asyncrpc.tools.inspection.records import StackFrame
from tests.unit.serving.dashboard.machine.told import (
    HUGE,
    ODD_NAMES,
    as_sent,
    done,
    group,
    history,
    noted,
    under_way,
)

NOW_NS = 5_000_000_000
PAIR = ("a", "b")


def rows(*reports: CollectiveHistory) -> list[Row]:
    return done(rows_of({report.name: report for report in reports}, NOW_NS))[0]


def row_of(*reports: CollectiveHistory) -> Row:
    (row,) = rows(*reports)
    return row


def test_empty_group_has_no_rows() -> None:
    assert done(rows_of({}, NOW_NS)) == ([], [])
    assert rows(history("a", [])) == rows(history("a", [group(PAIR)])) == []


def test_row_has_all_keys() -> None:
    row = row_of(
        history("a", [group(PAIR, begun=1)], [noted(0)]),
        history("b", [group(PAIR, begun=1)], [noted(0, began_ns=2_000_000_000)]),
    )
    assert set(row) >= set(KEYS)
    assert row == {
        "group": "group 'all'",
        "sequence": 0,
        "kind": "all_reduce",
        "state": "ok",
        "came": [0, 1],
        "missing": [],
        "unknown": [],
        "ranks": 2,
        "ranks_left_out": 0,
        "workers": ["a", "b"],
        "age_s": 4.0,  # since the first began it
        "took_s": 2.0,  # until the last ended it
        "bytes": 24,
        "at": None,
    }


@pytest.mark.parametrize(
    ("is_noted", "begun"),
    [*product((True, False), (CLOSED, 0, 7, 8, HUGE)), (False, None)],
)
def test_rank_has_come_is_missing_or_is_unknown(
    *, is_noted: bool, begun: int | None
) -> None:
    """`begun` is what rank 1 tells of the group of collective 7; None: it is silent."""
    reports = [history("a", [group(PAIR, begun=8)], [under_way(7)])]
    if begun is not None:
        noted_there = [under_way(7)] if is_noted else []
        reports.append(history("b", [group(PAIR, begun=begun)], noted_there))
    row = row_of(*reports)
    expected: tuple[list[int], list[int], list[int]]
    if is_noted or (begun or 0) > 7:
        expected = [0, 1], [], []  # by its note, or it is beyond
    elif begun in (None, CLOSED):
        expected = [0], [], [1]
    else:
        expected = [0], [1], []
    assert (row["came"], row["missing"], row["unknown"]) == expected


def test_rank_without_the_group_is_unknown() -> None:
    row = row_of(history("a", [group(PAIR)], [under_way(0)]), history("b", []))
    assert row["unknown"] == [1]


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        (("ok", "ok"), "ok"),
        (("ok", "RankLostError"), "RankLostError"),
        (("cancelled", "RankLostError"), "cancelled"),
        (("ok", None), "under way"),
        (("RankLostError", None), "under way"),
    ],
)
def test_row_state_is_under_way_or_the_first_failure(
    outcomes: tuple[str | None, ...], state: str
) -> None:
    reports = [
        history(
            name,
            [group(PAIR, begun=1)],
            [under_way(0) if outcome is None else noted(0, outcome=outcome)],
        )
        for name, outcome in zip(PAIR, outcomes, strict=True)
    ]
    row = row_of(*reports)
    assert row["state"] == state
    assert (row["took_s"] is None) == (state == "under way")


def test_row_shows_the_frame_of_the_first_rank_that_knows() -> None:
    frames = (StackFrame("step", "/app/train.py", 41), StackFrame("main", "/x.py", 1))
    row = row_of(
        history("a", [group(PAIR)], [under_way(0)]),
        history("b", [group(PAIR)], [under_way(0, frames=frames)]),
    )
    assert row["at"] == "train.py:41 in step"
    assert row_of(history("a", [group(PAIR)], [noted(0, frames=frames)]))["at"] is None


def test_clock_that_is_behind_gives_no_negative_age() -> None:
    row = row_of(history("a", [group(PAIR)], [under_way(0, began_ns=2 * NOW_NS)]))
    assert row["age_s"] == 0.0


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("float32", (2, 3), 24),
        ("torch.float32", (2, 3), 24),
        ("bfloat16", (5,), 10),
        ("complex128", (2,), 32),
        ("bool", (), 1),
        ("int64", (0, HUGE), 0),
        ("float32", None, None),
        ("", (2,), None),
        ("<b>", (2,), None),
        ("uint8", (HUGE,), HUGE),
        ("int64", (HUGE,), None),
        ("float32", (HUGE,) * 5000, None),
        ("float32", (*(HUGE,) * 5000, 0), 0),
    ],
)
def test_bytes_follow_from_type_and_shape(
    dtype: str, shape: tuple[int, ...] | None, nbytes: int | None
) -> None:
    row = row_of(history("a", [group(PAIR)], [noted(0, dtype=dtype, shape=shape)]))
    assert row["bytes"] == nbytes
    as_sent(row)


def test_collectives_are_identified_by_group_and_number() -> None:
    groups = [group(PAIR, group_id=1, begun=9), group(PAIR, group_id=2, begun=9)]
    collectives = [
        noted(number, group=place) for place in (0, 1) for number in (0, 3, HUGE)
    ]
    reports = [
        history("a", groups, collectives),
        history(
            "b",
            reversed(groups),
            [
                collective._replace(group=1 - collective.group)
                for collective in collectives
            ],
        ),
    ]
    joined = rows(*reports)
    assert len(joined) == len(collectives)
    assert all(row["came"] == [0, 1] for row in joined)


def test_member_without_a_rank_is_not_counted() -> None:
    row = row_of(
        history("a", [group(PAIR)], [under_way(0)]),
        history("guest", [group(PAIR)], [under_way(0)]),
    )
    assert (row["came"], row["unknown"], row["ranks"]) == ([0], [1], 2)


def test_collective_of_an_unlisted_group_is_left_out() -> None:
    collectives = [under_way(0, group=1), under_way(1, group=HUGE), under_way(2)]
    assert [
        row["sequence"] for row in rows(history("a", [group(PAIR)], collectives))
    ] == [2]


@pytest.mark.parametrize("size", [1, RANKS_MAX, RANKS_MAX + 1, 1000])
def test_listed_ranks_are_limited_and_the_rest_counted(size: int) -> None:
    names = [f"w{number}" for number in range(size)]
    ranks = list(range(size))
    reports = [history(name, [group(names, begun=1)], [under_way(0)]) for name in names]
    row = row_of(*reports)
    assert row["came"] == ranks[:RANKS_MAX]
    assert row["workers"] == names[:RANKS_MAX]
    assert (row["ranks"], row["ranks_left_out"]) == (size, max(0, size - RANKS_MAX))
    reports = [
        report._replace(groups=(group(names),), collectives=()) for report in reports
    ]
    reports[0] = history(names[0], [group(names, begun=1)], [under_way(0)])
    row = row_of(*reports)
    assert (row["came"], row["missing"]) == ([0], ranks[1 : RANKS_MAX + 1])
    assert row["ranks_left_out"] == max(0, size - 1 - RANKS_MAX)


def test_odd_names_stay_text() -> None:
    reports = [
        history(
            name,
            [group(ODD_NAMES)._replace(label=name, group_id=place)],
            [noted(0, operation=name, outcome=name, dtype=name)],
        )
        for place, name in enumerate(ODD_NAMES)
    ]
    joined = rows(*reports)
    assert as_sent({"rows": joined}) == {"rows": joined}
    assert {row["group"] for row in joined} == set(ODD_NAMES)


@pytest.mark.parametrize("count", [1, SLICE_MAX, 2 * SLICE_MAX + 1])
def test_rows_are_joined_a_slice_at_a_time(count: int) -> None:
    collectives: list[Any] = [noted(number) for number in range(count)]
    reports = {name: history(name, [group(PAIR)], collectives) for name in PAIR}
    joined, steps = done(rows_of(reports, NOW_NS))
    assert len(joined) == count
    assert max(steps) <= SLICE_MAX
    # Groups, what is told, rows, each of which looks at two ranks, and what is let go
    # of: rows, and two ranks.
    assert sum(steps) == 2 * 2 + 2 * count + 2 * count + count + 2


def test_row_of_a_large_group_is_a_slice_of_its_own() -> None:
    names = [f"w{number}" for number in range(1000)]
    reports = {
        name: history(name, [group(names)], [noted(number) for number in range(3)])
        for name in names[:2]
    }
    joined, steps = done(rows_of(reports, NOW_NS))
    assert len(joined) == 3
    assert steps == [1000, 3, 1000, 3, 1000, 1000, 1000, 3, 2]
