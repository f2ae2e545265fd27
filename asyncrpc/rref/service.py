"""Remote references of one worker, whole: what `Worker.references` is.

Source: docs/reference/rref-protocol.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from asyncrpc.errors import (
    CallError,
    DeadlineExceededError,
    EncodeError,
    Outcome,
    OwnerLostError,
    RRefDeletedError,
    RRefError,
    UsageError,
    rebuild,
)
from asyncrpc.ids import WorkerId
from asyncrpc.rref import machine as m
from asyncrpc.rref.handle import RRef
from asyncrpc.rref.pins import Shared
from asyncrpc.rref.travel import Travel
from asyncrpc.rref.values import OwnedValues, result_of
from asyncrpc.runtime.calls.destination import Destination, put
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.membership.members import UNKNOWN_INCARNATION
from asyncrpc.runtime.options import PLAIN, UNSET, CallOptions, options_within
from asyncrpc.runtime.ports import PeerLink
from asyncrpc.runtime.worker import Worker


class RRefService(Travel, OwnedValues):
    """A `runtime.extensions.References` and `Service`."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.backward_from: Callable[..., Any] | None = None  # set by autograd

    async def fetch(
        self, handle: RRef[Any], timeout_s: Any, out: torch.Tensor | None = None
    ) -> Any:
        """Return the value or a copy of it; see `RRef.to_here`."""
        shared = handle._shared  # noqa: SLF001
        shared.check()
        if not shared.is_here:
            try:
                return await self.start_method(handle, "", (), {}, timeout_s, out=out)
            except RRefDeletedError:
                shared.check()  # the owner had refused to make it, and that says why
                raise
        self.worker.check_on_loop("RRef.to_here")
        future = self._values.get(handle.rref_id)
        if future is None:
            raise RRefDeletedError(f"the value of {handle!r} is gone, or never came")
        if timeout_s is UNSET:
            timeout_s = self.worker.options.rpc_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait([future])  # failed if freed, or if this worker ends
        except TimeoutError:
            raise DeadlineExceededError(
                function="to_here",
                to=self.worker.name,
                outcome=Outcome.UNKNOWN,
                timeout_s=timeout_s or 0.0,
            ) from None
        value = result_of(future)
        if out is None:
            return value
        return put(value, out, function="to_here", to=self.worker.name)

    def start_method(
        self,
        handle: RRef[Any],
        name: str,
        args: Any,
        kwargs: Any,
        timeout_s: Any,
        *,
        out: torch.Tensor | None = None,
    ) -> CallFuture[Any]:
        """Start a method of a referenced object, on its owner.

        Raises:
            OwnerLostError: the owner is gone.
            EncodeError: an argument cannot travel.
            UsageError: nothing can be received into `out`.
        """
        shared = handle._shared  # noqa: SLF001
        shared.check()
        destination = None if out is None else Destination(out)
        called = name or "to_here"
        call = self.worker.new_call(called, shared.owner.name, with_site=True)
        call.destination = destination
        target = ["=", *handle.rref_id, name]
        call.add_done_callback(_Keep(handle))
        values = (list(args), dict(kwargs))
        self.worker.begin(
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
        shared = handle._shared  # noqa: SLF001
        shared.check()
        target = ["=", *handle.rref_id, name]
        values = (list(args), dict(kwargs))
        options = options_within(timeout_s)
        return self.start_remote(
            shared.owner.name, target, values, options=options, keep=handle
        )

    async def backward(
        self, handle: RRef[Any], context: Any, *, retain_graph: bool
    ) -> None:
        """Run a backward pass from the value; see `RRef.backward`."""
        if self.backward_from is None:
            raise UsageError("this worker was made without autograd")
        await self.backward_from(handle, context, retain_graph=retain_graph)

    def start_remote(
        self,
        to: str,
        target: str | list[Any] | None,
        values: tuple[list[Any], dict[str, Any]],
        *,
        options: CallOptions = PLAIN,
        keep: Any = None,
    ) -> RRef[Any]:
        """Start a call whose result stays on the callee; return the handle at once."""
        rref_id = self.new_id()
        shared = self._shared_of(rref_id, self._owner_named(to))
        # Queued before any note of the handle's end, in whatever thread that comes.
        self._notes.append((self._created if shared.is_here else self._made, shared))
        name = target[-1] if isinstance(target, list) else target or "a callable"
        call = self.worker.new_call(name.rpartition(":")[2], to, kind="remote")
        call.options = options
        call.add_done_callback(_Keep(keep))
        shared.call = call
        handle = self.handle_class._make(self.whole, shared)
        meta = {"r": list(rref_id), **self.worker.meta_here()}
        refused: list[EncodeError] = []
        self.worker.on_loop_thread(
            lambda: self._begin_remote(
                shared, call, target, values, keep, meta, refused.append
            )
        )
        if refused:  # in this thread; for another the reference raises it
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
        refusal = self.refusal() if shared.is_here else None
        self.settle_notes()
        if shared.is_here:
            self.value(rref_id)
            if refusal is not None:
                self.fail(rref_id, refusal)
                call.fail(refusal)
                call.exception()  # the value has it
                return
        call.add_done_callback(lambda done: self._on_remote_answered(shared, done))
        try:
            self.worker.begin(
                call,
                target,
                values,
                timeout_s=call.options.timeout_s,
                meta=meta,
                on_link=partial(self._bind, shared, of),
            )
        except (CallError, RRefError) as error:
            # Not the one that is raised: its traceback keeps the handle.
            call.fail(rebuild(type(error), error.args, dict(vars(error))))
            call.exception()
            if isinstance(error, EncodeError):
                on_refused(error)

    def _owner_named(self, to: str) -> WorkerId:
        """Return which life of a worker a call is to reach, as far as is known."""
        entry = self.worker.directory.find(to)
        if entry.link is not None:
            return entry.link.peer
        # Whether the life whose connection is broken just now goes on is not known.
        found = UNKNOWN_INCARNATION if entry.broken else entry.member.incarnation
        return WorkerId(entry.member.name, found)

    def _made(self, shared: Shared) -> Iterable[m.Effect]:
        self._user.create(shared.rref_id, shared.owner.incarnation)
        return ()

    def _bind(self, shared: Shared, of: RRef[Any] | None, link: PeerLink) -> None:
        """The call that makes a value goes over this link: there is its owner.

        Args:
            shared: of the value.
            of: the reference whose method makes it, if one does.
            link: to the worker that is to make it.

        Raises:
            RRefError: the value was given up before the call could be sent, or the
                owner of `of` is gone.
        """
        shared.check()
        if of is not None:
            _check_owner(of._shared, link)  # noqa: SLF001
        owner = link.peer
        self._names[owner.incarnation] = owner.name
        if owner.incarnation != shared.owner.incarnation:
            self._user.rebind(shared.rref_id, owner.incarnation)
            shared.owner = owner

    def _on_remote_answered(self, shared: Shared, call: asyncio.Future[Any]) -> None:
        """The owner has run the function, or the call failed before it could."""
        error = None if call.cancelled() else call.exception()
        shared.call = None
        if shared.is_here:
            if error is not None:
                self.fail(shared.rref_id, error)
            return
        if shared.is_apart:
            return  # the owner was lost, and has come back meanwhile
        if error is None:
            self._carry_out(self._user.confirmed(shared.rref_id))
            return
        if shared.error is None:
            shared.error = error if isinstance(error, Exception) else None
        self._carry_out(self._user.refused(shared.rref_id))


def _check_owner(shared: Shared, link: PeerLink) -> None:
    """Refuse to ask another life of the owner for a value.

    Raises:
        OwnerLostError: the owner is gone.
    """
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
