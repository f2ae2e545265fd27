"""A web worker without a web server: a process that enters a `ModelHost` when told to.

It does what comes through a pipe, one thing after the other, and answers each: so a
test knows how far it is, and can kill it there.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, TypeAlias

import torch

import asyncrpc
from asyncrpc.serving import ModelHost
from tests.integration.serving.model_host import models

ANSWER_S: Final = 300.0  # only a hang takes it
Doing: TypeAlias = Callable[[ModelHost, Any], Awaitable[Any]]


class WebWorker:
    """A web worker, as a test sees it.

    Attributes:
        is_over: whether it has been ended.
    """

    def __init__(self, **environ: str) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._pipe: Connection[Any, Any] = ours
        self._process: BaseProcess = multiprocessing.get_context("forkserver").Process(
            target=_main, args=(environ, theirs)
        )
        self._process.start()
        theirs.close()
        self.is_over = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def begin(self, what: str, value: Any = None) -> None:
        """Let it do something; `result` returns what came of it."""
        self._pipe.send((what, value))

    def result(self) -> Any:
        """Return what it answers to the oldest thing, or raise what it raised there."""
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError("the web worker does not answer")
        is_error, result = self._pipe.recv()
        if is_error:
            raise result
        return result

    def do(self, what: str, value: Any = None) -> Any:
        """Let it do something, and return what came of it."""
        self.begin(what, value)
        return self.result()

    def enter(self, function: str = "make_model", **options: Any) -> None:
        """Let it enter a host for a function of `models`."""
        self.do("enter", (function, options))

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self) -> None:
        """Let it leave, if it can, and wait for its end."""
        self.is_over = True
        self._pipe.close()
        self._process.join(ANSWER_S)
        assert self._process.exitcode is not None
        self._process.close()


def _main(environ: dict[str, str], pipe: Connection[Any, Any]) -> None:
    os.environ.update(environ)
    asyncrpc.run(_serve(pipe))


async def _serve(pipe: Connection[Any, Any]) -> None:
    """Do what comes, until the pipe is closed; then leave the host."""
    hosts: list[ModelHost] = []
    try:
        while True:
            try:
                what, value = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            try:
                result = await _do(hosts, what, value)
            except Exception as error:  # noqa: BLE001  (the test's)
                pipe.send((True, error))
            else:
                pipe.send((False, result))
    finally:
        for host in hosts:
            await host.__aexit__(None, None, None)


async def _do(hosts: list[ModelHost], what: str, value: Any) -> Any:
    if what == "enter":
        function, options = value
        model_host = ModelHost(f"{models.__name__}:{function}", **options)
        await model_host.__aenter__()
        hosts.append(model_host)
        return None
    if what == "enter_other":
        where, function = value
        sys.path[:] = [where, *(path for path in sys.path if path != where)]
        model_host = ModelHost(function, linger_s=3600.0)
        await model_host.__aenter__()
        hosts.append(model_host)
        return None
    if what == "leave":
        await hosts.pop().__aexit__(None, None, None)
        return None
    return await DOINGS[what](hosts[-1], value)


async def _call(host: ModelHost, value: Any) -> Any:
    method, *args = value
    return await getattr(host.model.rpc_async(), method)(*args)


async def _forward(host: ModelHost, numbers: list[float]) -> list[float]:
    rows: torch.Tensor = await host.model.rpc_async().forward(torch.tensor(numbers))
    return rows.tolist()  # a tensor itself would travel in memory that this one shares


async def _send(host: ModelHost, megabytes: int) -> tuple[float, int]:
    """Send a tensor until one has come by a slab; return its sum, and their number.

    What is sent before the model's process has mapped the slab comes by the socket.
    """
    rows = torch.ones(megabytes << 18)
    while True:
        total = await host.model.rpc_async().total(rows)
        slabs = await host.peer.call(models.mapped_slabs)
        if slabs:
            return total, slabs


async def _until_attached(host: ModelHost, count: int) -> models.Inside:
    """Return what the model's process has once so many are attached."""
    while True:
        inside: models.Inside = await host.peer.call(models.look_inside)
        if inside.attached == count and inside.links == count:
            return inside


async def _status(host: ModelHost, _: Any) -> Any:
    return tuple(host.status)


async def _model(host: ModelHost, _: Any) -> str:
    return host.model.owner_name()


async def _lost(host: ModelHost, losses: int) -> Any:
    """Return the status once the process has been lost so often."""
    while host.status.losses < losses:  # noqa: ASYNC110  (nothing public tells of it)
        await asyncio.sleep(0)
    return tuple(host.status)


async def _call_when_lost(host: ModelHost, pid: int) -> Any:
    """Kill the model's process, and call it in the moment in which that is known."""
    os.kill(pid, signal.SIGKILL)
    await _lost(host, 1)
    return await host.model.rpc_async().pid()


async def _wait_ready(host: ModelHost, timeout_s: Any) -> str:
    return (await host.wait_ready(timeout_s)).owner_name()


DOINGS: Final[dict[str, Doing]] = {
    "call": _call,
    "forward": _forward,
    "send": _send,
    "until_attached": _until_attached,
    "status": _status,
    "model": _model,
    "lost": _lost,
    "call_when_lost": _call_when_lost,
    "wait_ready": _wait_ready,
}
