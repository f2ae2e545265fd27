"""What a peer that means harm may say: every message, about others, right or nearly so.

`Liar` draws messages whose fields name real workers, ranks, groups, references and
contexts, or numbers at the edges of what may travel.  All is read off `Choices`, so a
fuzzer that changes bytes steers it, and a seed gives the same lies again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch

from asyncrpc import Worker
from asyncrpc.core.membership.messages import MemberRecord, fields_of
from asyncrpc.core.services import schema
from asyncrpc.core.services.schema import Message
from asyncrpc.core.wire.frames import FrameKind
from tests.fuzz.choices import Choices

T = TypeVar("T")

EDGES: Final = (0, 1, 2, 77, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2)
# Frames that name what their receiver knows; the rest is of the connection alone.
FRAMES: Final = (
    *(FrameKind.CANCEL, FrameKind.STREAM_CREDIT, FrameKind.CREDIT, FrameKind.WANT),
    *(FrameKind.FREE, FrameKind.PONG, FrameKind.LANES, FrameKind.DROP),
    *(FrameKind.PING, FrameKind.ACK, FrameKind.LANE_BROKEN),
)
# In the place of what a message should hold.
HOSTILE: Final[tuple[Any, ...]] = (
    *(0, 1, -1, 2, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), -(1 << 70)),
    *(True, None, 0.5, -1.0, float("nan"), float("inf"), "", "é\udcff", "a\0b"),
    *("x" * 5000, b"", b"\xff" * 9, bytes(100), [], {}, [None], [[]], [-1] * 5),
    *(["a"] * 300, {"a": 1}, {1: 2}, {"fields": []}, [[], {"fields": []}]),
    [[[[[[[[[[[[[[[[[["deep"]]]]]]]]]]]]]]]]]],
    (1, 2),
    *(torch.ones(1), torch.ones(0), torch.tensor(float("nan")), torch.ones(2, 2)),
    torch.ones(1, dtype=torch.int64),
)
CONTENT_DEPTH_MAX: Final = 6  # to which a lie is put in the place of a right part


@dataclass
class Facts:
    """What is true of others, and so of use in a lie."""

    workers: Sequence[Worker]  # the honest ones
    # Their incarnations, ranks and groups.
    numbers: list[int] = field(default_factory=list)
    # Of their references and contexts: who made them, and their numbers.
    ids: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # their names, addresses and tags

    def __post_init__(self) -> None:
        for worker in self.workers:
            life = int(worker.incarnation)
            self.numbers += [life, worker.rank]
            self.ids += [(life, number) for number in range(3)]
            self.texts += [worker.name, *worker.addresses]
        self.texts += ["", "nobody", "tcp://127.0.0.1:9", "relay://nobody"]
        self._fits: dict[tuple[int, int], list[Any]] = {}

    def fitting(self, kind: schema.Kind) -> list[Any]:
        """Return which of the facts, and of the edges, a field may be."""
        key = id(kind), len(self.numbers) + len(self.texts)
        if key not in self._fits:
            known = (*self.numbers, *EDGES, *self.texts, *HOSTILE, False, bytes(16))
            self._fits[key] = [fact for fact in known if _is_fit(kind, fact)] or [1]
        return self._fits[key]


def _is_fit(kind: schema.Kind, value: Any) -> bool:
    try:
        kind.read(value)
    except schema.UnfitError:
        return False
    return True


class Liar:
    def __init__(self, facts: Facts, choices: Choices) -> None:
        self.facts = facts
        self.choices = choices

    def one_of(self, values: Sequence[T]) -> T:
        return values[self.choices.below(min(256, len(values)))]

    def kind(self, kinds: Mapping[Any, type[Message]]) -> type[Message]:
        return self.one_of(list(kinds.values()))

    def content(self, kind: type[Message]) -> Any:
        """Return the content of a message: of right form, or nearly so."""
        if kind.name == "membership.news":
            count = 1 + self.choices.below(2)
            return self.spoiled([[[-1, self._record()] for _ in range(count)]])
        return self.spoiled(self.value(kind.record))

    def value(self, kind: schema.Kind) -> Any:  # noqa: PLR0911  (a kind, a line)
        """Return a value that a field may be."""
        if type(kind) is type(_RECORD):
            return self._record()
        if isinstance(kind, schema.RecordSchema):
            fields = self._fields(kind)
            return [fields[0], {schema.FIELDS: fields[1:]}] if kind.is_led else fields
        if isinstance(kind, schema.Maybe):
            return None if self.choices.below(2) else self.value(kind.inner)
        if isinstance(kind, schema.Array):
            count = (1, 0, 1, 3)[self.choices.below(4)]
            return [self.value(kind.inner) for _ in range(count)]
        if isinstance(kind, schema.EnumName):
            return self.one_of(list(kind.members))
        if isinstance(kind, schema.Instance):
            return torch.full(((1, 3)[self.choices.below(2)],), 99.0)
        return self.one_of(self.facts.fitting(kind))

    def _fields(self, kind: schema.RecordSchema) -> list[Any]:
        """Return the fields of a record; the two numbers of an id belong together."""
        fields = [self.value(field_kind) for _, field_kind in kind.places]
        names = [name for name, _ in kind.places]
        for at, pair in enumerate(itertools.pairwise(names)):
            if pair in {("creator", "serial"), ("root", "number")}:
                ids = self.facts.ids
                # The last ones are of what is under way.
                life, number = ids[-1 - self.choices.below(min(256, len(ids)))]
                fields[at] = life
                is_pass = pair[0] == "root"
                fields[at + 1] = self.choices.below(200) if is_pass else number
        return fields

    def _record(self) -> list[Any]:
        """Return a record of a member that is not as it was, or of nobody."""
        numbers, texts = self.facts.numbers, self.facts.texts
        worker = self.one_of(self.facts.workers)
        service: Any = worker.parts.service("membership")
        record: list[Any] = list(fields_of(service.table.me))
        wrong = self.choices.below(256)  # which of these
        for at, values in (
            (0, [worker.name for worker in self.facts.workers] + ["nobody"]),
            (1, (-1, 0, 1, 2)),
            (2, numbers),
            (3, [[text] for text in texts if ":" in text]),
            (5, EDGES),
            (6, EDGES),
            (7, (0, 1, 2)),
        ):
            if wrong >> at & 1:
                record[at] = self.one_of(values)
        return record

    def spoiled(self, content: Any) -> Any:
        """Return a content as it is, as a rule, or wrong in one place."""
        return self._spoiled(content) if self.choices.below(3) == 2 else content

    def _spoiled(self, content: Any, depth: int = 0) -> Any:
        """Return a content that is wrong in one place."""
        how = self.choices.below(8)
        is_whole = type(content) not in (list, dict) or not content
        if how == 0 or is_whole or depth > CONTENT_DEPTH_MAX:
            return self.one_of(HOSTILE)
        if type(content) is dict:
            key = self.one_of(list(content))
            return {**content, key: self._spoiled(content[key], depth + 1)}
        at = self.choices.below(min(256, len(content)))
        before, part, after = content[:at], content[at], content[at + 1 :]
        if how == 1:
            return before
        if how == 2:
            return [*content, self.one_of(HOSTILE)]
        if how == 3:
            return [*before, part, part, *after]
        return [*before, self._spoiled(part, depth + 1), *after]

    def frame(self) -> tuple[FrameKind, int, int]:
        """Return the kind, the call and the number of a frame."""
        calls = (0, 1, 2, 7, 1 << 40, (1 << 64) - 1)
        numbers = (1, 0, -1, 2, 4096, (1 << 63) - 1, -(1 << 63), 1 << 40)
        return self.one_of(FRAMES), self.one_of(calls), self.one_of(numbers)


_RECORD: Final = schema.kind_of(MemberRecord)
