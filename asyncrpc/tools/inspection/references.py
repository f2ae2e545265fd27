"""What a worker tells of its references: who owns the value, and who holds it."""

from __future__ import annotations

from asyncrpc.core.rref.records import RRefRecord
from asyncrpc.core.rref.service import RRefService
from asyncrpc.tools.inspection.reference_records import ReferenceSeen, ReferencesSeen


def references_seen(service: RRefService, oldest_max: int) -> ReferencesSeen:
    """Return the oldest references that a worker owns and holds."""
    records = service.records(oldest_max)
    counts = service.counts()
    left_out = counts["owned"] + counts["held"] - len(records)
    return ReferencesSeen([_seen(record) for record in records], left_out)


def _seen(record: RRefRecord) -> ReferenceSeen:
    return ReferenceSeen(
        *(record.rref_id, record.owner, record.creator, record.is_owner, record.state),
        *(
            record.type_name,
            sorted(record.holders),
            record.handles,
            record.lent,
            record.age_s,
        ),
    )
