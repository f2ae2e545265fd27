"""The grounds that a cluster may stand on, by name: one suite runs on each.

A test's process and the programs that it starts make the same cluster by the same name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncrpc import Cluster, SshOptions
from asyncrpc.clusters.hosts import WorkerOutput
from asyncrpc.clusters.remote.boot import ServerSettings, path_of_program
from asyncrpc.clusters.remote.command import open_command
from asyncrpc.clusters.remote.host import RemoteHost, RemotePlace

SSHD: Final = "SSHD_OF_TESTS"  # a variable: JSON with what tests/clusters/ssh started
BEGINS_S: Final = 300.0  # on a busy machine what takes seconds takes minutes


class CommandGround:
    """Hosts that are host servers on this host, behind pipes."""

    is_here: Final = False

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.hosts: list[RemoteHost] = []

    async def open(self, output: WorkerOutput) -> list[RemoteHost]:
        settings = ServerSettings(
            python=sys.executable,
            directory=os.getcwd(),  # noqa: PTH109  (a text, as it travels)
            path=path_of_program(),
            environment={"OF_THE_HOST": "1"},
        )
        self.hosts = [
            RemoteHost(
                RemotePlace(
                    *(name, lambda: open_command(settings.words), settings, ""),
                    BEGINS_S,
                ),
                output,
            )
            for name in self.names
        ]
        return self.hosts

    async def close(self) -> None:
        """There is nothing to give back."""


def here(count: int, **settings: Any) -> Cluster:
    return Cluster(count, **settings)


def behind_command(count: int, **settings: Any) -> Cluster:
    cluster = Cluster(count, **settings)
    cluster._ground = CommandGround(["one", "other"][: max(1, count)])
    return cluster


def by_ssh(count: int, **settings: Any) -> Cluster:
    sshd = json.loads(os.environ[SSHD])
    ssh = SshOptions(client_keys=[sshd["key"]], known_hosts=sshd["known_hosts"])
    if count % 2:
        return Cluster.ssh([sshd["host"]], count, ssh=ssh, **settings)
    # Twice the same: two connections.
    return Cluster.ssh([sshd["host"]] * 2, count // 2, ssh=ssh, **settings)


GROUNDS: Final[Mapping[str, Callable[..., Cluster]]] = {
    "here": here,
    "command": behind_command,
    "ssh": by_ssh,
}
