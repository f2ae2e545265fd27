"""How these tests look at a group until a hang is told as it should be."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import pytest

from asyncrpc import Options, Worker
from asyncrpc.tools.inspection.group import GroupView, view_of
from asyncrpc.tools.inspection.machine.graph import find_hangs
from asyncrpc.tools.inspection.machine.wording import sentence
from asyncrpc.tools.inspection.observer import Observer

SECRET: Final = "a secret of this test"
OPTIONS: Final = Options(secret=SECRET, drain_timeout_s=0.0)
GENEROUS_S: Final = 60.0
AFTER_S: Final = 0.2
PAUSE_S: Final = 0.05  # between two looks

TRAINER: Final = r"^trainer task `train` waits [\d.]+ s for "


async def look(worker: Worker) -> GroupView:
    """Look at a worker's group, as the command does."""
    async with Observer(OPTIONS) as observer:
        return await view_of(observer, worker.addresses[0])


async def until_said(worker: Worker, wanted: str) -> GroupView:
    """Look until a finding reads so; fail with all that was found if none ever does."""
    said: list[str] = []
    try:
        async with asyncio.timeout(GENEROUS_S):
            while True:
                view = await look(worker)
                graph = view.graph
                hangs = find_hangs(graph, after_s=AFTER_S)
                said = [sentence(graph, hang) for hang in hangs]
                if any(re.search(wanted, text) for text in said):
                    return view
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        pytest.fail(f"nothing reads like {wanted!r}; there is: {said}")
