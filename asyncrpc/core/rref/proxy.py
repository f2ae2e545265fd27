"""Proxies: the methods of a referenced object, called on its owner, in one round trip.

The names are those of the remote object, which cannot be asked here: so any attribute
is called, and the owner raises if it does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from asyncrpc.core.calls.futures import CallFuture, refuse_on_loop
from asyncrpc.errors import UsageError

if TYPE_CHECKING:
    from asyncrpc.core.rref.handle import RRef

T = TypeVar("T")  # of the referenced object

# Starts a method: of a reference, by name, with arguments, keyword arguments, a limit.
Start = Callable[[Any, str, Any, Any, Any], Any]


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
