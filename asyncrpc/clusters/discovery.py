"""How `asyncrpc status`, `why`, `top` and `dashboard` find a cluster of this user.

A cluster has an entry in the run directory, as a run of `asyncrpc run` has: a note of
the program's own worker and of each worker of this host, and the secret, mode 0600.
It is removed when the cluster ends; that of a program which was killed is swept away.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import AsyncExitStack

from asyncrpc.api import Worker
from asyncrpc.clusters.threads import in_thread
from asyncrpc.core.host.run_places import make_place, places_here
from asyncrpc.core.loop.clock import NS_PER_S, wall_ns
from asyncrpc.errors import UsageError
from asyncrpc.tools.inspection.run_entry import RunEntry, record_of
from asyncrpc.tools.inspection.run_note import RunNoteFile

logger = logging.getLogger("asyncrpc")


async def find_by_commands(
    stack: AsyncExitStack, worker: Worker, count: int, secret: bytes
) -> str:
    """Make the entry of a cluster; return its path, empty if that is impossible.

    Args:
        stack: removes it.
        worker: of the program.
        count: how many workers the cluster starts with.
    """
    entry = await in_thread(_enter_run, worker, count, secret)
    if entry is None:
        return ""
    stack.push_async_callback(in_thread, entry.remove)
    return str(entry.path)


def _enter_run(worker: Worker, count: int, secret: bytes) -> RunEntry | None:
    try:
        command = sys.argv if any(sys.argv) else [worker.name]
        record = record_of(
            command, nprocs=count, began_s=wall_ns() / NS_PER_S, secret_file=""
        )
        entry = RunEntry(make_place(places_here(os.environ)), record, secret.decode())
    except (OSError, UsageError, UnicodeError) as error:
        logger.debug("`asyncrpc status` will not find this cluster: %s", error)
        return None
    RunNoteFile(worker, entry.path).write(worker.addresses)
    return entry
