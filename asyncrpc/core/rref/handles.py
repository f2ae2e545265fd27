"""The handles of one worker: they are counted when made, and when collected.

A handle may be made or collected in any thread, also by a finalizer in the middle of
anything.  So neither changes the tables: both queue a note, which the loop applies.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from asyncrpc.core.ids import RRefId, WorkerId
from asyncrpc.core.rref import machine as m
from asyncrpc.core.rref.handle import RRef, attach
from asyncrpc.core.rref.shared import Shared, SharedById
from asyncrpc.core.rref.tables import Tables

if TYPE_CHECKING:
    from asyncrpc.core.rref.service import RRefService

SERIAL_BYTES: Final = 8
SERIALS_DRAWN: Final = 64  # at once
_Change: TypeAlias = Callable[[Shared], Iterable[m.Effect]]


class Handles:
    """Makes handles, and applies what becomes of them to the tables.

    Attributes:
        handle_class: of the handles that are made; a facade may have its own.

    Thread safety: as each method says; the rest on the worker's loop.
    """

    def __init__(
        self,
        service: RRefService,
        *,
        me: WorkerId,
        loop: asyncio.AbstractEventLoop,
        tables: Tables,
        shared: SharedById,
        on_applied: Callable[[], None],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.service = service
        self.handle_class: type[RRef[Any]] = RRef
        self._me = me
        self._loop = loop
        self._owner, self._user = tables.owner, tables.user
        self._carry_out = tables.carry_out
        self._shared = shared
        self._on_applied = on_applied
        self._random_bytes = random_bytes
        self._serials: list[int] = []
        # Changes for the loop to make; at most two for each handle.
        self._notes: deque[tuple[_Change, Shared]] = deque()
        self._is_due = False
        self._thread_id = threading.get_ident()

    def new_id(self) -> RRefId:
        """Return an id that no other reference has; from any thread.

        Its number cannot be guessed: who knows it was sent the reference.
        """
        try:
            serial = self._serials.pop()
        except IndexError:  # one system call for many
            drawn = self._random_bytes(SERIAL_BYTES * SERIALS_DRAWN)
            pieces = range(0, len(drawn), SERIAL_BYTES)
            new = [int.from_bytes(drawn[at : at + SERIAL_BYTES]) for at in pieces]
            serial = new.pop()
            self._serials.extend(new)
        return RRefId(self._me.incarnation, serial)

    def make(self, shared: Shared) -> RRef[Any]:
        """Make a handle that the caller has counted; from any thread."""
        handle: RRef[Any] = self.handle_class.__new__(self.handle_class)
        attach(handle, self.service, shared, self._note_dropped)
        return handle

    def adopt(self, handle: RRef[Any], rref_id: RRefId) -> None:
        """Make `handle` refer to a value of this worker; from any thread."""
        shared = self._shared.of(rref_id, self._me)
        self._note(self._owner_creates, shared)
        attach(handle, self.service, shared, self._note_dropped)

    def note_remote(self, shared: Shared) -> None:
        """Count a handle of a value that a call is to make; from any thread.

        The loop is not woken: it has the call to send, and applies the note before.
        """
        change = self._owner_creates if shared.is_here else self._user_creates
        self._notes.append((change, shared))

    def drop_all(self, at_home: Iterable[Shared]) -> None:
        """Drop the counts of references that were to go to this worker itself."""
        for shared in at_home:
            self._note_dropped(shared)

    def count(self, shared: Shared) -> None:
        """Count one more handle of a value."""
        if shared.is_here:
            self._owner.local_acquire(shared.rref_id)
        else:
            self._user.add_handle(shared.rref_id)

    def _owner_creates(self, shared: Shared) -> Iterable[m.Effect]:
        return self._owner.create(shared.rref_id)

    def _user_creates(self, shared: Shared) -> Iterable[m.Effect]:
        self._user.create(shared.rref_id, shared.owner.incarnation)
        return ()

    def _dropped(self, shared: Shared) -> Iterable[m.Effect]:
        if shared.is_here:
            return self._owner.local_release(shared.rref_id)
        return () if shared.is_apart else self._user.drop_handle(shared.rref_id)

    def _note_dropped(self, shared: Shared) -> None:
        self._note(self._dropped, shared)

    def _note(self, change: _Change, shared: Shared) -> None:
        """Queue a change for the loop; from any thread, also from a finalizer."""
        self._notes.append((change, shared))
        if self._is_due:
            return
        self._is_due = True
        # To wake the loop takes a system call; on its own thread it is awake.
        is_here = threading.get_ident() == self._thread_id
        loop = self._loop
        try:
            (loop.call_soon if is_here else loop.call_soon_threadsafe)(self._apply)
        except RuntimeError:  # the loop is closed, and all of this with it
            self._notes.clear()

    def _apply(self) -> None:
        self._is_due = False
        self.settle()
        self._on_applied()

    def settle(self) -> None:
        """Apply what was queued.  Cheap if nothing was."""
        notes = self._notes
        while notes:
            change, shared = notes.popleft()
            effects = change(shared)
            if effects:
                self._carry_out(effects)
