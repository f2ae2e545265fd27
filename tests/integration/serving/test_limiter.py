"""A bounded number of blocks runs at once; the others wait, or are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrpc import UsageError, deadline
from asyncrpc.errors import DeadlineExceededError, OverloadedError
from asyncrpc.serving import Limiter
from asyncrpc.testing.loop import SimLoop


class Blocks:
    """Blocks that run until they are let go."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.running: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def block(self, name: str, **options: Any) -> None:
        async with self.limiter.turn(**options):
            self.running.append(name)
            try:
                await self.ends[name].wait()
            finally:
                self.running.remove(name)

    async def start(self, name: str, **options: Any) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.ensure_future(self.block(name, **options))
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def end_all(self) -> None:
        for end in self.ends.values():
            end.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def test_blocks_beyond_the_limit_wait_for_their_turn() -> None:
    blocks = Blocks(Limiter(2))
    for name in "abcd":
        await blocks.start(name)
    assert blocks.running == ["a", "b"]
    await blocks.end("b")
    assert blocks.running == ["a", "c"]
    stats = blocks.limiter.stats()
    assert (stats.running, stats.waiting, stats.answered) == (2, 1, 1)
    await blocks.end_all()
    assert blocks.limiter.stats().answered == 4


async def test_blocks_beyond_waiting_max_are_refused() -> None:
    blocks = Blocks(Limiter(1, waiting_max=1))
    for name in "abc":
        await blocks.start(name)
    with pytest.raises(OverloadedError, match="waiting_max") as caught:
        await blocks.tasks["c"]
    assert caught.value.retry_after_s > 0
    await blocks.end_all()
    assert blocks.limiter.stats().refused == 1


async def test_blocks_run_by_priority_and_fair_share() -> None:
    blocks = Blocks(Limiter(1))
    await blocks.start("first")
    for name in ("a1", "a2"):
        await blocks.start(name, client="a")
    await blocks.start("b", client="b")
    await blocks.start("high", client="a", priority=1)
    order = []
    await blocks.end("first")
    while blocks.running:
        order += blocks.running
        await blocks.end(blocks.running[0])
    assert order == ["high", "a1", "b", "a2"]


async def test_failed_or_cancelled_block_admits_the_next() -> None:
    limiter = Limiter(1)
    blocks = Blocks(limiter)

    async def fail() -> None:
        async with limiter.turn():
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        await fail()
    for name in "abc":
        await blocks.start(name)
    blocks.tasks["b"].cancel()
    blocks.tasks["a"].cancel()
    await asyncio.wait([blocks.tasks["a"], blocks.tasks["b"]])
    await asyncio.sleep(0)
    assert blocks.running == ["c"]
    await blocks.end_all()
    stats = limiter.stats()
    assert (stats.failed, stats.left, stats.answered) == (1, 2, 1)
    assert (stats.running, stats.waiting) == (0, 0)


async def test_cancelled_block_passes_its_turn_on() -> None:
    blocks = Blocks(Limiter(1))
    for name in "abc":
        await blocks.start(name)
    blocks.ends["a"].set()
    blocks.tasks["b"].cancel()  # before it knows of its turn
    await asyncio.wait([blocks.tasks["a"], blocks.tasks["b"]])
    await asyncio.sleep(0)
    assert blocks.running == ["c"]
    await blocks.end_all()
    # The other way round: its turn has come, and it is cancelled before it runs.
    for name in "de":
        await blocks.start(name)
    blocks.ends["d"].set()
    await blocks.tasks["d"]
    blocks.tasks["e"].cancel()
    await asyncio.wait([blocks.tasks["e"]])
    await blocks.start("f")
    assert blocks.running == ["f"]
    await blocks.end_all()
    assert blocks.limiter.stats().running == 0


class TestInVirtualTime:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_expired_block_never_runs(self) -> None:
        blocks = Blocks(Limiter(1))
        await blocks.start("a")
        with pytest.raises(DeadlineExceededError):
            async with deadline(1.0), blocks.limiter.turn():
                raise AssertionError
        with pytest.raises(DeadlineExceededError):
            async with deadline(0.0), blocks.limiter.turn():
                raise AssertionError
        await blocks.end_all()
        assert blocks.limiter.stats().expired == 2

    async def test_block_over_its_queue_age_is_refused(self) -> None:
        limiter = Limiter(2, max_queue_age_s=2.0)

        async def block() -> str:
            try:
                async with limiter.turn():
                    await asyncio.sleep(1.0)
            except OverloadedError:
                return "refused"
            return "ran"

        assert await asyncio.gather(*(block() for _ in range(4))) == ["ran"] * 4
        # Two run, three wait for 1 s to 2 s, and more would wait longer.
        results = await asyncio.gather(*(block() for _ in range(9)))
        assert results == ["ran"] * 5 + ["refused"] * 4


async def test_limiter_belongs_to_one_loop() -> None:
    limiter = Limiter(1)

    async def use() -> None:
        async with limiter.turn():
            pass

    await use()
    with pytest.raises(UsageError, match="on another one"):
        await asyncio.to_thread(asyncio.run, use())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"running_max": 0}, "running_max must be"),
        ({"waiting_max": 0}, "waiting_max must be"),
        ({"max_queue_age_s": -1}, "max_queue_age_s must be"),
        ({"name": 3}, "name must be"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Limiter(**{"running_max": 1, **wrong})
