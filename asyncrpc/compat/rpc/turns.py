"""Turns at a store: one worker at a time joins a group that has no size, or leaves it.

Source: torch.distributed.rpc takes a token at the store for the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_POLL_S: Final = 0.005
_PATIENCE_S: Final = 60.0  # for one that holds its turn: it may have died


@contextmanager
def turn_at(store: Any) -> Iterator[None]:
    """Wait for a turn, and end it with the block.

    One that died in its turn is passed by, after a minute.
    """
    number = store.add("turns/taken", 1)
    served = store.add("turns/served", 0)
    since_s = time.monotonic()
    while served < number - 1:
        time.sleep(_POLL_S)
        now = store.add("turns/served", 0)
        if now != served:
            served, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > _PATIENCE_S:
            served, since_s = store.add("turns/served", 1), time.monotonic()
    try:
        yield
    finally:
        if store.add("turns/served", 0) < number:
            store.add("turns/served", 1)
