"""Passing open files: to whoever claims them, within limits, and nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrpc.core.transport import descriptors
from asyncrpc.core.transport.descriptors import (
    SUFFIX,
    TOKEN_BYTES,
    DescriptorInbox,
    send_descriptor,
)
from asyncrpc.errors import ConnectError, TransportError
from tests.inner_state import unclaimed

TOKEN = bytes(range(TOKEN_BYTES))


@pytest.fixture
def path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="arpc-") as directory:
        yield str(Path(directory) / "worker")


@pytest.fixture
async def inbox(path: str) -> DescriptorInbox:
    new_inbox = DescriptorInbox(asyncio.get_running_loop())
    await new_inbox.listen(path)
    return new_inbox


def file_with(text: bytes) -> int:
    descriptor = os.memfd_create("x", os.MFD_CLOEXEC)
    os.write(descriptor, text)
    return descriptor


def connect(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path + SUFFIX)
    return sock


async def until_closed(sock: socket.socket) -> None:
    """Wait until the inbox has had enough of a connection."""
    sock.setblocking(False)  # noqa: FBT003
    assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""


async def test_descriptor_can_be_claimed_before_and_after_it_came(
    inbox: DescriptorInbox, path: str
) -> None:
    sent = file_with(b"hello")
    claims = asyncio.create_task(inbox.claim(TOKEN))
    await asyncio.to_thread(send_descriptor, path, TOKEN, sent)
    first = await claims
    await asyncio.to_thread(send_descriptor, path, TOKEN, sent)
    second = await inbox.claim(TOKEN)
    inbox.close()
    for descriptor in (first, second):
        assert os.pread(descriptor, 9, 0) == b"hello"
        assert not os.get_inheritable(descriptor)
    for descriptor in (sent, first, second):
        os.close(descriptor)


async def test_socket_is_private_and_removed(inbox: DescriptorInbox, path: str) -> None:
    beside = Path(path + SUFFIX)
    assert beside.stat().st_mode & 0o777 == 0o600  # noqa: ASYNC240
    inbox.close()
    inbox.close()
    assert not beside.exists()  # noqa: ASYNC240
    with pytest.raises(ConnectError, match="cannot pass a descriptor"):
        await asyncio.to_thread(send_descriptor, path, TOKEN, 0)


@pytest.mark.parametrize("count", [0, 2, 8])
async def test_record_without_exactly_one_file_is_dropped(
    inbox: DescriptorInbox, path: str, count: int
) -> None:
    with connect(path) as sock:
        if count:
            socket.send_fds(sock, [TOKEN], [0] * count)
        else:
            sock.sendall(TOKEN)
        await until_closed(sock)
    assert unclaimed(inbox) == 0
    inbox.close()


@pytest.mark.parametrize("token", [TOKEN[1:], TOKEN + b"x", b"j" * 4096])
async def test_record_of_another_length_is_dropped(
    inbox: DescriptorInbox, path: str, token: bytes
) -> None:
    with connect(path) as sock:
        socket.send_fds(sock, [token], [0])
        with contextlib.suppress(ConnectionResetError):  # with the rest unread
            await until_closed(sock)
    assert unclaimed(inbox) == 0
    inbox.close()


async def test_silent_departure_is_forgotten(inbox: DescriptorInbox, path: str) -> None:
    connect(path).close()
    with connect(path) as sock:  # accepted after it, in order
        sock.sendall(TOKEN)
        await until_closed(sock)
    inbox.close()


async def test_silent_connections_are_few_and_time_out(
    inbox: DescriptorInbox, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(descriptors, "RECORD_TIMEOUT_S", 0.05)
    silent = [connect(path) for _ in range(3)]
    for sock in reversed(silent):  # the third at once, the others in time
        await until_closed(sock)
        sock.close()
    inbox.close()


async def test_unclaimed_descriptor_is_closed(
    inbox: DescriptorInbox, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "CLAIM_TIMEOUT_S", 0.05)
    reading, writing = os.pipe()
    await asyncio.to_thread(send_descriptor, path, TOKEN, writing)
    os.close(writing)
    assert await asyncio.to_thread(os.read, reading, 1) == b""  # no writer is left
    with pytest.raises(TimeoutError):
        await inbox.claim(TOKEN)
    inbox.close()
    os.close(reading)


async def test_unclaimed_descriptors_are_limited(
    inbox: DescriptorInbox, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "UNCLAIMED_MAX", 2)
    for serial in range(4):
        await asyncio.to_thread(send_descriptor, path, bytes([serial]) * TOKEN_BYTES, 0)
    with connect(path) as sock:  # taken after them, in order
        sock.sendall(TOKEN)
        await until_closed(sock)
    assert unclaimed(inbox) == 2
    inbox.close()
    assert unclaimed(inbox) == 0


async def test_abandoned_claim_closes_its_descriptor(
    inbox: DescriptorInbox, path: str
) -> None:
    reading, writing = os.pipe()
    claim = asyncio.create_task(inbox.claim(TOKEN))
    await asyncio.sleep(0)
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    await asyncio.to_thread(send_descriptor, path, TOKEN, writing)
    os.close(writing)
    with connect(path) as sock:
        sock.sendall(TOKEN)
        await until_closed(sock)
    inbox.close()
    assert os.read(reading, 1) == b""
    os.close(reading)


async def test_directory_open_to_others_is_refused(path: str) -> None:
    Path(path).parent.chmod(0o755)
    inbox = DescriptorInbox(asyncio.get_running_loop())
    with pytest.raises(TransportError, match="chmod 700"):
        await inbox.listen(path)
    inbox.close()
