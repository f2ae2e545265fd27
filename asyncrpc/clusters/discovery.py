"""How `asyncrpc status`, `why`, `top` and `dashboard` find a cluster of this user.

A cluster has an entry in the run directory, as a run of `asyncrpc run` has: a note of
the program's own worker and of each worker of this host, and the secret, mode 0600.
It is removed when the cluster ends; that of a program which was killed is swept away.
"""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack

from asyncrpc.api import Worker
from asyncrpc.clusters.threads import in_thread
from asyncrpc.core.host.run_entry import RunEntry, enter_run
from asyncrpc.core.loop.clock import NS_PER_S, wall_ns
from asyncrpc.tools.inspection.run_note import RunNoteFile


async def find_by_commands(
    stack: AsyncExitStack, worker: Worker, count: int, secret: bytes
) -> str:
    """Make the entry of a cluster; return its path, empty if that is impossible.

    Args:
        stack: removes it.
        worker: of the program.
        count: how many workers the cluster starts with.
    """
    entry = await in_thread(_enter, worker, count, secret)
    if entry is None:
        return ""
    stack.push_async_callback(in_thread, entry.remove)
    return str(entry.path)


def _enter(worker: Worker, count: int, secret: bytes) -> RunEntry | None:
    command = sys.argv if any(sys.argv) else [worker.name]
    entry = enter_run(
        command,
        nprocs=count,
        began_s=wall_ns() / NS_PER_S,
        secret=os.fsdecode(secret),
    )
    if entry is not None:
        RunNoteFile(worker, entry.path).write(worker.addresses)
    return entry
