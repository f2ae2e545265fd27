"""Ports for those that must be told one before anybody listens there.

A port that the system gives and that is closed again can be gone before it is used: the
system takes the ports of outgoing connections from the same range, and every process of
tests makes some.  These lie below that range, and no two processes give out the same.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator
from typing import Final

_FIRST: Final = 10_000
_BLOCK: Final = 100  # ports that one process gives out, one after the other
_BLOCKS: Final = 220  # up to 31,999: the range of outgoing connections begins at 32,768


def free_port() -> int:
    """Return a port where nobody listens, and which no other process gives out."""
    if _Block.owner != os.getpid():  # forked
        _Block.claim()
    return next(
        port for port in itertools.islice(_Block.ports, _BLOCK) if _is_free(port)
    )


class _Block:
    """The ports of this process; another process cannot claim them while it lives."""

    owner: int
    claimed: socket.socket
    ports: Iterator[int]

    @classmethod
    def claim(cls) -> None:
        """Claim a block that no process has."""
        for number in random.SystemRandom().sample(range(_BLOCKS), _BLOCKS):
            claimed = socket.socket(socket.AF_UNIX)
            try:
                claimed.bind(f"\0asyncrpc-tests-ports-{number}")
            except OSError:
                claimed.close()
                continue
            first = _FIRST + number * _BLOCK
            cls.owner, cls.claimed = os.getpid(), claimed
            cls.ports = itertools.cycle(range(first, first + _BLOCK))
            return
        raise OSError("every block of ports for tests is claimed")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


_Block.claim()
