"""`Cluster.slurm`: host servers on the nodes of a Slurm job, each behind an `srun`.

Inside a job its nodes are used.  Outside, `salloc` asks for nodes and runs a shell here
that tells which they are, and then waits for the end of its input: so the job ends with
the program, however that ends.

Source: the manual pages of salloc and srun, Slurm 22.05.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from asyncrpc.clusters.hosts import WorkerOutput
from asyncrpc.clusters.remote.boot import settings_for
from asyncrpc.clusters.remote.command import CommandStream, open_command
from asyncrpc.clusters.remote.host import RemoteHost, RemotePlace
from asyncrpc.clusters.remote.options import SlurmOptions
from asyncrpc.clusters.settings import NOT_KEPT_BY_SLURM
from asyncrpc.clusters.threads import in_thread
from asyncrpc.core.arguments import check_kind
from asyncrpc.core.environment.slurm import expand_hosts
from asyncrpc.errors import ClusterError, UsageError

# Says which job and nodes these are, and waits for the end of its input.
_TELL: Final = 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat >/dev/null'
_LINE_MAX: Final = 1 << 16
_END_S: Final = 10.0


class SlurmGround:
    """The nodes of a job."""

    is_here: Final = False
    waits_for: Final = "waiting for nodes of Slurm"

    not_kept: str = NOT_KEPT_BY_SLURM
    start_timeout_s: float = 60.0

    def __init__(self, nodes: int, options: SlurmOptions | None) -> None:
        """Ask for nodes; UsageError: the options are none."""
        kinds = (SlurmOptions, type(None))
        check_kind("slurm", options, kinds, "a SlurmOptions or None")
        self._nodes, self._options = nodes, options or SlurmOptions()
        self._allocation: CommandStream | None = None

    async def open(self, output: WorkerOutput) -> list[RemoteHost]:
        """Return the nodes; ClusterError: Slurm gives none."""
        job, nodes = await self._job()
        options = self._options
        settings = await in_thread(
            settings_for, options.python, options.directory, options.environment
        )
        hosts = []
        for node in nodes:
            connect = partial(open_command, _srun(job, node, settings.words))
            place = RemotePlace(node, connect, settings, self.start_timeout_s)
            hosts.append(RemoteHost(place, output))
        return hosts

    async def _job(self) -> tuple[str, Sequence[str]]:
        """Return the number of the job and its nodes."""
        job = os.environ.get("SLURM_JOB_ID")
        if job is None:
            job, _, nodes = (await self._allocate()).partition(" ")
            return job, expand_hosts(nodes.strip())
        nodes = os.environ.get("SLURM_JOB_NODELIST", "")
        names = expand_hosts(nodes)
        if len(names) < self._nodes:
            raise UsageError(
                f"this job {job} has {len(names)} nodes ({nodes}), fewer than nodes="
                f"{self._nodes}: ask sbatch or salloc for more"
            )
        return job, names[: self._nodes]

    async def _allocate(self) -> str:
        """Wait for a job; return its number and nodes."""
        options = self._options
        words = ["salloc", f"--nodes={self._nodes}", "--no-bell", *options.arguments]
        stream = await open_command([*words, "sh", "-c", _TELL])
        self._allocation = stream
        line = b""
        try:
            async with asyncio.timeout(options.queue_timeout_s):
                while b"\n" not in line and len(line) < _LINE_MAX:
                    received = await stream.read(_LINE_MAX)
                    if not received:
                        said = (await stream.read_errors(_LINE_MAX)).decode().strip()
                        raise ClusterError(
                            f"Slurm gives no {self._nodes} nodes: {said}; check"
                            " SlurmOptions(arguments=...)"
                        )
                    line += received
        except TimeoutError:
            await self.close()
            raise ClusterError(
                f"Slurm's queue gave no {self._nodes} nodes within"
                f" {options.queue_timeout_s:g} s; the request has been withdrawn."
                " `squeue` and `sinfo` say why; or give a longer"
                " SlurmOptions(queue_timeout_s=...)"
            ) from None
        return line.decode().strip()

    async def close(self) -> None:
        """End the job, if it is ours."""
        stream = self._allocation
        if stream is None:
            return
        stream.end_input()
        stream.terminate()  # while it waits in the queue, it does not read
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await stream.wait_ended()
        stream.abort()


def _srun(job: str, node: str, words: Sequence[str]) -> list[str]:
    return [
        *("srun", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1"),
        "--overlap",  # with other steps of the job
        "--unbuffered",  # frames are no lines
        "--mem=0",  # all that the job has there
        *("--cpu-bind=none", "--quiet", "--kill-on-bad-exit=0"),
        *words,
    ]
