"""Leases of places in shared memory: they may die at any time, in any thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asyncrpc.core.payloads.sharing import Leases
from asyncrpc.core.shm.slab import Slab

PLACE_BYTES = 4096


class Lenders:
    """Takes places back; the loop of these tests is closed, so none comes."""

    def take_back(self, locations: list[int]) -> None:
        pytest.fail(f"{locations} came back after the loop")


def drop_here(views: list[Any]) -> None:
    views.clear()


def drop_in_a_thread(views: list[Any]) -> None:
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()


@pytest.mark.parametrize("drop", [drop_here, drop_in_a_thread])
def test_shared_block_may_die_after_the_loop(drop: Any) -> None:
    """A program may keep a tensor for longer than the worker that received it."""
    loop = asyncio.new_event_loop()
    leases = Leases(loop)
    slab = Slab.create(PLACE_BYTES)
    views = [leases.lend(Lenders(), slab, 0, PLACE_BYTES)]
    assert len(leases) == 1
    loop.close()
    drop(views)
    assert not leases.dead
