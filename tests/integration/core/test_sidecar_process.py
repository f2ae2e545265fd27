"""A sidecar without a worker: its own process, which is blocked, or has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.links.sidecar_process import PACKAGE, PROGRAM
from asyncrpc.core.sidecar import pulse, query
from asyncrpc.core.sidecar.process import CONNECTIONS_MAX
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.handover import port_name
from asyncrpc.core.wire.frames import Hello
from tests.integration.core.test_sidecar import GENEROUS_S, SECRET, ask

QUICK = f"""
import sys
sys.argv[1:1] = [{PACKAGE!r}]
exec({PROGRAM.partition("main(")[0]!r})
from asyncrpc.core.sidecar import process
process.REMAINS_S = 0.5
main(sys.argv[2:])
"""


@contextlib.contextmanager
def with_sidecar(
    incarnation: int,
) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes], str]]:
    """A process that is no worker, its sidecar, and the address of that."""
    with contextlib.ExitStack() as exit_stack:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=PIPE)
        memory = os.memfd_create(pulse.NAME)
        exit_stack.callback(os.close, memory)
        started = pulse.started_at(process.pid)
        os.write(memory, pulse.Pulse(process.pid, started, incarnation, 0).pack())
        descriptor = os.pidfd_open(process.pid)
        exit_stack.callback(os.close, descriptor)
        listening = exit_stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in pair:
            exit_stack.enter_context(end)
            end.settimeout(0)
        passed = [memory, descriptor, pair[1].fileno(), listening.fileno()]
        port = listening.getsockname()[1]
        arguments = [*map(str, passed[:3]), port_name(port), str(passed[3])]
        command = [sys.executable, "-I", "-S", "-c", QUICK, *arguments]
        sidecar = subprocess.Popen(command, stdin=PIPE, pass_fds=passed)
    with process, sidecar:
        assert sidecar.stdin is not None
        sidecar.stdin.write(query.key_from(SECRET.encode(), incarnation))
        sidecar.stdin.flush()
        yield process, sidecar, address
        process.kill()
        sidecar.kill()


async def test_sidecar_reports_a_death_for_a_while_and_ends() -> None:
    with with_sidecar(incarnation=7) as (process, sidecar, address):
        hello = Hello("b", 7, 0, 1, sidecar=(address,))
        assert await ask(hello) is Evidence.BUSY  # it has no loop
        process.kill()
        async with asyncio.timeout(GENEROUS_S):
            while await ask(hello) is not Evidence.GONE:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert await asyncio.to_thread(sidecar.wait, GENEROUS_S) == 0
        assert await ask(hello) is Evidence.UNREACHABLE


@pytest.mark.parametrize("said", [b"", query.ASKED[:1], query.ASKED, b"x"])
async def test_held_connections_block_no_question(said: bytes) -> None:
    """Four times as many as it holds, while the worker accepts nothing itself."""
    with with_sidecar(incarnation=7) as (_, _, address):
        where = Address.parse(address)
        hello = Hello("b", 7, 0, 1, sidecar=(address,))
        with contextlib.ExitStack() as held:
            for _ in range(4 * CONNECTIONS_MAX):
                client = socket.create_connection((where.host, where.port))
                held.enter_context(client).sendall(said)
            assert await ask(hello, timeout_s=GENEROUS_S) is Evidence.BUSY
