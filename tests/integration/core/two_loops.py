"""A worker on one event loop, and all that a program can await of it.

As a program: closes the worker's loop under it, uses each door from another loop, and
prints what happened as JSON.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import torch
from torch import nn

import asyncrpc
from asyncrpc import UsageError, functions, serving
from asyncrpc.collectives import rendezvous
from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.loop.loops import loop_factory
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer
from tests.integration.core.groups import alone

RAN: list[str] = []


def note(what: str = "function") -> str:
    RAN.append(what)
    return what


@functions.idempotent
def note_idempotent() -> None:
    note("idempotent")


async def numbers() -> AsyncGenerator[int, None]:
    note("stream")
    yield 1
    yield 2


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


class Noting:
    def method(self) -> None:
        note("method")


async def note_batch(items: list[Any]) -> list[Any]:
    note("batch")
    return items


class Program:
    """A worker, and what its own loop has begun with it."""

    def __init__(self) -> None:
        self.home, self.second = loop_factory()(), loop_factory()()
        self.worker = alone("w")
        self.home.run_until_complete(self._begin())
        RAN.clear()

    async def _begin(self) -> None:
        await self.worker.__aenter__()
        self.peer = self.worker.peer("w")
        self.reference: Any = self.peer.remote(Noting)
        await self.reference.to_here()
        self.items: Any = self.peer.stream(numbers)
        assert await anext(self.items) == 1
        self.future = asyncrpc.rpc_async("w", wait_for_ever)
        self.fan_out: Any = self.worker.group(["w"]).call(wait_for_ever)
        self.changes = self.worker.members_changed()
        self.module = await RemoteModule("w", nn.Linear, (2, 2))
        parameters = await self.module.remote_parameters()
        self.optimizer = await DistributedOptimizer("SGD", parameters, lr=0.1)
        self.context = await asyncrpc.autograd.context().__aenter__()
        self.group = asyncrpc.Group(self.worker)
        self.unmet = DistributedDataParallel(nn.Linear(2, 2), self.group)
        self.model = await DistributedDataParallel(nn.Linear(2, 2), self.group)
        self.loss = self.model(torch.ones(1, 2)).sum()
        self.batcher: Any = serving.Batcher(note_batch, 4, 0.0)
        await self.batcher.__aenter__()
        self.limiter = serving.Limiter(4)
        async with self.limiter.turn():
            pass
        self.replicas = await serving.Replicas(self.worker, "w").__aenter__()
        self.replica = await serving.Replica(self.worker).__aenter__()

    async def wait_until_idle(self) -> None:
        """Let all that was sent by mistake run before this."""
        await self.peer.call(len, ())

    async def close(self) -> None:
        self.fan_out.cancel()
        self.future.cancel()
        self.reference.release()
        await self.items.aclose()
        await self.replica.__aexit__(None, None, None)
        await self.replicas.__aexit__(None, None, None)
        await self.batcher.__aexit__(None, None, None)
        await self.context.__aexit__(None, None, None)
        await self.worker.__aexit__(None, None, None)


async def awaited(value: Awaitable[Any]) -> Any:
    return await value


async def drain(items: AsyncGenerator[Any, None]) -> list[Any]:
    return [item async for item in items]


async def entered(block: AbstractAsyncContextManager[Any]) -> None:
    async with block:
        pass


async def issued(program: Program) -> None:
    program.worker.tokens.issue(valid_s=9.0)


Door = Callable[[Program], Awaitable[Any]]

DOORS: Final[dict[str, Door]] = {
    "call": lambda its: its.peer.call(note),
    "a call with a limit": lambda its: its.peer.using(timeout_s=2.0).call(note),
    "an idempotent call": lambda its: its.peer.call(note_idempotent),
    "two calls": lambda its: asyncio.gather(its.peer.call(note), its.peer.call(note)),
    "a future": lambda its: awaited(its.future),
    "stream": lambda its: drain(its.peer.stream(numbers)),
    "a stream that has begun": lambda its: drain(its.items),
    "a reference": lambda its: its.reference.to_here(),
    "an awaited reference": lambda its: awaited(its.reference),
    "a group of peers": lambda its: awaited(its.worker.group(["w"]).call(note)),
    "a group call that has begun": lambda its: awaited(its.fan_out),
    "the replies of a group": lambda its: anext(its.fan_out),
    "the future of a group": lambda its: awaited(its.fan_out.futures["w"]),
    "barrier": lambda its: its.worker.barrier(),
    "rendezvous": lambda its: rendezvous(its.worker, "here"),
    "find": lambda its: its.worker.find("w"),
    "members_changed": lambda its: anext(its.changes),
    "tokens": issued,
    "start": lambda its: its.worker.__aenter__(),
    "shutdown": lambda its: its.worker.shutdown(),
    "asyncrpc.shutdown": lambda _: asyncrpc.shutdown(graceful=False),
    "the worker's exit": lambda its: its.worker.__aexit__(None, None, None),
    "autograd.context": lambda _: entered(asyncrpc.autograd.context()),
    "a context's exit": lambda its: its.context.__aexit__(None, None, None),
    "autograd.backward": lambda its: asyncrpc.autograd.backward(
        its.context, [its.loss]
    ),
    "DistributedOptimizer": lambda its: awaited(
        DistributedOptimizer("SGD", [its.reference], lr=0.1)
    ),
    "step": lambda its: its.optimizer.step(its.context),
    "state_dict": lambda its: its.optimizer.state_dict(),
    "RemoteModule": lambda its: awaited(its.module),
    "remote_parameters": lambda its: its.module.remote_parameters(),
    "run_method": lambda its: its.module.run_method("forward", (torch.ones(2),)),
    "all_reduce": lambda its: its.group.all_reduce(torch.ones(2)),
    "the group's exit": lambda its: its.group.__aexit__(None, None, None),
    "DDP": lambda its: awaited(its.unmet),
    "DDP.backward": lambda its: its.model.backward(its.loss),
    "DDP.join": lambda its: entered(its.model.join()),
    "Batcher": lambda its: its.batcher(1),
    "the batcher's exit": lambda its: its.batcher.__aexit__(None, None, None),
    "Limiter": lambda its: entered(its.limiter.turn()),
    "Replicas": lambda its: its.replicas.call(note),
    "wait_ready": lambda its: its.replicas.wait_ready(),
    "the replicas' exit": lambda its: its.replicas.__aexit__(None, None, None),
    "Replica.drain": lambda its: its.replica.drain(),
    "the replica's exit": lambda its: its.replica.__aexit__(None, None, None),
    "Preemption": lambda _: entered(asyncrpc.Preemption()),
    "inspection.why": lambda its: asyncrpc.inspection.why(worker=its.worker),
}
# A thread without a loop may start these; only to await them takes the loop.
STARTS: Final[dict[str, Door]] = {
    "rpc_async": lambda its: awaited(asyncrpc.rpc_async(its.worker.name, note)),
    "remote": lambda its: its.peer.remote(note).to_here(),
    "rref.rpc_async": lambda its: awaited(its.reference.rpc_async().method()),
    "rref.remote": lambda its: its.reference.remote().method().to_here(),
    "forward_async": lambda its: awaited(its.module.forward_async(torch.ones(2))),
}

# Functions of asyncio that look for the loop that runs here first.
ASYNCIO: Final[dict[str, Door]] = {
    "gather": lambda its: asyncio.gather(its.future),
    "shield": lambda its: asyncio.shield(its.future),
    "wait": lambda its: asyncio.wait([its.future]),
    "ensure_future": lambda its: awaited(asyncio.ensure_future(its.future)),
    "timeout": lambda its: within(its.future),
    "TaskGroup": lambda its: in_task_group(its.future),
}


async def within(value: Awaitable[Any]) -> Any:
    async with asyncio.timeout(60):
        return await value


async def in_task_group(value: Awaitable[Any]) -> Any:
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(awaited(value))
    except* UsageError as errors:
        (error,) = errors.exceptions
        raise error from None


async def use(program: Program, door: Door) -> Any:
    current_worker_var.set(program.worker)
    async with asyncio.timeout(60):
        return await door(program)


def on_second_loop(program: Program, door: Door) -> Any:
    return program.second.run_until_complete(use(program, door))


def without_loop(program: Program, door: Door) -> Any:
    """Step a coroutine once, as the loop of another library does."""

    async def open_door() -> Any:
        return await door(program)

    coroutine = open_door()
    context = contextvars.copy_context()
    context.run(current_worker_var.set, program.worker)
    try:
        return context.run(coroutine.send, None)
    except StopIteration as stop:
        return stop.value
    finally:
        coroutine.close()


def outcomes(
    program: Program, doors: dict[str, Door], step: Callable[[Program, Door], Any]
) -> dict[str, str]:
    """Return what each door did."""
    did = {}
    for name, door in doors.items():
        try:
            did[name] = f"returned {step(program, door)!r}"
        except UsageError as error:
            did[name] = f"refused: {error}"
        except BaseException as error:  # noqa: BLE001  (it is what the test asks for)
            did[name] = f"raised {error!r}"
        if RAN:
            did[name] += f", and ran {RAN}"
            RAN.clear()
    return did


def main() -> None:
    program = Program()
    program.home.close()
    json.dump(outcomes(program, DOORS | STARTS | ASYNCIO, on_second_loop), sys.stdout)


if __name__ == "__main__":
    main()
