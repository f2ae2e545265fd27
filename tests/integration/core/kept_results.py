"""Functions that return what belongs to their worker, or to yet another one.

They run at `b`, are called by `a`; `c` is a third worker.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, Final, cast

import torch

import asyncrpc
from asyncrpc import Group, Worker
from asyncrpc.autograd import context
from asyncrpc.core.loop.loops import running_loop
from asyncrpc.testing import acting_as
from tests.integration.core import remote


def _me() -> Worker:
    return cast("Worker", asyncrpc.current_worker())


def reference_of(owner: str) -> Any:
    return _me().peer(owner).remote(max, 2, 3)


def references_of_all() -> Any:
    return {owner: [reference_of(owner)] for owner in ("a", "b", "c")}


def reference_that_failed(owner: str) -> Any:
    return _me().peer(owner).remote(remote.raises_at_once)


def reference_of_references(owner: str) -> Any:
    return _me().peer(owner).remote(reference_of, "a")


def done_call() -> Any:
    call = _me().parts.start_call("c", max, (2, 3))
    call.wait()
    return call


def failed_call() -> Any:
    call = _me().parts.start_call("c", remote.raises_at_once)
    try:
        call.wait()
    except ValueError:
        return call
    return None


def pending_call() -> Any:
    return _me().parts.start_call("c", max, (2, 3))


def stream() -> Any:
    return _me().peer("c").stream(remote.count_to, 3)


def autograd_context() -> Any:
    return context()


def group() -> Any:
    """Return a group, which is made and closed on the worker's loop."""
    future: concurrent.futures.Future[Group] = concurrent.futures.Future()
    me = _me()

    def make() -> None:
        with acting_as(me):
            created = Group(me, ["b"], name="returned")
        me.loop.call_soon(created.close)
        future.set_result(created)

    if running_loop() is me.loop:
        make()
    else:
        me.loop.call_soon_threadsafe(make)
    return future.result()


def proxy() -> Any:
    return reference_of("b").rpc_async()


def kept_error() -> Any:
    """Return an error that has what cannot travel."""
    return ValueError(_me())


BELONGING: Final[dict[str, Callable[[], Any]]] = {
    "done call": done_call,
    "failed call": failed_call,
    "pending call": pending_call,
    "calls": lambda: [pending_call(), {"in": done_call()}],
    "stream": stream,
    "autograd context": autograd_context,
    "group": group,
    "worker": _me,
    "peer": lambda: _me().peer("c"),
    "peers": lambda: _me().group(["b", "c"]),
    "proxy": proxy,
    "pool": lambda: _me().parts.pool,
    "loop": lambda: _me().loop,
    "thread": threading.current_thread,
    "error": kept_error,
}


def in_thread(kind: str) -> Any:
    return BELONGING[kind]()


async def in_coroutine(kind: str) -> Any:
    """What is made by code that waits is made in a thread, all the same."""
    return await asyncio.to_thread(BELONGING[kind])


def in_list(kind: str) -> Any:
    return [1, BELONGING[kind](), torch.ones(3)]


def in_generator(kind: str) -> Any:
    yield 1
    yield BELONGING[kind]()


_kept: Final[list[Any]] = []  # whatever nobody would keep


@asyncrpc.on_loop
def let_go() -> None:
    for value in _kept:
        if isinstance(value, tuple):
            value[0].close()
    _kept.clear()


def _of_another_loop(*, is_done: bool, is_closed: bool) -> Any:
    def make() -> None:
        loop = asyncio.SelectorEventLoop()
        future = loop.create_future()
        if is_done:
            future.set_result(5)
        if is_closed:
            loop.close()
        _kept.append((loop, future))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return _kept[-1][1]


def _torch_future() -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    _kept.append(future)
    return future


def _concurrent() -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    _kept.append(future)
    return future


def _cancelled_concurrent() -> Any:
    future = _concurrent()
    future.cancel()
    return future


def _cancelled_soon() -> Any:
    future = _concurrent()
    _me().loop.call_soon_threadsafe(future.cancel)
    return future


def _of_this_loop(*, is_cancelled: bool) -> Any:
    future = _me().loop.create_future()
    _kept.append(future)
    if is_cancelled:
        future.cancel()
    return future


def _cancelled_call() -> Any:
    call = _me().parts.start_call("c", remote.sleep_long)
    call.cancel()
    return call


FUTURES: Final[dict[str, Callable[[], Any]]] = {
    "another loop's": lambda: _of_another_loop(is_done=False, is_closed=False),
    "a closed loop's": lambda: _of_another_loop(is_done=False, is_closed=True),
    "another loop's that is done": lambda: _of_another_loop(
        is_done=True, is_closed=False
    ),
    "cancelled": lambda: _of_this_loop(is_cancelled=True),
    "cancelled concurrent": _cancelled_concurrent,
    "cancelled soon": _cancelled_soon,
    "cancelled call": _cancelled_call,
    "concurrent": _concurrent,
    "torch's": _torch_future,
    "this loop's": lambda: _of_this_loop(is_cancelled=False),
    "call": lambda: _me().parts.start_call("c", remote.sleep_long),
}


_gate: Final = threading.Event()


@asyncrpc.on_loop
def open_gate() -> None:
    _gate.set()


@asyncrpc.async_execution
def call_behind_gate() -> Any:
    """Return the future of a call when the caller has given this one up."""
    call = FUTURES["call"]()
    _gate.wait()
    _gate.clear()
    return call


@asyncrpc.async_execution
def by_future(kind: str) -> Any:
    return FUTURES[kind]()
