"""What has become of a peer's process, as far as this worker can find out.

A process of this host is seen from the kernel and from its heartbeat record; for one of
another host its sidecar is asked.  Where both are, `Hello.sidecar` says; see `sidecar`.
What is concluded from the evidence, `machine.detector` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from typing import Final

from asyncrpc.core.links.heartbeat import find_here, now_ns
from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.sidecar import pulse, query
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.endpoints import Resolver
from asyncrpc.core.wire.frames import Hello
from asyncrpc.errors import UsageError

SIDECARS_MAX: Final = 8  # addresses of one sidecar that are asked

_EVIDENCE: Final = {
    pulse.GONE: Evidence.GONE,
    pulse.STOPPED: Evidence.STOPPED,
    pulse.BUSY: Evidence.BUSY,
    pulse.TICKING: Evidence.TICKING,
}


async def evidence_of(
    hello: Hello,
    *,
    credentials_pid: int | None,
    secret: bytes | None,
    timeout_s: float,
) -> Evidence:
    """Find out what has become of a peer's process.  Never raises.

    Args:
        secret: the cluster's; the peer's sidecar answers only if it is right.
    """
    evidence = _local_evidence(hello, credentials_pid)
    if evidence is not Evidence.UNKNOWN:
        return evidence
    return await evidence_at(
        hello.sidecar, hello.incarnation, secret=secret, timeout_s=timeout_s
    )


async def evidence_at(
    addresses: Iterable[str],
    incarnation: int,
    *,
    secret: bytes | None,
    timeout_s: float,
) -> Evidence:
    """Ask the sidecar of a worker of another host, at the worker's own port."""
    sidecars = [
        address for address in map(_tcp_address, addresses) if address is not None
    ]
    if not sidecars:
        return Evidence.UNKNOWN
    return await _sidecar_evidence(
        incarnation, sidecars[:SIDECARS_MAX], secret, timeout_s
    )


def evidence_of_pid(pid: int) -> Evidence:
    """Look at the process of this host that listens at a Unix socket.

    Its heartbeat record is not known before it has introduced itself: a process that
    can run, and lets its peers wait, counts as busy.
    """
    return _EVIDENCE.get(pulse.state_of(pid, None), Evidence.UNKNOWN)


def _local_evidence(hello: Hello, credentials_pid: int | None) -> Evidence:
    """Look at a process of this host."""
    address = find_here(hello)
    if address is not None:
        state = pulse.state_of(address.pid, address.started)
        peer_pulse = pulse.read_of(address.pid, address.descriptor)
        if peer_pulse is not None and peer_pulse.incarnation != hello.incarnation:
            peer_pulse = None
        return _EVIDENCE.get(pulse.judge(peer_pulse, state, now_ns()), Evidence.UNKNOWN)
    if credentials_pid and credentials_pid == hello.pid and pulse.is_gone(hello.pid):
        return Evidence.GONE
    return Evidence.UNKNOWN


async def _sidecar_evidence(
    incarnation: int, sidecars: list[Address], secret: bytes | None, timeout_s: float
) -> Evidence:
    """Ask a sidecar at all of its addresses at once; the first answer counts."""
    key = query.key_from(secret, incarnation)
    answers: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def ask(address: Address) -> None:
        answer = await _answer(address, key, incarnation)
        if answer is not None and not answers:
            answers.append(answer)
            for task in tasks:
                task.cancel()

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            tasks += [group.create_task(ask(address)) for address in sidecars]
    if not answers:
        return Evidence.UNREACHABLE
    return _EVIDENCE.get(answers[0], Evidence.UNKNOWN)


async def _answer(address: Address, key: bytes, incarnation: int) -> int | None:
    """Return what a sidecar answers at one address; None if it does not."""
    nonce = os.urandom(query.NONCE_BYTES)
    try:
        endpoints = await Resolver().resolve(address.host, address.port)
        reader, writer = await asyncio.open_connection(
            endpoints[0].host, endpoints[0].port
        )
    except OSError:
        return None
    try:
        writer.write(query.pack_query(key, incarnation, nonce))
        record = await reader.readexactly(query.ANSWER_BYTES)
    except (OSError, asyncio.IncompleteReadError):
        return None
    finally:
        writer.transport.abort()
    return query.read_answer(key, incarnation, nonce, record)


def _tcp_address(text: str) -> Address | None:
    """Return a sidecar's address; None if it is not one."""
    if not text.startswith("tcp://"):
        return None
    try:
        return Address.parse(text)
    except UsageError:
        return None
