"""`asyncrpc doctor`: what `env://` finds here, from where, and what is missing.

What this process can see is gathered first; `diagnose` then decides, from the variables
and these facts alone.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrpc.cli.table import UNCUT, lines_of
from asyncrpc.environment import LaunchPlacement, LaunchValue, read_all, resolve
from asyncrpc.environment.torchrun import BY_HAND
from asyncrpc.environment.values import Field, spoken
from asyncrpc.errors import UsageError
from asyncrpc.runtime.host import LAUNCHER_PID
from asyncrpc.runtime.options import Options
from asyncrpc.transport.interfaces import host_addresses

_MIB: Final = 1 << 20
# Docker and Kubernetes give 64 MiB unless they are asked for more.
SHARED_MEMORY_WANTED_BYTES: Final = 1 << 30
FILES_WANTED: Final = 4096
_FILES_PER_WORKER: Final = 8  # a connection with its lanes, and what is dialed again
_FILES_OF_ITS_OWN: Final = 256
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (the kernel's)
_NOT_READY: Final = 1


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What can be seen of this process and its host.

    Attributes:
        has_secret: whether a secret is set.
        addresses: at which others may reach this host, best first.
        shared_memory_bytes: size of /dev/shm; None where it does not exist.
        files_max: how many files this process may open.
        trouble: what is wrong with the options that the environment sets.
    """

    has_secret: bool
    addresses: tuple[str, ...]
    shared_memory_bytes: int | None
    files_max: int
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        launcher: what has started this process; "" if that is not known.
        outer: the launchers around it.
        values: what was found, or all that was said if that is contradictory.
        problems: for which `env://` fails here.
        warnings: what may go wrong later.
    """

    launcher: str
    outer: tuple[str, ...]
    values: tuple[LaunchValue, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc doctor`."""
    parser.description = (
        "Show which launcher started this process, and its place among the others with "
        "the variable that each value comes from.  Run it under the launcher, as in "
        "`srun asyncrpc doctor`.  The exit code is 0 if a worker could start by env:// "
        "here, else 1."
    )
    parser.set_defaults(act=_doctor)
    parser.add_argument("--json", action="store_true", help="write JSON")


def _doctor(arguments: argparse.Namespace) -> int:
    found = diagnose(os.environ, gather(os.environ), launcher_pid=LAUNCHER_PID)
    print(as_json(found) if arguments.json else as_text(found))
    return _NOT_READY if found.problems else 0


def gather(environ: Mapping[str, str]) -> HostFacts:
    """Look at this process and its host."""
    has_secret, trouble = False, ""
    addresses: tuple[str, ...] = ()
    try:
        options = Options().with_environment(environ)
        has_secret = options.secret is not None
        addresses = tuple(map(str, host_addresses(options.network.interface)))
    except UsageError as error:
        trouble = str(error)
    size = None
    with contextlib.suppress(OSError):
        found = os.statvfs(_SHARED_MEMORY)
        size = found.f_frsize * found.f_blocks
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(has_secret, addresses, size, files_max, trouble)


def diagnose(
    environ: Mapping[str, str], facts: HostFacts, *, launcher_pid: int | None = None
) -> Diagnosis:
    """Decide what is missing, and what may go wrong."""
    problems = [facts.trouble] if facts.trouble else []
    try:
        placement = resolve(environ, launcher_pid=launcher_pid)
    except UsageError as error:
        problems.append(str(error))
        values = tuple(_all_values(environ))
        return Diagnosis("", (), values, tuple(problems), ())
    problems += _missing(placement)
    values = tuple(placement.values[one] for one in Field if one in placement.values)
    warnings = (*_of_network(placement, facts), *_of_limits(placement, facts))
    return Diagnosis(
        placement.launcher, placement.outer, values, tuple(problems), warnings
    )


def _all_values(environ: Mapping[str, str]) -> Iterable[LaunchValue]:
    with contextlib.suppress(UsageError):
        for reading in read_all(environ):
            yield from reading.values


def _missing(placement: LaunchPlacement) -> Iterable[str]:
    rank, size = placement.rank, placement.world_size
    missing = []
    if rank is None:
        missing.append("its rank (RANK)")
    if size is None:
        missing.append("the number of workers (WORLD_SIZE)")
    if placement.host is None:
        missing.append("the host of the meeting point (MASTER_ADDR)")
    if placement.port is None:
        missing.append("the port of the meeting point (MASTER_PORT)")
    if missing:
        yield f"env:// does not find {spoken(missing)} ({placement.advice()})"
    if rank is not None and size is not None and rank >= size:
        yield f"rank {rank} is not in a world of {size} workers"


def _of_network(placement: LaunchPlacement, facts: HostFacts) -> Iterable[str]:
    """Return what keeps workers of other hosts away."""
    if facts.trouble or _is_one_host(placement):
        return
    if not facts.has_secret:
        yield (
            "no secret: workers of other hosts are refused; set ASYNCRPC_SECRET to the "
            "same 32 random bytes everywhere (openssl rand -hex 32), or "
            "ASYNCRPC_SECRET_FILE to a file of mode 600 that holds them, or use TLS"
        )
    if all(map(_is_loopback, facts.addresses)):
        yield (
            "this host has no address but loopback: other hosts cannot reach it; give "
            "it a network interface"
        )


def _of_limits(placement: LaunchPlacement, facts: HostFacts) -> Iterable[str]:
    """Return which limits of this process or host are low."""
    size = facts.shared_memory_bytes
    if size is not None and size < SHARED_MEMORY_WANTED_BYTES:
        yield (
            f"{_SHARED_MEMORY} has {size // _MIB} MiB: large tensors between workers "
            "of a host then pass through sockets; mount a memory volume there (Docker: "
            "--shm-size=1g; Kubernetes: an emptyDir with medium Memory)"
        )
    workers = placement.world_size or 1
    wanted = max(FILES_WANTED, _FILES_OF_ITS_OWN + _FILES_PER_WORKER * workers)
    if facts.files_max < wanted:
        yield (
            f"this process may open {facts.files_max} files: {workers} workers may "
            f"need {wanted}; raise the limit by `ulimit -n {wanted}`"
        )


def _is_one_host(placement: LaunchPlacement) -> bool:
    if placement.host is not None and _is_loopback(placement.host):
        return True
    size = placement.world_size
    return size is None or size in {1, placement.local_world_size}


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def as_json(found: Diagnosis) -> str:
    """Return a diagnosis for programs."""
    values: list[dict[str, Any]] = [
        {
            "field": one.field.value,
            "value": one.content,
            "origin": one.origin,
            "launcher": one.launcher,
            "derived": one.is_derived,
        }
        for one in found.values
    ]
    record = {
        "launcher": found.launcher,
        "outer": found.outer,
        "values": values,
        "problems": found.problems,
        "warnings": found.warnings,
    }
    return json.dumps(record, indent=2)


def as_text(found: Diagnosis) -> str:
    """Return a diagnosis for people: a table, then what to do."""
    around = f", inside {' and '.join(found.outer)}" if found.outer else ""
    lines = [f"started by {found.launcher}{around}"]
    if found.launcher in {"", BY_HAND}:
        lines = [f"no launcher is known to have started this process{_left(found)}"]
    rows = [
        (
            one.field.value,
            str(one.content),
            f"derived from {one.origin}" if one.is_derived else one.origin,
            one.launcher,
        )
        for one in found.values
    ]
    if rows:
        lines += [
            "",
            *lines_of([("what", "value", "from", "launcher"), *rows], width=UNCUT),
        ]
    for title, texts in (("problem", found.problems), ("warning", found.warnings)):
        lines += ["", *(f"{title}: {text}" for text in texts)] if texts else []
    if not found.problems:
        lines += ["", "a worker can start here by env://"]
    return "\n".join(lines)


def _left(found: Diagnosis) -> str:
    launchers = sorted({one.launcher for one in found.values} - {BY_HAND})
    if found.launcher or not launchers:
        return ""
    return f", though variables of {spoken(launchers)} are there"
