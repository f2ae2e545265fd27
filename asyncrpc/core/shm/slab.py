"""Making and mapping slabs: memory without a name, at an address of our own.

A slab is a memfd.  Its size is sealed, so that no process that has it can shrink it
under another (which would end that one with SIGBUS).  It vanishes with its last
mapping, however its processes end.

Pages are touched before they are used, in a thread: a fresh page costs ten times its
copy.  Small pages are made in short pieces: one long `madvise` for them would keep
other threads from mapping memory of their own.  Where the kernel has huge pages, they
make a copy of 16 MiB a fifth faster, and mapping a slab that exists free.

Source: memfd_create(2), madvise(2), fcntl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Final

from asyncrpc.core.serde.encoded import view_memory
from asyncrpc.core.shm.machine.pool import HUGE_PAGE_BYTES
from asyncrpc.errors import MalformedError

# Not named by every Python that we support.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x1 | 0x2 | 0x4  # no more seals, no shrinking, no growing
_MADV_REMOVE: Final = 9
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
_MADV_COLLAPSE: Final = 25  # Linux 6.1
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

is_supported: Final = hasattr(os, "memfd_create")


class Slab:
    """One slab, mapped into this process until the last view of it is gone.

    Attributes:
        address: of the first byte.
        size_bytes: of the whole.
        memory: all of it; to be used only while this object lives.
        descriptor: of its memfd, as long as it is needed to pass the slab on; else -1.
    """

    __slots__ = (
        "__weakref__",
        "_close",
        "address",
        "descriptor",
        "memory",
        "size_bytes",
    )

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        close = weakref.finalize(self, os.close, descriptor)
        close.atexit = False
        self._close = close
        self.address = _map(descriptor, size_bytes)
        self.memory = view_memory(None, self.address, size_bytes)
        weakref.finalize(self, _LIBC.munmap, self.address, size_bytes).atexit = False

    @classmethod
    def create(cls, size_bytes: int) -> Slab:
        """Make a slab; call `prefault` before its pages are used."""
        descriptor = os.memfd_create(
            "asyncrpc-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        try:
            os.ftruncate(descriptor, size_bytes)
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, size_bytes)

    @classmethod
    def attach(cls, descriptor: int, size_bytes: int) -> Slab:
        """Map a slab that a peer has made."""
        try:
            seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
            real_bytes = os.fstat(descriptor).st_size
            page_bytes = os.fstatvfs(descriptor).f_bsize  # huge ones may run out
        except OSError as error:
            os.close(descriptor)
            raise MalformedError(f"a descriptor is not of a slab: {error}") from error
        is_sealed = seals & _SEALS == _SEALS and page_bytes == mmap.PAGESIZE
        if not is_sealed or real_bytes != size_bytes or not size_bytes:
            os.close(descriptor)
            raise MalformedError(
                f"a slab of {real_bytes} bytes with seals {seals:#x}, but a sealed "
                f"one of {size_bytes} was announced"
            )
        slab = cls(descriptor, size_bytes)
        slab.close_descriptor()
        return slab

    def close_descriptor(self) -> None:
        """Close the descriptor, once no other process needs it.  Idempotent."""
        self._close()
        self.descriptor = -1

    def view(self, owner: object, start: int, nbytes: int) -> memoryview:
        """Return a part of the memory; it keeps `owner` alive, which keeps the slab."""
        return view_memory(owner, self.address + start, nbytes)

    def prefault(self) -> Slab:
        """Allocate every page, and return the slab; slow: for a thread.

        A huge page is made of one small page of it, the rest of which the kernel fills
        with zeros: 256 MiB take 15 ms in this way, and 130 to 650 ms if all small pages
        are made first.
        """
        self.prefault_part(0, self.size_bytes)
        return self

    def prefault_part(self, start: int, nbytes: int) -> None:
        """Allocate the pages of a part; see `prefault`.

        One call makes all huge pages: the kernel lets other threads map memory between
        two of them, and a thread that needs the GIL again after each would wait for a
        busy loop every time (64 MiB beside one: 30 ms, and 100 to 500 ms with a call a
        huge page).
        """
        first = self.address + start
        end = first + nbytes
        _LIBC.madvise(first, nbytes, _MADV_HUGEPAGE)
        inner = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        inner_end = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        for address in range(inner, inner_end, HUGE_PAGE_BYTES):
            _touch(address, 1)
        if inner < inner_end and not _LIBC.madvise(
            inner, inner_end - inner, _MADV_COLLAPSE
        ):
            small = [(first, inner), (inner_end, end)]
        else:
            small = [
                (address, min(address + HUGE_PAGE_BYTES, end))
                for address in range(first, end, HUGE_PAGE_BYTES)
            ]
        for address, stop in small:
            if address < stop and not populate(address, stop - address):
                _touch(address, stop - address)

    def discard(self, start: int, nbytes: int) -> None:
        """Give whole pages back to the kernel, in every process; they read as zeros."""
        if _LIBC.madvise(self.address + start, nbytes, _MADV_REMOVE):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot free memory: {os.strerror(number)}")


def populate(address: int, nbytes: int) -> bool:
    """Make the kernel provide the pages of mapped memory, whose content stays.

    Slow: for a thread.  Another thread may write to the memory meanwhile.
    """
    start = address & -mmap.PAGESIZE
    length = address + nbytes - start
    return not _LIBC.madvise(start, length, _MADV_POPULATE_WRITE)


def _touch(address: int, nbytes: int) -> None:
    """Make the kernel provide the pages, where it cannot be told to."""
    for page in range(address, address + nbytes, mmap.PAGESIZE):
        ctypes.c_ubyte.from_address(page).value |= 0


def _map(descriptor: int, size_bytes: int) -> int:
    """Map a descriptor where a huge page could begin; return the address."""
    reserved_bytes = size_bytes + HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = _checked(_LIBC.mmap(None, reserved_bytes, 0, flags, -1, 0))
    address = (base + HUGE_PAGE_BYTES - 1) & -HUGE_PAGE_BYTES
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _MAP_FIXED
    try:
        _checked(_LIBC.mmap(address, size_bytes, rights, flags, descriptor, 0))
    except OSError:
        _LIBC.munmap(base, reserved_bytes)
        raise
    if address > base:
        _LIBC.munmap(base, address - base)
    after = address + size_bytes
    if base + reserved_bytes > after:
        _LIBC.munmap(after, base + reserved_bytes - after)
    return address


def _checked(address: int | None) -> int:
    if address is None or address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map memory: {os.strerror(number)}")
    return address


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p, ctypes.c_size_t
    library.mmap.argtypes = [
        address,
        size,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    library.mmap.restype = address
    with contextlib.suppress(AttributeError):
        library.madvise.argtypes = [address, size, ctypes.c_int]
    library.munmap.argtypes = [address, size]
    return library


_LIBC: Final = _libc()  # it holds nothing but the names of functions
