"""Programs in a mount namespace of their own, where file systems are full.

$ unshare --mount python -m tests.integration.core.short_of_space CASE DIRECTORY
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import torch

import asyncrpc
from asyncrpc.errors import TransportError
from tests.integration.core import remote
from tests.integration.core.groups import alone, processes

Run = Callable[[Coroutine[Any, Any, str]], str]


def mount(where: Path, options: str) -> None:
    command = ["/bin/mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)]
    subprocess.run(command, check=True)


async def starts() -> str:
    """Start a worker, and call it; return what became of that."""
    try:
        async with alone("a") as worker:
            return f"ran {await worker.peer('a').call(remote.add, 1)}"
    except TransportError as error:
        return str(error)


def no_inode(directory: Path, run: Run) -> Iterator[str]:
    """A directory for temporary files takes some files of a worker, and no more."""
    os.environ["TMPDIR"] = str(directory)
    for free in range(1, 5):
        mount(directory, "nr_inodes=8")
        taken = [directory / f"{number}" for number in range(7 - free)]
        for path in taken:
            path.touch()
        tempfile.tempdir = None
        yield f"{run(starts())} {len(list(directory.iterdir())) - len(taken)}"
        for path in taken:
            path.unlink()
        yield f"again {run(starts())} {len(list(directory.iterdir()))}"
        subprocess.run(["/bin/umount", str(directory)], check=True)


def nowhere(directory: Path, run: Run) -> Iterator[str]:
    """No directory for temporary files can be written."""
    mounts = [Path("/tmp"), Path("/var/tmp"), Path("/mnt")]  # noqa: S108
    for where in mounts:
        mount(where, "ro")
    os.chdir("/mnt")
    os.environ["TMPDIR"] = str(directory)
    yield run(starts())
    mount(mounts[0], "size=1m")
    yield f"again {run(starts())}"


def shared_memory(_: Path, run: Run) -> Iterator[str]:
    """Where shared memory has 64 KiB: what asyncrpc shares does not lie there."""
    mount(Path("/dev/shm"), "size=64k")  # noqa: S108  (a mount)

    async def share() -> str:
        async with processes("b", transport="uds") as own:
            large = torch.ones(8 << 20)
            sent = await own.peer("b").call(remote.add, large)
            shared = await own.peer("b").call(remote.add, asyncrpc.share(large))
            return f"{sent.sum().item()} {shared.sum().item()}"

    yield run(share())


def log(_: Path, run: Run) -> Iterator[str]:
    """The file of the log is full; handlers of logging say so, and calls go on."""

    async def call() -> str:
        async with processes("b") as own:
            logging.getLogger("asyncrpc").warning("a line")
            return str(await own.peer("b").call(remote.add, 1))

    with contextlib.suppress(OSError), Path("/dev/full").open("w") as full:
        logging.basicConfig(level=logging.DEBUG, stream=full)
        yield run(call())


CASES: dict[str, Callable[[Path, Run], Iterator[str]]] = {
    function.__name__: function for function in (no_inode, nowhere, shared_memory, log)
}

if __name__ == "__main__":
    case, place, loop = sys.argv[1:]
    run = asyncrpc.run if loop == "uvloop" else asyncio.run
    for line in CASES[case](Path(place), run):
        sys.stdout.write(f"{line}\n")
