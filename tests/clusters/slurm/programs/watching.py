"""Three workers on three nodes, of which one is lost: the others say what they see.

Started with `end`, they let the loss end them; with `go-on`, rank 0 asks the other
survivor to go on, and both end in order.
"""

from __future__ import annotations

import asyncio
import sys

import asyncrpc

released = asyncio.Event()


async def release() -> str:
    """Let this worker end."""
    released.set()
    return asyncrpc.current_worker().name


async def first_loss(worker: asyncrpc.Worker) -> str:
    """Wait until a member is lost; return its name."""
    changes = worker.members_changed()
    await worker.barrier()
    print(f"{worker.name} watches", flush=True)
    async for change in changes:
        if change.kind == "lost":
            return change.member.name
    raise AssertionError("nobody was lost")


async def main() -> None:
    """Watch, and say what is seen."""
    async with asyncrpc.Worker() as worker:
        lost = await first_loss(worker)
        print(f"{worker.name} saw that {lost} is lost", flush=True)
        if sys.argv[1] == "end":
            await worker.barrier()  # an error that names who is lost
        if worker.rank == 0:
            (other,) = {"worker1", "worker2"} - {lost}
            name = await worker.peer(other).call(release)
            print(f"{worker.name} goes on with {name}", flush=True)
        else:
            await released.wait()


asyncrpc.run(main())
