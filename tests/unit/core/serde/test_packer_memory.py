"""What is packed once, and is large, costs no memory afterwards."""

from __future__ import annotations

from asyncrpc.core.serde.quick import QuickWriter
from tests.chaos.heap import Heap

LARGE = 64 << 20  # characters


def test_long_text_leaves_no_memory_behind() -> None:
    quick, heap = QuickWriter(), Heap()
    assert quick.write("short") is not None
    before = heap.bytes_in_use
    assert quick.write("n" * LARGE) is not None
    assert heap.bytes_in_use - before < LARGE // 4
    assert quick.write("short") is not None
