"""What functions should not return, and what they should not raise.

`give(kind)` returns, or raises, what has that name; `ways` does so in every way that a
function can run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import inspect
import io
import math
import socket
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, NoReturn

import numpy as np
import torch

import asyncrpc
from asyncrpc.errors import MalformedError

DEEP: Final = 2_000  # more than pickle follows
DEEPER: Final = 100_000
LONG: Final = (64 << 20) + 1  # more than the control part of a message holds


class Hostile:
    """A value of which one special method raises; which one, its class says."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def _hostile_class(name: str, error: type[BaseException]) -> type[Hostile]:
    """Return a class one of whose special methods raises; its name leads to it."""

    def method(*_: object, **__: object) -> NoReturn:
        raise error("no")

    body: dict[str, Any] = {name: property(method) if name == "__class__" else method}
    if name == "__eq__":
        body["__hash__"] = method
    kind = type(f"{error.__name__}In{name.strip('_').title()}", (Hostile,), body)
    kind.__module__, kind.__qualname__ = __name__, kind.__name__
    setattr(sys.modules[__name__], kind.__name__, kind)
    return kind


_LOCK: Final = threading.Lock()
_METHODS: Final = (
    *("__repr__", "__eq__", "__hash__", "__bool__", "__len__", "__iter__"),
    *("__class__", "__getattribute__"),
)
HOSTILE: Final[dict[tuple[str, type[BaseException]], type[Hostile]]] = {
    (name, error): _hostile_class(name, error)
    for name in _METHODS
    for error in (ValueError, SystemExit)
}


def hostile(name: str, error: type[BaseException]) -> Any:
    """Return an object of which one special method raises."""
    return HOSTILE[name, error]()


class Reducing:
    """A value whose reduction raises, or is none."""

    GARBAGE: Final = {
        "none": None,
        "text": "no such name",
        "empty": (),
        "uncallable": (5, ()),
        "five": (len, 5),
    }

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        if self.kind == "endless":
            return Reducing, (Reducing("endless"),)
        if self.kind in self.GARBAGE:
            return self.GARBAGE[self.kind]
        return misraise(self.kind)


class Listed:
    """Becomes a list, which is no key, where it is read."""

    def __reduce__(self) -> Any:
        return list, ()


class Pretender:
    """Says that it is of a class that it is not of."""

    def __init__(self, claimed: type) -> None:
        self.__dict__["claimed"] = claimed

    @property
    def __class__(self) -> Any:
        return self.__dict__["claimed"]

    @__class__.setter
    def __class__(self, _: object) -> None: ...


class RaisingTensor(torch.Tensor):
    """Nothing can be done with it; sending asks it nothing."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} is not for this tensor")


def _deep(levels: int = DEEP) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def _deeper_mapping() -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for _ in range(DEEPER):
        nested = {"in": nested}
    return nested


def _cyclic() -> list[Any]:
    ring: list[Any] = []
    ring.append({"again": [ring]})
    return ring


def _resized(nbytes: int, view: Any = ...) -> torch.Tensor:
    """Return a part of a tensor most of whose memory has been freed since."""
    tensor = torch.ones(1024, 1024)
    part: torch.Tensor = tensor[view]
    tensor.untyped_storage().resize_(nbytes)
    return part


def _released() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


async def _async_generator() -> AsyncIterator[int]:
    yield 1


def _generator() -> Iterator[int]:
    yield 1


def _closed_file() -> io.StringIO:
    file = io.StringIO()
    file.close()
    return file


def _closed_socket() -> socket.socket:
    with socket.socket() as endpoint:
        return endpoint


def _future_of_another_loop() -> asyncio.Future[Any]:
    futures: list[asyncio.Future[Any]] = []

    def make() -> None:
        loop = asyncio.SelectorEventLoop()
        futures.append(loop.create_future())
        loop.close()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return futures[0]


def _nonsense_sparse() -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 99]]), torch.ones(2), (3,), check_invariants=False
    )


# What can be had where pickles are allowed, however odd it is.
FINE: Final[dict[str, Callable[[], Any]]] = {
    "none": lambda: None,
    "text": lambda: "text",
    "number": lambda: 5,
    "surrogates": lambda: "\ud800 and \udfff",
    "big integer": lambda: 1 << 70_000,
    "negative integer": lambda: -(1 << 70),
    "nan": lambda: math.nan,
    "type": lambda: int,
    "meta tensor": lambda: torch.ones(3, device="meta"),
    "raising tensor": lambda: torch.ones(3).as_subclass(RaisingTensor),
    "no leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "no elements": lambda: np.zeros((0, 3)),
    "structured array": lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "f8", (2,))]),
    "strided view": lambda: memoryview(b"abcdef")[::2],
    "empty storage": lambda: torch.ones(0),
    "cyclic": _cyclic,
    "bad repr": lambda: hostile("__repr__", ValueError),
    "bad eq": lambda: hostile("__eq__", ValueError),
    "bad hash": lambda: hostile("__hash__", SystemExit),
    "bad bool": lambda: hostile("__bool__", SystemExit),
    "bad len": lambda: hostile("__len__", ValueError),
    "bad iter": lambda: hostile("__iter__", ValueError),
    "bad class": lambda: hostile("__class__", ValueError),
    "exiting class": lambda: hostile("__class__", SystemExit),
}
# What cannot: the caller is told so.
BAD: Final[dict[str, Callable[[], Any]]] = {
    "deep": _deep,
    "too many dimensions": lambda: torch.ones([1] * 65),
    "lambda": lambda: lambda: _LOCK,
    "module": lambda: math,
    "lock": threading.Lock,
    "closed file": _closed_file,
    "socket": _closed_socket,
    "frame": inspect.currentframe,
    "plain generator": _generator,
    "async generator": _async_generator,
    "foreign future": _future_of_another_loop,
    "context": contextvars.copy_context,
    "worker": asyncrpc.current_worker,
    "peer": lambda: asyncrpc.current_worker().peer("b"),
    "peers": lambda: asyncrpc.current_worker().group(["b"]),
    "emptied tensor": lambda: _resized(0),
    "shrunk tensor": lambda: _resized(16),
    "shrunk view": lambda: _resized(64, (0, slice(16, 32))),
    "shrunk columns": lambda: _resized(64, (slice(None), slice(3, 9))),
    "shrunk tensors": lambda: [_resized(64), _resized(0, (0, slice(1, 9)))],
    "nonsense sparse": _nonsense_sparse,
    "object array": lambda: np.array([Reducing("value")], dtype=object),
    "released view": _released,
    "bad getattr": lambda: hostile("__getattribute__", ValueError),
    "exiting getattr": lambda: hostile("__getattribute__", SystemExit),
    "pretends tensor": lambda: Pretender(torch.Tensor),
    "pretends list": lambda: [Pretender(list), threading.Lock()],
    "pretends error": lambda: Pretender(ValueError),
    "pretends function": lambda: Pretender(types.FunctionType),
    "pretends awaitable": lambda: Pretender(asyncio.Future),
    "pretends coroutine": lambda: Pretender(types.CoroutineType),
    "pretends rref": lambda: Pretender(asyncrpc.RRef),
    "unhashable key": lambda: {Listed(): 1},
    **{
        f"reduce {kind}": functools.partial(Reducing, kind)
        for kind in (
            *(*Reducing.GARBAGE, "endless", "value", "exit", "interrupt", "memory"),
            *("recursion", "cancelled", "stop", "async stop", "generator exit"),
            *("base", "remote", "protocol", "exiting", "pretending"),
        )
    },
}
VALUES: Final = FINE | BAD
# Takes seconds in every way.
TOO_MUCH: Final[dict[str, Callable[[], Any]]] = {
    "long text": lambda: "n" * LONG,
    "levels": lambda: _deep(DEEPER),
    "levels of pairs": _deeper_mapping,
}


class AttributeRaises(Exception):  # noqa: N818  (it says what it does)
    """One of its attributes cannot be read."""

    def __init__(self, name: str, error: type[BaseException]) -> None:
        super().__init__("no attribute")
        self.__dict__["guarded"] = name, error

    def __getattribute__(self, name: str) -> Any:
        fields = object.__getattribute__(self, "__dict__")
        guarded, error = fields.get("guarded", ("", ValueError))
        if name == guarded:
            raise error("an attribute")
        return object.__getattribute__(self, name)


class ExitingError(Exception):
    """Cannot be put into words, nor be pickled."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt("no reduction")


class PretendingError(Exception):
    """Does not say of what class it is."""

    @property
    def __class__(self) -> Any:
        raise SystemExit("no class")

    @__class__.setter
    def __class__(self, _: object) -> None: ...


ERRORS: Final[dict[str, Callable[[], BaseException]]] = {
    "value": lambda: ValueError("short"),
    "exit": lambda: SystemExit(3),
    "interrupt": lambda: KeyboardInterrupt("short"),
    "generator exit": lambda: GeneratorExit("short"),
    "memory": lambda: MemoryError("short"),
    "recursion": lambda: RecursionError("short"),
    "base": lambda: BaseException("short"),
    "cancelled": lambda: asyncio.CancelledError("short"),
    "stop": lambda: StopIteration("short"),
    "async stop": lambda: StopAsyncIteration("short"),
    "timeout": lambda: TimeoutError("short"),
    "remote": lambda: asyncrpc.RemoteError("short"),
    "protocol": lambda: MalformedError("short"),
    "lost": lambda: asyncrpc.WorkerLostError("short"),
    "rejected": lambda: asyncrpc.RejectedError("short"),
    "many": lambda: ExceptionGroup("many", [ValueError("one"), KeyError("two")]),
    "exiting": ExitingError,
    "pretending": PretendingError,
    "interrupt inside": lambda: ValueError(Reducing("interrupt")),
    "exit inside": lambda: ValueError(Reducing("exit")),
    "no class inside": lambda: ValueError(hostile("__class__", SystemExit)),
    "worker inside": lambda: ValueError(asyncrpc.current_worker()),
    "no args": lambda: AttributeRaises("args", SystemExit),
    "no dict": lambda: AttributeRaises("__dict__", SystemExit),
    "no class": lambda: AttributeRaises("__class__", KeyboardInterrupt),
    "no cause": lambda: AttributeRaises("__cause__", SystemExit),
    "no notes": lambda: AttributeRaises("__notes__", MemoryError),
    "no traceback": lambda: AttributeRaises("__traceback__", ValueError),
}
RAISED: Final = (*ERRORS, "endless recursion", "sys.exit")


def recurse(depth: int = 0) -> int:
    """Never return."""
    return recurse(depth + 1) + 1


def misraise(kind: str) -> NoReturn:
    """Raise what has the name."""
    if kind == "endless recursion":
        recurse()
    if kind == "sys.exit":
        sys.exit("over")
    # In no variable: its traceback has this frame, and so both would last.
    raise ERRORS[kind]()  # noqa: RSE102  (it is no class)


def give(kind: str) -> Any:
    """Return, or raise, what has the name."""
    if kind in VALUES:
        return VALUES[kind]()
    if kind in TOO_MUCH:
        return TOO_MUCH[kind]()
    return misraise(kind)


def settled(kind: str) -> concurrent.futures.Future[Any]:
    """Return a future that has such an outcome."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    try:
        future.set_result(give(kind))
    except BaseException as error:  # noqa: BLE001  (whatever it is)
        future.set_exception(error)
    return future
