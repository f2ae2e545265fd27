"""A lock in a store: one worker at a time joins or leaves a group without a size.

Source: torch.distributed.rpc takes a token at the store for the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from asyncrpc.core.loop.clock import now_s

_POLL_S: Final = 0.005
_PATIENCE_S: Final = 60.0  # wait for the holder of the lock, which may have died


@contextmanager
def locked_at(store: Any) -> Iterator[None]:
    """Hold the lock of a store.

    If the holder has died, the lock is taken from it after a minute.
    """
    number = store.add("lock/taken", 1)
    served = store.add("lock/served", 0)
    since_s, poll = now_s(), threading.Event()  # never set: a way to wait
    while served < number - 1:
        poll.wait(_POLL_S)
        now = store.add("lock/served", 0)
        if now != served:
            served, since_s = now, now_s()
        elif now_s() - since_s > _PATIENCE_S:
            served, since_s = store.add("lock/served", 1), now_s()
    try:
        yield
    finally:
        if store.add("lock/served", 0) < number:
            store.add("lock/served", 1)


def _group_membership_management(
    store: Any,
    name: str,
    is_join: bool,  # noqa: FBT001  (torch's signature)
) -> AbstractContextManager[None]:
    """Hold the lock while a worker joins or leaves."""
    _ = name, is_join
    return locked_at(store)


def _update_group_membership(*_: object) -> None:
    """Do nothing: asyncrpc's members know who joins and who leaves."""
