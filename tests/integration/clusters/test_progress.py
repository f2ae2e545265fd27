"""The line that a terminal shows while a cluster starts: a real one."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from asyncrpc.clusters.progress import starting

REPOSITORY = Path(__file__).parents[3]
PROGRAM = """
import asyncrpc
async def main():
    async with asyncrpc.Cluster(2) as cluster:
        await cluster["w1"].call(print, "from a worker", flush=True)
        print("up")
asyncrpc.run(main())
"""


def run(errors: int) -> str:
    """Run the program with this stream for its errors; return its output."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        check=True,
        text=True,
    ).stdout


def read_to_end(screen: int) -> str:
    """Return what a terminal shows until its programs have ended."""
    pieces = []
    with open(screen, "rb", buffering=0) as shown, suppress(OSError):
        while piece := shown.read(1 << 16):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_terminal_shows_a_line_and_takes_it_away() -> None:
    screen, terminal = pty.openpty()
    with ThreadPoolExecutor(1) as reader:
        content = reader.submit(read_to_end, screen)
        try:
            output = run(terminal)
        finally:
            os.close(terminal)
        drawn = content.result()
    assert sorted(output.splitlines()) == ["[w1] from a worker", "up"]
    first, *_, last = drawn.strip("\r").split("\r")
    assert first.startswith("cluster: 0 of 2 workers run, waiting for w0, w1 (")
    assert drawn.endswith("\r")
    assert not last.strip()


def test_pipe_gets_no_line() -> None:
    reader, writer = os.pipe()
    run(writer)
    os.close(writer)
    with open(reader, "rb") as errors:  # noqa: PTH123
        assert errors.read() == b""


def test_line_names_the_first_that_are_waited_for() -> None:
    assert starting("c", 1, ["w1"]) == "c: 1 of 2 workers run, waiting for w1"
    absent = [f"w{number}" for number in range(1, 8)]
    expected = "c: 1 of 8 workers run, waiting for w1, w2, w3 and 4 more"
    assert starting("c", 1, absent) == expected
