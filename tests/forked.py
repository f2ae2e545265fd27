"""Programs in processes that have imported everything before they begin.

`python -c PROGRAM` imports torch and asyncrpc first, which takes seconds; a process
that is forked from the server of `tests.preloaded` is there at once.  What tests how an
interpreter begins or ends, or how it takes Ctrl-C, needs one of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final, TextIO

END_S: Final = 60.0  # for a process that was killed to be gone; only a failure takes it


class ForkedProgram:
    def __init__(self, process: BaseProcess, output: TextIO) -> None:
        self._process = process
        self.output = output  # what it writes to its standard output and error

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once; return when it has ended."""
        self._process.kill()
        self._process.join(END_S)
        assert self._process.exitcode is not None


@contextlib.contextmanager
def forked(source: str, **environment: str) -> Iterator[ForkedProgram]:
    """Run Python code as a program's main module; whatever happens, it ends.

    Args:
        source: the code; it can pass on no function of its own.
    """
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as output:
        ours = Connection(writing, readable=False)
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(source, environment, ours)
        )
        process.start()
        ours.close()
        running = ForkedProgram(process, output)
        try:
            yield running
        finally:
            running.kill()
            process.close()


def _run(source: str, environment: dict[str, str], output: Connection) -> None:
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    os.environ.update(environment)
    exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102
