"""`Cluster.ssh`: host servers behind SSH, one connection for each host.

asyncssh reads `~/.ssh/config`, so that names of hosts, users, ports, keys and jump
hosts may be what they are for `ssh`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from asyncrpc.clusters.hosts import WorkerOutput
from asyncrpc.clusters.remote.boot import settings_for
from asyncrpc.clusters.remote.host import RemoteHost, RemotePlace
from asyncrpc.clusters.remote.options import SshOptions, SshTarget
from asyncrpc.clusters.threads import in_thread
from asyncrpc.core.arguments import check_kind
from asyncrpc.errors import ClusterError, UsageError

try:
    import asyncssh
except ImportError:  # the extra `ssh`
    asyncssh = None  # type: ignore[assignment]

_KEEPALIVE_S: Final = 15.0  # a connection that is silent for four of them is lost
_NOT_THERE: Final = 127  # the code of a shell that does not find a command


class SshGround:
    """The hosts of `Cluster.ssh`."""

    is_here: Final = False

    not_kept: str = ""
    start_timeout_s: float = 60.0

    def __init__(self, hosts: Sequence[str], options: SshOptions | None) -> None:
        """Describe the hosts; UsageError: asyncssh is missing, or a host is wrong."""
        if asyncssh is None:
            raise UsageError(
                "Cluster.ssh needs asyncssh: pip install 'asyncrpc-torch[ssh]'"
            )
        check_kind("ssh", options, (SshOptions, type(None)), "an SshOptions or None")
        self._targets = [SshTarget.parse(text) for text in hosts]
        self._options = options or SshOptions()
        names = self._targets[0].text if len(hosts) == 1 else f"{len(hosts)} hosts"
        self.waits_for = f"connecting to {names}"

    async def open(self, output: WorkerOutput) -> list[RemoteHost]:
        """Return the hosts."""
        options = self._options
        settings = await in_thread(
            settings_for, options.python, options.directory, options.environment
        )
        hosts = []
        for target in self._targets:
            connect = partial(_connect, target, options, settings.shell_command)
            place = RemotePlace(target.text, connect, settings, self.start_timeout_s)
            hosts.append(RemoteHost(place, output))
        return hosts

    async def close(self) -> None:
        """There is nothing to give back."""


class _SshStream:
    """The streams of a command on another host."""

    def __init__(self, connections: Sequence[Any], process: Any) -> None:
        self._connections, self._process = connections, process

    async def read(self, size: int) -> bytes:
        """Return up to so many bytes of its output; none: the end."""
        return await _read(self._process.stdout, size)

    async def read_errors(self, size: int) -> bytes:
        """Return up to so many bytes of its errors; none: the end."""
        return await _read(self._process.stderr, size)

    async def write(self, data: bytes) -> None:
        """Write to its input; OSError: it is gone."""
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except asyncssh.Error as error:
            raise ConnectionError(str(error)) from error

    def end_input(self) -> None:
        """End its input."""
        with suppress(OSError, asyncssh.Error):
            self._process.stdin.write_eof()

    async def wait_ended(self) -> str:
        """Wait until it has ended; return how."""
        with suppress(asyncssh.Error):
            await self._process.wait_closed()
        code = self._process.returncode
        if code == _NOT_THERE:
            return "there is no such interpreter; give SshOptions(python=...)"
        return "its connection was lost" if code is None else f"it exited with {code}"

    def abort(self) -> None:
        """Close the connections; sshd ends the input of the command."""
        for connection in self._connections:
            connection.abort()


async def _read(stream: Any, size: int) -> bytes:
    try:
        received: bytes = await stream.read(size)
    except asyncssh.Error as error:
        raise ConnectionError(str(error)) from error
    return received


async def _connect(target: SshTarget, options: SshOptions, command: str) -> _SshStream:
    connections = list[Any]()
    try:
        if options.jump is not None:
            jump = SshTarget.parse(options.jump)
            connections.append(await _open(jump, options, None))
        tunnel = connections[0] if connections else None
        connections.insert(0, await _open(target, options, tunnel))
        process = await connections[0].create_process(command, encoding=None)
    except BaseException as error:
        for connection in connections:
            connection.abort()
        if isinstance(error, asyncssh.Error):
            raise ClusterError(
                f"host {target.text!r} starts no process: {error}"
            ) from error
        raise
    return _SshStream(connections, process)


async def _open(target: SshTarget, options: SshOptions, tunnel: Any) -> Any:
    """Open a connection; ClusterError says why there is none."""
    choices: dict[str, Any] = {
        "port": target.port or options.port,
        "username": target.username or options.username,
        "client_keys": options.client_keys,
        "known_hosts": options.known_hosts,
        "tunnel": tunnel,
    }
    choices = {name: value for name, value in choices.items() if value is not None}
    where = f"host {target.text!r}"
    try:
        connection = await asyncssh.connect(
            target.host,
            **choices,
            connect_timeout=options.connect_timeout_s,
            login_timeout=options.connect_timeout_s,
            keepalive_interval=_KEEPALIVE_S,
        )
    except asyncssh.HostKeyNotVerifiable as error:
        raise ClusterError(
            f"the key of {where} is not in known_hosts, or is another: {error}; connect"
            " once by `ssh`, or give SshOptions(known_hosts=...)"
        ) from error
    except asyncssh.PermissionDenied as error:
        raise ClusterError(
            f"{where} accepts no key that was offered: {error}; give"
            " SshOptions(client_keys=..., username=...), or add the public key to the"
            " authorized_keys there"
        ) from error
    except (asyncssh.KeyImportError, FileNotFoundError) as error:
        raise ClusterError(f"a key for {where} cannot be read: {error}") from error
    except (asyncssh.Error, OSError, TimeoutError) as error:
        raise ClusterError(
            f"{where} cannot be reached by SSH: {str(error) or 'no answer in time'}"
        ) from error
    # A forked child of the program must not hold the connection.
    os.register_at_fork(after_in_child=partial(_leave, weakref.ref(connection)))
    return connection


def _leave(connection: weakref.ref[Any]) -> None:
    ours = connection()
    socket = None if ours is None else ours.get_extra_info("socket")
    if socket is not None and socket.fileno() >= 0:
        os.close(socket.fileno())
