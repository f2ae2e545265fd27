"""Ray as the ground of a `Cluster`: a host server in each bundle of a placement group.

The actor of a bundle passes the streams of its host server on; calls between workers
do not pass through Ray.  Ray ends the actors with the program, and with an actor ends
its host server.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from asyncrpc.clusters.hosts import WorkerOutput
from asyncrpc.clusters.ray.bundles import Bundles, Handle, check_bundles
from asyncrpc.clusters.ray.placement import misfit_of
from asyncrpc.clusters.remote.boot import ServerSettings, settings_for
from asyncrpc.clusters.remote.command import CommandStream, open_command
from asyncrpc.clusters.remote.host import RemoteHost, RemotePlace
from asyncrpc.clusters.remote.options import RayOptions
from asyncrpc.clusters.settings import NOT_KEPT_BY_RAY
from asyncrpc.clusters.threads import in_thread
from asyncrpc.core.arguments import check_kind
from asyncrpc.errors import ClusterError

_NAME_BYTES: Final = 4  # of a placement group: Ray wants each name once


class HostActor:
    """The actor: runs a host server on its node."""

    def __init__(self) -> None:
        self._stream: CommandStream | None = None

    async def start(self, words: Sequence[str]) -> None:
        """Start the command; an empty first word is this Python."""
        self._stream = await open_command([words[0] or sys.executable, *words[1:]])

    async def use(self, method: str, *args: Any) -> Any:
        """Call a method of its streams; wait for it if that takes time."""
        result = getattr(self._stream, method)(*args)
        return await result if asyncio.iscoroutine(result) else result


class ActorStream:
    """The streams of a host server, by way of its actor."""

    def __init__(self, actor: Handle, errors: type[Exception]) -> None:
        """Use an actor whose host server has been started.

        Args:
            errors: what Ray raises once the actor is gone.
        """
        self._actor, self._errors = actor, errors

    async def read(self, size: int) -> bytes:
        """Return up to so many bytes of its output; none: the end."""
        return await self._read("read", size)

    async def read_errors(self, size: int) -> bytes:
        """Return up to so many bytes of its errors; none: the end."""
        return await self._read("read_errors", size)

    async def _read(self, method: str, size: int) -> bytes:
        try:
            received: bytes = await self._actor.use.remote(method, size)
        except self._errors:
            return b""
        return received

    async def write(self, data: bytes) -> None:
        """Write to its input; OSError: it is gone."""
        try:
            await self._actor.use.remote("write", data)
        except self._errors as error:
            raise OSError(f"its actor is gone: {error}") from error

    def end_input(self) -> None:
        """End its input, upon which it ends."""
        self._actor.use.remote("end_input")

    async def wait_ended(self) -> str:
        """Wait until it has ended; return how."""
        try:
            how: str = await self._actor.use.remote("wait_ended")
        except self._errors:
            return "its actor has ended"
        return how

    def abort(self) -> None:
        """Give it up: the end of its input ends it, and that of its actor."""
        self._actor.use.remote("abort")


class RayGround:
    """The bundles of a placement group, each a host."""

    is_here: Final = False
    waits_for: Final = "waiting for Ray's bundles"
    not_kept: str = NOT_KEPT_BY_RAY
    start_timeout_s: float = 60.0

    def __init__(
        self, bundles: Sequence[Mapping[str, float]], options: RayOptions | None
    ) -> None:
        """Describe the bundles; UsageError: Ray could not reserve them."""
        check_bundles(bundles)
        check_kind("ray", options, (RayOptions, type(None)), "a RayOptions or None")
        self._resources, self._options = bundles, options or RayOptions()
        self._bundles: Bundles | None = None

    async def open(self, output: WorkerOutput) -> list[RemoteHost]:
        """Return the bundles once Ray has placed them; ClusterError: it has not."""
        options = self._options
        self._bundles = bundles = Bundles(self._resources, options.strategy)
        await bundles.reserve(f"asyncrpc-{secrets.token_hex(_NAME_BYTES)}")
        try:
            async with asyncio.timeout(options.placement_timeout_s):
                await bundles.placed()
        except TimeoutError:
            nodes = await bundles.nodes()
            misfit = misfit_of(self._resources, options.strategy, nodes)
            raise ClusterError(
                f"Ray has not placed the bundles within {options.placement_timeout_s:g}"
                f" s: {misfit}"
            ) from None
        # By `ray.init()` a worker joins the same cluster of Ray.
        environment = {"RAY_ADDRESS": bundles.address, **options.environment}
        settings = await in_thread(
            settings_for, options.python, options.directory, environment
        )
        hosts = []
        for index in range(len(self._resources)):
            connect = partial(self._connect, bundles, index, settings)
            name = f"bundle {index}"
            place = RemotePlace(name, connect, settings, self.start_timeout_s)
            hosts.append(RemoteHost(place, output))
        return hosts

    async def _connect(
        self, bundles: Bundles, index: int, settings: ServerSettings
    ) -> ActorStream:
        runtime_env = self._options.runtime_env
        actor = await bundles.start_actor(index, HostActor, runtime_env=runtime_env)
        words = settings.words
        if self._options.python is None:  # that of Ray there
            words[0] = ""
        try:
            await actor.start.remote(words)
        except bundles.actor_errors as error:
            raise ClusterError(f"the actor of bundle {index} died: {error}") from error
        return ActorStream(actor, bundles.actor_errors)

    async def close(self) -> None:
        """Give the bundles back, which ends their actors."""
        if self._bundles is not None:
            await self._bundles.remove()
