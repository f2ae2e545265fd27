"""The model process: a worker and a model, without a parent process.

It begins with a lock that it inherits, listens, makes the model, and ends when the
machine in `machine.occupancy` says so.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import pickle
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from asyncrpc import LocalRendezvous, Options, run
from asyncrpc.api import Worker
from asyncrpc.core.host.socket_directory import SocketDirectory
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.loop.clock import NS_PER_S, wall_ns
from asyncrpc.extend import add_service
from asyncrpc.serving.model_host.hosted import HostedModel
from asyncrpc.serving.model_host.machine.occupancy import OccupancyState
from asyncrpc.serving.model_host.order import HostOrder
from asyncrpc.serving.model_host.slot import SlotNote
from asyncrpc.tools.inspection.run_note import RunNoteFile

FRESH_S: Final = 3600.0  # cleaners of temporary directories wait for days
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def main(pipe: BinaryIO, lock: int) -> None:
    """Run the process."""
    order: HostOrder = pickle.load(pipe)  # noqa: S301  (from our starter)
    _let_go_of(pipe)
    _keep_to_this_process(lock)
    sys.argv[:] = [order.function]
    if isinstance(sys.stdout, io.TextIOWrapper):  # to a pipe, kilobytes are buffered
        sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()  # shows where native code crashes
    is_stuck = run(_serve(order, lock))
    sys.stdout.flush()
    sys.stderr.flush()
    if is_stuck:  # the interpreter would wait for the thread, or crash beside it
        os._exit(0)


def _let_go_of(pipe: BinaryIO) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, pipe.fileno())
    os.close(nothing)


def _keep_to_this_process(lock: int) -> None:
    """Keep processes that the model starts from holding the lock after this one."""
    os.set_inheritable(lock, False)  # noqa: FBT003  (positional only)
    os.register_at_fork(after_in_child=lambda: _close(lock))


def _close(lock: int) -> None:
    try:
        os.close(lock)
    except OSError:  # the slot was left before the fork
        return


async def _serve(order: HostOrder, lock: int) -> bool:
    """Serve the model until the end; return whether a thread is still making it."""
    sockets = SocketDirectory()
    hosted = HostedModel(order, lock)
    worker = Worker(
        order.name,
        rendezvous=LocalRendezvous(1),
        options=options_with(order.options, order.secret, sockets),
    )
    add_service(worker, lambda _: hosted)
    for_verbs = RunNoteFile(worker, order.path)
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, hosted.end, f"it was sent {number.name}")
    released = asyncio.Event()
    try:
        async with worker:
            note = _note_of(order, worker.addresses)
            await asyncio.to_thread(for_verbs.write, worker.addresses)
            await asyncio.to_thread(hosted.keep_fresh)  # the previous one may have died
            await asyncio.to_thread(hosted.tell, note)
            holding = loop.create_task(hosted.hold(released), name="asyncrpc model")
            await _until_ending(hosted)
            await asyncio.to_thread(for_verbs.remove)
            await asyncio.to_thread(hosted.tell, replace(note, is_ending=True))
            hosted.dismiss()
            if not holding.done() and not hosted.is_made:
                holding.cancel()
        released.set()
        await asyncio.wait([holding])
        if not holding.cancelled():
            holding.result()
    finally:
        for_verbs.remove()
        hosted.untell()
        sockets.remove()
    return hosted.is_stuck


def _note_of(order: HostOrder, addresses: tuple[str, ...]) -> SlotNote:
    return SlotNote(
        order.generation,
        os.getpid(),
        addresses,
        function=order.function,
        folder=str(Path.cwd()),
        host=os.uname().nodename,
        host_id=HOST_ID,
        began_s=wall_ns() / NS_PER_S,
    )


async def _until_ending(hosted: HostedModel) -> None:
    """Return when the process is to end."""
    occupancy, loop = hosted.occupancy, asyncio.get_running_loop()
    while occupancy.state is not OccupancyState.ENDING:
        hosted.changed.clear()
        ends_at_s = occupancy.ends_at_s
        left_s = FRESH_S if ends_at_s is None else ends_at_s - loop.time()
        try:
            async with asyncio.timeout(min(left_s, FRESH_S)):
                await hosted.changed.wait()
        except TimeoutError:
            occupancy.elapse(loop.time())
            await asyncio.to_thread(hosted.keep_fresh)


def options_with(options: Options, secret: bytes, sockets: SocketDirectory) -> Options:
    """Return options of a worker that only processes of this user can reach."""
    listen = (f"uds://{sockets.path / 'worker'}",)
    network = replace(options.network, listen=listen, advertise=None)
    return replace(options, secret=secret, secret_file=None, network=network)
