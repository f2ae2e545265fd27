"""Ways for a process to stand still until the test lets it go on: by a named pipe."""

from __future__ import annotations

import ctypes
import os

import asyncrpc


def hold_interpreter(path: str) -> None:
    """Hold the interpreter's lock in C code: nothing else of this process runs."""
    os.close(ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY))


async def block_loop(path: str) -> None:
    """Block the event loop; other threads run."""
    os.close(os.open(path, os.O_RDONLY))


def let_go(path: str) -> None:
    """End the one or the other, which has begun."""
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


async def sidecar_pid() -> int:
    """Return the id of the process of this worker's sidecar; 0 if there is none."""
    process = asyncrpc.current_worker().parts.sidecar.process
    return 0 if process is None else process.pid
