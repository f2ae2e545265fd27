"""A service that is loaded when its first message comes."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrpc.core.ids import WorkerId
from asyncrpc.core.services import registry as services
from asyncrpc.core.services.registry import LaterService, Services
from asyncrpc.core.services.router import Route, answers, takes
from asyncrpc.core.services.schema import LOOKERS, Notice, Request, message
from asyncrpc.errors import ClosedError, MalformedError
from tests.unit.recording import RecordingLink, worker

MODULE = "module_that_loads_later"
GATE = "gate_of_what_loads_later"
PEER = worker("peer")


@message("late", "hear")
class Hear(Notice):
    """A notice."""

    number: int


@message("late", "count")
class Count(Request[int]):
    """A request."""


class Late:
    """Keeps what it hears, and of whom it hears that it is lost."""

    name = "late"

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.lost: list[str] = []
        self.routes: list[Route] = [
            takes(Hear, self._hear),
            answers(Count, self._count),
        ]

    def _hear(self, _: Any, notice: Hear) -> None:
        if notice.number == 0:
            raise MalformedError("it says nothing")
        self.heard.append(notice.number)

    async def _count(self, _: Any, __: Count) -> int:
        return len(self.heard)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        self.lost.append(peer.name)

    async def close(self) -> None:
        self.heard.clear()


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the service's module be imported once the event is set."""
    event = threading.Event()
    (tmp_path / f"{MODULE}.py").write_text(f"import {GATE}\n{GATE}.event.wait(60)\n")
    holder: Any = types.ModuleType(GATE)
    holder.event = event
    monkeypatch.setitem(sys.modules, GATE, holder)
    monkeypatch.syspath_prepend(tmp_path)
    yield event
    event.set()
    sys.modules.pop(MODULE, None)


def with_late(loaded: list[Late], *, module: str = MODULE) -> Services:
    def make() -> Late:
        loaded.append(Late())
        return loaded[-1]

    offered = Services()
    offered.add_later("late", module, make, by=LOOKERS)
    return offered


def tell(offered: Services, number: int, link: RecordingLink | None = None) -> None:
    notice = Hear(number)
    route = offered.router.notice(notice.head)
    route.handle(link or RecordingLink(PEER), notice.pack())


async def count(offered: Services) -> Any:
    request = Count()
    route = offered.router.request(request.head)
    return await route.handle(RecordingLink(PEER), request.pack())


async def test_messages_wait_in_order_until_a_thread_has_loaded_the_service(
    gate: threading.Event,
) -> None:
    loaded: list[Late] = []
    offered = with_late(loaded)
    offered.on_peer_lost(worker("gone"), "it died")
    offered.on_peer_lost(worker("back"), "it died")
    offered.on_peer_back(worker("back"))
    tell(offered, 1)
    answer = asyncio.ensure_future(count(offered))  # noqa: RUF100
    tell(offered, 2)
    await asyncio.sleep(0)
    assert not loaded
    assert not answer.done()
    gate.set()
    assert await answer == 2
    tell(offered, 3)
    (late,) = loaded
    assert (late.heard, late.lost) == ([1, 2, 3], ["gone"])
    assert list(offered) == [late]


async def test_loaded_module_needs_no_thread() -> None:
    loaded: list[Late] = []
    tell(with_late(loaded, module=__name__), 1)
    assert loaded[0].heard == [1]


async def test_worker_can_use_the_service_before_waiting_messages_end(
    gate: threading.Event,
) -> None:
    loaded: list[Late] = []
    offered = with_late(loaded)
    tell(offered, 1)
    service = offered.named("late")
    assert loaded == [service]
    assert loaded[0].heard == [1]
    gate.set()
    assert await count(offered) == 1
    assert len(loaded) == 1


async def test_wrong_notice_that_waited_harms_no_other(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[Late] = []
    offered = with_late(loaded)
    for number in (1, 0, 2):
        tell(offered, number)
    gate.set()
    assert await count(offered) == 2
    assert "it says nothing" in caplog.text


async def test_waiting_notices_of_a_peer_are_limited(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "NOTICES_MAX", 2)
    offered = with_late([])
    tell(offered, 1)
    tell(offered, 2)
    with pytest.raises(MalformedError, match="2 notices of one worker"):
        tell(offered, 3)
    tell(offered, 3, RecordingLink(worker("another")))


async def test_failed_import_is_tried_again(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[Late] = []
    offered = with_late(loaded, module="there_is_no_such_module")
    with pytest.raises(ModuleNotFoundError):
        await count(offered)
    with pytest.raises(ModuleNotFoundError):
        await count(offered)
    assert "cannot be loaded" in caplog.text


async def test_end_of_the_worker_fails_waiting_requests(gate: threading.Event) -> None:
    loaded: list[Late] = []
    offered = with_late(loaded)
    answer = asyncio.ensure_future(count(offered))
    await asyncio.sleep(0)
    for service in offered:
        await service.close()
    with pytest.raises(ClosedError):
        await answer
    assert not loaded


def test_permitted_senders_are_known_before_the_import() -> None:
    offered = with_late([], module="there_is_no_such_module")
    assert offered.router.request(Count().head).by == LOOKERS
    (later,) = offered
    assert isinstance(later, LaterService)
