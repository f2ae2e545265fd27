"""What is between the workers, and how it is broken: namespaces, or proxies.

`Namespaces` gives every worker a network namespace of its own, on one bridge: the
kernel's own TCP is cut (`ss -K`), and packets vanish between two workers when the one's
neighbour table sends them to a hardware address that nobody has.  It needs root, `ip`
and `ss`; delays also need netem.  `Proxies` needs nothing: a proxy stands in front of
each worker, and breaks what comes to it.

Nothing outside the namespaces is touched: the bridge has one to itself.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final, Self

from asyncrpc.testing import Proxy
from tests.ports import free_port

PORT: Final = 7700
BRIDGE: Final = "br0"
_NOBODY: Final = "02:00:00:00:00:ee"  # a hardware address that no interface has


class Wires(ABC):
    """What is between the workers."""

    kind: str
    # Which kinds of faults it can make.
    faults: frozenset[str] = frozenset({"cut", "partition", "delay"})

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)  # of the workers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:  # noqa: B027  (others override it)
        pass

    @property
    @abstractmethod
    def where(self) -> dict[str, str]:
        """Where each worker is to be dialed."""

    @abstractmethod
    def listen(self, name: str) -> str:
        """Where a worker listens."""

    def command(self, name: str) -> list[str]:
        """Return what comes before the command that starts a worker."""
        return []

    @abstractmethod
    async def cut(self, worker: str, other: str) -> None:
        """Break every connection between two workers."""

    @abstractmethod
    async def partition(self, worker: str, other: str) -> None:
        """Let nothing pass between two workers, and tell nobody."""

    def parted(self, worker: str, other: str) -> tuple[str, ...]:
        """Return whom a partition of two workers is between; of one: it and all."""
        return worker, other

    @abstractmethod
    async def delay(self, name: str, seconds: float) -> None:
        """Delay what goes to or from a worker."""

    @abstractmethod
    async def heal(self, worker: str, other: str) -> None:
        """End a partition."""


class Proxies(Wires):
    """A proxy in front of each worker, on loopback.

    A partition holds back all that was dialed to one worker: its own dials get through,
    so that it can speak to others, but a broken connection cannot be made anew to it.
    """

    kind = "proxies"

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._proxies = {
            name: Proxy(f"tcp://127.0.0.1:{free_port()}") for name in names
        }
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start the proxies."""
        for proxy in self._proxies.values():
            await self._stack.enter_async_context(proxy)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def where(self) -> dict[str, str]:
        return {name: proxy.address for name, proxy in self._proxies.items()}

    def listen(self, name: str) -> str:
        return str(self._proxies[name].target)

    async def cut(self, worker: str, other: str) -> None:
        for name in (worker, other):
            self._proxies[name].cut()

    async def partition(self, worker: str, other: str) -> None:
        self._proxies[worker].partition()

    def parted(self, worker: str, other: str) -> tuple[str, ...]:
        """Return the first: nobody's dials get through to it."""
        return (worker,)

    async def heal(self, worker: str, other: str) -> None:
        self._proxies[worker].heal()

    async def delay(self, name: str, seconds: float) -> None:
        """Delay what was dialed to the worker, both ways."""
        self._proxies[name].delay(seconds)


class Namespaces(Wires):
    """A network namespace for each worker, on a bridge that has one, too."""

    kind = "network namespaces"

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._prefix = f"chaos{os.getpid()}"
        self._addresses = {name: f"10.77.0.{i}" for i, name in enumerate(names, 1)}

    @classmethod
    async def are_permitted(cls) -> bool:
        """Say whether this process may make namespaces and what is in them."""
        if os.geteuid() or not (shutil.which("ip") and shutil.which("ss")):
            return False
        try:
            async with cls(["a", "b"]):
                return True
        except OSError:
            return False

    async def __aenter__(self) -> Self:
        """Make the namespaces."""
        try:
            await self._lay()
        except BaseException:
            await self._take_away()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Delete them, and what is in them."""
        await self._take_away()

    async def _lay(self) -> None:
        switch = self._namespace("switch")
        await ip("netns", "add", switch)
        await ip("-n", switch, "link", "add", "name", BRIDGE, "type", "bridge")
        await ip("-n", switch, "link", "set", BRIDGE, "up")
        for number, (name, address) in enumerate(self._addresses.items()):
            inside, port = self._namespace(name), f"p{number}"
            await ip("netns", "add", inside)
            await ip(
                *("-n", switch, "link", "add", "name", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", inside),
            )
            await ip("-n", switch, "link", "set", port, "master", BRIDGE, "up")
            await ip("-n", inside, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                await ip("-n", inside, "link", "set", device, "up")
        if not await self._has_netem():
            self.faults -= {"delay"}

    async def _has_netem(self) -> bool:
        try:
            await self.delay(self.names[0], 0.001)
            await self.delay(self.names[0], 0.0)
        except OSError:
            return False
        return True

    async def _take_away(self) -> None:
        for name in (*self.names, "switch"):
            try:
                await ip("netns", "del", self._namespace(name))
            except OSError:  # it was never made
                continue

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    @property
    def where(self) -> dict[str, str]:
        return {name: f"tcp://{at}:{PORT}" for name, at in self._addresses.items()}

    def listen(self, name: str) -> str:
        return self.where[name]

    def command(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(name)]

    async def cut(self, worker: str, other: str) -> None:
        """Have the kernel end the sockets between two workers, as by a reset."""
        inside = self.command(worker)
        await run_command(*inside, "ss", "-K", "dst", self._addresses[other])

    async def partition(self, worker: str, other: str) -> None:
        """Send what goes between two workers to nobody."""
        for here, there in ((worker, other), (other, worker)):
            await ip(
                *("-n", self._namespace(here), "neigh", "replace"),
                *(self._addresses[there], "lladdr", _NOBODY),
                *("dev", "eth0", "nud", "permanent"),
            )

    async def heal(self, worker: str, other: str) -> None:
        """Let the neighbour tables learn the truth again.

        If two partitions of the same workers overlap, the first to heal ends both.
        """
        for here, there in ((worker, other), (other, worker)):
            await ip(
                *("-n", self._namespace(here), "neigh", "flush"),
                *("to", self._addresses[there], "dev", "eth0", "nud", "permanent"),
            )

    async def delay(self, name: str, seconds: float) -> None:
        """Delay what leaves a worker."""
        device = (*self.command(name), "tc", "qdisc")
        if seconds:
            netem = ("root", "netem", "delay", f"{seconds * 1000:.0f}ms")
            await run_command(*device, "replace", "dev", "eth0", *netem)
        else:
            await run_command(*device, "del", "dev", "eth0", "root")


async def ip(*arguments: str) -> None:
    await run_command("ip", *arguments)


async def run_command(*words: str) -> None:
    """Run a command to its end."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    if process.returncode:
        raise OSError(f"{' '.join(words)}: {said.decode(errors='replace').strip()}")
