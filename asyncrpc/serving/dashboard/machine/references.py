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


def rows_of(answers: Mapping[str, ReferencesSeen]) -> Slices[list[Row]]:
    """Return a row for each value, in slices: by its owner, if that has answered.

    If the owner has not answered, the row is made from the holders.
    """
    owned: list[Row] = []
    held: dict[str, list[tuple[str, ReferenceSeen]]] = {}
    for name, seen in answers.items():
        for part in parts_of(seen.references):
            for reference in part:
                if reference.is_owner:
                    owned.append(_row(reference, reference.holders))
                elif reference.owner not in answers:
                    held.setdefault(_named(reference), []).append((name, reference))
            yield len(part)
    for values, weight in weighed_parts(held.values(), len):
        for seen_by in values:
            names = sorted({name for name, _ in seen_by})
            oldest = max((reference for _, reference in seen_by), key=_age_of)
            owned.append(_row(oldest, names))
        yield weight
    yield from let_go(held)
    return owned


def left_out_of(answers: Iterable[ReferencesSeen]) -> int:
    """Return how many references, owned or held, the workers left out."""
    return sum(seen.left_out for seen in answers)


def _age_of(reference: ReferenceSeen) -> float:
    return known_age(reference.age_s) or 0.0


def _named(reference: ReferenceSeen) -> str:
    return str(reference.rref_id)


def _row(reference: ReferenceSeen, holders: list[str]) -> Row:
    return {
        "owner": reference.owner,
        "reference": _named(reference),
        "type": reference.type_name or None,
        "state": reference.state,
        "age_s": known_age(reference.age_s),
        "holders": holders[:HOLDERS_MAX],
        "holders_left_out": max(0, len(holders) - HOLDERS_MAX),
        "creator": reference.creator,
        "local_users": reference.handles,
        "lent": reference.lent,
        "is_owners_word": reference.is_owner,
    }
