"""A Slurm cluster on this machine: real daemons, started and ended by hand.

Every node is a network namespace of its own, with its own host name and /etc/hosts, and
an address on one bridge: so workers on two nodes are on two hosts.  The files are
shared, as a home directory on a cluster is.  There is no systemd, and nothing outside
the cluster's own directory is changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tests.clusters.hanging import HANGS_S
from tests.ports import free_port

PROGRAMS: Final = (
    *("munged", "slurmctld", "slurmd", "srun"),
    *("ip", "nsenter", "setpriv", "unshare"),
)
_DIES_WITH_US: Final = ("setpriv", "--pdeathsig", "KILL")
_IP: Final = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin") or "ip"
POLL_S: Final = 0.1

_CONF: Final = """\
ClusterName=asyncrpc
SlurmctldHost={controller}({gateway})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={top}/munge/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/spool/%n
SlurmctldPidFile={top}/run/slurmctld.pid
SlurmdPidFile={top}/run/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=30
SlurmdTimeout=5
SchedulerParameters=sched_interval=1
NodeName=DEFAULT CPUs=4 RealMemory=4000 State=UNKNOWN
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE: Final = "NodeName={name} NodeHostname={name} NodeAddr={address} Port=17001"


def missing_programs() -> list[str]:
    """Return what this machine lacks; empty: a cluster can be started."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [
        program for program in PROGRAMS if shutil.which(program, path=path) is None
    ]
    return missing if os.geteuid() == 0 else [*missing, "the user root"]


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its name, and where it is."""

    name: str
    namespace: str
    address: str


class SlurmCluster:
    """A controller here, and nodes in namespaces; a context."""

    def __init__(self, top: Path, nodes: int = 3) -> None:
        self.top = top  # directory of its files
        mark = os.getpid()
        self._bridge = f"slb{mark}"
        self._net = f"10.{100 + mark // 256 % 100}.{mark % 256}"
        self.gateway = f"{self._net}.1"
        # By number, from 0.
        self.nodes = [
            Node(f"node{number}", f"slurm{mark}-{number}", f"{self._net}.{10 + number}")
            for number in range(1, nodes + 1)
        ]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        # For `srun` and the others.
        self.environ = {
            **{name: text for name, text in os.environ.items() if not _is_told(name)},
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
            "SLURM_CONF": str(top / "slurm.conf"),
        }

    # --- its life --------------------------------------------------------------------

    def __enter__(self) -> Self:
        end_left_over()
        try:
            self._write_files()
            self._make_networks()
            munge = self.top / "munge"
            files = [
                f"--{name}={munge / file}"
                for name, file in (
                    ("key-file", "key"),
                    ("socket", "socket"),
                    ("pid-file", "pid"),
                    ("log-file", "log"),
                    ("seed-file", "seed"),
                )
            ]
            self._start("munged", ["munged", "--foreground", "--force", *files])
            self.wait_for((munge / "socket").exists, "munged listens")
            self._start("slurmctld", ["slurmctld", "-D"])
            for node in self.nodes:
                self.start_node(node)
            self.wait_idle()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all daemons, what they have started, and the networks."""
        if "slurmctld" in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run("scancel", "--partition=main", "--signal=KILL", check=False)
        for node in self.nodes:
            self.kill_processes(node)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for node in self.nodes:
            _end_namespace(node.namespace)
        _ip("link", "del", self._bridge, check=False)

    def _write_files(self) -> None:
        for name in ("munge", "state", "spool", "run", "log"):
            (self.top / name).mkdir(parents=True, exist_ok=True)
        self.top.chmod(0o755)  # munge's socket is for everybody
        for node in self.nodes:
            (self.top / "spool" / node.name).mkdir(exist_ok=True)
        key = self.top / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(64))
        controller = socket.gethostname()
        lines = [f"127.0.0.1 localhost\n{self.gateway} {controller}\n"]
        lines += [f"{node.address} {node.name}\n" for node in self.nodes]
        (self.top / "hosts").write_text("".join(lines))
        nodes = [
            _NODE.format(name=node.name, address=node.address) for node in self.nodes
        ]
        text = _CONF.format(
            controller=controller,
            gateway=self.gateway,
            top=self.top,
            port=free_port(),
            nodes="\n".join(nodes),
        )
        (self.top / "slurm.conf").write_text(text)

    def _make_networks(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for node in self.nodes:
            here, there = f"{node.namespace}a", f"{node.namespace}b"
            _ip("netns", "add", node.namespace)
            _ip("link", "add", here, "type", "veth", "peer", "name", there)
            _ip("link", "set", here, "master", self._bridge, "up")
            _ip("link", "set", there, "netns", node.namespace, "name", "eth0")
            for words in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{node.address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
            ):
                _ip("-n", node.namespace, *words)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.top / "log" / name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [*_DIES_WITH_US, *command],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.top,
                start_new_session=True,
            )

    def start_node(self, node: Node) -> None:
        """Start the daemon of a node, on a host of its own."""
        script = (
            f"hostname {node.name} && mount --bind {self.top / 'hosts'} /etc/hosts"
            f" && exec slurmd -D -N {node.name}"
        )
        # Not `ip netns exec`: its own /sys has no control groups, which slurmd wants.
        command = ["nsenter", f"--net=/run/netns/{node.namespace}"]
        command += ["unshare", "--uts", "--mount", "sh", "-c", script]
        self._start(node.name, command)

    def cut_off(self, node: Node) -> None:
        """Let a node lose its power: it answers nothing more, not even that it ends."""
        _ip("-n", node.namespace, "link", "set", "eth0", "down")
        self.kill_processes(node)

    def kill_processes(self, node: Node) -> None:
        """Kill everything that runs on a node, its daemon as well."""
        _kill_in(node.namespace)

    # --- what tests do with it -------------------------------------------------------

    def run(self, *command: str, check: bool = True) -> str:
        """Run one of Slurm's commands; return what it prints."""
        done = subprocess.run(
            command,
            env=self.environ,
            capture_output=True,
            encoding="utf-8",
            timeout=HANGS_S,
            check=False,
        )
        if check:
            assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        lines = self.run("sinfo", "-N", "-h", "-o", "%N %T", check=False).split("\n")
        return dict(line.split() for line in lines if line)

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller knows of a job."""
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def submit(self, script: Path, *options: str) -> str:
        """Submit a batch script; return the job's number."""
        return self.run("sbatch", "--parsable", *options, str(script)).strip()

    def wait_state(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states; return what is known of it."""
        self.wait_for(
            lambda: self.job(job)["JobState"] in states, f"job {job} in {states}"
        )
        return self.job(job)

    def start_again(self, job: str) -> None:
        """Let a requeued job begin at once: Slurm makes it wait for two minutes."""
        self.wait_state(job, "PENDING")
        # Its nodes refuse what was signed in the second in which its last life ended.
        over_s = int(time.time()) + 2
        self.wait_for(lambda: time.time() > over_s, "another second")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def end_jobs(self) -> None:
        """Cancel what is left, and wait until it is gone."""
        self.run("scancel", "--partition=main", "--signal=KILL", check=False)
        self.run("scancel", "--partition=main", check=False)
        self.wait_for(lambda: not self.run("squeue", "-h"), "no job is left")

    def repair(self) -> None:
        """Bring all nodes back."""
        for node in self.nodes:
            if self._daemons[node.name].poll() is not None:
                _ip("-n", node.namespace, "link", "set", "eth0", "up")
                self.start_node(node)
            if "down" in self.states()[node.name]:
                self.run("scontrol", "update", f"NodeName={node.name}", "State=RESUME")

    def wait_idle(self) -> None:
        self.wait_for(lambda: set(self.states().values()) == {"idle"}, "all idle")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; on a hang, show the logs."""
        end_s = time.monotonic() + HANGS_S
        while not condition():
            if time.monotonic() > end_s:
                raise AssertionError(f"not within {HANGS_S} s: {what}\n{self.logs()}")
            time.sleep(POLL_S)

    def logs(self) -> str:
        """Return the ends of all logs."""
        paths = sorted((self.top / "log").iterdir())
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-2000:]}" for path in paths
        )


@contextlib.contextmanager
def running_cluster(top: Path, nodes: int = 3) -> Iterator[SlurmCluster]:
    with SlurmCluster(top, nodes) as cluster:
        yield cluster


def end_left_over() -> None:
    """End the nodes of runs that were killed; their other daemons died with them."""
    for line in _ip("netns", "list").splitlines():
        match = re.match(r"slurm(\d+)-\d+\b", line)
        if match and not Path(f"/proc/{match[1]}").exists():
            _end_namespace(match[0])
            _ip("link", "del", f"slb{match[1]}", check=False)


def _end_namespace(namespace: str) -> None:
    """Let no process be left in a namespace, and remove it."""
    while _kill_in(namespace):  # what is killed may have started others meanwhile
        time.sleep(POLL_S)
    _ip("netns", "del", namespace, check=False)


def _kill_in(namespace: str) -> list[int]:
    listing = _ip("netns", "pids", namespace, check=False)
    pids = [int(pid) for pid in listing.split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def _is_told(name: str) -> bool:
    """Return whether a variable is of an outer launcher, or of another Slurm."""
    return name.startswith(("SLURM", "ASYNCRPC_", "PMI", "OMPI")) or name in {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(
        [_IP, *words], capture_output=True, encoding="utf-8", check=False
    )
    if check:
        assert done.returncode == 0, (words, done.stderr)
    return done.stdout
