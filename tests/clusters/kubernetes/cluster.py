"""A cluster without Kubernetes: pods are namespaces, with what a manifest gives them.

A pod has namespaces of its own for the network, mounts, processes and the host's name:
its own address, /etc/hosts, /etc/resolv.conf, /tmp, /dev/shm of the size that the
manifest says, and the secret as a file.  Its program is process 1, so signals reach it
as in a container.  A name server answers for all; the test plays the kubelet and the
controllers, which start pods, publish names, probe, and end pods with their grace.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.clusters.kubernetes.controllers import DOMAIN, PodPlan
from tests.clusters.network.hosts import GENEROUS_S, ROOT, Host, Network

SECRET: Final = "a secret of these pods"
_SERVER: Final = "10.7.0.2"
# What the kubelet does before it starts the program; $1: the pod's folder, $2: its
# name, $3: the size of /dev/shm, $4: where the secret is mounted.
_ENTER: Final = """
set -e
hostname "$2"
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/resolv.conf" /etc/resolv.conf
mount -t tmpfs tmpfs /run
mkdir -p "$4"
install -m 400 "$1/secret" "$4/secret"
mount -t tmpfs -o "size=$3" tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
shift 4
echo __started
exec "$@"
"""
_PROBE: Final = """
import sys, urllib.error, urllib.request
try:
    answer = urllib.request.urlopen(sys.argv[1], timeout=5)
except urllib.error.HTTPError as error:
    answer = error
except OSError as error:
    sys.exit(f"0 {error}")
print(answer.status, answer.read().decode())
"""
_KNOCK: Final = """
import socket, sys, time
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).close()
        break
    except OSError:
        time.sleep(0.1)
"""


class Output:
    """What a program prints, line by line, read in a thread of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._read, args=(process,))
        self._thread.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def hears(self, beginning: str, *, since: int = 0) -> str:
        """Wait for a line; return what follows its beginning."""

        def matching() -> str | None:
            matches = (
                line for line in self._lines[since:] if line.startswith(beginning)
            )
            return next(matches, None)

        with self._changed:
            self._changed.wait_for(
                lambda: matching() is not None or self._is_over, GENEROUS_S
            )
            heard = matching()
        assert heard is not None, f"{beginning!r} never came: {self.text}"
        return heard.removeprefix(beginning).strip()

    @property
    def count(self) -> int:
        return len(self._lines)

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def join(self) -> None:
        self._thread.join(GENEROUS_S)


class Pod:
    """One life of a pod."""

    def __init__(
        self, plan: PodPlan, host: Host, address: str, process: subprocess.Popen[str]
    ) -> None:
        self.plan = plan
        self.host = host
        self.address = address
        self.output = Output(process)
        self._process = process
        self.output.hears("__started")
        self._first = _child(process.pid)

    def hears(self, beginning: str, *, since: int = 0) -> str:
        """Wait for a line of the program; return what follows its beginning."""
        return self.output.hears(beginning, since=since)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program, which is process 1 of the pod."""
        os.kill(self._first, number)

    def wait(self, timeout_s: float = GENEROUS_S) -> int:
        """Wait for the end; return the exit code."""
        code = self._process.wait(timeout_s)
        self.output.join()
        return code

    def terminate(self) -> int | None:
        """End the pod as the kubelet does."""
        self.send(signal.SIGTERM)
        try:
            return self.wait(self.plan.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """End the pod at once, as when its node is lost."""
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """Leave nothing behind."""
        if self._process.poll() is None:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


class SimulatedCluster:
    """Pods, a name server, and the addresses that are left."""

    def __init__(self, net: Network, folder: Path) -> None:
        self._net = net
        self._folder = folder
        self._records = folder / "records"
        self._records.write_text("")
        self._published: dict[str, str] = {}
        self._groups: dict[str, list[str]] = {}
        self._numbers = iter(range(10, 250))
        self._node = net.host("node", pods=_SERVER)
        self.names = self._serve_names()
        self._pods: list[Pod] = []

    def _serve_names(self) -> Output:
        script = Path(__file__).with_name("names.py")
        command = ["nsenter", "-t", str(self._node.pid), "-n", sys.executable, "-u"]
        process = subprocess.Popen(
            [*command, str(script), _SERVER, str(self._records)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._server = process
        output = Output(process)
        output.hears("ready")
        return output

    @property
    def node_address(self) -> str:
        return _SERVER

    def close(self) -> None:
        """End all pods and the name server."""
        for pod in self._pods:
            pod.close()
        self._server.kill()
        self._server.wait(GENEROUS_S)
        self.names.join()
        assert self._server.stdout is not None
        self._server.stdout.close()

    # --- what the controllers do ----------------------------------------------------

    def start(self, plan: PodPlan, *, publish: bool = True) -> Pod:
        """Start a pod at an address that no pod has had.

        Args:
            publish: whether its name is published at once, if the manifest says so.
        """
        number = next(self._numbers)
        address = f"10.7.0.{number}"
        host = self._net.host(f"{plan.hostname}-{number}", pods=address)
        process = self._run(plan, host, address)
        pod = Pod(plan, host, address, process)
        self._pods.append(pod)
        if publish and plan.publishes_unready:
            self.publish(pod)
        return pod

    def _run(self, plan: PodPlan, host: Host, address: str) -> subprocess.Popen[str]:
        folder = self._folder / f"pod-{host.name}"
        folder.mkdir()
        own = f"{address} {plan.full_name} {plan.hostname}\n"
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{own}")
        (folder / "secret").write_text(SECRET)
        search = f"{DOMAIN} svc.cluster.local cluster.local"
        lines = [f"nameserver {_SERVER}", f"search {search}", "options ndots:5"]
        (folder / "resolv.conf").write_text("\n".join(lines) + "\n")
        volumes = {volume["name"]: volume for volume in plan.spec["volumes"]}
        size = volumes["shared-memory"]["emptyDir"]["sizeLimit"].removesuffix("i")
        mounts = {m["name"]: m["mountPath"] for m in plan.container["volumeMounts"]}
        command = ["nsenter", "-t", str(host.pid), "-n"]
        command += ["unshare", "-m", "-u", "-i", "-p", "-f", "--kill-child"]
        command += ["--mount-proc", "sh", "-c", _ENTER, "sh", str(folder)]
        command += [plan.hostname, size, mounts["secret"], *plan.container["command"]]
        inherited = {name: os.environ[name] for name in ("PATH",)}
        test = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=inherited | test | dict(plan.variables),
        )

    def publish(self, pod: Pod) -> None:
        """Let the DNS lead to a pod, and to no former life of it."""
        self._published[pod.plan.full_name] = pod.address
        self._write()

    def publish_group(self, name: str, *pods: Pod) -> None:
        """Let a name lead to several pods, as that of a headless Service does."""
        self._groups[f"{name}.{DOMAIN}"] = [pod.address for pod in pods]
        self._write()

    def listens(self, pod: Pod, port: int) -> None:
        """Wait until a process of a pod listens at a port."""
        command = ["nsenter", "-t", str(self._node.pid), "-n", sys.executable, "-c"]
        subprocess.run([*command, _KNOCK, pod.address, str(port)], check=True)

    def withdraw(self, pod: Pod) -> None:
        """Take a name out of the DNS."""
        self._published.pop(pod.plan.full_name, None)
        self._write()

    def _write(self) -> None:
        lines = [f"{name} {address}\n" for name, address in self._published.items()]
        for name, addresses in self._groups.items():
            lines += [f"{name} {address}\n" for address in addresses]
        new = self._records.with_suffix(".new")
        new.write_text("".join(lines))
        new.rename(self._records)

    # --- what the kubelet does ------------------------------------------------------

    def probe(self, pod: Pod, which: str) -> tuple[int, str]:
        """Ask as a probe of the pod's container does; return the status and the text.

        A status of 0 means that nobody answered.
        """
        asked = pod.plan.container[which]["httpGet"]
        (port,) = (
            entry["containerPort"]
            for entry in pod.plan.container["ports"]
            if entry["name"] == asked["port"]
        )
        url = f"http://{pod.address}:{port}{asked['path']}"
        command = ["nsenter", "-t", str(self._node.pid), "-n", sys.executable, "-c"]
        done = subprocess.run(
            [*command, _PROBE, url], capture_output=True, text=True, check=False
        )
        status, _, text = (done.stdout or done.stderr).partition(" ")
        return int(status), text


def _child(parent: int) -> int:
    """Return the process that `unshare` has made."""
    done = subprocess.run(
        ["pgrep", "-P", str(parent)],  # noqa: S607  (the kernel's own list may be empty)
        capture_output=True,
        text=True,
        check=False,
    )
    (child,) = done.stdout.split()
    return int(child)


@contextlib.contextmanager
def simulated_cluster(net: Network, folder: Path) -> Iterator[SimulatedCluster]:
    """Return a cluster that ends with the block."""
    cluster = SimulatedCluster(net, folder)
    try:
        yield cluster
    finally:
        cluster.close()
