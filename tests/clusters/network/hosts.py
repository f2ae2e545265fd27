"""Hosts made of namespaces: each with a network, a hosts file and programs of its own.

A host is a network namespace, and one of mounts for its `/etc/hosts`.  They are joined
by bridges, which have a namespace to themselves: nothing outside is touched.  It needs
root and `ip`; where those are missing, `why_not` says so and the tests are skipped.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).parents[3]
GENEROUS_S: Final = (
    300.0  # a program that imports torch beside busy ones takes a minute
)
SECRET: Final = "a secret of these hosts"
# A program gets its part of the work by its name, and tells what came of it by lines.
ENTER: Final = 'mount --bind "$0" /etc/hosts && exec "$@"'


@functools.cache
def why_not() -> str:
    """Return why there can be no namespaces here; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [
        program for program in ("ip", "unshare", "nsenter") if not shutil.which(program)
    ]
    if missing:
        return f"this host has no {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "-n", "-m", "ip", "link", "set", "lo", "up"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip()


def run(*command: str) -> None:
    """Run a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{' '.join(command)}: {done.stderr}"


@dataclass
class Program:
    """A program that runs on a host; it tells what it does line by line."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    unheard: list[str] = field(default_factory=list)

    def hears(self, beginning: str) -> str:
        """Wait for a line that was not heard before; return what follows its beginning.

        Lines of another kind that come before it may be heard later.
        """
        for line in self.unheard:
            if line.startswith(beginning):
                self.unheard.remove(line)
                return line.removeprefix(beginning).strip()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()
            self.unheard.append(line)
        raise AssertionError(f"{beginning!r} never came: {self.output}")

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def ends(self) -> str:
        """Wait for its end, which must be a good one; return what it said."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout
        code = self.process.wait(GENEROUS_S)
        assert code == 0, self.output
        return self.output

    def kill(self) -> None:
        """End it by SIGKILL."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(GENEROUS_S)


@dataclass
class Host:
    name: str
    pid: int  # of the process that holds its namespaces
    hosts: Path
    folder: Path
    stack: ExitStack

    def run(self, *command: str) -> None:
        run("nsenter", "-t", str(self.pid), "-n", *command)

    def names(self, **addresses: str) -> None:
        """Write its hosts file anew; a name may have several addresses."""
        lines = ["127.0.0.1 localhost"]
        for name, several in addresses.items():
            lines += [f"{address} {name}" for address in several.split()]
        self.hosts.write_text("\n".join(lines) + "\n")

    def start(self, source: str, *arguments: str, **environ: str) -> Program:
        """Start a program; it ends with the test at the latest."""
        command = ["nsenter", "-t", str(self.pid), "-n", "unshare", "-m"]
        command += ["sh", "-c", ENTER, str(self.hosts)]
        command += [sys.executable, "-u", "-c", source, *arguments]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ASYNC")}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=inherited
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            | {"ASYNCRPC_SECRET": SECRET}
            | environ,
        )
        self.stack.callback(_end, process)
        return Program(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait(GENEROUS_S)


class Network:
    """Hosts, and the bridges between them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._links = 0
        self._hosts: dict[str, Host] = {}
        self._bridges: set[str] = set()

    def __enter__(self) -> Self:
        """Begin with the namespace of the bridges."""
        self._middle = self._hold()
        return self

    def __exit__(self, *_: object) -> None:
        """End all programs, and with them the namespaces."""
        self._stack.close()

    def _hold(self) -> int:
        """Make namespaces; return the process that holds them."""
        ready = "ip link set lo up; echo; exec sleep 1000000"
        process = subprocess.Popen(
            ["unshare", "-n", "-m", "sh", "-c", ready],  # noqa: S607
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(_end, process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    def host(self, name: str, **addresses: str) -> Host:
        """Make a host with an interface for each bridge, such as `a="10.0.0.1"`."""
        hosts = self._folder / f"hosts-{name}"
        host = Host(name, self._hold(), hosts, self._folder, self._stack)
        host.names()
        for bridge, address in addresses.items():
            self._wire(host, bridge, address)
        self._hosts[name] = host
        return host

    def _wire(self, host: Host, bridge: str, address: str) -> None:
        middle = ("nsenter", "-t", str(self._middle), "-n", "ip")
        if bridge not in self._bridges:
            self._bridges.add(bridge)
            run(*middle, "link", "add", f"br{bridge}", "type", "bridge")
            run(*middle, "link", "set", f"br{bridge}", "up")
        self._links += 1
        end = f"v{self._links}"
        interface = f"eth{bridge}"
        run(
            *(*middle, "link", "add", end, "type", "veth"),
            *("peer", "name", interface, "netns", str(host.pid)),
        )
        run(*middle, "link", "set", end, "master", f"br{bridge}")
        run(*middle, "link", "set", end, "up")
        host.run("ip", "address", "add", f"{address}/24", "dev", interface)
        host.run("ip", "link", "set", interface, "up")

    def cut(self, bridge: str) -> None:
        """Let nothing pass a bridge any more, and tell nobody."""
        middle = ("nsenter", "-t", str(self._middle), "-n", "ip")
        run(*middle, "link", "set", f"br{bridge}", "down")


@contextmanager
def network(folder: Path) -> Iterator[Network]:
    with Network(folder) as net:
        yield net
