"""What a thread knows of its streams is known where its call is encoded.

On a device made of host memory, in whose place a mark is noted: test_cuda.py asks the
same of real streams.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asyncrpc import Worker
from asyncrpc.core import hosting
from asyncrpc.core.devices import backends
from asyncrpc.core.devices.streams import carried_mark
from asyncrpc.core.peers import group, peer
from asyncrpc.testing import Cluster
from tests.integration.devices import accelerators, remote
from tests.integration.devices.accelerators import IS_FAKE, TYPE

pytestmark = pytest.mark.skipif(not IS_FAKE, reason="real streams have their own tests")

HOME = f"{TYPE}:0"


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The marks that calls have carried to where they are encoded."""
    accelerators.set_up()
    marks: list[Any] = []

    def mark(_backend: Any, device: torch.device) -> None:
        marks.append(carried_mark(device))

    monkeypatch.setattr(backends.Backend, "mark", mark)
    return marks


def choose(monkeypatch: pytest.MonkeyPatch, mark: str) -> None:
    """Let whoever makes a call be on a stream with this mark."""
    for module in (peer, group, hosting):
        monkeypatch.setattr(module, "marks_here", lambda: {torch.device(HOME): mark})


async def test_stream_is_marked_where_the_call_is_made(
    met: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(2, options=accelerators.options(is_exclusive=False)) as (a, b):
        value = await accelerators.Hands(a).put(torch.ones(2))

        async def call(through: str) -> Any:
            choose(monkeypatch, through)
            met.clear()
            if through == "a thread":
                return await asyncio.to_thread(in_a_thread, a, b.name, value)
            if through == "a group":
                [devices] = await a.group([b.name]).call(remote.where, value)
                return devices
            return await a.parts.start_call(b.name, remote.where, (value,))

        for through in ("a link to be made", "a thread", "a group"):
            devices = await asyncio.create_task(call(through))
            assert devices == [HOME]
            assert met == [through]


def in_a_thread(worker: Worker, to: str, value: torch.Tensor) -> Any:
    return worker.parts.start_call(to, remote.where, (value,)).wait()


async def test_call_without_a_stream_has_no_mark(met: list[Any]) -> None:
    async with Cluster(2, options=accelerators.options(is_exclusive=False)) as (a, b):
        value = await accelerators.Hands(a).put(torch.ones(2))
        for _ in range(2):
            await a.peer(b.name).call(remote.where, value)
        await asyncio.to_thread(in_a_thread, a, b.name, value)
    assert met == [None, None, None]
