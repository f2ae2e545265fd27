"""TLS between workers: whom certificates let in, and what both ends say of the others.

A refusal has to be told at both ends: the dialer's call raises it, the acceptor logs
and counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import trustme

import asyncrpc
from asyncrpc import NetworkOptions, Options, Tls, UsageError, Worker
from asyncrpc.errors import AuthenticationError
from tests.certificates import Authority
from tests.integration.core import remote
from tests.integration.core.groups import LIMIT_S, REPOSITORY, alone, until

QUICK = Options(
    network=NetworkOptions(listen=("tcp://127.0.0.1:0",), handshake_timeout_s=5.0),
    drain_timeout_s=0.5,
)
NOWHERE = "tcp://127.0.0.1:9"  # nobody calls it
SECRET = "the secret of the cluster"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "stranger")


@asynccontextmanager
async def pair(
    dialer: Options, acceptor: Options, at: str | None = None
) -> AsyncIterator[tuple[Worker, Worker]]:
    """Start a worker that dials and one that is dialed."""
    async with alone("ps", acceptor) as ps:
        addresses = {"me": NOWHERE, "ps": at or ps.addresses}
        async with Worker("me", rendezvous=addresses, options=dialer) as me:
            yield me, ps


def with_tls(tls: Tls | None, secret: str | None = None) -> Options:
    return replace(QUICK, tls=tls, secret=secret)


async def refused(
    dialer: Options,
    acceptor: Options,
    caplog: pytest.LogCaptureFixture,
    at: str | None = None,
) -> tuple[str, str]:
    """Dial, which must fail; return what each end says of it."""
    with caplog.at_level(logging.WARNING, "asyncrpc"):
        async with pair(dialer, acceptor, at) as (me, ps):
            with pytest.raises(AuthenticationError) as caught:
                await me.peer("ps").call(remote.add, 1)
            assert me.counters.authentications_failed == 1
            await until(lambda: ps.counters.authentications_failed == 1)
            assert ps.parts.directory.links == []
    logged = [
        record.getMessage() for record in caplog.records if "refused" in record.message
    ]
    return str(caught.value), logged[0]


# --- who gets in ---------------------------------------------------------------------


async def test_certificates_suffice_without_a_secret(authority: Authority) -> None:
    """For large payloads and calls in the other direction, too."""
    ours, theirs = with_tls(authority.tls()), with_tls(authority.tls())
    large = torch.arange(4 << 20, dtype=torch.float32)
    async with pair(ours, theirs) as (me, ps):
        assert await me.peer("ps").call(remote.add, 1) == 2
        assert torch.equal(await me.peer("ps").call(remote.echo, large), large)
        assert await ps.peer("me").call(remote.add, 2) == 3
        assert me.counters == ps.counters == asyncrpc.Counters()


async def test_certificates_do_not_replace_the_secret(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = authority.tls()
    async with pair(with_tls(tls, SECRET), with_tls(tls, SECRET)) as (me, _):
        assert await me.peer("ps").call(remote.add, 1) == 2
    for text in await refused(with_tls(tls, "other"), with_tls(tls, SECRET), caplog):
        assert "the two workers have different secrets, or a proxy" in text


async def test_secret_suffices_with_one_trusted_certificate(
    authority: Authority,
) -> None:
    """The end that dials needs none, where the secret vouches for it."""
    theirs = replace(authority.tls(), verify_peer=False)
    stray = Authority(authority.path.parent, "stray").issue()
    ours = Tls(certificate=stray, ca=authority.path)
    async with pair(with_tls(ours, SECRET), with_tls(theirs, SECRET)) as (me, _):
        assert await me.peer("ps").call(remote.add, 1) == 2


async def test_custom_ssl_contexts_work(authority: Authority) -> None:
    path = authority.issue()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_cert_chain(path)
        context.load_verify_locations(authority.path)
    server.verify_mode = ssl.CERT_REQUIRED
    server.maximum_version = ssl.TLSVersion.TLSv1_2
    tls = Tls(certificate=path, server_context=server, client_context=client)
    async with pair(with_tls(tls), with_tls(tls)) as (me, _):
        assert await me.peer("ps").call(remote.add, 1) == 2


async def test_certificate_may_name_a_host_name(authority: Authority) -> None:
    tls = authority.tls("workers.example", server_hostname="workers.example")
    async with pair(with_tls(tls), with_tls(tls)) as (me, _):
        assert await me.peer("ps").call(remote.add, 1) == 2


async def test_a_unix_socket_needs_no_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    """The kernel vouches there: a worker with and one without TLS talk."""
    ours = Options(network=NetworkOptions(listen=(f"uds://{tmp_path}/me",)))
    theirs = Options(
        tls=authority.tls(), network=NetworkOptions(listen=(f"uds://{tmp_path}/ps",))
    )
    async with pair(ours, theirs) as (me, _):
        assert await me.peer("ps").call(remote.add, 1) == 2


# --- who does not --------------------------------------------------------------------


async def test_acceptor_certificate_of_another_authority_is_refused(
    authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = Tls(certificate=stranger.issue(), ca=authority.path)
    said, logged = await refused(with_tls(authority.tls()), with_tls(theirs), caplog)
    assert "is not signed by an authority of this worker" in said
    assert "give both the same Tls(ca=...)" in said
    assert "refused this worker's certificate: the authority that signed it" in logged


async def test_dialer_certificate_of_another_authority_is_refused(
    authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Tls(certificate=stranger.issue(), ca=authority.path)
    said, logged = await refused(with_tls(ours), with_tls(authority.tls()), caplog)
    assert "refused this worker's certificate" in said
    assert "is not signed by an authority of this worker" in logged


@pytest.mark.parametrize("expired", ["dialer", "acceptor"])
async def test_expired_certificate_is_refused(
    authority: Authority, expired: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = with_tls(authority.tls(expired=expired == "dialer"))
    theirs = with_tls(authority.tls(expired=expired == "acceptor"))
    said, logged = await refused(ours, theirs, caplog)
    finder, owner = (logged, said) if expired == "dialer" else (said, logged)
    assert "the peer's certificate has expired" in finder
    assert "issue a new one" in finder
    assert "refused this worker's certificate: it has expired" in owner


@pytest.mark.parametrize("named", [None, "workers.example"])
async def test_certificate_for_another_host_is_refused(
    authority: Authority, named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ours = replace(authority.tls(), server_hostname=named)
    theirs = with_tls(authority.tls("10.1.2.3", "elsewhere.example"))
    said, logged = await refused(with_tls(ours), theirs, caplog)
    kind = "name" if named else "addr"
    assert f"the peer's certificate is for another {kind}" in said
    assert "Tls(server_hostname=...)" in said
    assert "refused this worker's certificate" in logged


async def test_dialer_without_a_certificate_is_refused(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=str(authority.path))
    options = with_tls(authority.tls())
    async with alone("ps", options) as ps:
        url = urlsplit(ps.addresses[0])
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                url.hostname, url.port, ssl=context
            )
            await reader.read()
            writer.close()
        await until(lambda: ps.counters.authentications_failed == 1)
    assert "has no certificate and this worker demands one" in caplog.text


async def test_tls_at_one_end_only_is_explained(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    plain, secured = with_tls(None, SECRET), with_tls(authority.tls(), SECRET)
    for dialer, acceptor in ((plain, secured), (secured, plain)):
        caplog.clear()
        said, logged = await refused(dialer, acceptor, caplog)
        with_and_without = (said, logged) if dialer is secured else (logged, said)
        assert "does not speak TLS and this worker does" in with_and_without[0]
        assert "the peer speaks TLS and this worker does not" in with_and_without[1]
        for text in (said, logged):
            assert "give both workers Options(tls=...), or neither" in text


# --- what cannot be set up -----------------------------------------------------------


async def test_listening_without_verification_is_refused(authority: Authority) -> None:
    """Encryption alone does not tell friend from stranger."""
    tls = replace(authority.tls(), verify_peer=False)
    worker = alone("a", with_tls(tls))
    with pytest.raises(UsageError, match=r"Options\(tls=Tls\(ca=...\)\)"):
        await worker.__aenter__()


def test_tls_without_a_ca_is_refused(authority: Authority) -> None:
    with pytest.raises(UsageError, match="public authority"):
        Tls(certificate=authority.issue())


async def test_bad_certificate_is_named(authority: Authority, tmp_path: Path) -> None:
    good = authority.tls()
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    public = tmp_path / "public.pem"
    trustme.CA().cert_pem.write_to_path(public)
    wrong = [
        (replace(good, certificate=tmp_path / "none.pem"), "none.pem"),
        (replace(good, certificate=empty), "PEM"),
        (replace(good, certificate=public), "public.pem"),  # there is no key in it
        (replace(good, key=empty), "empty.pem"),
        (replace(good, ca=tmp_path / "gone.pem"), "gone.pem"),
        (replace(good, ca=empty), "empty.pem"),
    ]
    for tls, words in wrong:
        options = with_tls(tls)
        worker = alone("a", options)
        with pytest.raises(UsageError, match=words):
            await worker.__aenter__()


# --- somebody between ----------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Between:
    """Somebody in the path, who passes on what comes, decrypted if it can be."""

    def __init__(
        self,
        to: str,
        server: ssl.SSLContext | None = None,
        client: ssl.SSLContext | None = None,
    ) -> None:
        self._url = urlsplit(to)
        self._server_context = server
        self._client_context = client
        self.seen = bytearray()
        self.address = ""
        self._writers: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        far = await asyncio.open_connection(
            self._url.hostname, self._url.port, ssl=self._client_context
        )
        self._writers += (far[1], writer)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(self._pump(reader, far[1]))
            pumps.create_task(self._pump(far[0], writer))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while some := await reader.read(1 << 16):
                self.seen += some
                writer.write(some)
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Between]:
        tasks: set[asyncio.Task[None]] = set()

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.create_task(self._serve(reader, writer)))

        server = await asyncio.start_server(
            serve, "127.0.0.1", 0, ssl=self._server_context
        )
        self.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=LIMIT_S)


@asynccontextmanager
async def with_somebody_between(
    options: Options,
    server: ssl.SSLContext | None = None,
    client: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[Worker, Worker, Between]]:
    async with alone("ps", options) as ps:
        between = Between(ps.addresses[0], server, client)
        async with between.running():
            addresses = {"me": NOWHERE, "ps": between.address}
            async with Worker("me", rendezvous=addresses, options=options) as me:
                yield me, ps, between


@pytest.mark.parametrize("encrypted", [True, False])
async def test_eavesdropper_reads_no_plain_text(
    authority: Authority, *, encrypted: bool
) -> None:
    """Without TLS it reads the text: the control of this test."""
    options = with_tls(authority.tls() if encrypted else None, SECRET)
    async with with_somebody_between(options) as (me, _, between):
        await me.peer("ps").call(remote.echo, "the words")
        assert (b"the words" in between.seen) is not encrypted


async def test_proxy_that_terminates_tls_cannot_relay_proofs(
    authority: Authority,
) -> None:
    """The proxy has a certificate of the same authority, for the right address."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        context.load_cert_chain(authority.issue())
        context.load_verify_locations(authority.path)
    options = with_tls(authority.tls(), SECRET)
    async with with_somebody_between(options, server, client) as (me, ps, between):
        with pytest.raises(AuthenticationError, match="with its own certificate"):
            await me.peer("ps").call(remote.add, 1)
        assert between.seen.startswith(b"ARPC")  # so it was in the path, decrypted
        assert me.counters.authentications_failed == 1
        assert ps.parts.directory.links == []


async def test_cut_connection_is_made_again_with_tls(authority: Authority) -> None:
    """A call that is under way does not notice."""
    async with with_somebody_between(with_tls(authority.tls())) as (me, ps, between):
        assert await me.peer("ps").call(remote.add, 1) == 2
        call = me.parts.start_call("ps", remote.slow_one)
        await until(lambda: ps.parts.active == 1)
        before = len(between.seen)
        between.cut()
        assert await call == 1
        assert await me.peer("ps").call(remote.echo, "the words") == "the words"
        assert len(between.seen) > before
        assert b"the words" not in between.seen


# --- the page ------------------------------------------------------------------------

PAGE = REPOSITORY / "docs" / "explanation" / "security.md"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
async def test_commands_of_the_page_make_valid_certificates(tmp_path: Path) -> None:
    commands = PAGE.read_text("utf-8").split("```sh\n")[1].split("```")[0]
    shell = await asyncio.create_subprocess_shell(
        f"set -e\n{commands}", cwd=tmp_path, stderr=asyncio.subprocess.DEVNULL
    )
    assert await shell.wait() == 0
    tls = Tls(
        certificate=tmp_path / "worker.pem",
        key=tmp_path / "worker.key",
        ca=tmp_path / "ca.pem",
        server_hostname="workers.internal",
    )
    async with pair(with_tls(tls), with_tls(tls)) as (me, _):
        assert await me.peer("ps").call(remote.add, 1) == 2
