"""Which host this process is on, as far as a connection is concerned."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final


def _host_id() -> str:
    """Return what two workers share if Unix sockets and loopback reach one another."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        net, mount = (
            Path(f"/proc/self/ns/{kind}").readlink() for kind in ("net", "mnt")
        )
    except OSError:  # no Linux
        return platform.node()
    return f"{boot}/{net}/{mount}"


def _launcher_pid() -> int | None:
    """Return the process that started those of this host, as MPICH's launcher does.

    Each is the leader of a session, and all leaders are children of the launcher,
    whatever shells are between a leader and this process.
    """
    try:
        status = Path(f"/proc/{os.getsid(0)}/stat").read_text()
    except OSError:  # no Linux
        return None
    # The name of the program, in parentheses, may have spaces and parentheses itself.
    return int(status.rpartition(")")[2].split()[1])


# Found at import: to read a file later could block an event loop.
HOST_ID: Final = _host_id()
LAUNCHER_PID: Final = _launcher_pid()
