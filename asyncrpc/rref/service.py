"""Remote references of one worker, whole: what `Worker.references` is.

Source: docs/reference/rref-protocol.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from asyncrpc.errors import (
    CallError,
    EncodeError,
    RRefDeletedError,
    RRefError,
    UsageError,
)
from asyncrpc.ids import WorkerId
from asyncrpc.rref.handle import RRef
from asyncrpc.rref.pins import Shared
from asyncrpc.rref.travel import Travel
from asyncrpc.rref.values import OwnedValues, result_of
from asyncrpc.runtime.destination import Destination, put
from asyncrpc.runtime.futures import CallFuture
from asyncrpc.runtime.options import UNSET
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
        future = self.value(handle.rref_id)
        if timeout_s is UNSET:
            timeout_s = self.worker.options.rpc_timeout_s
        async with asyncio.timeout(timeout_s):
            await asyncio.wait([future])
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
        self.worker.begin(call, target, values, timeout_s=timeout_s)
        return call

    def remote_method(
        self, handle: RRef[Any], name: str, args: Any, kwargs: Any, timeout_s: Any
    ) -> RRef[Any]:
        """Start a method whose result stays on the owner."""
        shared = handle._shared  # noqa: SLF001
        shared.check()
        target = ["=", *handle.rref_id, name]
        values = (list(args), dict(kwargs))
        return self.start_remote(
            shared.owner.name, target, values, timeout_s, keep=handle
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
        timeout_s: Any = UNSET,
        *,
        keep: Any = None,
    ) -> RRef[Any]:
        """Start a call whose result stays on the callee; return the handle at once."""
        rref_id = self.new_id()
        member = self.worker.directory.find(to).member
        owner = WorkerId(member.name, member.incarnation)
        shared = self._shared_of(rref_id, owner)
        name = target if isinstance(target, str) else "a method"
        call = self.worker.new_call(name.rpartition(":")[2], to)
        call.add_done_callback(_Keep(keep))
        handle = RRef._make(self.whole, shared)
        self.worker.on_loop_thread(
            lambda: self._begin_remote(shared, call, target, values, timeout_s)
        )
        return handle

    def _begin_remote(
        self,
        shared: Shared,
        call: CallFuture[Any],
        target: Any,
        values: Any,
        timeout_s: Any,
    ) -> None:
        rref_id = shared.rref_id
        self._names[shared.owner.incarnation] = shared.owner.name
        if shared.is_here:
            refusal = self.refusal()
            self._carry_out(self._owner.create(rref_id))
            self.value(rref_id)
            if refusal is not None:
                self.fail(rref_id, refusal)
                call.fail(refusal)
                call.exception()  # the value has it
                return
        else:
            self._user.create(rref_id, shared.owner.incarnation)
        call.add_done_callback(lambda done: self._on_remote_answered(shared, done))
        try:
            self.worker.begin(
                call, target, values, timeout_s=timeout_s, meta={"r": list(rref_id)}
            )
        except (CallError, RRefError) as error:
            call.fail(error)
            call.exception()
            if isinstance(error, EncodeError):
                raise

    def _on_remote_answered(self, shared: Shared, call: asyncio.Future[Any]) -> None:
        """The owner has run the function, or the call failed before it could."""
        error = None if call.cancelled() else call.exception()
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


class _Keep:
    """A callback that keeps an object alive until the future is done."""

    __slots__ = ("_kept",)

    def __init__(self, kept: Any) -> None:
        self._kept = kept

    def __call__(self, _future: object) -> None:
        self._kept = None
