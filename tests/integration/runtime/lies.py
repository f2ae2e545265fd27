"""What a peer that means harm may say: every message, of right form, about others.

`Liar` draws messages whose fields name real workers, ranks, groups, references and
contexts, or numbers at the edges of what may travel.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from asyncrpc import AsyncRpcError, Worker
from asyncrpc.runtime import schema
from asyncrpc.runtime.membership.messages import MemberRecord, fields_of
from asyncrpc.runtime.messages import Message, Request
from asyncrpc.wire.frames import FrameKind
from tests.raw_messages import RawMessage

EDGES: Final = (0, 1, 2, 77, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2)
RECORD: Final = schema.kind_of(MemberRecord)
# Frames that name what their receiver knows; the rest is of the connection alone.
FRAMES: Final = (
    *(FrameKind.CANCEL, FrameKind.STREAM_CREDIT, FrameKind.CREDIT, FrameKind.WANT),
    *(FrameKind.FREE, FrameKind.PONG, FrameKind.LANES, FrameKind.DROP),
)
TRIES: Final = 200  # to draw what a field may be


@dataclass
class Facts:
    """What is true of others, and so of use in a lie.

    Attributes:
        workers: the honest ones.
        numbers: their incarnations, ranks and groups.
        ids: of their references and contexts: who made them, and their numbers.
        texts: their names, addresses and tags.
    """

    workers: Sequence[Worker]
    numbers: list[int] = field(default_factory=list)
    ids: list[tuple[int, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for worker in self.workers:
            life = int(worker.incarnation)
            self.numbers += [life, worker.rank]
            self.ids += [(life, number) for number in range(3)]
            self.texts += [worker.name, *worker.addresses]
        self.texts += ["", "nobody", "tcp://127.0.0.1:9", "relay://nobody"]


class Liar:
    """Draws messages from a seed."""

    def __init__(self, facts: Facts, seed: int) -> None:
        self.facts = facts
        self.chance = random.Random(seed)

    def message(self, kinds: Mapping[Any, type[Message]]) -> tuple[Any, bool]:
        """Return a message, and whether it is a request."""
        kind = self.chance.choice(list(kinds.values()))
        content = self._of(kind.record)
        if kind.name == "membership.news":
            content = [[[-1, self._record()] for _ in range(2)]]
        message: Any = RawMessage(kind.service, kind.method, content)
        message.read_answer = lambda _peer, value: value
        return message, issubclass(kind, Request)

    def _of(self, kind: schema.Kind) -> Any:  # noqa: PLR0911  (a kind, a line)
        """Return a value that a field may be."""
        # ruff: noqa: SLF001  (what a kind is made of is nowhere public)
        chance = self.chance
        if type(kind) is type(RECORD):
            return self._record()
        if isinstance(kind, schema.RecordSchema):
            fields = self._fields(kind)
            if kind.leading is None:
                return fields
            return [self._of(kind.leading[1]), {schema.FIELDS: fields}]
        if isinstance(kind, schema.Maybe):
            return None if chance.random() < 0.5 else self._of(kind._inner)
        if isinstance(kind, schema.Array):
            return [self._of(kind._inner) for _ in range(chance.choice((0, 1, 1, 3)))]
        if isinstance(kind, schema.EnumName):
            return chance.choice(list(kind._members.__members__))
        if isinstance(kind, schema.Instance):
            return torch.full((chance.choice((1, 3)),), 99.0)
        return self._leaf(kind)

    def _fields(self, kind: schema.RecordSchema) -> list[Any]:
        """Return the fields of a record; the two numbers of an id belong together."""
        fields = [self._of(one) for _, one in kind.places]
        names = [name for name, _ in kind.places]
        for at, pair in enumerate(itertools.pairwise(names)):
            if pair in {("creator", "serial"), ("root", "number")}:
                ids = self.facts.ids
                newest = ids[-1:] if self.chance.random() < 0.5 else ids
                life, number = self.chance.choice(newest)
                fields[at] = life
                is_pass = pair[0] == "root"
                fields[at + 1] = self.chance.randrange(200) if is_pass else number
        return fields

    def _leaf(self, kind: schema.Kind) -> Any:
        chance, facts = self.chance, self.facts
        pools: tuple[Sequence[Any], ...] = (
            facts.numbers,
            EDGES,
            facts.texts,
            (True, False),
            (b"", b"\xff", bytes(16)),
            (0.5, float("nan"), 1e308),
            (None, {}, []),
        )
        for _ in range(TRIES):
            value = chance.choice(chance.choice(pools))
            try:
                kind.explain("", value)
            except AsyncRpcError:
                continue
            return value
        return 1

    def _record(self) -> list[Any]:
        """Return a record of a member that is not as it was, or of nobody."""
        chance, numbers, texts = self.chance, self.facts.numbers, self.facts.texts
        worker = chance.choice(self.facts.workers)
        service: Any = worker.parts.service("membership")
        record: list[Any] = list(fields_of(service.table.me))
        for at, values in (
            (0, [one.name for one in self.facts.workers]),
            (1, (-1, 0, 1, 2)),
            (2, numbers),
            (3, [[text] for text in texts if ":" in text]),
            (5, EDGES),
            (6, EDGES),
            (7, (0, 1, 2)),
        ):
            if chance.random() < 0.4:
                record[at] = chance.choice(values)
        return record

    def frame(self) -> tuple[FrameKind, int, int]:
        """Return the kind, the call and the number of a frame."""
        chance = self.chance
        return chance.choice(FRAMES), chance.choice((0, 1, 2, 7, 1 << 40)), 1
