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
    EXCLUSIVE,
    TYPE,
    Hands,
    options,
    set_up,
)

Pair = tuple[Worker, Worker]
HOME = f"{TYPE}:0"


@pytest.fixture(scope="session", autouse=True)
def device_kept_for_life() -> None:
    """Have torch and the driver open what a process keeps, before tests look for leaks.

    torch's engine starts a thread for the device, and CUDA opens a file when memory is
    first shared.
    """
    set_up()
    if TYPE == "cuda":
        storage: Any = torch.ones(1, device=HOME).untyped_storage()
        storage._share_cuda_()  # there is no public way
    if TYPE in {"cuda", "fake"}:
        leaf = torch.ones(1, device=HOME).requires_grad_()
        look: Any = leaf.register_hook
        look(lambda _: threading.current_thread() and None)
        try:
            (leaf * 2).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            pytest.exit(f"run these tests by themselves, as `make test` does: {error}")


@pytest.fixture(params=EXCLUSIVE, ids=lambda value: "exclusive" if value else "threads")
def is_exclusive(request: pytest.FixtureRequest) -> bool:
    chosen: bool = request.param
    return chosen


@pytest.fixture
def ledger(is_exclusive: bool) -> Iterator[fake_device.Ledger | None]:  # noqa: FBT001
    """Who used the devices; where they are exclusive, no two at once, nor the loop."""
    record = set_up()
    if record is None:
        yield None
        return
    record.clear()
    yield record
    if is_exclusive:
        assert record.overlaps == []
        assert record.on_loop == []


@pytest.fixture
async def pair(
    ledger: fake_device.Ledger | None,
    is_exclusive: bool,  # noqa: FBT001
) -> AsyncIterator[Pair]:
    async with Cluster(2, options=options(is_exclusive=is_exclusive)) as (a, b):
        with acting_as(a):
            yield a, b


@pytest.fixture
def hands(pair: Pair) -> Hands:
    return Hands(pair[0])
