"""The handle of a remote reference: what a program holds.

A handle is a local Python object; all handles of one worker to one value share one
count at the owner.  Collecting a handle only queues a note for the event loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from asyncrpc.errors import UsageError
from asyncrpc.ids import RRefId, WorkerId, WorkerInfo
from asyncrpc.rref.proxy import AsyncProxy, BlockingProxy, RemoteProxy
from asyncrpc.runtime.current import current_worker
from asyncrpc.runtime.options import UNSET, check_call_timeout

if TYPE_CHECKING:
    from asyncrpc.rref.pins import Shared
    from asyncrpc.rref.service import RRefService

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value on some worker, its owner.

    `RRef(value)` refers to a local value.  `remote` makes references to values on
    others.  A reference travels in calls and results like any value; the value itself
    stays where it is until `to_here` fetches a copy, and is freed when no worker holds
    a reference any more.

    Thread safety: all methods may be called from any thread; what is awaited, on the
    worker's loop.

    Source: torch.distributed.rpc.RRef.
    """

    __slots__ = ("__weakref__", "_final", "_service", "_shared", "rref_id")

    _final: weakref.finalize[[Any, Shared], RRef[Any]]
    _service: RRefService
    _shared: Shared
    rref_id: RRefId

    def __init__(self, value: T) -> None:
        """Refer to a value of this worker.

        Args:
            value: anything.

        Raises:
            NotStartedError: there is no running worker here.
        """
        references: Any = current_worker().references
        if references is None:
            raise UsageError("the current worker was made without remote references")
        references.adopt(self, value)

    @classmethod
    def _make(cls, service: RRefService, shared: Shared) -> RRef[Any]:
        """Make a handle that the caller has counted."""
        handle: RRef[Any] = cls.__new__(cls)
        service.attach(handle, shared)
        return handle

    # --- who owns it -----------------------------------------------------------------

    @property
    def owner_id(self) -> WorkerId:
        """The owner and its incarnation."""
        return self._shared.owner

    def owner(self) -> WorkerInfo:
        """Return who holds the value."""
        return self._service.info(self._shared.owner)

    def owner_name(self) -> str:
        """Return the name of the worker that holds the value."""
        return self._shared.owner.name

    def is_owner(self) -> bool:
        """Say whether the value is on this worker."""
        return self._shared.is_here

    def confirmed_by_owner(self) -> bool:
        """Say whether the owner counts this worker as a holder."""
        return self._service.is_confirmed(self._shared)

    def release(self) -> None:
        """Give this handle back now, instead of when it is collected.  Idempotent.

        For a value that refers to another worker's, which refers back: no worker sees
        such a circle, and it lives until a handle in it is given back, or a worker in
        it leaves.  Other handles of the same value, here and elsewhere, keep it.

        Raises:
            RRefDeletedError: not here, but whenever this handle is used from now on.

        Thread safety: from any thread.
        """
        self._service.release(self)

    # --- the value -------------------------------------------------------------------

    def local_value(self) -> T:
        """Return the value itself, on its owner; a thread waits while it is being made.

        Raises:
            UsageError: the value is on another worker, or is still being made and this
                is the event loop: use `await rref.to_here()`.
            RRefDeletedError: it has been freed.
            Exception: what the function that was to make it raised.
        """
        value: T = self._service.local_value(self)
        return value

    async def to_here(
        self,
        timeout: Any = UNSET,  # noqa: ASYNC109  (torch's name, as its meaning)
        *,
        timeout_s: Any = UNSET,
        out: torch.Tensor | None = None,
    ) -> T:
        """Return the value: a copy of it, or the value itself on its owner.

        Inside an autograd context the copy's tensors are differentiable.

        Args:
            timeout: seconds; None is no limit; left out, the worker's default.  Same
                as `timeout_s`; torch's name for it.
            timeout_s: seconds.
            out: a tensor of the value's shape and dtype, which the value is received
                into and which is returned; see `Peer.using`.

        Raises:
            OwnerLostError: the owner is gone.
            DeadlineExceededError: the value did not come in time.
            UsageError: nothing can be received into `out`.
            OutMismatchError: the value does not fit into `out`.
            EncodeError: the value cannot travel.
            Exception: what the function that was to make it raised.

        Cancellation:
            The owner is told; nothing else changes, but for the content of `out`,
            which is no longer written to.

        Source: torch.distributed.rpc.RRef.to_here; `out` is ours.
        """
        name, limit = (
            ("timeout", timeout) if timeout_s is UNSET else ("timeout_s", timeout_s)
        )
        check_call_timeout(name, limit)
        value: T = await self._service.fetch(self, limit, out)
        return value

    def __await__(self) -> Generator[Any, None, T]:
        """Await the value: the same as `to_here()`."""
        # Not by way of `to_here`, which blocks in a facade's subclass.
        return self._service.fetch(self, UNSET).__await__()

    # --- calling its methods ---------------------------------------------------------

    def rpc_async(self, timeout: Any = UNSET) -> AsyncProxy[T]:
        """Return a proxy whose methods run on the owner and return futures.

        Example:
            >>> y = await rref.rpc_async().forward(x)
        """
        check_call_timeout("timeout", timeout)
        return AsyncProxy(self, timeout)

    def rpc_sync(self, timeout: Any = UNSET) -> BlockingProxy[T]:
        """Return a proxy whose methods run on the owner and block; for threads only."""
        check_call_timeout("timeout", timeout)
        return BlockingProxy(self, timeout)

    def remote(self, timeout: Any = UNSET) -> RemoteProxy[T]:
        """Return a proxy whose methods run on the owner and return RRefs."""
        check_call_timeout("timeout", timeout)
        return RemoteProxy(self, timeout)

    async def backward(self, context: Any, *, retain_graph: bool = False) -> None:
        """Run a distributed backward pass from the value, a tensor, on its owner.

        Args:
            context: the autograd context that the value was computed in.
            retain_graph: keep the graph for another pass.

        Raises:
            AutogradError: the pass failed, or the value needs no gradient.
            UsageError: this worker was made without autograd.

        Cancellation:
            The pass is undone.

        Source: torch.distributed.rpc.RRef.backward.
        """
        await self._service.backward(self, context, retain_graph=retain_graph)

    def __reduce__(self) -> Any:
        """Refuse to be pickled: a reference must be counted where it goes.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "an RRef cannot be pickled: it is counted where it goes. Send it as an "
            "argument or a result of a call, also inside containers and objects"
        )

    def __repr__(self) -> str:
        owner = self._shared.owner.name
        kind = "OwnerRRef" if self._shared.is_here else "UserRRef"
        return (
            f"<{kind} {self.rref_id.creator:016x}:{self.rref_id.serial} on {owner!r}>"
        )
