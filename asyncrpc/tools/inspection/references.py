"""What a worker tells of its references: who owns the value, and who holds it."""

from __future__ import annotations

from asyncrpc.core.rref.records import RRefRecord
from asyncrpc.core.rref.service import RRefService
from asyncrpc.tools.inspection.reference_records import ReferenceSeen, ReferencesSeen


def references_seen(service: RRefService, oldest_max: int) -> ReferencesSeen:
    """Return the oldest references that a worker owns and holds."""
    found = service.records(oldest_max)
    counts = service.counts()
    left_out = counts["owned"] + counts["held"] - len(found)
    return ReferencesSeen([_seen(one) for one in found], left_out)


def _seen(one: RRefRecord) -> ReferenceSeen:
    return ReferenceSeen(
        *(one.rref_id, one.owner, one.creator, one.is_owner, one.state),
        *(one.type_name, sorted(one.holders), one.handles, one.lent, one.age_s),
    )
