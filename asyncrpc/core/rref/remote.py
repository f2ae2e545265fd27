"""The user's side of calls on references: values are fetched, called, and made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from asyncrpc.core.arguments import UNSET
from asyncrpc.core.calls.destination import Destination, put
from asyncrpc.core.calls.futures import CallFuture, on_done
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.members import UNKNOWN_INCARNATION
from asyncrpc.core.options import PLAIN, CallOptions, options_within
from asyncrpc.core.parts import Parts
from asyncrpc.core.rref.handle import RRef, shared_of
from asyncrpc.core.rref.handles import Handles
from asyncrpc.core.rref.names import PeerNames
from asyncrpc.core.rref.owned import OwnedValues
from asyncrpc.core.rref.shared import Shared, SharedById
from asyncrpc.core.rref.tables import Tables
from asyncrpc.core.rref.values import Values, result_of
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.errors import (
    CallError,
    DeadlineExceededError,
    EncodeError,
    Outcome,
    OwnerLostError,
    RRefDeletedError,
    RRefError,
    rebuild,
)


class RemoteValues:
    """Calls of this worker on values that others have, and its own values fetched."""

    def __init__(
        self,
        me: WorkerId,
        worker: Parts,
        owned: OwnedValues,
        *,
        tables: Tables,
        handles: Handles,
        shared: SharedById,
        values: Values,
        names: PeerNames,
        timeout_s: float | None,
    ) -> None:
        """Prepare to call.

        Args:
            timeout_s: for a value of this worker that is still being made; None is no
                limit.
        """
        self._me = me
        self._worker = worker
        self._directory = worker.directory
        self._user = tables.user
        self._carry_out = tables.carry_out
        self._handles = handles
        self._shared = shared
        self._values = values
        self._owned = owned
        self._names = names
        self._timeout_s = timeout_s

    # --- values ----------------------------------------------------------------------

    async def fetch(
        self, handle: RRef[Any], timeout_s: Any, out: torch.Tensor | None = None
    ) -> Any:
        """Return the value or a copy of it; see `RRef.to_here`."""
        shared = shared_of(handle)
        shared.check()
        if not shared.is_here:
            try:
                return await self.start_method(
                    handle, "", (), {}, timeout_s, out=out, awaits=True
                )
            except RRefDeletedError:
                shared.check()  # the owner refused to make it, and that error says why
                raise
        self._worker.check_on_loop("RRef.to_here")
        future = self._values.get(handle.rref_id)
        if future is None:
            raise RRefDeletedError(f"the value of {handle!r} was freed, or never made")
        if timeout_s is UNSET:
            timeout_s = self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([future])  # failed if freed, or if this worker ends
        except TimeoutError:
            raise DeadlineExceededError(
                function="to_here",
                to=self._me.name,
                outcome=Outcome.UNKNOWN,
                timeout_s=timeout_s or 0.0,
            ) from None
        value = result_of(future)
        if out is None:
            return value
        return put(value, out, function="to_here", to=self._me.name)

    # --- methods ---------------------------------------------------------------------

    def start_method(
        self,
        handle: RRef[Any],
        name: str,
        args: Any,
        kwargs: Any,
        timeout_s: Any,
        *,
        out: torch.Tensor | None = None,
        awaits: bool = False,
    ) -> CallFuture[Any]:
        """Start a method of a referenced object, on its owner.

        Args:
            awaits: the caller awaits the call at once, and gives it to nobody.
        """
        shared = shared_of(handle)
        shared.check()
        destination = None if out is None else Destination(out)
        called = name or "to_here"
        call = self._worker.new_call(
            called, shared.owner.name, with_site=True, awaits=awaits
        )
        call.destination = destination
        target = ["=", *handle.rref_id, name]
        on_done(call, _Keep(handle))
        values = (list(args), dict(kwargs))
        self._worker.begin(
            call,
            target,
            values,
            timeout_s=timeout_s,
            on_link=partial(_check_owner, shared),
        )
        return call

    def remote_method(
        self, handle: RRef[Any], name: str, args: Any, kwargs: Any, timeout_s: Any
    ) -> RRef[Any]:
        """Start a method whose result stays on the owner."""
        shared = shared_of(handle)
        shared.check()
        target = ["=", *handle.rref_id, name]
        values = (list(args), dict(kwargs))
        options = options_within(timeout_s)
        return self.start_remote(
            shared.owner.name, target, values, options=options, keep=handle
        )

    # --- values that calls make ------------------------------------------------------

    def start_remote(
        self,
        to: str,
        target: str | list[Any] | None,
        values: tuple[list[Any], dict[str, Any]],
        *,
        options: CallOptions = PLAIN,
        keep: RRef[Any] | None = None,
    ) -> RRef[Any]:
        """Start a call whose result stays on the callee; return the handle at once."""
        handles, owner = self._handles, self._owner_named(to)
        name = target[-1] if isinstance(target, list) else target or "a callable"
        call = self._worker.new_call(name.rpartition(":")[2], to, kind="remote")
        shared = self._shared.of(handles.new_id(), owner)
        # Queued before any note of the handle's end, in whatever thread that comes.
        handles.note_remote(shared)
        call.options = options
        if keep is not None:
            on_done(call, _Keep(keep))
        shared.call = call
        handle = handles.make(shared)
        meta = {"r": list(shared.rref_id), **self._worker.meta_here()}
        refused: list[EncodeError] = []
        here = threading.get_ident()

        def refuse(error: EncodeError) -> None:
            # For a call of another thread than the loop's, only the reference raises
            # it: that thread may have gone on already.
            if threading.get_ident() == here:
                refused.append(error)

        self._worker.on_loop_thread(
            lambda: self._begin_remote(shared, call, target, values, keep, meta, refuse)
        )
        if refused:
            raise refused.pop()
        return handle

    def _begin_remote(  # noqa: PLR0917
        self,
        shared: Shared,
        call: CallFuture[Any],
        target: Any,
        values: Any,
        of: RRef[Any] | None,
        meta: dict[str, Any],
        on_refused: Callable[[EncodeError], None],
    ) -> None:
        rref_id = shared.rref_id
        refusal = self._owned.refusal() if shared.is_here else None
        self._handles.settle()
        if shared.is_here:
            self._values.expect(rref_id)
            if refusal is not None:
                self._values.fail(rref_id, refusal)
                call.fail(refusal)
                call.exception()  # the value has it
                return
        on_done(call, partial(self._on_answered, shared))
        try:
            self._worker.begin(
                call,
                target,
                values,
                timeout_s=call.options.timeout_s,
                meta=meta,
                on_link=partial(self._bind, shared, of),
            )
        except (CallError, RRefError) as error:
            # Raise a copy: the traceback of this one would keep the handle alive.
            call.fail(rebuild(type(error), error.args, dict(vars(error))))
            call.exception()
            if isinstance(error, EncodeError):
                on_refused(error)

    def _owner_named(self, to: str) -> WorkerId:
        """Return which life of a worker a call is to reach, as far as is known."""
        known = self._directory.met(to)
        link = None if known is None else known.link
        if link is not None:
            return link.peer
        if to in self._worker.calls.expected:  # a former life is over
            return WorkerId(to, UNKNOWN_INCARNATION)
        entry = self._directory.find(to)
        # It is not known whether a life goes on whose connection is broken just now.
        incarnation = UNKNOWN_INCARNATION if entry.broken else entry.member.incarnation
        return WorkerId(entry.member.name, incarnation)

    def _bind(self, shared: Shared, of: RRef[Any] | None, link: PeerLink) -> None:
        """Record the link of the call that makes a value: its peer is the owner."""
        shared.check()
        if of is not None:
            _check_owner(shared_of(of), link)
        owner = link.peer
        self._names.note(owner)
        if owner.incarnation != shared.owner.incarnation:
            self._user.rebind(shared.rref_id, owner.incarnation)
            shared.owner = owner

    def _on_answered(self, shared: Shared, call: asyncio.Future[Any]) -> None:
        """Record that the owner ran the function, or that the call failed before."""
        error = None if call.cancelled() else call.exception()
        shared.call = None
        if shared.is_here:
            if error is not None:
                self._values.fail(shared.rref_id, error)
            return
        if shared.is_apart:
            return  # the owner was lost, and has come back meanwhile
        if error is None or _says_owner_counts(error):
            self._carry_out(self._user.confirmed(shared.rref_id))
            return
        if shared.error is None:
            shared.error = error if isinstance(error, Exception) else None
        self._carry_out(self._user.refused(shared.rref_id))


def _says_owner_counts(error: BaseException) -> bool:
    """Return whether the call that makes a value expired once the owner had begun it.

    Then the owner has failed the value, and counts this worker.  It alone watches the
    deadline of such a call: what expires here was never sent.
    """
    if not isinstance(error, DeadlineExceededError):
        return False
    return error.outcome is not Outcome.NOT_EXECUTED


def _check_owner(shared: Shared, link: PeerLink) -> None:
    """Refuse to ask another life of the owner for a value."""
    owner = shared.owner
    is_known = owner.incarnation != UNKNOWN_INCARNATION
    if is_known and link.peer.incarnation != owner.incarnation:
        raise OwnerLostError(
            worker=owner.name,
            incarnation=owner.incarnation,
            reason="it has been restarted",
        )


class _Keep:
    """A callback that keeps an object alive until the future is done."""

    __slots__ = ("_kept",)

    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def __call__(self, _future: object) -> None:
        self._kept = None
