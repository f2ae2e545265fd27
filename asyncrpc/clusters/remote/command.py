"""Host servers behind a command of this host, such as `srun`, and their streams."""

from __future__ import annotations

import asyncio
import os
import weakref
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import IO

from asyncrpc.errors import ClusterError


class CommandStream:
    """The streams of a process of this host."""

    def __init__(self, process: Process, stdin: asyncio.StreamWriter) -> None:
        self._process, self._stdin = process, stdin

    async def read(self, size: int) -> bytes:
        """Return up to so many bytes of its output; none: the end."""
        assert self._process.stdout is not None
        return await self._process.stdout.read(size)

    async def read_errors(self, size: int) -> bytes:
        """Return up to so many bytes of its errors; none: the end."""
        assert self._process.stderr is not None
        return await self._process.stderr.read(size)

    async def write(self, data: bytes) -> None:
        """Write to its input; OSError: it is gone."""
        self._stdin.write(data)
        await self._stdin.drain()

    def end_input(self) -> None:
        """End its input."""
        self._stdin.close()

    async def wait_ended(self) -> str:
        """Wait until it has ended; return how."""
        return f"it exited with code {await self._process.wait()}"

    def terminate(self) -> None:
        """Ask it to end by SIGTERM, if it runs."""
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.terminate()

    def abort(self) -> None:
        """Kill it, if it runs."""
        self._stdin.close()
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                self._process.kill()


async def open_command(words: Sequence[str]) -> CommandStream:
    """Start a command; ClusterError: it is not there."""
    reader, writer = os.pipe()
    pipe = os.fdopen(writer, "wb", buffering=0)
    try:
        # Its own session: Ctrl-C at a terminal is for the program alone.
        process = await asyncio.create_subprocess_exec(
            *words, stdin=reader, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
    except OSError as error:
        pipe.close()
        raise ClusterError(f"{words[0]!r} cannot be started: {error}") from error
    finally:
        os.close(reader)
    # A forked child of the program must not keep the server alive.
    os.register_at_fork(after_in_child=partial(_leave, weakref.ref(pipe)))
    loop = asyncio.get_running_loop()
    reading = asyncio.StreamReader()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(reading), pipe
    )
    stdin = asyncio.StreamWriter(transport, protocol, reading, loop)
    return CommandStream(process, stdin)


def _leave(pipe: weakref.ref[IO[bytes]]) -> None:
    ours = pipe()
    if ours is not None and not ours.closed:
        os.close(ours.fileno())
