"""A worker that is used on a second event loop of its own thread.

As with the session's fixture of a test suite whose tests have loops of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
)
from contextlib import closing
from typing import Any

import pytest
from torch import nn

import asyncrpc
from asyncrpc import LocalRendezvous, RRef, UsageError, Worker
from asyncrpc.nn import RemoteModule
from asyncrpc.runtime.calls.context import current_worker_var
from asyncrpc.runtime.loops import loop_factory

RAN: list[str] = []


def note(what: str = "function") -> str:
    RAN.append(what)
    return what


@asyncrpc.idempotent
def note_idempotent() -> None:
    note("idempotent")


async def numbers() -> AsyncGenerator[int, None]:
    note("stream")
    yield 1
    yield 2


class Noting:
    def method(self) -> None:
        note("method")


class Program:
    """A worker on one loop, and what a second loop finds of it."""

    def __init__(self) -> None:
        self.home, self.second = loop_factory()(), loop_factory()()
        self.worker = Worker("w", rank=0, rendezvous=LocalRendezvous(1))
        self.home.run_until_complete(self.worker.__aenter__())
        self.peer = self.worker.peer("w")
        self.reference: RRef[Noting] = self.home.run_until_complete(self._refer())
        self.items = self.home.run_until_complete(self._stream())
        RAN.clear()

    async def _refer(self) -> RRef[Noting]:
        reference: RRef[Noting] = self.peer.remote(Noting)
        await reference.to_here()
        return reference

    async def _stream(self) -> AsyncGenerator[int, None]:
        items: Any = self.peer.stream(numbers)
        assert await anext(items) == 1
        return items  # type: ignore[no-any-return]

    async def wait_until_idle(self) -> None:
        """Let all that was sent by mistake run before this."""
        await self.peer.call(len, ())

    async def close(self) -> None:
        self.reference.release()
        await self.items.aclose()
        await self.worker.__aexit__(None, None, None)


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    with closing(program.home), closing(program.second):
        yield program
        program.home.run_until_complete(program.close())


async def drain(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def in_context(worker: Worker) -> None:
    async with asyncrpc.autograd.context():
        pass


DOORS: dict[str, Callable[[Program], Awaitable[Any]]] = {
    "call": lambda its: its.peer.call(note),
    "a call with a limit": lambda its: its.peer.using(timeout_s=2.0).call(note),
    "an idempotent call": lambda its: its.peer.call(note_idempotent),
    "two calls": lambda its: asyncio.gather(its.peer.call(note), its.peer.call(note)),
    "rpc_async": lambda its: asyncrpc.rpc_async(its.worker.name, note),
    "stream": lambda its: drain(its.peer.stream(numbers)),
    "a stream that has begun": lambda its: drain(its.items),
    "remote": lambda its: its.peer.remote(note).to_here(),
    "a reference": lambda its: its.reference.to_here(),
    "an awaited reference": lambda its: _awaited(its.reference),
    "rref.rpc_async": lambda its: its.reference.rpc_async().method(),
    "rref.remote": lambda its: its.reference.remote().method().to_here(),
    "a group of peers": lambda its: _awaited(its.worker.group(["w"]).call(note)),
    "barrier": lambda its: its.worker.barrier(),
    "find": lambda its: its.worker.find("w"),
    "shutdown": lambda its: its.worker.shutdown(),
    "autograd": lambda its: in_context(its.worker),
    "RemoteModule": lambda its: _awaited(RemoteModule(its.worker.name, nn.Identity)),
}


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


@pytest.mark.parametrize("door", DOORS)
def test_a_second_loop_of_the_thread_is_refused_and_nothing_runs(
    program: Program, door: str
) -> None:
    async def use() -> None:
        current_worker_var.set(program.worker)
        await DOORS[door](program)

    with pytest.raises(UsageError, match="another one"):
        program.second.run_until_complete(use())
    program.home.run_until_complete(program.wait_until_idle())
    assert RAN == []


def test_the_thread_itself_may_start_a_call_between_two_runs_of_its_loop(
    program: Program,
) -> None:
    future = program.worker.parts.start_call("w", note, ("later",))
    assert program.home.run_until_complete(future) == "later"
