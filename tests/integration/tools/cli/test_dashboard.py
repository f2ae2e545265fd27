"""`asyncrpc dashboard`: serves a page until it is told to end, or says why not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import pytest_asyncio
import uvloop

from asyncrpc import LocalRendezvous, NetworkOptions, Options, Worker
from asyncrpc.tools.cli.dashboard import TOKEN_VARIABLE
from asyncrpc.tools.cli.main import main
from tests.integration.serving.looking_in import Browser, Events

SECRET: Final = "a secret of this test"
TOKEN: Final = "a-token-of-this-test"
BEARER: Final = {"Authorization": f"Bearer {TOKEN}"}
LIMIT_S: Final = 120.0  # that only a failure reaches
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing names a group but what a test does."""
    for name in ("ASYNCRPC_ADDRESS", "ASYNCRPC_SECRET_FILE", TOKEN_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ASYNCRPC_SECRET", SECRET)
    monkeypatch.setenv("ASYNCRPC_RUN_DIR", str(tmp_path / "runs"))


@asynccontextmanager
async def group(secret: str | None) -> AsyncIterator[list[Worker]]:
    """Two workers here, that others can reach: at sockets, as one has no secret."""
    meeting = LocalRendezvous(2)
    with tempfile.TemporaryDirectory(prefix="asyncrpc-") as folder:
        async with AsyncExitStack() as stack:
            yield await asyncio.gather(
                *(
                    stack.enter_async_context(
                        Worker(
                            name,
                            rank=rank,
                            world_size=2,
                            rendezvous=meeting,
                            options=options_at(f"uds://{folder}/{name}", secret),
                        )
                    )
                    for rank, name in enumerate("ab")
                )
            )


def options_at(address: str, secret: str | None) -> Options:
    network = NetworkOptions(listen=(address,))
    return Options(secret=secret, drain_timeout_s=0.0, network=network)


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[list[Worker]]:
    async with group(SECRET) as members:
        yield members


@asynccontextmanager
async def served(
    worker: Worker, *arguments: str, **environment: str
) -> AsyncIterator[tuple[Process, Browser]]:
    """Run the command at a free port; yield its process, and a browser there."""
    command = (sys.executable, "-m", "asyncrpc", "dashboard", worker.addresses[0])
    process = await asyncio.create_subprocess_exec(
        *(*command, "--port", "0", "--every", "0.1", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            url = (await process.stdout.readline()).decode().strip()
        assert url.startswith("http://"), await process.stderr.read()
        jar = aiohttp.CookieJar(unsafe=True)  # keeps cookies of hosts that are numbers
        async with aiohttp.ClientSession(url, cookie_jar=jar) as session:
            yield process, Browser(session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: Process, by: signal.Signals) -> tuple[int, bytes, bytes]:
    """End a command; return its exit status, and what it has printed since."""
    process.send_signal(by)
    async with asyncio.timeout(LIMIT_S):
        output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output, errors


async def until_end(events: Events) -> None:
    """Read a stream to its end, which may be abrupt."""
    with suppress(aiohttp.ClientPayloadError):
        await events.until_end()


class TestServing:
    """The loop here only plays the browser: one is enough."""

    loops = {"uvloop": uvloop.new_event_loop}  # noqa: RUF012

    @pytest.mark.parametrize("by", SIGNALS)
    async def test_dashboard_shows_the_group_until_a_signal(
        self, workers: list[Worker], by: signal.Signals
    ) -> None:
        async with served(workers[0]) as (process, browser):
            assert (await browser.get("api/overview"))[0] == 401
            assert await browser.sign_in(SECRET) == 200
            look = await browser.look("overview")
            assert [row["worker"] for row in look["rows"]] == ["a", "b"]
            async with browser.live("overview/live") as events:
                await events.look()
                ending = asyncio.ensure_future(ended(process, by))
                await until_end(events)  # a browser that looks does not hold it up
                assert await ending == (0, b"", b"")
        # Nobody has noticed: it was no member.
        assert await workers[0].peer("b").call(abs, -1) == 1

    async def test_token_from_the_environment_works_beside_the_secret(
        self, workers: list[Worker]
    ) -> None:
        async with served(workers[0], **{TOKEN_VARIABLE: TOKEN}) as (_, browser):
            assert (await browser.get("login"))[1]["takes"] == "either"
            assert (await browser.get("api/overview", **BEARER))[0] == 200
            assert await browser.sign_in(SECRET) == 200

    @pytest.mark.slow
    async def test_token_file_overrides_the_environment(
        self, workers: list[Worker], tmp_path: Path
    ) -> None:
        file = tmp_path / "token"
        file.touch(0o600)
        file.write_text(TOKEN + "\n")
        options = ("--token-file", str(file))
        other = {TOKEN_VARIABLE: "another-token-of-this-test"}
        async with served(workers[0], *options, **other) as (_, browser):
            assert (await browser.get("api/overview", **BEARER))[0] == 200
            wrong = {"Authorization": f"Bearer {other[TOKEN_VARIABLE]}"}
            assert (await browser.get("api/overview", **wrong))[0] == 401

    @pytest.mark.slow
    async def test_dashboard_serves_a_group_without_a_secret(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("ASYNCRPC_SECRET")
        async with group(None) as (a, _), served(a) as (process, browser):
            assert (await browser.get("login"))[1]["takes"] == "nothing"
            assert (await browser.get("api/overview"))[0] == 200
            assert (await ended(process, signal.SIGTERM))[0] == 0

    @pytest.mark.parametrize("by", SIGNALS)
    async def test_signal_ends_the_command_while_no_worker_answers(
        self, by: signal.Signals
    ) -> None:
        """Before it listens, a signal ends it without a traceback."""

        async def say_nothing(
            _: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            connected.set()
            await over.wait()
            writer.close()

        connected, over = asyncio.Event(), asyncio.Event()
        async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "asyncrpc",
                    "dashboard",
                    f"tcp://127.0.0.1:{port}",
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
            )
            async with asyncio.timeout(LIMIT_S):
                await connected.wait()
            status, output, errors = await ended(process, by)
            over.set()
        assert (output, errors) == (b"", b"")
        assert status == (130 if by is signal.SIGINT else -signal.SIGTERM)


# --- what it refuses -----------------------------------------------------------------


def status_of(arguments: Sequence[str]) -> int:
    try:
        return main(["dashboard", *arguments])
    except SystemExit as error:  # of argparse
        return int(error.code or 0)


async def refused(
    printed: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str]:
    """Run the command in a thread; return its exit status, and its words."""
    printed.readouterr()
    status = await asyncio.to_thread(status_of, arguments)
    output = printed.readouterr()
    assert output.out == ""
    return status, output.err


class TestRefusals:
    """The command has a loop of its own."""

    loops = {"uvloop": uvloop.new_event_loop}  # noqa: RUF012

    async def test_port_in_use_is_reported(
        self, workers: list[Worker], capsys: pytest.CaptureFixture[str]
    ) -> None:
        async with await asyncio.start_server(
            lambda _, writer: writer.close(), "127.0.0.1", 0
        ) as server:
            port = server.sockets[0].getsockname()[1]
            address = workers[0].addresses[0]
            status, words = await refused(capsys, address, "--port", str(port))
        assert status == 2
        assert f"cannot listen at port {port} of host '127.0.0.1'" in words
        assert "the port is in use" in words

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("--host", "198.51.100.7"), "cannot listen at port 8265"),
            (("--host", "no such host"), "cannot listen at port 8265"),
            (("--port", "65536"), "port"),
            (("--port", "-1"), "port"),
            (("--port", "x"), "invalid int value: 'x'"),
            (("--every", "0"), "every_s must be at least 0.1 seconds"),
            (("--every", "nan"), "must be a finite number of seconds"),
            (("--after", "-1"), "must be a finite number of seconds"),
            (("--token-file", "/no/such"), "--token-file: cannot read"),
            (("--run", "train"), "there is no run 'train'"),
        ],
    )
    async def test_impossible_option_is_reported(
        self,
        workers: list[Worker],
        capsys: pytest.CaptureFixture[str],
        arguments: tuple[str, ...],
        problem: str,
    ) -> None:
        status, words = await refused(capsys, workers[0].addresses[0], *arguments)
        assert status == 2
        assert problem in words
        assert "Traceback" not in words

    @pytest.mark.parametrize(
        ("address", "problem"),
        [
            (
                "tcp://127.0.0.1:1",
                "tcp://127.0.0.1:1: refused: no process listens there",
            ),
            ("uds:///no/such/socket", "/no/such/socket"),
            ("http://127.0.0.1", "http"),
            ("127.0.0.1:7000", "127.0.0.1:7000"),
        ],
    )
    async def test_address_without_a_worker_is_reported(
        self, capsys: pytest.CaptureFixture[str], address: str, problem: str
    ) -> None:
        status, words = await refused(capsys, address)
        assert status == 2
        assert problem in words
        assert words.startswith("asyncrpc dashboard: ")

    async def test_missing_address_is_explained(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, words = await refused(capsys)
        assert status == 2
        assert "give the ADDRESS of any worker" in words

    async def test_wrong_secret_is_reported_and_not_shown(
        self,
        workers: list[Worker],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("ASYNCRPC_SECRET", "another secret than the group's")
        status, words = await refused(capsys, workers[0].addresses[0])
        assert status == 2
        assert "secret" in words
        assert SECRET not in words

    @pytest.mark.parametrize(
        ("token", "problem"), [("short", "token"), (SECRET, "must not be the secret")]
    )
    async def test_invalid_token_is_refused(
        self,
        workers: list[Worker],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        token: str,
        problem: str,
    ) -> None:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        status, words = await refused(capsys, workers[0].addresses[0])
        assert status == 2
        assert problem in words

    async def test_group_without_a_secret_is_not_shown_to_other_hosts(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("ASYNCRPC_SECRET")
        async with group(None) as (a, _):
            status, words = await refused(capsys, a.addresses[0], "--host", "0.0.0.0")  # noqa: S104
        assert status == 2
        assert (
            "--host 0.0.0.0 would show the group to everyone, as it has no secret"
            in words
        )
