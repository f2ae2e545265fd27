"""The way of a small call through the package is short: few files, seldom changed."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Self

import asyncrpc
from asyncrpc.testing import Cluster

PACKAGE = Path(asyncrpc.__file__).parent.as_posix() + "/"
FILES_MAX = 18
CHANGES_PART_MAX = 0.6


async def echo(value: int) -> int:
    return value


class Visits:
    """The file of each Python call of the package, in order, while it is set."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __enter__(self) -> Self:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            self.files.append(file.removeprefix(PACKAGE))


async def test_small_call_visits_few_files_and_rarely_switches() -> None:
    """Both ends are in this process; the shortest of some calls counts.

    The first calls introduce the function, and a heartbeat may fall into any.
    """
    async with Cluster(2, network="uds") as (a, b):
        peer = a.peer(b.name)
        calls: list[list[str]] = []
        for number in range(20):
            with Visits() as visits:
                assert await peer.call(echo, number) == number
            calls.append(visits.files)
    files = min(calls, key=len)
    assert len(set(files)) <= FILES_MAX, sorted(set(files))
    changes = sum(file != after for file, after in pairwise(files))
    assert changes < CHANGES_PART_MAX * len(files), files
