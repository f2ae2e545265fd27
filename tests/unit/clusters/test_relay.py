"""What passes on the lines that processes print."""

from __future__ import annotations

import os
import threading

from asyncrpc.clusters.local.processes import OutputRelay


class Lines:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, str, bytes]] = []

    def prefix_of(self, name: str, number: int, stream: str) -> bytes:
        return f"{name}{number}: ".encode()

    def write(self, name: str, stream: str, lines: bytes) -> None:
        self.taken.append((name, stream, lines))


def test_lines_of_several_processes_come_with_their_names() -> None:
    lines = Lines()
    relay = OutputRelay(lines)
    for name in ("a", "b"):
        output, errors = relay.pipes(name)
        os.write(output, b"one\ntw")
        os.write(output, b"o\n")
        os.write(errors, b"no end of line")
        os.close(output)
        os.close(errors)
    relay.close()
    for number, name in enumerate(["a", "b"]):
        printed = b"".join(
            text for by, stream, text in lines.taken if (by, stream) == (name, "stdout")
        )
        prefix = f"{name}{number}: ".encode()
        assert printed == prefix + b"one\n" + prefix + b"two\n"
        assert (name, "stderr", prefix + b"no end of line\n") in lines.taken


def test_thread_may_end_before_it_is_woken() -> None:
    """As it may between the two steps of `close`."""

    class Slow(OutputRelay):
        """Its thread has ended when `close` writes to it."""

        def _wake(self) -> None:
            super()._wake()
            if self._is_closed:
                self._thread.join()
                super()._wake()

    relay = Slow(Lines())
    relay.close()
    assert "cluster-output" not in [thread.name for thread in threading.enumerate()]
