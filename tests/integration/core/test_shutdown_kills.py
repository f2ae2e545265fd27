"""Whoever is killed, and whenever: each survivor leaves, and leaves nothing.

Nobody waits for the dead: one that is silent would be lost after an hour only.

Twelve points are played; `ASYNCRPC_POINTS=50` plays fifty.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.integration.core.killable_processes import Point, Survivor, play

POINTS: Final = int(os.environ.get("ASYNCRPC_POINTS", "12"))
AT_A_TIME: Final = 4  # groups of four processes
SHARED: Final = Path("/dev/shm")  # noqa: S108  (it is only looked at)


def shared_memory() -> set[str]:
    return {path.name for path in SHARED.iterdir()} if SHARED.exists() else set()


@pytest.mark.parametrize("first", range(0, POINTS, AT_A_TIME))
def test_survivors_leave_and_leave_nothing_behind(first: int, tmp_path: Path) -> None:
    points = [Point.of(seed) for seed in range(first, min(first + AT_A_TIME, POINTS))]
    folders = [tmp_path / str(point.seed) for point in points]
    for folder in folders:
        folder.mkdir()
    before = shared_memory()
    with ThreadPoolExecutor(AT_A_TIME) as playing:
        ended = list(playing.map(play, points, folders))
    for point, folder, survivors in zip(points, folders, ended, strict=True):
        check(point, survivors)
        left = [path for path in folder.iterdir() if path.name != "store"]
        assert len(left) <= len(point.victims), (str(point), left)
    assert shared_memory() <= before


def check(point: Point, survivors: list[Survivor]) -> None:
    for survivor in survivors:
        assert survivor.exit_code == 0, (str(point), survivor)
