"""A worker that calls all others for as long as the test wants, and notes who answers.

    python working.py notes.jsonl stop

Whenever the answers change, a line is added to the notes.  It ends in order once the
file `stop` is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import asyncrpc
from asyncrpc.errors import WorkerLostError

NOTES, STOP = map(Path, sys.argv[1:3])
RESTART = os.environ["TORCHELASTIC_RESTART_COUNT"]


def note(**fields: object) -> None:
    with NOTES.open("a") as notes:  # one write of one line: others write there, too
        notes.write(
            json.dumps({"pid": os.getpid(), "restart": RESTART, **fields}) + "\n"
        )


async def answers(worker: asyncrpc.Worker) -> list[str]:
    names = []
    for rank in range(worker.world_size):
        try:
            name = await worker.peer(f"worker{rank}").call(os.getenv, "RANK")
        except WorkerLostError:
            name = "lost"
        names.append(str(name))
    return names


async def main() -> None:
    async with asyncrpc.Worker() as worker:
        note(met=worker.name, of=worker.world_size, incarnation=worker.incarnation)
        former: list[str] = []
        while not STOP.exists():
            current = await answers(worker)
            if current != former:
                note(name=worker.name, answers=current)
            if "fails" in sys.argv and RESTART == "0" and worker.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            former = current
            await asyncio.sleep(0.05)
        await worker.shutdown(graceful=True)


asyncrpc.run(main())
