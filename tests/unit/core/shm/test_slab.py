"""Slabs: made, mapped twice, sealed, and gone with the last view."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from asyncrpc.core.serde.shared import seal
from asyncrpc.core.shm.machine.pool import HUGE_PAGE_BYTES
from asyncrpc.core.shm.slab import Slab
from asyncrpc.errors import MalformedError

SIZE_BYTES = 4 << 20


def mappings() -> int:
    return (
        Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:asyncrpc-slab")
    )


def test_both_mappings_see_the_same_memory() -> None:
    ours = Slab.create(SIZE_BYTES).prefault()
    theirs = Slab.attach(os.dup(ours.descriptor), SIZE_BYTES).prefault()
    ours.view(ours, 100, 3)[:] = b"abc"
    theirs.view(theirs, 102, 3)[:] = b"xyz"
    assert bytes(ours.view(ours, 100, 6)) == b"abxyz\0"
    assert theirs.descriptor == -1


@pytest.mark.parametrize("nbytes", [4096, HUGE_PAGE_BYTES, SIZE_BYTES // 4 * 3])
@pytest.mark.parametrize("start", [0, 4096, HUGE_PAGE_BYTES // 2, HUGE_PAGE_BYTES])
def test_prefault_makes_every_page_and_keeps_the_content(
    start: int, nbytes: int
) -> None:
    slab = Slab.create(2 * SIZE_BYTES)
    slab.view(slab, start, 3)[:] = b"abc"
    slab.prefault_part(start, nbytes)
    assert os.fstat(slab.descriptor).st_blocks * 512 >= nbytes
    assert bytes(slab.view(slab, start, 4)) == b"abc\0"


def test_slab_starts_at_a_huge_page_boundary() -> None:
    assert Slab.create(SIZE_BYTES).address % HUGE_PAGE_BYTES == 0


def test_slab_cannot_be_shrunk_by_another_process() -> None:
    slab = Slab.create(SIZE_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(slab.descriptor, 0)


def test_view_keeps_the_mapping_alive_until_it_ends() -> None:
    slab = Slab.create(SIZE_BYTES)
    view = slab.view(slab, 0, 10)
    descriptor = slab.descriptor
    del slab
    gc.collect()
    view[:] = bytes(10)
    assert mappings() == 1
    del view
    assert mappings() == 0
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def unsealed() -> tuple[int, int]:
    descriptor = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE_BYTES)
    return descriptor, SIZE_BYTES


def shorter_than_said() -> tuple[int, int]:
    slab = Slab.create(SIZE_BYTES)
    return os.dup(slab.descriptor), 2 * SIZE_BYTES


def no_memory_at_all() -> tuple[int, int]:
    reading, writing = os.pipe()
    os.close(writing)
    return reading, SIZE_BYTES


def of_huge_pages() -> tuple[int, int]:
    """There may be none: then whoever touches it ends with SIGBUS."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB
    descriptor = os.memfd_create("x", flags)
    os.ftruncate(descriptor, HUGE_PAGE_BYTES)
    seal(descriptor)
    return descriptor, HUGE_PAGE_BYTES


@pytest.mark.parametrize(
    "make", [unsealed, shorter_than_said, of_huge_pages, no_memory_at_all]
)
def test_malformed_slab_is_refused_and_closed(make: object) -> None:
    assert callable(make)
    descriptor, size_bytes = make()
    with pytest.raises(MalformedError):
        Slab.attach(descriptor, size_bytes)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
