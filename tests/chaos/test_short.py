"""A short run of the chaos suite: as `make chaos`, but for some seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from asyncrpc import Outcome
from tests.chaos.fleet import Settings
from tests.chaos.heap import Heap, allocated_blocks
from tests.chaos.log import Call
from tests.chaos.run import go
from tests.chaos.verdict import Verdict, judge_calls, judge_memory

SECONDS = 15.0


@pytest.mark.slow
class TestShort:
    loops: ClassVar = {"asyncio": asyncio.SelectorEventLoop}

    async def test_short_run_has_no_unexplained_losses(self, tmp_path: Path) -> None:
        report = await go(Settings(SECONDS, 5, 3, "auto", tmp_path))
        problems = {
            name: lines for name, lines in report.verdict.lines.items() if lines
        }
        assert problems == {}
        assert report.injected.total() > 2
        assert report.verdict.outcomes["EXECUTED", True] > 100
        assert report.mistakes.workers == {"a", "b", "c"}
        assert report.mistakes.at_once >= 2
        assert len(report.mistakes.counts) >= 8  # kinds


def call(outcome: Outcome | None, *ran: str, took_s: float = 0.1) -> Call:
    return Call("run b", 2.0, list(ran), outcome, took_s)


@pytest.mark.parametrize(
    ("logged", "line"),
    [
        (call(Outcome.EXECUTED), "claimed EXECUTED, not logged"),
        (call(Outcome.NOT_EXECUTED, "b"), "claimed NOT_EXECUTED, but logged"),
        (call(Outcome.EXECUTED, "b", "b"), "run twice"),
        (call(None, "b"), "no answer by the limit + 20 s"),
        (call(Outcome.EXECUTED, "b", took_s=27.5), "no answer by the limit + 20 s"),
        (call(Outcome.EXECUTED, "b"), None),
        (call(Outcome.NOT_EXECUTED), None),
        (call(Outcome.UNKNOWN, "b"), None),
        (call(Outcome.UNKNOWN), None),
    ],
)
def test_verdict_finds_each_violation(logged: Call, line: str | None) -> None:
    verdict = Verdict()
    judge_calls({"a.1.1": logged}, verdict)
    kinds = {name for name, lines in verdict.lines.items() if lines}
    assert kinds == ({line} if line else set())


@pytest.mark.parametrize(("grown", "leaks"), [(0, 0), (100, 1)])
def test_growing_memory_is_found(grown: int, leaks: int) -> None:
    verdict = Verdict()
    samples = [
        {"bytes": (100 << 20) + at * (grown << 20) // 80, "blocks": 900_000}
        for at in range(80)
    ]
    judge_memory("a.1", samples, verdict)
    assert len(verdict.leaks) == leaks


def test_memory_in_use_is_measured() -> None:
    heap = Heap()
    before = heap.bytes_in_use
    if not before:
        pytest.skip("this C library does not say what is in use")
    kept = torch.zeros(16 << 20, dtype=torch.uint8)
    # Something else may be freed meanwhile, but not as much as a hundredth of it.
    assert heap.bytes_in_use - before >= 0.99 * kept.nbytes
    assert allocated_blocks() > 0
