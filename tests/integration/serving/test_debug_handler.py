"""The page of a group in torch's debug server, which runs for real, over HTTP."""

from __future__ import annotations

import asyncio
import base64
import html
import pickle
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # unlisted
from torch.distributed.debug import start_debug_server, stop_debug_server

from asyncrpc import LocalRendezvous, Options, UsageError, Worker, serving
from asyncrpc.errors import NotStartedError
from asyncrpc.testing import ProcessCluster
from tests.integration.tools.inspection import hanging
from tests.integration.tools.inspection.ranks import take_part
from tests.ports import free_port

SECRET: Final = "a secret of this test"
OPTIONS: Final = Options(secret=SECRET, drain_timeout_s=0.0)
TOKEN: Final = "a-token-of-this-test"
BEARER: Final = {"Authorization": f"Bearer {TOKEN}"}
GENEROUS_S: Final = 60.0
PAUSE_S: Final = 0.05  # between two requests


@pytest_asyncio.fixture
async def trainer() -> AsyncIterator[Worker]:
    """The worker of rank 0 of a group that hangs, in two ways."""
    cluster = ProcessCluster(
        ["ps"], name="trainer", method="forkserver", options=OPTIONS
    )
    async with cluster as worker:
        tasks = [
            asyncio.create_task(evict(worker), name="<b>train</b>"),
            asyncio.create_task(take_part(["trainer", "ps"], ["barrier"])),
        ]
        yield worker
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def evict(worker: Worker) -> None:
    await worker.peer("ps").call(hanging.evict)


class Site:
    """torch's debug server, as a browser sees it."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self.port = port
        self._url = f"http://localhost:{port}"
        self._session = session

    async def get(self, path: str, **headers: str) -> tuple[int, str, Any]:
        """Return the status, the text and the headers of a page."""
        http_headers = {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        async with self._session.get(self._url + path, headers=http_headers) as answer:
            return answer.status, await answer.text(), answer.headers

    async def until_up(self) -> None:
        async with asyncio.timeout(GENEROUS_S):
            while True:
                try:
                    await self.get("/asyncrpc")
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(PAUSE_S)
                else:
                    return

    async def until_shown(self, wanted: str) -> str:
        """Return the page once it has some text."""
        page = ""
        try:
            async with asyncio.timeout(GENEROUS_S):
                while wanted not in page:
                    status, text, _ = await self.get("/asyncrpc", **BEARER)
                    assert status == 200
                    page = html.unescape(text)
        except TimeoutError:
            pytest.fail(f"{wanted!r} is not in {page}")
        return text


@pytest_asyncio.fixture
async def site(trainer: Worker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    store_port, port = free_port(), free_port()
    store = TCPStore("127.0.0.1", store_port, is_master=True, wait_for_workers=False)
    values = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    handler = serving.debug_handler(trainer, token=TOKEN, after_s=0.2)
    await asyncio.to_thread(
        start_debug_server, port=port, start_method="forkserver", handlers=[handler]
    )
    try:
        async with aiohttp.ClientSession() as session:
            opened = Site(port, session)
            await opened.until_up()
            yield opened
    finally:
        await asyncio.to_thread(stop_debug_server)
        del store


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


async def test_token_shows_the_hang_and_its_calls(site: Site) -> None:
    page = await site.until_shown("for Lock `table` held by ps task `evict`: a cycle")
    shown = html.unescape(page)
    assert "trainer task `<b>train</b>` waits" in shown
    assert "<b>" not in page
    assert "asyncrpc</a>" in page  # torch's row of links
    calls = shown.partition("Calls in flight")[2].partition("<h2>")[0]
    assert "<td>trainer</td><td>ps</td><td>" in calls
    collectives = shown.partition("Collectives under way")[2].partition("<h2>")[0]
    assert "<td>barrier 1</td><td>group 'ranks' of 2</td>" in collectives
    assert "ranks.py:" in collectives


REFUSED: Final = (
    "",
    "Bearer",
    "Bearer " + TOKEN[:-1],
    f"Bearer {TOKEN} \u00e4",
    f"Digest {TOKEN}",
    TOKEN,
    "Basic ???",
    basic(TOKEN),
    basic(f"{TOKEN}:"),
    basic(f"user:{TOKEN}x"),
    basic(f"user:{SECRET}"),
)


async def test_page_without_the_token_shows_nothing(site: Site) -> None:
    for credentials in REFUSED:
        headers = {"Authorization": credentials} if credentials else {}
        for path in ("/asyncrpc", f"/asyncrpc?token={TOKEN}"):
            status, text, answered = await site.get(path, **headers)
            assert status == 401, credentials
            assert text.startswith("This page needs the token")
            assert answered["WWW-Authenticate"] == 'Basic realm="asyncrpc"'
            for ours in ("trainer", "evict", "barrier", "table", TOKEN, SECRET):
                assert ours not in text


@pytest.mark.parametrize(
    ("credentials", "status"),
    [(f"Bearer {TOKEN}", b"200 OK"), ("", b"401 Unauthorized")],
)
async def test_response_is_sent_once(
    site: Site, credentials: str, status: bytes
) -> None:
    reader, writer = await asyncio.open_connection("localhost", site.port)
    header = f"Authorization: {credentials}\r\n" if credentials else ""
    writer.write(f"GET /asyncrpc HTTP/1.0\r\n{header}\r\n".encode())
    sent = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = sent.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 " + status)
    assert sent.count(b"HTTP/1.0") == 1
    assert b"Content-Length: %d\r\n" % len(body) in head


async def test_token_works_as_a_password(site: Site) -> None:
    credentials = {"Authorization": basic(f"anyone:{TOKEN}")}
    status, text, answered = await site.get("/asyncrpc", **credentials)
    assert status == 200
    assert text.rstrip().endswith("</section>")
    assert answered["Cache-Control"] == "no-store"


async def test_unreachable_group_is_reported(trainer: Worker) -> None:
    alone = Worker(
        "alone", rank=0, world_size=1, rendezvous=LocalRendezvous(1), options=OPTIONS
    )
    async with alone:
        handler = serving.debug_handler(alone, token=TOKEN)
        text = await asyncio.to_thread(handler.dump)
        assert text is not None
        assert "no call is under way" in text
        assert "0  alone  runs" in text
    text = await asyncio.to_thread(handler.dump)
    assert text is not None
    assert "the group cannot be looked at: no worker answers at" in text


async def test_handler_pickles_and_hides_its_secrets(trainer: Worker) -> None:
    handler = serving.debug_handler(trainer, token=TOKEN)
    again = pickle.loads(pickle.dumps(handler))
    assert again.dump_filename() == "asyncrpc"
    for text in (repr(again), str(again)):
        assert TOKEN not in text
        assert SECRET not in text


class TestMistakes:
    @pytest.mark.parametrize("token", [None, "", "short", "ä" * 20, "a" * 20 + "\n"])
    async def test_invalid_token_is_refused(self, trainer: Worker, token: Any) -> None:
        with pytest.raises(UsageError, match="token must be at least 16 printable"):
            serving.debug_handler(trainer, token=token)

    async def test_secret_as_the_token_is_refused(self, trainer: Worker) -> None:
        with pytest.raises(UsageError, match="must not be the secret of the group"):
            serving.debug_handler(trainer, token=SECRET)

    def test_worker_that_does_not_run_is_refused(self) -> None:
        worker = Worker("new", rendezvous={"new": "uds:///nowhere"})
        with pytest.raises(NotStartedError, match="'new' does not run"):
            serving.debug_handler(worker, token=TOKEN)
