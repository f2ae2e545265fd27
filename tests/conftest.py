"""Every test: leaves nothing behind, and lets no exception of the loop pass unseen.

Tests run in another order each time, which the end of the report names.  So that no
test depends on it, each begins with the same state of the generators of numbers.

Coroutine tests run on uvloop and on asyncio.  A class may choose its own loops with an
attribute `loops`, a mapping of names to factories (a simulation does).
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import hypothesis
import numpy as np
import pytest
import pytest_asyncio
import torch
import uvloop

from asyncrpc.core.logs import PeerLineFilter
from asyncrpc.core.multiprocessing.store import serve_store
from asyncrpc.testing.leaks import ResourceSnapshot, running_tasks

pytest_plugins = ["tests.tiers", "tests.blocking"]

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
LOOPS: Mapping[str, LoopFactory] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.SelectorEventLoop,
}


def pytest_configure(config: pytest.Config) -> None:
    del config
    # Machines are shared and slow at times; what hangs, the limit of each test ends.
    # The same code gets the same verdict; `make property` looks for new examples.
    hypothesis.settings.register_profile(
        "asyncrpc",
        deadline=None,
        derandomize=not os.environ.get("ASYNCRPC_EXPLORE"),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("asyncrpc")
    # On AMD processors MKL's results depend on where in memory the matrices lie (a QR
    # decomposition's by 1e-6), which tests that compare bits do not want.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    # A shell's background jobs ignore Ctrl-C; so would the programs that get it here.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # libuv keeps the pipe for signals that its first loop makes; uvloop has one libuv,
    # torch's store another.
    uvloop.new_event_loop().close()
    serve_store()


@pytest.hookimpl(trylast=True)  # Hypothesis has marked its own by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Hypothesis shrinks what fails for 300 s at most, and says then what it was."""
    for item in items:
        if item.get_closest_marker("hypothesis"):
            item.add_marker(pytest.mark.timeout(400))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, LoopFactory]:
    del config
    own: Mapping[str, LoopFactory] | None = getattr(
        getattr(item, "cls", None), "loops", None
    )
    return own or LOOPS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to have this order again: with -q the header does not."""
    seed = getattr(terminalreporter.config.option, "randomly_seed", None)
    terminalreporter.write_line(f"the same order: --randomly-seed={seed}")


@pytest.fixture(autouse=True)
def the_same_beginning() -> None:
    """Seed what a test may draw from, whichever tests ran before it, and logged."""
    for line_filter in logging.getLogger("asyncrpc").filters:
        if isinstance(line_filter, PeerLineFilter):
            line_filter.forget()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (the one that is shared)
    torch.manual_seed(0)


unhandled: list[dict[str, Any]] = []  # what loops of the present test were told of


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Descriptors, threads and processes; of coroutine tests also the loop's tasks.

    This comes before the loop's own fixture, so it looks when the loop is closed.  Only
    then some errors come to light that nobody has retrieved.
    """
    unhandled.clear()
    before = ResourceSnapshot.take()
    yield
    assert not unhandled, f"unhandled on the loop: {unhandled}"
    leaks = before.compare(grace_s=0)
    if leaks:
        gc.collect()  # what waits for the collector is freed, with a ResourceWarning
        leaks = before.compare(grace_s=10.0)
    if leaks:
        pytest.fail(str(leaks))


@pytest.fixture(autouse=True)
def quiet_loop(nothing_left_behind: None, request: pytest.FixtureRequest) -> None:
    """A coroutine test leaves no task on its loop; what that is told of is kept."""
    del nothing_left_behind  # it has to come first, and so look last
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("watched_loop")


@pytest_asyncio.fixture
async def watched_loop() -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: unhandled.append(context))
    before = running_tasks()
    yield
    for _ in range(3):  # what has been cancelled needs a turn to end
        await asyncio.sleep(0)
    left = sorted(task.get_name() for task in running_tasks() - before)
    assert not left, f"tasks left behind: {left}"
