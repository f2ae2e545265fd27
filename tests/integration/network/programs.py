"""What the programs of these tests do; each is started on a host of its own."""

from __future__ import annotations

import os
import sys

import asyncrpc
from asyncrpc import Options, Worker
from asyncrpc.errors import RendezvousTimeoutError


def say(line: str) -> None:
    """Tell the test something."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def where() -> tuple[str, str]:
    """Return who answers."""
    return asyncrpc.current_worker().name, str(os.getpid())


async def _meet(name: str, rank: str, size: str, place: str, limit_s: str) -> None:
    """Meet the others, call each once, and leave together with them."""
    options = Options(rendezvous_timeout_s=float(limit_s))
    say("begins")
    try:
        async with Worker(
            name,
            rank=int(rank),
            world_size=int(size),
            rendezvous=place,
            options=options,
        ) as worker:
            for other in range(int(size)):
                say(f"answer {(await worker.peer(other).call(where))[0]}")
                peer = worker.parts.directory.link_to(worker.peer(other).name)
                if peer is not None and peer.connection.address is not None:
                    say(f"by {peer.connection.address}")
            await worker.shutdown(graceful=True, timeout_s=60.0)
    except RendezvousTimeoutError as error:
        say(f"missing {error}")
    say("ended")


def meet(*arguments: str) -> None:
    """Run `_meet`."""
    asyncrpc.run(_meet(*arguments))
