"""Values that are wrong somewhere: what a user may give by mistake, or in bad faith."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch

import asyncrpc
from asyncrpc import Worker
from asyncrpc.testing import acting_as

LONG_TEXT: Final = "n" * ((64 << 20) + 1)  # more than the control part of a message
_DEPTH: Final = 100_000


@dataclass
class World:
    """Who is there to be used wrongly.

    Attributes:
        a: the worker that is used.
        b: its peer, if it is in this process.
        stranger: a worker of another group, in this process.
        ended: a worker that has ended.
        other_loop: an event loop that does not run.
        unawaited: a coroutine that nobody awaits.
        kept: what uses of one function share: a group, a module, by name.
    """

    a: Worker
    b: Worker | None
    stranger: Worker
    ended: Worker
    other_loop: asyncio.AbstractEventLoop
    unawaited: Coroutine[Any, Any, None]
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def other(self) -> Worker:
        """The peer, which is in this process."""
        assert self.b is not None
        return self.b

    @property
    def peer(self) -> asyncrpc.Peer:
        return self.a.peer("b")


class RaisesInReduce:
    def __reduce__(self) -> NoReturn:
        raise SystemExit("it does not want to be sent")


class RaisesInRepr:
    def __repr__(self) -> NoReturn:
        raise ValueError("it does not want to be seen")

    __str__ = __repr__


class RaisesInEq:
    def __eq__(self, other: object) -> NoReturn:
        raise ValueError("it does not want to be compared")

    __hash__ = object.__hash__


class RaisesInHash:
    def __hash__(self) -> NoReturn:
        raise ValueError("it does not want to be found")


class RaisesInEverything:
    """Whatever is asked of it, it raises; but for what makes it an object."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError("it does not want to be used")

    __bool__ = __len__ = __iter__ = __index__ = __float__ = __call__ = _refuse
    __getitem__ = __contains__ = __next__ = __enter__ = __eq__ = __lt__ = _refuse
    __hash__ = __repr__ = __str__ = __reduce__ = __fspath__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError("it does not want to be looked at")


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(_DEPTH):
        value = [value]
    return value


async def never_awaited() -> None:
    """Be a coroutine."""


def released_reference(world: World) -> asyncrpc.RRef[Any]:
    with acting_as(world.a):
        rref: asyncrpc.RRef[Any] = asyncrpc.RRef(1)
    rref.release()
    return rref


def reference_of_stranger(world: World) -> asyncrpc.RRef[Any]:
    with acting_as(world.stranger):
        return asyncrpc.RRef(1)


WRONG: Final[Mapping[str, Callable[[World], Any]]] = {
    "none": lambda _: None,
    "true": lambda _: True,
    "an integer": lambda _: 5,
    "a negative integer": lambda _: -5,
    "an integer of 70 bits": lambda _: 1 << 70,
    "a fraction": lambda _: 0.5,
    "not a number": lambda _: float("nan"),
    "infinite": lambda _: float("inf"),
    "text": lambda _: "text",
    "empty text": lambda _: "",
    "text with a surrogate": lambda _: "\udc80",
    "bytes": lambda _: b"bytes",
    "an empty list": lambda _: [],
    "a list of numbers": lambda _: [1.5, 2.5],
    "a list of text": lambda _: ["text", "text"],
    "a map": lambda _: {"text": 1},
    "a generator": lambda _: (number for number in range(3)),
    "a tensor": lambda _: torch.ones(2, 3),
    "a tensor of integers": lambda _: torch.ones(3, dtype=torch.int64),
    "a meta tensor": lambda _: torch.ones(3, device="meta"),
    "a sparse tensor": lambda _: torch.eye(3).to_sparse(),
    "too many dimensions": lambda _: torch.ones([1] * 65),
    "too large": lambda _: LONG_TEXT,
    "too deep": lambda _: deep(),
    "a class": lambda _: int,
    "a function": lambda _: len,
    "unpicklable": lambda _: threading.Lock(),
    "a local function": lambda _: lambda: None,
    "an ended worker": lambda world: world.ended,
    "another worker": lambda world: world.stranger,
    "a released reference": released_reference,
    "a reference of another worker": reference_of_stranger,
    "a peer of another worker": lambda world: world.stranger.peer(0),
    "a future of another loop": lambda world: world.other_loop.create_future(),
    "a coroutine": lambda world: world.unawaited,
    "raises in __reduce__": lambda _: RaisesInReduce(),
    "raises in __repr__": lambda _: RaisesInRepr(),
    "raises in __eq__": lambda _: RaisesInEq(),
    "raises in __hash__": lambda _: RaisesInHash(),
    "raises in everything": lambda _: RaisesInEverything(),
}

# Kinds that are made of workers, and of what belongs to them or to a loop.
OF_WORKERS: Final = {
    "an ended worker",
    "another worker",
    "a released reference",
    "a reference of another worker",
    "a peer of another worker",
    "a future of another loop",
    "a coroutine",
}
SECONDS: Final = {"none", "an integer", "a fraction", "an integer of 70 bits"}
"""Kinds that are a number of seconds, or None."""
