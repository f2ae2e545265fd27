"""The references of a group: which workers own the values, and which hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from asyncrpc.serving.dashboard.machine.answers import known_age
from asyncrpc.serving.dashboard.machine.paging import Row
from asyncrpc.tools.inspection.machine.slices import (
    Slices,
    let_go,
    parts_of,
    weighed_parts,
)
from asyncrpc.tools.inspection.reference_records import ReferenceSeen, ReferencesSeen

KEYS: Final = (
    *("owner", "reference", "type", "state", "age_s", "holders", "creator"),
    *("local_users", "lent"),
)
HOLDERS_MAX: Final = 20  # names in a row


def rows_of(told: Mapping[str, ReferencesSeen]) -> Slices[list[Row]]:
    """Return a row for each value, in slices: by its owner, if that has answered.

    If the owner has not answered, the row is made from the holders.
    """
    owned: list[Row] = []
    held: dict[str, list[tuple[str, ReferenceSeen]]] = {}
    for name, seen in told.items():
        for part in parts_of(seen.references):
            for one in part:
                if one.is_owner:
                    owned.append(_row(one, one.holders))
                elif one.owner not in told:
                    held.setdefault(_named(one), []).append((name, one))
            yield len(part)
    for values, weight in weighed_parts(held.values(), len):
        for seen_by in values:
            names = sorted({name for name, _ in seen_by})
            oldest = max((one for _, one in seen_by), key=_age_of)
            owned.append(_row(oldest, names))
        yield weight
    yield from let_go(held)
    return owned


def left_out_of(told: Iterable[ReferencesSeen]) -> int:
    """Return how many references, owned or held, the workers left out."""
    return sum(one.left_out for one in told)


def _age_of(one: ReferenceSeen) -> float:
    return known_age(one.age_s) or 0.0


def _named(one: ReferenceSeen) -> str:
    return str(one.rref_id)


def _row(one: ReferenceSeen, holders: list[str]) -> Row:
    return {
        "owner": one.owner,
        "reference": _named(one),
        "type": one.type_name or None,
        "state": one.state,
        "age_s": known_age(one.age_s),
        "holders": holders[:HOLDERS_MAX],
        "holders_left_out": max(0, len(holders) - HOLDERS_MAX),
        "creator": one.creator,
        "local_users": one.handles,
        "lent": one.lent,
        "is_owners_word": one.is_owner,
    }
