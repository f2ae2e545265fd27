"""The liveness sidecar: lets peers see whether this worker runs, even if it is busy.

Peers of this host see it from the kernel and from our *heartbeat record*, which the
event loop writes twice a second; those of other hosts ask the *sidecar process*, which
lives on when this one stands still, or has died (`asyncrpc.watch`).  `Hello.watch` says
where both are:

    pulse://PID/STARTED/NAMESPACE/DESCRIPTOR    see `asyncrpc.watch.pulse`
    tcp://HOST:PORT                             see `asyncrpc.watch.query`

What a peer concludes from them is in `evidence`.

Only Linux tells all this.  Elsewhere, and in a simulation, there is no evidence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from asyncrpc.runtime.links.heartbeat import (
    HeartbeatRecord,
    find_here,
    is_supported,
)
from asyncrpc.runtime.links.sidecar_process import SidecarProcess
from asyncrpc.runtime.links.sidecar_process import (
    is_supported as process_is_supported,
)
from asyncrpc.runtime.options import Options
from asyncrpc.runtime.ports import Identity
from asyncrpc.transport.address import Address
from asyncrpc.wire.messages import Hello

logger = logging.getLogger("asyncrpc")


class Sidecar:
    """Lets peers see that one worker runs: its record, and a process beside it.

    Attributes:
        addresses: for `Hello.watch`.
        process: it, where there may be one.
    """

    def __init__(self, identity: Identity, options: Options) -> None:
        """Prepare it; nothing can be seen yet.

        Args:
            identity: of the worker.
            options: whether there is a process, where it listens, and its secret.
        """
        self._identity = identity
        self._options = options
        self._record: HeartbeatRecord | None = None
        self.process: SidecarProcess | None = None
        self.addresses: tuple[str, ...] = ()

    async def start(
        self, listening: Iterable[Address], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Let a worker that runs in real time be seen.

        Where that is impossible there is nothing to see, and no error.

        Args:
            listening: where it listens; the process does beside its addresses of TCP.
            loop: of the worker.

        Raises:
            TransportError: the process cannot listen.
            UsageError: the interface of the options has no address.

        Cancellation:
            `close` undoes what has been done.
        """
        options, incarnation = self._options, self._identity.incarnation
        if not is_supported:
            return
        try:
            self._record = HeartbeatRecord(incarnation, loop)
        except OSError as error:
            logger.debug("worker %r: no pulse: %s", self._identity.name, error)
            return
        self.addresses = (str(self._record.address),)
        beside = [one for one in listening if one.scheme == "tcp"]
        if options.liveness.watch == "off" or not beside or not process_is_supported:
            return
        self.process = SidecarProcess(
            self._identity, loop, options.secret_bytes, memory=self._record.descriptor
        )
        await self.process.listen(beside, options.network.interface)
        self.addresses += tuple(map(str, self.process.addresses))
        if options.liveness.watch == "on":
            self.process.start()

    def on_peer(self, hello: Hello) -> None:
        """Make the process answer if this peer cannot see for itself."""
        if self.process is not None and find_here(hello) is None:
            self.process.start()

    def close(self) -> None:
        """End what there is; it takes 1 ms where there is a process to end."""
        if self.process is not None:
            self.process.close()
        if self._record is not None:
            self._record.close()
            self._record = None
