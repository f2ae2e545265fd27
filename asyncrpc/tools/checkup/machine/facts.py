"""The facts about a process and its host, before anything is judged.

None stands for a fact that this system does not tell.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """A package that asyncrpc requires.

    Attributes:
        version: the installed version; empty: not installed.
        wanted: the required version, as in `>=2.6`; empty: any.
        extra: the extra that requires it; empty: it is always required.
    """

    name: str
    version: str
    wanted: str
    extra: str = ""


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """The versions of the software.

    Attributes:
        built_with: what torch was built with, as in `CUDA 12.8`.
        libraries: the packages that asyncrpc requires.
    """

    asyncrpc: str
    python: str
    python_wanted: str
    built_with: tuple[str, ...]
    libraries: tuple[LibraryFacts, ...]


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """The event loop.

    Attributes:
        kind: its module, as in `uvloop`.
        is_running: whether a worker runs on it; else it is that of `asyncrpc.run`.
        has_uvloop: whether uvloop can be imported.
        is_debug: whether it is in asyncio's debug mode.
    """

    kind: str
    is_running: bool
    has_uvloop: bool
    is_debug: bool


@dataclass(frozen=True, slots=True)
class ThreadFacts:
    """Threads and processors.

    Attributes:
        cores: that this process may use.
        quota_cores: processor time that its cgroup may use, in cores; None: no limit.
        omp: OMP_NUM_THREADS, if it is set.
        pool_threads: of a worker, for plain functions.
    """

    cores: int
    quota_cores: float | None
    torch_threads: int
    omp: str
    pool_threads: int
    workers_here: int


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory and its limits, in bytes.

    Attributes:
        limit: of the cgroup; None: none.
        used: by the cgroup, without reclaimable memory; None: unknown.
        kills: how many of its processes the kernel has killed for memory.
        address_space: limit of this process; None: none.
        locked: how much may be locked; None: no limit.
        shared_limit: how much a worker may share with its peers.
    """

    total: int | None = None
    available: int | None = None
    limit: int | None = None
    used: int | None = None
    kills: int | None = None
    address_space: int | None = None
    locked: int | None = None
    shared_limit: int = 0


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Open files.

    Attributes:
        files_max: how many this process may open; None: no limit.
        hard_max: the most to which it may raise that; None: no limit.
        opened: how many it has open; None: unknown.
    """

    files_max: int | None
    hard_max: int | None
    opened: int | None
    workers: int


@dataclass(frozen=True, slots=True)
class SharedMemoryFacts:
    """The file system of shared memory, /dev/shm.

    Attributes:
        size: in bytes; None: it does not exist.
        free: of it, in bytes.
        is_writable: whether this process may write there.
    """

    size: int | None
    free: int = 0
    is_writable: bool = False


@dataclass(frozen=True, slots=True)
class PageFacts:
    """Huge pages.

    Attributes:
        private: transparent ones, for private memory: `always`, `madvise` or `never`;
            empty: this kernel has none.
        shared: the same for shared memory, as in `advise`.
    """

    private: str = ""
    shared: str = ""
    reserved: int = 0
    free: int = 0
    page_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ClockFacts:
    """Clocks.

    Attributes:
        source: what the monotonic clock is read from, as in `tsc`; empty: unknown.
        available: the other sources.
        is_synchronised: whether the wall clock is synchronised; None: unknown.
        error_s: by how much it may be wrong, by the kernel; None: unknown.
    """

    source: str = ""
    available: tuple[str, ...] = ()
    is_synchronised: bool | None = None
    error_s: float | None = None


@dataclass(frozen=True, slots=True)
class InterfaceFacts:
    """A network interface.

    Attributes:
        addresses: the usable ones.
        mtu: bytes of a packet; None: unknown.
    """

    name: str
    addresses: tuple[str, ...]
    mtu: int | None


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The interfaces and addresses of this host.

    Attributes:
        interfaces: those with an address, without loopback.
        advertised: addresses that a worker tells its peers, the best first.
        chosen_by: the option that has chosen them, as in `ASYNCRPC_INTERFACE=ib0`;
            empty: none.
        is_one_host: whether all workers are on this host; None: unknown.
        trouble: why no address was chosen; empty: no trouble.
    """

    interfaces: tuple[InterfaceFacts, ...]
    advertised: tuple[str, ...]
    chosen_by: str = ""
    is_one_host: bool | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class PrivateFileFacts:
    """A file that other users must not read.

    Attributes:
        problem: what is wrong; empty: nothing.
    """

    what: str
    path: str
    problem: str


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """The secrets that prove a worker's identity.

    Attributes:
        secret_bytes: length of the secret; None: no secret.
        origin: where it comes from, as in `ASYNCRPC_SECRET`.
        has_tls: whether connections are encrypted.
        files: with secrets or private keys.
    """

    secret_bytes: int | None
    origin: str
    has_tls: bool
    files: tuple[PrivateFileFacts, ...]


@dataclass(frozen=True, slots=True)
class TracingFacts:
    """Access of debuggers to a process.

    Attributes:
        ptrace_scope: of the kernel's Yama; None: it has no Yama.
    """

    ptrace_scope: int | None
    is_root: bool


@dataclass(frozen=True, slots=True)
class TimeoutFacts:
    """Times of a worker, in seconds; None: no limit.

    Attributes:
        call: timeout of a call that sets none.
        rendezvous: until all workers have come.
        lost_after: how long a peer may be silent.
        stall_after: after which a stall is logged.
    """

    call: float | None
    rendezvous: float
    lost_after: float
    stall_after: float | None


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """All facts of one process."""

    versions: VersionFacts
    loop: LoopFacts
    threads: ThreadFacts
    memory: MemoryFacts
    files: FileFacts
    shared_memory: SharedMemoryFacts
    pages: PageFacts
    clocks: ClockFacts
    network: NetworkFacts
    secrets: SecretFacts
    tracing: TracingFacts
    timeouts: TimeoutFacts
