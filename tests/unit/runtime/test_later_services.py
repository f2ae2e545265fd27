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

from asyncrpc.errors import ClosedError, MalformedError
from asyncrpc.ids import WorkerId
from asyncrpc.runtime import services
from asyncrpc.runtime.messages import LOOKERS, Notice, Request, message
from asyncrpc.runtime.router import Route, answers, takes
from asyncrpc.runtime.services import LaterService, Services
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


def with_late(made: list[Late], *, module: str = MODULE) -> Services:
    def make() -> Late:
        made.append(Late())
        return made[-1]

    found = Services()
    found.add_later("late", module, make, by=LOOKERS)
    return found


def tell(found: Services, number: int, link: RecordingLink | None = None) -> None:
    notice = Hear(number)
    route = found.router.notice(notice.head)
    route.handle(link or RecordingLink(PEER), notice.pack())


async def count(found: Services) -> Any:
    request = Count()
    route = found.router.request(request.head)
    return await route.handle(RecordingLink(PEER), request.pack())


async def test_messages_wait_in_order_until_a_thread_has_loaded_the_service(
    gate: threading.Event,
) -> None:
    made: list[Late] = []
    found = with_late(made)
    found.on_peer_lost(worker("gone"), "it died")
    found.on_peer_lost(worker("back"), "it died")
    found.on_peer_back(worker("back"))
    tell(found, 1)
    answer = asyncio.ensure_future(count(found))  # noqa: RUF100
    tell(found, 2)
    await asyncio.sleep(0)
    assert not made
    assert not answer.done()
    gate.set()
    assert await answer == 2
    tell(found, 3)
    (late,) = made
    assert late.heard == [1, 2, 3]
    assert late.lost == ["gone"]
    assert list(found) == [late]


async def test_loaded_module_needs_no_thread() -> None:
    made: list[Late] = []
    found = with_late(made, module=__name__)
    tell(found, 1)
    assert made[0].heard == [1]


async def test_worker_can_use_the_service_before_waiting_messages_end(
    gate: threading.Event,
) -> None:
    made: list[Late] = []
    found = with_late(made)
    tell(found, 1)
    service = found.named("late")
    assert made == [service]
    assert made[0].heard == [1]
    gate.set()
    assert await count(found) == 1
    assert len(made) == 1


async def test_wrong_notice_that_waited_harms_no_other(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Late] = []
    found = with_late(made)
    for number in (1, 0, 2):
        tell(found, number)
    gate.set()
    assert await count(found) == 2
    assert "it says nothing" in caplog.text


async def test_waiting_notices_of_a_peer_are_limited(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "NOTICES_MAX", 2)
    found = with_late([])
    tell(found, 1)
    tell(found, 2)
    with pytest.raises(MalformedError, match="2 notices of one worker"):
        tell(found, 3)
    tell(found, 3, RecordingLink(worker("another")))


async def test_failed_import_is_tried_again(
    gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Late] = []
    found = with_late(made, module="there_is_no_such_module")
    with pytest.raises(ModuleNotFoundError):
        await count(found)
    with pytest.raises(ModuleNotFoundError):
        await count(found)
    assert "cannot be loaded" in caplog.text


async def test_end_of_the_worker_fails_waiting_requests(gate: threading.Event) -> None:
    made: list[Late] = []
    found = with_late(made)
    answer = asyncio.ensure_future(count(found))
    await asyncio.sleep(0)
    for service in found:
        await service.close()
    with pytest.raises(ClosedError):
        await answer
    assert not made


def test_permitted_senders_are_known_before_the_import() -> None:
    found = with_late([], module="there_is_no_such_module")
    assert found.router.request(Count().head).by == LOOKERS
    (later,) = found
    assert isinstance(later, LaterService)
