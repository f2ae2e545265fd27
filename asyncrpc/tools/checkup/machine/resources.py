"""Checks of memory, files, /dev/shm and huge pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from asyncrpc.tools.checkup.machine.facts import (
    FileFacts,
    MemoryFacts,
    PageFacts,
    SharedMemoryFacts,
)
from asyncrpc.tools.checkup.machine.findings import CheckFinding, note, ok, wrong

_SHM: Final = "/dev/shm"  # noqa: S108  (the kernel's)
_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
# Docker and Kubernetes give 64 MiB by default.
SHARED_MEMORY_WANTED_BYTES: Final = _GIB
FILES_WANTED: Final = 4096
FILES_PER_WORKER: Final = 8  # a connection with its lanes, and redials
FILES_OF_ITS_OWN: Final = 256
_FULL: Final = 0.9  # of a limit: the next large tensor may exceed it
SHM_ADVICE: Final = (
    "DataLoader's workers, torch.multiprocessing and NCCL pass data through it, and "
    "fail when it is full (asyncrpc's own shared memory is elsewhere): Docker: "
    "--shm-size=1g; Kubernetes: an emptyDir with medium Memory; else mount -o remount,"
    "size=1g /dev/shm"
)


def size_of(count: int) -> str:
    """Return a number of bytes for people."""
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", _KIB)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}"
                if count < 1000 * size
                else (f"{count // size} {unit}")
            )
    return f"{count} bytes"


def _limit(count: int | None) -> str:
    return "no limit" if count is None else size_of(count)


def check_memory(facts: MemoryFacts) -> Iterator[CheckFinding]:
    """Check the memory of the host, and the limits of cgroup and process."""
    yield _of_host(facts)
    yield from _of_cgroup(facts)
    if facts.address_space is None:
        yield ok("address space", "no limit (RLIMIT_AS)")
    else:
        yield note(
            "address space",
            f"{size_of(facts.address_space)} (RLIMIT_AS)",
            "torch and shared memory map far more than they use, and fail at this "
            "limit: `ulimit -v unlimited`",
        )
    yield ok("locked memory", f"{_limit(facts.locked)} (RLIMIT_MEMLOCK)")


def _of_host(facts: MemoryFacts) -> CheckFinding:
    if facts.total is None or facts.available is None:
        return ok("memory", "unknown here")
    observation = f"{size_of(facts.available)} of {size_of(facts.total)} available"
    if facts.available < (1 - _FULL) * facts.total:
        return note(
            "memory", observation, "the kernel may end processes: use less of it"
        )
    return ok("memory", observation)


def _of_cgroup(facts: MemoryFacts) -> Iterator[CheckFinding]:
    if facts.kills:
        yield note(
            "memory kills",
            f"{facts.kills} in this cgroup",
            "the kernel has ended processes here for want of memory: raise the limit "
            "of the container or job, or use less",
        )
    if facts.limit is None:
        yield ok("memory limit", "none by a cgroup")
        return
    used = "" if facts.used is None else f", {size_of(facts.used)} of it used"
    observation = f"{size_of(facts.limit)} by the cgroup{used}"
    if facts.used is not None and facts.used > _FULL * facts.limit:
        advice = "the kernel ends processes at the limit: raise it, or use less"
        yield note("memory limit", observation, advice)
    elif facts.shared_limit > facts.limit / 2:
        yield note(
            "memory limit",
            observation,
            f"a worker may share up to {size_of(facts.shared_limit)} with its peers, "
            "which counts: lower LimitOptions.shared_memory_bytes, or raise the limit",
        )
    else:
        yield ok("memory limit", observation)


def check_files(facts: FileFacts) -> Iterator[CheckFinding]:
    """Check how many files may be open, against the workers of the group."""
    wanted = max(FILES_WANTED, FILES_OF_ITS_OWN + FILES_PER_WORKER * facts.workers)
    used = "" if facts.opened is None else f", {facts.opened} open"
    if facts.files_max is None:
        yield ok("open files", f"no limit{used}")
        return
    observation = f"{facts.files_max} (RLIMIT_NOFILE){used}"
    if facts.files_max >= wanted:
        yield ok("open files", observation)
        return
    workers = "a worker" if facts.workers == 1 else f"{facts.workers} workers"
    how = f"`ulimit -n {wanted}`"
    if facts.hard_max is not None and facts.hard_max < wanted:
        how = "root sets it in limits.conf, LimitNOFILE= or `docker run --ulimit`"
    advice = f"{workers} may need {wanted}: {how}"
    is_full = facts.opened is not None and facts.opened > _FULL * facts.files_max
    yield (wrong if is_full else note)("open files", observation, advice)


def check_shared_memory(facts: SharedMemoryFacts) -> Iterator[CheckFinding]:
    """Check the file system of shared memory."""
    if facts.size is None:
        yield note(_SHM, "does not exist", SHM_ADVICE)
        return
    observation = f"{size_of(facts.size)}, {size_of(facts.free)} free"
    if not facts.is_writable:
        advice = f"this user may not write there: {SHM_ADVICE}"
        yield note(_SHM, f"{observation}, read-only", advice)
    elif facts.size < SHARED_MEMORY_WANTED_BYTES:
        yield note(_SHM, observation, f"it is small: {SHM_ADVICE}")
    elif facts.free < (1 - _FULL) * facts.size:
        advice = "remove what dead programs have left there: `ls -l /dev/shm`"
        yield note(_SHM, f"{observation}: nearly full", advice)
    else:
        yield ok(_SHM, observation)


def check_pages(facts: PageFacts) -> Iterator[CheckFinding]:
    """Check huge pages."""
    if not facts.private and not facts.reserved:
        yield ok("huge pages", "this kernel has none")
        return
    observation = f"private {facts.private or 'none'}, shared {facts.shared or 'none'}"
    if facts.reserved:
        free = f"{facts.free} of {facts.reserved} free"
        observation = f"{observation}; {free}, {size_of(facts.page_bytes)} each"
    if facts.private == "never":
        yield note(
            "huge pages",
            observation,
            "large tensors take more time to allocate and to read: `echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled`, as root",
        )
    else:
        yield ok("huge pages", observation)
