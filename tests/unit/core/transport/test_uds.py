"""Unix sockets: who may connect, and what happens to the files."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrpc.core.transport import uds
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.uds import PATH_BYTES_MAX, UdsConnector
from asyncrpc.errors import ConnectError, TransportError
from asyncrpc.testing.conformance import Acceptor, Recorder


@pytest.fixture
def base() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="arpc-") as directory:
        yield Path(directory)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Have the lock that a worker takes while it makes its socket."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def at(path: Path) -> Address:
    return Address("uds", str(path))


async def test_directory_and_socket_are_private_and_the_file_is_removed(
    base: Path,
) -> None:
    path = base / "workers" / "ps.sock"
    listener = await UdsConnector().listen(at(path), Recorder)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert listener.addresses == (at(path),)
    await listener.close()
    assert not path.exists()
    await listener.close()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
async def test_directory_open_to_others_is_refused(base: Path, mode: int) -> None:
    base.chmod(mode)  # noqa: ASYNC240
    with pytest.raises(TransportError, match=f"mode {mode:o}; chmod 700"):
        await UdsConnector().listen(at(base / "ps.sock"), Recorder)
    base.chmod(0o700)  # noqa: ASYNC240
    assert list(base.iterdir()) == []  # noqa: ASYNC240


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_directory_of_another_user_is_refused(base: Path) -> None:
    theirs = base / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(TransportError, match="user 12345 owns it"):
        await UdsConnector().listen(at(theirs / "ps.sock"), Recorder)


async def test_stale_socket_is_replaced(base: Path) -> None:
    path = base / "ps.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # closed without unlink, as by SIGKILL
    with pytest.raises(ConnectError):
        await UdsConnector().connect(at(path), Recorder())
    acceptor, near = Acceptor(), Recorder()
    listener = await UdsConnector().listen(at(path), acceptor)
    await UdsConnector().connect(at(path), near)
    await acceptor.connected(1)
    near.transport.close()
    await near.until_lost()
    await acceptor.accepted[0].until_lost()
    await listener.close()


async def test_live_socket_is_not_replaced(base: Path) -> None:
    path = base / "ps.sock"
    listener = await UdsConnector().listen(at(path), Recorder)
    with pytest.raises(TransportError, match="another worker listens there"):
        await UdsConnector().listen(at(path), Recorder)
    assert path.exists()
    await listener.close()


async def test_loop_runs_while_another_process_has_the_lock(base: Path) -> None:
    path = base / "ps.sock"
    with locked(base):
        listening = asyncio.create_task(UdsConnector().listen(at(path), Recorder))
        for _ in range(9):
            await asyncio.sleep(0)
        assert not listening.done()
        assert not path.exists()
    listener = await listening
    await listener.close()


async def test_wait_for_the_lock_can_be_cancelled(base: Path) -> None:
    with locked(base):
        listening = asyncio.create_task(
            UdsConnector().listen(at(base / "ps.sock"), Recorder)
        )
        await asyncio.sleep(0)
        listening.cancel()
        await asyncio.wait([listening])
        assert listening.cancelled()
    assert list(base.iterdir()) == []  # noqa: ASYNC240


async def test_lock_that_is_never_free_is_an_error(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uds, "LOCK_WAIT_S", 0.01)
    with (
        locked(base),
        pytest.raises(TransportError, match=r"has locked .* for 0\.01 s"),
    ):
        await UdsConnector().listen(at(base / "ps.sock"), Recorder)


async def test_file_that_is_not_a_socket_is_kept(base: Path) -> None:
    path = base / "precious.txt"
    path.write_text("do not delete")
    with pytest.raises(TransportError, match="not a socket"):
        await UdsConnector().listen(at(path), Recorder)
    assert path.read_text() == "do not delete"


async def test_close_leaves_the_file_of_a_successor(base: Path) -> None:
    path = base / "ps.sock"
    first = await UdsConnector().listen(at(path), Recorder)
    path.rename(base / "aside.sock")
    second = await UdsConnector().listen(at(path), Recorder)
    await first.close()
    assert path.exists()
    await second.close()


async def test_overlong_path_is_an_error_with_advice(base: Path) -> None:
    path = base / ("x" * PATH_BYTES_MAX)
    match = f"can have {PATH_BYTES_MAX}; use a shorter directory"
    with pytest.raises(TransportError, match=match):
        await UdsConnector().listen(at(path), Recorder)
    with pytest.raises(ConnectError, match=match):
        await UdsConnector().connect(at(path), Recorder())


async def test_longest_path_works(base: Path) -> None:
    name = "x" * (PATH_BYTES_MAX - len(os.fsencode(base)) - 1)
    listener = await UdsConnector().listen(at(base / name), Recorder)
    await listener.close()


async def test_kernel_credentials_of_the_peer_are_known(base: Path) -> None:
    acceptor, near = Acceptor(), Recorder()
    listener = await UdsConnector().listen(at(base / "ps.sock"), acceptor)
    await UdsConnector().connect(listener.addresses[0], near)
    await acceptor.connected(1)
    for recorder in (near, acceptor.accepted[0]):
        credentials = recorder.transport.credentials
        assert credentials is not None
        assert credentials.pid == os.getpid()
        assert (credentials.uid, credentials.gid) == (os.geteuid(), os.getegid())
    near.transport.close()
    await near.until_lost()
    await acceptor.accepted[0].until_lost()
    await listener.close()
