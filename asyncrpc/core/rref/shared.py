"""The state that all handles of one worker to one value share."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from asyncrpc.core.ids import Incarnation, RRefId, WorkerId
from asyncrpc.core.rref import machine as m
from asyncrpc.core.serde.dismantling import assemble, dismantle
from asyncrpc.errors import OwnerLostError, RRefDeletedError


class Shared:
    """The state that all handles of this worker to one value share.

    Attributes:
        error: why the value is no longer available.
        is_apart: whether the tables count these handles no more, which are lost.
        made_s: when the first of them was made, on the loop's clock.
        call: that makes the value, if it was made here and is under way.
    """

    __slots__ = (
        "__weakref__",
        "call",
        "error",
        "is_apart",
        "is_here",
        "made_s",
        "owner",
        "rref_id",
    )

    def __init__(
        self, rref_id: RRefId, owner: WorkerId, *, is_here: bool, made_s: float
    ) -> None:
        self.rref_id = rref_id
        self.owner = owner
        self.is_here = is_here
        self.made_s = made_s
        self.is_apart = False
        self.error: Exception | None = None
        self.call: asyncio.Future[Any] | None = None

    def check(self) -> None:
        """Raise a copy of `error` if the value is no longer available."""
        if self.error is not None:
            raise copy_of(self.error)

    def given_back(self, text: str) -> Shared:
        """Return the state of a handle that was given back: an error, and no count."""
        gone = Shared(
            self.rref_id, self.owner, is_here=self.is_here, made_s=self.made_s
        )
        gone.is_apart = True
        gone.error = RRefDeletedError(text)
        return gone


class SharedById:
    """The shared state of each value, as long as it has a handle.

    Thread safety: `of` may be called from any thread; the rest on the worker's loop.
    """

    def __init__(self, me: Incarnation, now_s: Callable[[], float]) -> None:
        self._me = me
        self._now_s = now_s
        self._known: weakref.WeakValueDictionary[RRefId, Shared] = (
            weakref.WeakValueDictionary()
        )
        self.get = self._known.get

    def of(self, rref_id: RRefId, owner: WorkerId) -> Shared:
        """Return what handles of a value share; make it for the first of them."""
        shared = self._known.get(rref_id)
        if shared is None:
            is_here = owner.incarnation == self._me
            shared = Shared(rref_id, owner, is_here=is_here, made_s=self._now_s())
            self._known[rref_id] = shared
        return shared

    def set_apart(self, rref_id: RRefId) -> None:
        """Stop counting the handles of a lost value."""
        shared = self._known.pop(rref_id, None)
        if shared is not None:
            shared.is_apart = True

    def lose(self, rref_id: RRefId, cause: m.LossCause) -> None:
        """Make every use of a value fail."""
        shared = self._known.get(rref_id)
        if shared is None or shared.error is not None:
            return
        if cause is m.LossCause.OWNER_LOST:
            shared.error = OwnerLostError(
                worker=shared.owner.name,
                incarnation=shared.owner.incarnation,
                reason=cause.value,
            )
        else:
            shared.error = RRefDeletedError(f"{rref_id}: {cause.value}")

    def lose_owner(self, owner: WorkerId, reason: str) -> None:
        """Make every use of a lost worker's values fail."""
        for shared in list(self._known.values()):
            is_its = shared.owner.incarnation == owner.incarnation
            if is_its and shared.error is None:
                shared.error = OwnerLostError(
                    worker=owner.name, incarnation=owner.incarnation, reason=reason
                )


def copy_of(error: BaseException) -> BaseException:
    """Return a copy of a kept error, to be raised.

    Raising the kept error itself would attach frames to it, and a frame may hold the
    very handle whose finalizer keeps the error.
    """
    try:
        copy = assemble(type(error), dismantle(error))
        copy.__cause__, copy.__context__ = error.__cause__, error.__context__
        copy.__suppress_context__ = error.__suppress_context__
        return copy.with_traceback(error.__traceback__)
    except BaseException:  # noqa: BLE001  (its own code: there is no other like it)
        return error
