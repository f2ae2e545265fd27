"""Functions and values that are wrong: what a worker of the chaos suite may be given.

What begins enters its call first, so that it can be seen that it ran.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import Group
from asyncrpc.errors import CollectiveError
from tests.chaos.called import begin, worker_here

TOO_LONG: Final = (64 << 20) + 1  # characters: more than a message's control part holds
HOSTILE: Final = (
    "two\nlines\r\n\x1b[31m, a NUL \0, half a pair \ud800, %s %(x)d {0} {y}: " * 4000
)


class SilentError(Exception):
    """Cannot be put into words."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    def __repr__(self) -> str:
        raise SystemExit("no text")


ERRORS: Final[dict[str, Callable[..., BaseException]]] = {
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "MemoryError": MemoryError,
    "RecursionError": RecursionError,
    "BaseException": BaseException,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "hostile text": lambda _: ValueError(HOSTILE),
    "many texts": lambda _: ValueError(*("x" * (1 << 18) for _ in range(40))),
    "no text": lambda _: SilentError(),
    "long name": lambda _: type("E" * (1 << 20), (Exception,), {})("short"),
    "hostile name": lambda _: type("E\n\x1b[31m %s", (Exception,), {})("short"),
}


def make_error(kind: str) -> BaseException:
    """Return an exception; `notes` and `chain` are made by hand."""
    if kind == "notes":
        noted = ValueError("short")
        for _ in range(200):
            noted.add_note(HOSTILE[: 64 << 10])
        return noted
    if kind == "chain":
        error: BaseException = ValueError("the first")
        for number in range(200):
            further = KeyError(number)
            further.__cause__, error = error, further
        return error
    return ERRORS[kind]("short")


KINDS: Final = (*ERRORS, "notes", "chain")


def raises(call_id: str, kind: str) -> None:
    begin(call_id)
    raise make_error(kind)


async def raises_async(call_id: str, kind: str) -> None:
    begin(call_id)
    raise make_error(kind)


@asyncrpc.on_loop
def raises_on_loop(call_id: str, kind: str) -> None:
    begin(call_id)
    raise make_error(kind)


def raises_in_a_generator(call_id: str, kind: str) -> Iterator[int]:
    begin(call_id)
    yield 1
    raise make_error(kind)


async def raises_in_an_async_generator(call_id: str, kind: str) -> AsyncIterator[int]:
    begin(call_id)
    yield 1
    raise make_error(kind)


def explode(kind: str) -> None:
    """Raise, while a value is being read."""
    raise make_error(kind)


class RaisesWhenRead:
    """Can be pickled, and not be rebuilt."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return explode, (self.kind,)


class RaisesWhenWritten:
    """Cannot be pickled, and says so in its own way."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        raise make_error(self.kind)


def takes(call_id: str, value: Any) -> str:
    begin(call_id)
    del value
    return call_id


RESULTS: Final[dict[str, Callable[[], Any]]] = {
    "65 dimensions": lambda: torch.ones([1] * 65),
    "too long": lambda: "n" * TOO_LONG,
    "a generator": lambda: (number for number in range(3)),
    "a lock": threading.Lock,
    **{
        f"{kind} when written": functools.partial(RaisesWhenWritten, kind)
        for kind in ("RecursionError", "SystemExit", "KeyboardInterrupt", "no text")
    },
}


def returns(call_id: str, kind: str) -> Any:
    begin(call_id)
    return RESULTS[kind]()


async def returns_async(call_id: str, kind: str) -> Any:
    begin(call_id)
    return RESULTS[kind]()


def gives(call_id: str, kind: str) -> RaisesWhenRead:
    begin(call_id)
    return RaisesWhenRead(kind)


async def streams(call_id: str, kind: str) -> AsyncIterator[Any]:
    begin(call_id)
    yield 1
    yield RaisesWhenRead(kind)


def only_here(name: str) -> Callable[..., Any]:
    """Return a function that no other process can import: it has not the file."""
    module = sys.modules.get(name)
    if module is None:
        module = types.ModuleType(name)
        module.__file__ = f"/only/here/{name}.py"  # without one it goes by value
        exec("def function(x=None): return x", module.__dict__)  # noqa: S102
        sys.modules[name] = module
        module.function.__module__ = name
    return module.function  # type: ignore[no-any-return]


async def take_part(call_id: str, name: str, members: list[str], odd: str) -> str:
    """Reduce in a group with one rank that has another shape; then with all alike."""
    begin(call_id)
    worker = worker_here()
    size = 5 if worker.name == odd else 4
    async with Group(worker, members, name=name) as group:
        try:
            await group.all_reduce(torch.ones(size))
        except CollectiveError as error:
            if type(error) is not CollectiveError:
                raise
            first = type(error).__name__
        else:
            first = "no error"
        total = await group.all_reduce(torch.ones(3))
    return f"{first}, then {total[0]:g}"
