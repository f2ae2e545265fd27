"""The handle of a remote reference: what a program holds.

A handle is a local Python object; all handles of one worker to one value share one
count at the owner.  Collecting a handle only queues a note for the event loop.

A proxy calls methods of the referenced object on its owner, in one round trip.  The
names are those of the remote object, which cannot be asked here: so any attribute
is called, and the owner raises if it does not exist.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from asyncrpc.core.arguments import UNSET, check_call_timeout
from asyncrpc.core.calls.futures import CallFuture, refuse_on_loop
from asyncrpc.core.html import Cell, State, panel
from asyncrpc.core.ids import RRefId, WorkerId, WorkerInfo
from asyncrpc.core.rref.shared import Shared
from asyncrpc.core.worker import current_worker
from asyncrpc.errors import UsageError

if TYPE_CHECKING:
    from asyncrpc.core.rref.service import RRefService

# Starts a method: of a reference, by name, with arguments, keyword arguments, a limit.
Start = Callable[[Any, str, Any, Any, Any], Any]

T = TypeVar("T")


class _MethodProxy(Generic[T]):
    """The methods of one referenced object."""

    __slots__ = ("_rref", "_start_method", "_timeout_s")

    def __init__(self, start_method: Start, rref: Any, timeout_s: Any) -> None:
        self._start_method = start_method
        self._rref = rref
        self._timeout_s = timeout_s

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: every other method's name is one of the owner's."""
        raise UsageError("a proxy of an RRef cannot be sent; send the RRef")

    def _start(self, name: str, args: Any, kwargs: Any) -> Any:
        return self._start_method(self._rref, name, args, kwargs, self._timeout_s)


class AsyncProxy(_MethodProxy[T]):
    """From `RRef.rpc_async`: methods return futures."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Callable[..., CallFuture[Any]]:
        return lambda *args, **kwargs: self._start(name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Call the referenced object itself."""
        call: CallFuture[Any] = self._start("__call__", args, kwargs)
        return call


class BlockingProxy(_MethodProxy[T]):
    """From `RRef.rpc_sync`: methods block the calling thread."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._run(name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the referenced object itself."""
        return self._run("__call__", args, kwargs)

    def _run(self, name: str, args: Any, kwargs: Any) -> Any:
        refuse_on_loop("rref.rpc_sync()", "use `await rref.rpc_async()`")
        return self._start(name, args, kwargs).wait()


class RemoteProxy(_MethodProxy[T]):
    """From `RRef.remote`: methods return references to their results."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Callable[..., RRef[Any]]:
        return lambda *args, **kwargs: self._start(name, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Call the referenced object itself."""
        rref: RRef[Any] = self._start("__call__", args, kwargs)
        return rref


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

    _final: weakref.finalize[[Shared], RRef[Any]]
    _service: RRefService
    _shared: Shared
    rref_id: RRefId

    def __init__(self, value: T) -> None:
        """Refer to a value of this worker.

        Args:
            value: anything.

        Raises:
            NotStartedError: no worker runs here.
        """
        references: Any = current_worker().parts.references
        if references is None:
            raise UsageError("the current worker was made without remote references")
        references.adopt(self, value)

    # --- who owns it -----------------------------------------------------------------

    @property
    def owner_id(self) -> WorkerId:
        """The owner and its incarnation."""
        return self._shared.owner

    async def made_on(self) -> WorkerId:
        """Internal: return the owner, once the call that makes the value has ended.

        Until then it may turn out to be another life of that worker.

        Raises:
            Nothing: the error goes to the caller that fetches the value.

        Cancellation:
            The call goes on.
        """
        call = self._shared.call
        if call is not None:
            await asyncio.wait([call])
        return self._shared.owner

    def owner(self) -> WorkerInfo:
        """Return the worker that holds the value."""
        return self._service.info(self._shared.owner)

    def owner_name(self) -> str:
        """Return the name of the worker that holds the value."""
        return self._shared.owner.name

    def is_owner(self) -> bool:
        """Return whether the value is on this worker."""
        return self._shared.is_here

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner counts this worker as a holder."""
        return self._service.is_confirmed(self._shared)

    def release(self) -> None:
        """Give this handle back now, instead of when it is collected.  Idempotent.

        Use it for a value that refers to one of another worker, which refers back: no
        worker sees such a cycle, and it lives until a handle in it is given back, or a
        worker in it leaves.  Other handles of the same value, here and elsewhere, keep
        it alive.  Any later use of this handle raises RRefDeletedError.

        Thread safety: from any thread.
        """
        shared = self._shared
        if self._final() is None and shared.error is not None:
            return  # it has been given back, or was lost, before
        self._shared = shared.given_back(
            f"{self!r} was given back by RRef.release(); use another handle of the "
            "value, or make it again"
        )

    # --- the value -------------------------------------------------------------------

    def local_value(self) -> T:
        """Return the value itself, on its owner; a thread waits while it is being made.

        Raises:
            UsageError: the value is on another worker, or is still being made and this
                is the event loop: use `await rref.to_here()`.
            RRefDeletedError: the value has been freed.
            Exception: the function that was to make the value raised it.
        """
        value: T = self._service.local_value(self)
        return value

    async def to_here(
        self,
        timeout_s: Any = UNSET,
        *,
        out: torch.Tensor | None = None,
    ) -> T:
        """Return the value: a copy of it, or the value itself on its owner.

        Inside an autograd context the copy's tensors are differentiable.

        Args:
            timeout_s: seconds; None is no limit; left out, the worker's default.
            out: a tensor of the value's shape and dtype, which the value is received
                into and which is returned; see `Peer.using`.

        Raises:
            OwnerLostError: the owner is gone.
            DeadlineExceededError: the value did not come in time.
            UsageError: `out` cannot receive a value.
            OutMismatchError: the value does not fit into `out`.
            EncodeError: the value cannot travel.
            Exception: the function that was to make the value raised it.

        Cancellation:
            The owner is told; nothing else changes, except that the content of `out` is
            undefined; it is no longer written to.

        Source: torch.distributed.rpc.RRef.to_here; `out` is ours.
        """
        check_call_timeout("timeout_s", timeout_s)
        value: T = await self._service.fetch(self, timeout_s, out)
        return value

    def __await__(self) -> Generator[Any, None, T]:
        """Await the value: the same as `to_here()`."""
        # Not by way of `to_here`, which blocks in a facade's subclass.
        return self._service.fetch(self, UNSET).__await__()

    # --- calling its methods ---------------------------------------------------------

    def rpc_async(self, timeout_s: Any = UNSET) -> AsyncProxy[T]:
        """Return a proxy whose methods run on the owner and return futures.

        Example:
            >>> y = await rref.rpc_async().forward(x)
        """
        check_call_timeout("timeout_s", timeout_s)
        return AsyncProxy(self._service.start_method, self, timeout_s)

    def rpc_sync(self, timeout_s: Any = UNSET) -> BlockingProxy[T]:
        """Return a proxy whose methods run on the owner and block; for threads only."""
        check_call_timeout("timeout_s", timeout_s)
        return BlockingProxy(self._service.start_method, self, timeout_s)

    def remote(self, timeout_s: Any = UNSET) -> RemoteProxy[T]:
        """Return a proxy whose methods run on the owner and return RRefs."""
        check_call_timeout("timeout_s", timeout_s)
        return RemoteProxy(self._service.remote_method, self, timeout_s)

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
        return f"<{kind} {self.rref_id} on {owner!r}>"

    def _repr_html_(self) -> str:
        shared = self._shared
        where = " (this worker)" if shared.is_here else ""
        if shared.error is not None:
            state = State("lost", "bad", str(shared.error))
        elif shared.call is not None and not shared.call.done():
            state = State("being made", "busy")
        else:
            state = State("held", "good", "await it for a copy of its value")
        rows: list[tuple[str, Cell]] = [
            ("owner", f"{shared.owner.name}{where}"),
            ("state", state),
            ("id", str(self.rref_id)),
        ]
        return panel("Remote reference", rows=rows)


# What the other half of a handle, its worker's references, needs of it.  Here, so that
# what a handle has stays private to this file.


def attach(
    handle: RRef[Any],
    service: RRefService,
    shared: Shared,
    on_collected: Callable[[Shared], object],
) -> None:
    """Tie a counted handle to what it refers to, until it is collected."""
    handle._service, handle._shared = service, shared  # noqa: SLF001
    handle.rref_id = shared.rref_id
    final = weakref.finalize(handle, on_collected, shared)
    final.atexit = False
    handle._final = final  # noqa: SLF001


def shared_of(handle: RRef[Any]) -> Shared:
    """Return what all handles of the value share."""
    return handle._shared  # noqa: SLF001


def service_of(handle: RRef[Any]) -> RRefService:
    """Return the references of the worker that has the handle."""
    return handle._service  # noqa: SLF001
