"""What runs in each Ray actor of a gang: one worker.

The actor is a shell: Ray places it, reports its death and ends it.  Calls between
workers do not pass through Ray.  It runs on the event loop that Ray makes for an
asynchronous actor.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from multiprocessing import spawn
from pathlib import Path
from typing import Any, Final

from asyncrpc import JoinRendezvous, Options
from asyncrpc.api import Worker
from asyncrpc.core.host.socket_directory import SocketDirectory
from asyncrpc.errors import NotStartedError

# Keys of multiprocessing's own record of a main module.
_MAIN_PATH: Final = "init_main_from_path"
_MAIN_NAME: Final = "init_main_from_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """The data that an actor needs to start its worker.

    Attributes:
        world_size: number of workers in the gang.
        contact: addresses of the driver's worker, which admits the worker.
        options: of the worker, without a secret.
        main: how to import the driver's main module; see `main_module`.
        secret: of the gang; not shown in any text.
    """

    name: str
    rank: int
    world_size: int
    contact: tuple[str, ...]
    options: Options
    main: Mapping[str, str]
    secret: bytes = field(repr=False)


def main_module() -> Mapping[str, str]:
    """Return how another process imports the main module of this one.

    It is empty if that is impossible, as in a notebook.

    Source: multiprocessing does the same with the method `spawn`.
    """
    prepared = spawn.get_preparation_data("")
    keys = (_MAIN_PATH, _MAIN_NAME)
    return {key: str(prepared[key]) for key in keys if prepared.get(key)}


def import_main(main: Mapping[str, str]) -> None:
    """Import the driver's main module, if it is on this node."""
    path, name = main.get(_MAIN_PATH), main.get(_MAIN_NAME)
    is_here = path is not None and Path(path).exists()
    if is_here or (name is not None and find_spec(name) is not None):
        spawn.prepare(dict(main))


@dataclass(frozen=True, slots=True, kw_only=True)
class GangWorker:
    """A worker of a gang, as it was started.

    Attributes:
        name: of the worker.
        rank: of the worker, and the index of its bundle.
        incarnation: 64 random bits that identify this life of the worker.
        generation: of the gang, in which this life began.
        pid: of the actor's process.
        node_id: Ray's id of the node, in hexadecimal.
        node_address: IP address of the node.
    """

    name: str
    rank: int
    incarnation: int
    generation: int
    pid: int
    node_id: str
    node_address: str


class NodeListener:
    """Where a worker on a Ray node listens: at the address of the node.

    Ray's nodes reach each other at their IP addresses, and so do the workers.  Workers
    on the same node use a Unix socket.
    """

    def __init__(self) -> None:
        self._sockets: SocketDirectory | None = None

    def options(self, options: Options, address: str) -> Options:
        """Return options with listening addresses, unless there are some.

        The program sets them in `options`, a node by `ASYNCRPC_INTERFACE`.
        """
        network = options.with_environment().network
        if network.listen or network.advertise or network.interface:
            return options
        self._sockets = SocketDirectory()
        host = f"[{address}]" if ":" in address else address
        listen = (f"uds://{self._sockets.path / 'worker'}", f"tcp://{host}:0")
        return replace(options, network=replace(network, listen=listen))

    def close(self) -> None:
        """Remove the directory of the socket."""
        if self._sockets is not None:
            self._sockets.remove()


class WorkerActor:
    """The actor: starts one worker and ends with it."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._listener = NodeListener()
        self._ended = asyncio.Event()

    async def start(self, order: WorkerOrder, generation: int) -> GangWorker:
        """Start the worker, and join it to the group of the driver's worker."""
        import ray  # noqa: PLC0415  (here it is loaded: Ray runs this)

        await asyncio.to_thread(import_main, order.main)
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        options = replace(order.options, secret=order.secret)
        worker = Worker(
            order.name,
            rank=order.rank,
            world_size=order.world_size,
            rendezvous=JoinRendezvous(order.contact),
            options=self._listener.options(options, address),
        )
        await worker.__aenter__()
        self._worker = worker
        return GangWorker(
            name=worker.name,
            rank=worker.rank,
            incarnation=worker.incarnation,
            generation=generation,
            pid=os.getpid(),
            node_id=context.get_node_id(),
            node_address=address,
        )

    async def meet(self, names: Sequence[str]) -> None:
        """Wait until this worker knows all others by their names."""
        worker = self._running()
        for name in names:
            if name != worker.name:
                await worker.find(name)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a coroutine function in the actor through Ray."""
        return await function(self._running(), *args)

    async def ended(self) -> None:
        """Return when the worker has been stopped; the actor's death ends the wait."""
        await self._ended.wait()

    def _running(self) -> Worker:
        if self._worker is None or self._worker.is_closed:
            raise NotStartedError("the worker of this actor does not run")
        return self._worker

    async def stop(self, drain_timeout_s: float) -> None:
        """Shut the worker down."""
        if self._worker is not None:
            await self._worker.shutdown(drain_timeout_s=drain_timeout_s)
        self._listener.close()
        self._ended.set()
