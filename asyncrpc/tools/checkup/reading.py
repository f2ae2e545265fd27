"""Gathers the facts of this process and its host; changes nothing.

It opens files and asks the kernel, so it must not run in an event loop's thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from asyncrpc.core.host.secret_file import problem_of
from asyncrpc.core.loop.loops import loop_factory
from asyncrpc.core.options import (
    INTERFACE_VARIABLE,
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    Options,
)
from asyncrpc.core.transport.interfaces import host_addresses, usable_addresses
from asyncrpc.errors import UsageError
from asyncrpc.tools.checkup import host_files
from asyncrpc.tools.checkup.machine.facts import (
    ClockFacts,
    FileFacts,
    InterfaceFacts,
    LibraryFacts,
    LoopFacts,
    MemoryFacts,
    NetworkFacts,
    PrivateFileFacts,
    ProcessFacts,
    SecretFacts,
    SharedMemoryFacts,
    ThreadFacts,
    TimeoutFacts,
    TracingFacts,
    VersionFacts,
)

DISTRIBUTION: Final = "asyncrpc-torch"
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (the kernel's)
# The extras of use at run time, without those for tests and examples.
_EXTRAS: Final = frozenset({"compression", "metrics", "manifest", "otel", "ray"})
_REQUIREMENT: Final = re.compile(
    r"([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*"
    r"(?:;.*?extra\s*==\s*[\"']([\w-]+)[\"'])?"
)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of a worker, running or about to start here.

    Attributes:
        options: of the worker, completed from the environment.
        loop: its event loop's class; None: it does not run yet.
        is_debug: whether the loop is in debug mode.
        workers_here: workers of the group on this host.
        is_one_host: whether these are all; None: unknown.
    """

    options: Options
    loop: type[Any] | None = None
    is_debug: bool = False
    workers: int = 1
    workers_here: int = 1
    is_one_host: bool | None = None


def gather(circumstances: Circumstances, environ: Mapping[str, str]) -> ProcessFacts:
    """Return all facts; blocks this thread for some milliseconds."""
    cgroups = host_files.read_cgroups()
    return ProcessFacts(
        versions=_versions(),
        loop=_loop(circumstances),
        threads=_threads(circumstances, environ, cgroups.quota_cores),
        memory=_memory(circumstances.options, cgroups),
        files=_files(circumstances.workers),
        shared_memory=shared_memory(_SHARED_MEMORY),
        pages=host_files.read_pages(),
        clocks=_clocks(),
        network=_network(circumstances, environ),
        secrets=_secrets(circumstances.options, environ),
        tracing=TracingFacts(host_files.read_ptrace_scope(), os.geteuid() == 0),
        timeouts=TimeoutFacts(
            circumstances.options.rpc_timeout_s,
            circumstances.options.rendezvous_timeout_s,
            circumstances.options.liveness.lost_after_s,
            circumstances.options.stall_after_s,
        ),
    )


# --- software ------------------------------------------------------------------------


def _versions() -> VersionFacts:
    wanted, requirements = "", []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        metadata = importlib.metadata.metadata(DISTRIBUTION)
        wanted = metadata["Requires-Python"] or ""
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    return VersionFacts(
        # The package imports this module: it is loaded, but cannot be imported here.
        asyncrpc=getattr(sys.modules.get("asyncrpc"), "__version__", "unknown"),
        python=platform.python_version(),
        python_wanted=wanted,
        built_with=_built_with(),
        libraries=libraries(requirements),
    )


def libraries(requirements: Sequence[str]) -> tuple[LibraryFacts, ...]:
    """Return the packages that a distribution requires, with the installed versions."""
    if not requirements:  # asyncrpc is not installed, but on the path
        requirements = ("torch", "numpy", "msgpack", "uvloop", "aiohttp")
    packages = []
    for text in requirements:
        parts = _REQUIREMENT.match(text)
        if parts is None or (parts[3] and parts[3] not in _EXTRAS):
            continue
        version = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(parts[1])
        wanted = parts[2].strip()
        packages.append(LibraryFacts(parts[1], version, wanted, parts[3] or ""))
    return tuple(packages)


def _built_with() -> tuple[str, ...]:
    versions = (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip))
    devices = [f"{name} {version}" for name, version in versions if version]
    return tuple(devices or ["no GPU"])


def _loop(circumstances: Circumstances) -> LoopFacts:
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    is_running = circumstances.loop is not None
    module = (circumstances.loop or loop_factory()).__module__
    return LoopFacts(
        kind=module.partition(".")[0],
        is_running=is_running,
        has_uvloop=has_uvloop,
        is_debug=circumstances.is_debug,
    )


def _threads(
    circumstances: Circumstances, environ: Mapping[str, str], quota_cores: float | None
) -> ThreadFacts:
    return ThreadFacts(
        cores=_usable_cores(),
        quota_cores=quota_cores,
        torch_threads=torch.get_num_threads(),
        omp=environ.get("OMP_NUM_THREADS", ""),
        pool_threads=circumstances.options.threads,
        workers_here=circumstances.workers_here,
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- resources -----------------------------------------------------------------------


def _memory(options: Options, cgroups: host_files.CgroupFacts) -> MemoryFacts:
    memory = host_files.meminfo()
    return MemoryFacts(
        total=memory.get("MemTotal"),
        available=memory.get("MemAvailable"),
        limit=cgroups.memory_limit,
        used=cgroups.memory_used,
        kills=cgroups.memory_kills,
        address_space=_soft(resource.RLIMIT_AS),
        locked=_soft(resource.RLIMIT_MEMLOCK),
        shared_limit=options.limits.shared_memory_bytes,
    )


def _soft(which: int) -> int | None:
    return _bounded(resource.getrlimit(which)[0])


def _bounded(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _files(workers: int) -> FileFacts:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = None
    with contextlib.suppress(OSError):
        opened = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return FileFacts(_bounded(soft), _bounded(hard), opened, workers)


def shared_memory(path: Path) -> SharedMemoryFacts:
    """Return how large a file system of shared memory is."""
    try:
        status = os.statvfs(path)
    except OSError:
        return SharedMemoryFacts(None)
    size, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    return SharedMemoryFacts(size, free, os.access(path, os.W_OK | os.X_OK))


# --- surroundings --------------------------------------------------------------------

# struct timex of 64-bit Linux: modes, offset, freq, maxerror, esterror, status.
_TIMEX: Final = struct.Struct("@I4xqqqqi")
_TIMEX_BYTES: Final = 512  # more than it has
_TIME_ERROR: Final = 5  # result of the call for a clock that is not synchronised
_UNSYNCHRONISED: Final = 0x40
_US_PER_S: Final = 1e6


def _clocks() -> ClockFacts:
    is_synchronised, error_s = wall_clock()
    clocks = host_files.read_clock_source()
    return replace(clocks, is_synchronised=is_synchronised, error_s=error_s)


def wall_clock() -> tuple[bool | None, float | None]:
    """Return whether the wall clock is synchronised, and its error in seconds.

    Each is None if the kernel does not tell.

    Source: adjtimex(2); without any mode it changes nothing, and needs no privilege.
    """
    if sys.platform != "linux" or struct.calcsize("P") != 8:  # noqa: PLR2004
        return None, None
    record = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(record)
    except (OSError, AttributeError):
        return None, None
    if state < 0:  # a sandbox forbids it
        return None, None
    *_, error_us, _estimate, status = _TIMEX.unpack_from(record)
    is_synchronised = state != _TIME_ERROR and not status & _UNSYNCHRONISED
    return is_synchronised, error_us / _US_PER_S if is_synchronised else None


def _network(circumstances: Circumstances, environ: Mapping[str, str]) -> NetworkFacts:
    network = circumstances.options.network
    advertised: tuple[str, ...] = ()
    trouble = ""
    try:
        advertised = tuple(map(str, host_addresses(network.interface)))
    except UsageError as error:
        trouble = str(error)
    chosen_by = ""
    if network.interface:
        is_set = environ.get(INTERFACE_VARIABLE) == network.interface
        chosen_by = INTERFACE_VARIABLE if is_set else "NetworkOptions.interface"
    return NetworkFacts(
        interfaces=_interfaces(),
        advertised=advertised,
        chosen_by=chosen_by,
        is_one_host=circumstances.is_one_host,
        trouble=trouble,
    )


def _interfaces() -> tuple[InterfaceFacts, ...]:
    addresses: dict[str, list[str]] = {}
    for entry in usable_addresses():
        if not entry.address.is_loopback:
            addresses.setdefault(entry.interface, []).append(str(entry.address))
    return tuple(
        InterfaceFacts(name, tuple(listed), host_files.read_mtu(name))
        for name, listed in addresses.items()
    )


def _secrets(options: Options, environ: Mapping[str, str]) -> SecretFacts:
    secret = options.secret_bytes
    origin, files = "Options.secret", []
    path = environ.get(SECRET_FILE_VARIABLE)
    if secret is not None and environ.get(SECRET_VARIABLE, "").encode() == secret:
        origin = SECRET_VARIABLE
    elif path:
        origin = SECRET_FILE_VARIABLE
    if path:
        files.append(secret_file(SECRET_FILE_VARIABLE, path))
    if options.tls is not None:
        key = options.tls.key or options.tls.certificate
        files.append(secret_file("Tls.key", str(key)))
    return SecretFacts(
        None if secret is None else len(secret),
        origin,
        options.tls is not None,
        tuple(files),
    )


def secret_file(role: str, path: str) -> PrivateFileFacts:
    """Return whether other users can read or replace a file."""
    try:
        problem = problem_of(os.stat(path), os.geteuid())  # noqa: PTH116  (as opened)
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {error}"
    return PrivateFileFacts(role, path, (problem or "").format(path=path))
