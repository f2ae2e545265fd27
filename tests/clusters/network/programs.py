"""What the programs of these tests do; each is started on a host of its own."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator

import torch

import asyncrpc
from asyncrpc import LivenessOptions, NetworkOptions, Options, Peer, Worker
from asyncrpc.errors import RendezvousTimeoutError


def say(line: str) -> None:
    """Tell the test something."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def where() -> tuple[str, str]:
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
    asyncrpc.run(_meet(*arguments))


async def twice(to: str, tensor: torch.Tensor) -> torch.Tensor:
    return await asyncrpc.current_worker().peer(to).call(torch.add, tensor, tensor)


def count_to(number: int) -> Iterator[int]:
    yield from range(number)


async def _obey(worker: Worker, command: str, name: str, *more: str) -> object:
    """Do what the test wants; return what it came to."""
    if command == "token":
        return worker.tokens.issue(valid_s=float(more[0]), name=name)
    if command == "revoke":
        return worker.tokens.revoke(name)
    if command == "block":
        time.sleep(float(name))  # noqa: ASYNC251  (that is the point)
        return name
    if command == "find":
        return (await worker.find(name, timeout_s=30.0)).name
    return await _use(worker.peer(name), command, *more)


async def _use(peer: Peer, command: str, *more: str) -> object:
    tensor = torch.rand(int(more[0]) if command == "tensor" else 5)
    if command == "call":
        return (await peer.call(where))[0]
    if command == "tensor":
        result = await peer.call(torch.add, tensor, tensor)
        return torch.equal(result, tensor + tensor)
    if command == "through":
        result = await peer.call(twice, more[0], tensor)
        return torch.equal(result, tensor + tensor)
    if command == "reference":
        return "".join(await peer.remote(list, "abc").to_here())
    assert command == "stream"
    return sum([number async for number in peer.stream(count_to, 100)])


async def _tell_changes(worker: Worker) -> None:
    async for change in worker.members_changed():
        say(f"{change.kind.name.lower()} {change.member.name}")


async def _serve(name: str, rank: str, size: str, place: str, *liveness: str) -> None:
    """Be a worker, and do what comes by lines on the standard input."""
    is_inside = int(size) > 0
    lost_after_s, sidecar = liveness
    listen = ("tcp://0.0.0.0:7000",) if is_inside else None
    async with Worker(
        name,
        rank=int(rank) if is_inside else None,
        world_size=int(size) if is_inside else None,
        rendezvous=place,
        options=Options(
            network=NetworkOptions(listen=listen),
            liveness=LivenessOptions(
                heartbeat_s=1.0, lost_after_s=float(lost_after_s), sidecar=sidecar
            ),
            drain_timeout_s=1.0,
        ),
    ) as worker:
        telling = asyncio.create_task(_tell_changes(worker))
        say("ready")
        while True:
            line = (await asyncio.to_thread(sys.stdin.readline)).split()
            if not line or line[0] == "end":
                break
            try:
                say(f"done {await _obey(worker, *line)}")
            except asyncrpc.errors.AsyncRpcError as error:
                say(f"failed {error}")
        telling.cancel()
    say("ended")


def serve(*arguments: str) -> None:
    asyncrpc.run(_serve(*arguments))
