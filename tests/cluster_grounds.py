"""The grounds that a cluster may stand on, by name: one suite runs on each.

A test's process and the programs that it starts make the same cluster by the same name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from asyncrpc import Cluster, SshOptions
from asyncrpc.clusters.hosts import WorkerOutput
from asyncrpc.clusters.remote.boot import settings_for
from asyncrpc.clusters.remote.command import open_command
from asyncrpc.clusters.remote.host import RemoteHost, RemotePlace
from asyncrpc.clusters.threads import in_thread

SSHD: Final = "SSHD_OF_TESTS"  # a variable: JSON with what tests/clusters/ssh started
BEGINS_S: Final = 300.0  # on a busy machine what takes seconds takes minutes


class CommandGround:
    """Hosts that are host servers on this host, behind pipes."""

    is_here: Final = False
    waits_for: Final = "starting hosts"
    not_kept: str = ""
    start_timeout_s: float = 60.0

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.hosts: list[RemoteHost] = []

    async def open(self, output: WorkerOutput) -> list[RemoteHost]:
        settings = await in_thread(settings_for, None, None, {"OF_THE_HOST": "1"})
        start = partial(open_command, settings.words)
        places = [RemotePlace(name, start, settings, BEGINS_S) for name in self.names]
        self.hosts = [RemoteHost(place, output) for place in places]
        return self.hosts

    async def close(self) -> None:
        """There is nothing to give back."""


def here(count: int, **settings: Any) -> Cluster:
    return Cluster(count, **settings)


def behind_command(count: int, **settings: Any) -> Cluster:
    cluster = Cluster(count, **settings)
    ground = CommandGround(["one", "other"][: max(1, count)])
    cluster._plan.ground = ground  # noqa: SLF001  (not public)
    return cluster


def by_ssh(count: int, **settings: Any) -> Cluster:
    sshd = json.loads(os.environ[SSHD])
    ssh = SshOptions(client_keys=[sshd["key"]], known_hosts=sshd["known_hosts"])
    if count % 2:
        return Cluster.ssh([sshd["host"]], count, ssh=ssh, **settings)
    # Twice the same: two connections.
    return Cluster.ssh([sshd["host"]] * 2, count // 2, ssh=ssh, **settings)


def by_slurm(count: int, **settings: Any) -> Cluster:
    nodes = 2 - count % 2
    return Cluster.slurm(nodes, count // nodes, **settings)


GROUNDS: Final[Mapping[str, Callable[..., Cluster]]] = {
    "here": here,
    "command": behind_command,
    "ssh": by_ssh,
    "slurm": by_slurm,
}
