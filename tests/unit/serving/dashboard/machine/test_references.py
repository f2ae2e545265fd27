"""References: the word of the owner, or of those that hold them."""

from __future__ import annotations

import pytest

from asyncrpc.core.ids import Incarnation, RRefId
from asyncrpc.serving.dashboard.machine.paging import Row
from asyncrpc.serving.dashboard.machine.references import (
    HOLDERS_MAX,
    KEYS,
    left_out_of,
    rows_of,
)
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX
from asyncrpc.tools.inspection.reference_records import ReferencesSeen
from tests.unit.serving.dashboard.machine.told import (
    HUGE,
    NO_NUMBERS,
    ODD_NAMES,
    as_sent,
    done,
    reference,
    references,
)


def rows(reports: dict[str, ReferencesSeen]) -> list[Row]:
    return done(rows_of(reports))[0]


def test_empty_group_has_no_rows() -> None:
    assert done(rows_of({})) == ([], [])
    assert rows({"a": references()}) == []


def test_row_from_the_owner_has_all_keys() -> None:
    (row,) = rows({"a": references(reference(1, "a"))})
    assert set(row) >= set(KEYS)
    assert row == {
        "owner": "a",
        "reference": "00000000000000ab-0000000000000001",
        "type": "Table",
        "state": "owned",
        "age_s": 3.0,
        "holders": ["holder"],
        "holders_left_out": 0,
        "creator": "maker",
        "local_users": 1,
        "lent": 2,
        "is_owners_word": True,
    }


def test_value_reported_by_its_owner_ignores_its_holders() -> None:
    reports = {
        "a": references(reference(1, "a", age_s=9.0)),
        "b": references(reference(1, "a", is_owner=False, state="held")),
        "c": references(reference(2, "a", is_owner=False)),  # it is gone there
    }
    assert [(row["age_s"], row["is_owners_word"]) for row in rows(reports)] == [
        (9.0, True)
    ]


def test_value_of_a_silent_owner_is_joined_from_its_holders() -> None:
    held = reference(1, "x", is_owner=False, type_name="", holders=[], state="held")
    reports = {
        "c": references(held._replace(age_s=2.0, handles=5)),
        "b": references(held._replace(age_s=7.0, handles=6), held._replace(age_s=1.0)),
        "d": references(held._replace(rref_id=RRefId(Incarnation(0xAB), 2))),
    }
    first, second = rows(reports)
    assert first["holders"] == ["b", "c"]  # each once, in order
    assert (first["age_s"], first["local_users"]) == (7.0, 6)  # of who had it first
    assert first["type"] is None
    assert not first["is_owners_word"]
    assert second["holders"] == ["d"]


@pytest.mark.parametrize("age_s", [-1.0, *NO_NUMBERS])
def test_nonfinite_age_is_null_and_not_the_oldest(age_s: float) -> None:
    odd = reference(1, "x", is_owner=False, age_s=age_s)
    (alone,) = rows({"a": references(odd)})
    assert alone["age_s"] is None
    for reports in ([odd, odd._replace(age_s=1.0)], [odd._replace(age_s=1.0), odd]):
        (row,) = rows({"a": references(*reports)})
        assert row["age_s"] == 1.0


@pytest.mark.parametrize("count", [0, 1, HOLDERS_MAX, HOLDERS_MAX + 1, 1000])
def test_listed_holders_are_limited_and_the_rest_counted(count: int) -> None:
    names = [f"w{number:04}" for number in range(count)]
    (row,) = rows({"a": references(reference(1, "a", holders=names))})
    assert row["holders"] == names[:HOLDERS_MAX]
    assert row["holders_left_out"] == max(0, count - HOLDERS_MAX)
    if count:
        held = reference(1, "silent", is_owner=False)
        (row,) = rows({name: references(held) for name in reversed(names)})
        assert row["holders"] == names[:HOLDERS_MAX]
        assert row["holders_left_out"] == max(0, count - HOLDERS_MAX)


def test_references_are_identified_by_creator_and_number() -> None:
    ids = [
        RRefId(Incarnation(creator), serial)
        for creator in (0, 1, (1 << 64) - 1)
        for serial in (0, 1, HUGE)
    ]
    joined = rows(
        {
            "a": references(
                *(
                    reference(0, "x", is_owner=False)._replace(rref_id=rref_id)
                    for rref_id in ids
                )
            )
        }
    )
    assert len({row["reference"] for row in joined}) == len(ids)


def test_odd_names_stay_text() -> None:
    reports = {
        name: references(
            reference(
                1, name, creator=name, type_name=name, state=name, holders=[*ODD_NAMES]
            ),
            reference(2, f"silent {name}", is_owner=False, holders=[]),
        )
        for name in ODD_NAMES
    }
    joined = rows(reports)
    assert as_sent({"rows": joined}) == {"rows": joined}
    assert {row["owner"] for row in joined if row["is_owners_word"]} == set(ODD_NAMES)
    assert {name for row in joined for name in row["holders"]} == set(ODD_NAMES)


@pytest.mark.parametrize("count", [1, SLICE_MAX, 2 * SLICE_MAX + 1])
def test_rows_are_joined_a_slice_at_a_time(count: int) -> None:
    reports = {
        name: references(
            *(reference(number, name) for number in range(count)),
            *(reference(number, "x", is_owner=False) for number in range(count)),
        )
        for name in ("a", "b")
    }
    joined, steps = done(rows_of(reports))
    assert len(joined) == 3 * count
    assert max(steps) <= SLICE_MAX
    assert sum(steps) == 4 * count + 2 * count + count  # told, made, let go of


def test_value_with_many_holders_is_a_slice_of_its_own() -> None:
    held = [reference(number, "x", is_owner=False) for number in range(3)]
    reports = {f"w{number}": references(*held) for number in range(SLICE_MAX)}
    joined, steps = done(rows_of(reports))
    assert len(joined) == 3
    assert steps[-4:] == [SLICE_MAX, SLICE_MAX, SLICE_MAX, 3]


def test_unreported_references_are_counted() -> None:
    assert left_out_of([]) == 0
    assert left_out_of([references(left_out=3), references(left_out=HUGE)]) == HUGE + 3
