"""Two workers with devices, and hands that use them where they may be used."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch

from asyncrpc import Worker
from asyncrpc.testing import Cluster, acting_as, fake_device
from tests.integration.devices.accelerators import (
    IS_FAKE,
    TAKES_TURNS,
    TYPE,
    Hands,
    options,
    set_up,
)

Pair = tuple[Worker, Worker]


@pytest.fixture(scope="session", autouse=True)
def engine_kept_for_life() -> None:
    """Have torch start its thread for the device before a test looks for leaks."""
    set_up()
    if IS_FAKE:
        leaf = torch.ones(1, device=f"{TYPE}:0").requires_grad_()
        look: Any = leaf.register_hook
        look(lambda _: threading.current_thread() and None)
        try:
            (leaf * 2).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            pytest.exit(f"run these tests by themselves, as `make test` does: {error}")


@pytest.fixture(params=TAKES_TURNS, ids=lambda one: "turns" if one else "threads")
def takes_turns(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    return chosen


@pytest.fixture
def ledger(takes_turns: bool) -> Iterator[fake_device.Ledger | None]:  # noqa: FBT001
    """Who used the devices; where they take turns, no two at once, nor the loop."""
    found = set_up()
    if found is None:
        yield None
        return
    found.clear()
    yield found
    if takes_turns:
        assert found.overlaps == []
        assert found.on_loop == []


@pytest.fixture
async def pair(
    ledger: fake_device.Ledger | None,
    takes_turns: bool,  # noqa: FBT001
) -> AsyncIterator[Pair]:
    async with Cluster(2, options=options(takes_turns=takes_turns)) as (a, b):
        with acting_as(a):
            yield a, b


@pytest.fixture
def hands(pair: Pair) -> Hands:
    return Hands(pair[0])
