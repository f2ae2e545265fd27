"""The messages of membership; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

from asyncrpc.core.ids import NAME_CHARACTERS_MAX, Incarnation
from asyncrpc.core.members import Member
from asyncrpc.core.membership.machine.membership import (
    BUCKETS,
)
from asyncrpc.core.membership.machine.records import (
    Record,
    Status,
)
from asyncrpc.core.membership.machine.ring import CIRCLE
from asyncrpc.core.services.schema import (
    WORKERS,
    Array,
    Count,
    Integer,
    Kind,
    Notice,
    Passing,
    RecordSchema,
    Request,
    Sender,
    UnfitError,
    kind_of,
    message,
)
from asyncrpc.core.wire.frames import (
    ADDRESSES_CHARACTERS_MAX,
    HOST_ID_CHARACTERS_MAX,
    RANK_END,
)

SERVICE: Final = "membership"
RECEIVER_ONLY: Final = -1  # instead of a limit: the receiver informs no other

_NAME: Final = Passing(
    lambda value: (
        type(value) is str
        and 0 < len(value) <= NAME_CHARACTERS_MAX
        and value.isprintable()
    ),
    f"a string of 1 to {NAME_CHARACTERS_MAX} printable characters",
)
_HOST_ID: Final = Passing(
    lambda value: type(value) is str and len(value) <= HOST_ID_CHARACTERS_MAX,
    f"a string of at most {HOST_ID_CHARACTERS_MAX} characters",
)
_STATUSES: Final = ", ".join(str(int(status)) for status in Status)


# --- records of members --------------------------------------------------------------


class MemberFields(NamedTuple):
    """A record of a member as it travels; see `Record` and `Member`."""

    name: Annotated[str, _NAME]
    rank: Annotated[int, Integer(-1, RANK_END, "a rank, or -1")]
    incarnation: Annotated[int, Integer(0, 1 << 64, "a life of a worker")]
    addresses: tuple[str, ...]
    host_id: Annotated[str, _HOST_ID]
    generation: Count
    version: Count
    status: Annotated[int, Integer(0, len(Status), f"one of {_STATUSES}")]


_FIELDS: Final = RecordSchema(MemberFields)


class _MemberRecord(Kind):
    """A record of a member, as an array of its fields."""

    is_unchanged = False
    shape = "record"

    def read(self, value: Any) -> Record:
        fields: MemberFields = _FIELDS.read(value)
        if sum(map(len, fields.addresses)) > ADDRESSES_CHARACTERS_MAX:
            wanted = f"{ADDRESSES_CHARACTERS_MAX} characters at most"
            raise UnfitError(wanted, fields.addresses, "addresses")
        name, rank, incarnation, addresses, host_id, *state = fields
        member = Member(name, rank, Incarnation(incarnation), addresses, host_id)
        generation, version, status = state
        return Record(member, generation, version, Status(status))

    def write(self, value: Record) -> list[Any]:
        return fields_of(value)


def fields_of(record: Record) -> list[Any]:
    """Return a record as it travels."""
    member = record.member
    fields = MemberFields(
        member.name,
        member.rank,
        member.incarnation,
        member.addresses,
        member.host_id,
        record.generation,
        record.version,
        int(record.status),
    )
    written: list[Any] = _FIELDS.write(fields)
    return written


MemberRecord: TypeAlias = Annotated[Record, _MemberRecord()]


# --- messages ------------------------------------------------------------------------


@message(SERVICE, "members", about="the receiver", by=WORKERS | Sender.OBSERVER)
class AskMembers(Request[list[MemberRecord]]):
    """Ask for the records of all workers except those that have left."""


@message(SERVICE, "find", about="the receiver")
class FindMember(Request[MemberRecord | None]):
    """Ask for the record of a member by its name; None if it is not known."""

    member: str


@message(SERVICE, "ping", about="the receiver")
class PingMember(Request[None]):
    """Ask whether the receiver is there."""


@message(SERVICE, "sync", about="the receiver")
class CompareDigest(Request[list[int] | None]):
    """Ask for the digests of all parts; None if the digest of the whole is the same."""

    digest: int


@message(
    SERVICE, "exchange", about="the sender; others, as a hint; a guest, itself alone"
)
class ExchangeRecords(Request[list[MemberRecord]]):
    """Ask for the records that the sender lacks, or has older.

    Attributes:
        parts: the parts that differ.
        records: the sender's records of live workers in these parts.
    """

    parts: list[Annotated[int, Integer(0, BUCKETS, f"a part of {BUCKETS}")]]
    records: list[MemberRecord]


class News(NamedTuple):
    """One record, and the part of the ring to inform.

    Attributes:
        limit: the end of the part of the ring that the receiver informs; or
            `RECEIVER_ONLY`.
        record: the news.
    """

    limit: Annotated[int, Integer(RECEIVER_ONLY, CIRCLE, "a place on the ring, or -1")]
    record: MemberRecord


_NEWS: Final = RecordSchema(News)


class _Separate(Array):
    """An array whose elements are read one by one: a wrong one spoils no other."""

    def read(self, value: Any) -> Any:
        return value if type(value) is list else super().read(value)


@message(SERVICE, "news", about="the sender; others, as a hint; a guest, itself alone")
class MemberNews(Notice):
    """How members have changed.

    Attributes:
        items: each a `News`; the receiver reads each one by `read_news`.
    """

    items: Annotated[Iterable[Any], _Separate(kind_of(News), list)]


def read_news(item: Any) -> News:
    """Return one item of the news that has arrived."""
    news: News = _NEWS.read_as("an item of the news", item)
    return news
