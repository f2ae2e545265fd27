"""One worker of the chaos suite: `python -m tests.chaos.worker SEAT`, SEAT in JSON.

It calls the others until it reads `finish` on its input.  On `let go` it lets go of all
that it holds, on `report` it says what it has left, on `leave` it ends in order.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from asyncrpc import LivenessOptions, NetworkOptions, Options, Policy
from asyncrpc.core.loop.loops import run as run_on_loop
from asyncrpc.testing import all_end
from asyncrpc.testing.leaks import open_descriptors
from tests.chaos.called import ChaosWorker
from tests.chaos.heap import Heap, allocated_blocks
from tests.chaos.load import Load
from tests.chaos.log import RAN, TOLD, Log
from tests.chaos.mistakes import MISTAKES

SAMPLE: Final = "sample"
SAMPLE_S: Final = 2.0
ALLOWED: Final = ("tests.chaos.called:*", "tests.chaos.wrongs:*")  # where STRICT
FINISH_S: Final = 60.0  # the longest limit of a call, several times over
ENDED_S: Final = 5.0  # for what waits when a worker has ended; its fleet waits longer


@dataclass(frozen=True, slots=True)
class Seat:
    """What a worker is told."""

    name: str  # its own
    where: dict[str, str]  # where everyone is to be dialed, by name
    listen: str  # where it listens
    advertise: str  # what it says of that; empty: the truth
    secret: str  # of the group
    folder: str  # for its logs
    seed: int  # of its load
    strict: list[str]  # names of the workers whose policy is STRICT
    options: dict[str, Any]  # more of its options


def holdings(worker: ChaosWorker) -> dict[str, Any]:
    """Count what a worker has that could be left behind."""
    gc.collect()
    references: Any = worker.parts.references
    counts = {f"values {what}": n for what, n in references.counts().items()}
    records = [str(record) for record in references.records()]
    links = worker.parts.directory.links
    return {
        **counts,
        "links": len(links),
        "calls waited for": sum(len(link.pending) for link in links),
        "calls served": sum(len(list(link.served)) for link in links),
        "active": worker.parts.active,
        "descriptors": len(open_descriptors()),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "records": records,
    }


async def tell_memory(name: str) -> None:
    """Tell how much memory is in use, every few seconds, until cancelled."""
    heap = Heap()
    while True:
        await asyncio.sleep(SAMPLE_S)
        say(name, SAMPLE, {"bytes": heap.bytes_in_use, "blocks": allocated_blocks()})


class Commands:
    """Lines that come in on the standard input."""

    async def __aenter__(self) -> asyncio.StreamReader:
        """Begin to read."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        return reader

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()


async def main(seat: Seat) -> None:
    """Be a worker until told to leave."""
    folder = Path(seat.folder)
    options = Options(
        secret=seat.secret,
        network=NetworkOptions(
            listen=(seat.listen,),
            advertise=(seat.advertise,) if seat.advertise else None,
        ),
        policy=Policy.STRICT if seat.name in seat.strict else Policy.TRUSTED,
        allow=ALLOWED,
        drain_timeout_s=seat.options["drain_timeout_s"],
        liveness=LivenessOptions(lost_after_s=seat.options["lost_after_s"]),
    )
    ran, event_log = (Log(folder, kind, seat.name) for kind in (RAN, TOLD))
    worker = ChaosWorker(
        seat.name, ran, event_log, rendezvous=seat.where, options=options
    )
    peers = [name for name in seat.where if name != seat.name]
    async with all_end(within_s=ENDED_S), Commands() as commands, worker:
        load = Load(worker, peers, seat.strict, seat.seed)
        say(seat.name, "ready", holdings(worker))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.go_on(MISTAKES))
            telling = tasks.create_task(tell_memory(seat.name))
            await next_command(commands, "finish")
            telling.cancel()
            load.stop()
            faulthandler.dump_traceback_later(FINISH_S, exit=True)
        faulthandler.cancel_dump_traceback_later()
        say(seat.name, "finished", {})
        await next_command(commands, "let go")
        worker.kept.clear()
        say(seat.name, "let go", {})
        await next_command(commands, "report")
        say(seat.name, "left", holdings(worker))
        await next_command(commands, "leave")
    ran.close()
    event_log.close()


async def next_command(commands: asyncio.StreamReader, expected: str) -> None:
    """Wait for a command; without a parent, end."""
    line = (await commands.readline()).decode().strip()
    if line != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def say(name: str, what: str, about: dict[str, Any]) -> None:
    """Tell the parent, in one line."""
    line = json.dumps({"name": name, "pid": os.getpid(), "what": what, **about})
    os.write(1, f"{line}\n".encode())


def seat_as_text(seat: Seat) -> str:
    return json.dumps(asdict(seat))


if __name__ == "__main__":
    run_on_loop(main(Seat(**json.loads(sys.argv[1]))))
