"""The programs that the pods of these tests run; each is process 1 of its pod."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from asyncrpc import Options, Worker
from asyncrpc.core.environment import resolve
from asyncrpc.errors import RendezvousTimeoutError


def say(line: str) -> None:
    """Tell the test something."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def where() -> str:
    """Return the address of the host that answers, as its name resolves there."""
    return socket.gethostbyname(socket.gethostname())


async def _greet(worker: Worker, name: str) -> None:
    say(f"{name} is at {await worker.peer(name).call(where)}")


async def _meet(limit_s: float) -> None:
    """Meet all others, call each; then call each that comes, until the pod ends."""
    say("begins")
    say(f"restart {resolve(os.environ).restart}")
    try:
        worker = Worker(options=Options(rendezvous_timeout_s=limit_s))
        async with worker:
            changes = worker.members_changed()
            say(f"met as {worker.name} of {worker.world_size}")
            for known_member in worker.known_members:
                await _greet(worker, known_member.name)
            say("has called all")
            async for change in changes:
                say(f"{change.kind} {change.member.name}")
                if change.kind in {"joined", "restarted"}:
                    await _greet(worker, change.member.name)
    except RendezvousTimeoutError as error:
        say(f"missing {error}")
        raise SystemExit(1) from None


def meet(limit_s: str = "600") -> None:
    asyncio.run(_meet(float(limit_s)))


if __name__ == "__main__":
    getattr(sys.modules[__name__], sys.argv[1])(*sys.argv[2:])
