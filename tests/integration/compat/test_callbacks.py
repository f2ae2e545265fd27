"""Callbacks of many futures at once block, call on, and wait for each other."""

from __future__ import annotations

import threading

import torch

from asyncrpc.compat import rpc
from tests.integration.compat.playing import play

COUNT = 200
GUEST = "worker1"


def double(number: int) -> int:
    return 2 * number


def wait_for_the_next() -> None:
    """Each callback waits for the future that ends after its own."""
    futures = [rpc.rpc_async(GUEST, double, (number,)) for number in range(COUNT)]
    done = threading.Semaphore(0)

    def wait_after(at: int) -> None:
        def wait(_: torch.futures.Future[int]) -> None:
            futures[at + 1].wait()
            done.release()

        futures[at].add_done_callback(wait)

    for at in range(8):  # torch has 16 threads for them
        wait_after(at)
    assert torch.futures.wait_all(futures) == [2 * number for number in range(COUNT)]
    for _ in range(8):
        assert done.acquire(timeout=60.0)


def test_a_callback_may_wait_for_a_future_that_ends_after_its_own() -> None:
    play(wait_for_the_next)


def call_on() -> None:
    """Each callback makes a call, and waits for it."""
    futures = [
        rpc.rpc_async(GUEST, double, (number,)).then(
            lambda done: rpc.rpc_sync(GUEST, double, (done.value(),))
        )
        for number in range(COUNT)
    ]
    assert torch.futures.wait_all(futures) == [4 * number for number in range(COUNT)]


def test_callbacks_may_make_calls() -> None:
    play(call_on)
