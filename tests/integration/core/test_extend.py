"""A service that a program builds with `asyncrpc.extend` and nothing else."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import pytest
import torch

import asyncrpc
from asyncrpc import extend
from asyncrpc.errors import MalformedError, UsageError
from tests.integration.core.groups import started

RATE: Final = extend.Integer(1, 101, "a rate of 1 to 100")


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Place(NamedTuple):
    row: extend.Count
    column: extend.Signed


@dataclass(slots=True)
class Cell:
    """A record within a message."""

    place: Place
    value: float


@extend.message("sheet", "write", about="a cell of the receiver's sheet")
class WriteCell(extend.Request[Cell]):
    at: extend.Spread[Place]
    values: torch.Tensor
    mode: Annotated[Mode, extend.EnumName(Mode)]
    rate: Annotated[int, RATE]
    latest: extend.Number = -1


@extend.message("sheet", "clear", by=extend.MEMBERS)
class ClearSheet(extend.Notice):
    """Empty the receiver's sheet."""


@extend.message("sheet", "read", by=extend.LOOKERS)
class ReadSheet(extend.Request[list[Cell]]):
    """Wait until the receiver's sheet is empty, or return its cells."""

    is_awaited: bool


class Sheet:
    """Cells that other workers write."""

    name = "sheet"

    def __init__(self, host: extend.ServiceHost) -> None:
        self.host = host
        self.cells: list[Cell] = []
        self.lost: list[extend.WorkerId] = []
        self.is_closed = False
        self._cleared = asyncio.Event()
        self.waits = asyncio.Event()

    @property
    def routes(self) -> Sequence[extend.Route]:
        return (
            extend.answers(WriteCell, self._on_write),
            extend.takes(ClearSheet, self._on_clear),
            extend.answers(ReadSheet, self._on_read),
        )

    @extend.does(lambda at: f"writes {at['request'].at}")
    async def _on_write(self, link: extend.PeerLink, request: WriteCell) -> Cell:
        add = request.values.sum if request.mode is Mode.FAST else request.values.mean
        value = float((await self.host.run_in_thread(add)) * request.rate)
        self.cells.append(Cell(request.at, value))
        return self.cells[-1]

    def _on_clear(self, link: extend.PeerLink, notice: ClearSheet) -> None:
        self.cells.clear()
        self._cleared.set()

    @extend.works_for(lambda at: at["self"])
    async def _on_read(self, link: extend.PeerLink, request: ReadSheet) -> list[Cell]:
        if request.is_awaited:
            await self._until_cleared()
        return self.cells

    @extend.waits(
        lambda at: extend.WaitDescription(
            extend.WaitKind.EVENT, "an empty sheet", at["self"]
        )
    )
    async def _until_cleared(self) -> None:
        self.waits.set()
        await self._cleared.wait()

    def on_peer_lost(self, peer: extend.WorkerId, reason: str) -> None:
        self.lost.append(peer)

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture
async def workers() -> AsyncIterator[list[asyncrpc.Worker]]:
    meeting = asyncrpc.LocalRendezvous(2)
    workers = [
        asyncrpc.Worker(name, rank=rank, rendezvous=meeting)
        for rank, name in enumerate(["a", "b"])
    ]
    for worker in workers:
        extend.add_service(worker, Sheet)
    async with started(*workers):
        yield workers


def write(rate: int = 2, mode: Mode = Mode.FAST) -> WriteCell:
    return WriteCell(Place(1, -1), torch.ones(4), mode, rate)


async def test_request_is_answered_by_a_record(workers: list[asyncrpc.Worker]) -> None:
    first, second = workers
    link = await extend.host_of(first).link_to("b")
    assert await extend.ask(link, write()) == Cell(Place(1, -1), 8.0)
    assert await extend.ask(link, write(mode=Mode.EXACT)) == Cell(Place(1, -1), 2.0)
    cells = await extend.ask(link, ReadSheet(is_awaited=False))
    assert cells == extend.service_of(second, Sheet).cells


async def test_field_outside_of_its_limits_costs_its_own_request_only(
    workers: list[asyncrpc.Worker],
) -> None:
    link = await extend.host_of(workers[0]).link_to("b")
    with pytest.raises(MalformedError, match=r"rate of 1 to 100"):
        await extend.ask(link, write(rate=101))
    assert (await extend.ask(link, write(rate=100))).value == 400.0


async def test_notice_ends_a_wait_known_to_why(workers: list[asyncrpc.Worker]) -> None:
    first, second = workers
    sheet = extend.service_of(second, Sheet)
    link = await extend.host_of(first).link_to("b")
    reading = asyncio.ensure_future(extend.ask(link, ReadSheet(is_awaited=True)))
    await sheet.waits.wait()
    findings = await asyncrpc.inspection.why(worker=first, after_s=0.0)
    assert "an empty sheet" in str(findings)
    link.tell(ClearSheet())
    assert await reading == []


async def test_service_hears_of_the_loss_of_a_peer_and_is_closed(
    workers: list[asyncrpc.Worker],
) -> None:
    first, second = workers
    lost: extend.WorkerId = extend.host_of(second).id
    incarnation: extend.Incarnation = second.incarnation
    await extend.host_of(first).link_to("b")
    await second.shutdown(drain_timeout_s=0.0)
    assert extend.service_of(first, Sheet).lost == [lost]
    assert lost.incarnation == incarnation
    with pytest.raises(UsageError):
        extend.service_of(second, Sheet)


def test_messages_say_who_may_send_them() -> None:
    assert WriteCell.by == extend.WORKERS == extend.MEMBERS | extend.Sender.GUEST
    assert ReadSheet.by == extend.LOOKERS == extend.MEMBERS | extend.Sender.OBSERVER
    assert isinstance(WriteCell.record, extend.RecordSchema)


async def test_host_knows_open_links_and_members(
    workers: list[asyncrpc.Worker],
) -> None:
    first, second = workers
    host = extend.host_of(first)
    link = await host.link_to("b")
    assert host.open_link_to("b") is link
    assert not link.is_draining
    assert host.incarnation_of("b") == second.incarnation
    assert host.incarnation_of("c") is None
    assert [member.name for member in host.known_members] == ["a", "b"]
    assert host.options is first.options
    assert await host.run_on_host(lambda: 3) == 3
    host.check_loop("a test")
    assert not host.is_ending
    await host.wait_idle()
    assert host.active == 0


class LateSheet(Sheet):
    name = "late"
    routes: Sequence[extend.Route] = ()


async def test_host_finds_a_service_that_was_added_late(
    workers: list[asyncrpc.Worker],
) -> None:
    host = extend.host_of(workers[0])
    assert host.find_service(LateSheet) is None
    sheet = LateSheet(host)
    host.add_service(sheet)
    assert extend.service_of(workers[0], LateSheet) is sheet


async def test_deadline_ends_a_request(workers: list[asyncrpc.Worker]) -> None:
    first, second = workers
    link = await extend.host_of(first).link_to("b")
    deadline = extend.Deadline.after(0.01, first.loop.time())
    with pytest.raises(asyncrpc.DeadlineExceededError):
        await extend.ask(link, ReadSheet(is_awaited=True), deadline=deadline)
    assert extend.service_of(second, Sheet).waits.is_set()


class Spans:
    """A tracer that keeps what is called."""

    meta = None

    def __init__(self) -> None:
        self.seen: list[str] = []

    def called(self, function: str, to: str, **_: object) -> Spans:
        self.seen.append(f"{function} at {to}")
        return self

    def served(self, function: str, caller: str, *_: object, **__: object) -> Spans:
        self.seen.append(f"{function} for {caller}")
        return self

    def end(self, outcome: str, **_: object) -> None:
        self.seen.append(outcome)


async def test_tracer_sees_calls(workers: list[asyncrpc.Worker]) -> None:
    first, _ = workers
    spans = Spans()
    tracer: Any = spans
    assert extend.tracer_of(first) is None
    extend.trace_by(first, tracer)
    assert extend.tracer_of(first) is tracer
    await first.peer("b").call(abs, -1)
    assert spans.seen == ["abs at b", "ok"]


async def test_running_worker_refuses_a_service(workers: list[asyncrpc.Worker]) -> None:
    with pytest.raises(UsageError, match="before it starts"):
        extend.add_service(workers[0], Sheet)
