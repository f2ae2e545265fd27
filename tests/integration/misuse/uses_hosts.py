"""How what is around workers is used: programs, serving, devices."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, Final

import torch
from aiohttp import web

import asyncrpc
from asyncrpc import Group, Tls, WorkerInfo, devices, observability, serving, xla
from asyncrpc.core.membership.changes import MemberChange
from asyncrpc.core.membership.machine.records import ChangeKind
from asyncrpc.devices import DeviceName
from asyncrpc.testing import Cluster, acting_as
from tests.integration.misuse import (
    uses_batching,
    uses_clusters,
    uses_observability,
    uses_processes,
    uses_replicas,
    uses_serving,
    uses_testing,
)
from tests.integration.misuse.beside import SEQUENCES, giving, in_thread, without_worker
from tests.integration.misuse.uses_values import CALLABLES, FLAG
from tests.integration.misuse.using import ANYTHING, Use, nothing
from tests.integration.misuse.wrong import SECONDS, World

TEXT: Final = {"text", "text with a surrogate", "too large"}
COUNTS: Final = {"an integer", "an integer of 70 bits"}
DURATIONS: Final = SECONDS - {"none"}
WORKERS: Final = {"an ended worker", "another worker"}


# --- programs ------------------------------------------------------------------------


def give_back(*args: Any, **kwargs: Any) -> Any:
    """Be called with anything."""
    return len(args), len(kwargs)


async def _main() -> int:
    return 1


@functools.wraps(asyncrpc.run)
def _run(main: Any, **kwargs: Any) -> Any:
    return asyncrpc.run(main() if main is _main else main, **kwargs)


async def _started_and_ended(starting: Any) -> None:
    async with starting:
        pass


@functools.wraps(asyncrpc.shutdown)
async def _shutdown(*args: Any, **kwargs: Any) -> None:
    """Shut down a worker that was made for it."""
    async with Cluster(1, names=["short-lived"]) as (worker,):
        with acting_as(worker):
            await asyncrpc.shutdown(*args, **kwargs)


async def _next_change(world: World) -> MemberChange:
    changes = world.a.members_changed()
    changes.put(MemberChange(ChangeKind.JOINED, WorkerInfo("new", 2), 1))
    return await anext(changes)


def _fan_out(world: World) -> asyncrpc.GroupCall[Any]:
    call = world.a.group(["b"]).call(give_back)
    for future in call.futures.values():  # whoever cancels does not ask how it ended
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return call


async def _first(iterated: Any) -> Any:
    """Take the first item, if there is one."""
    return await anext(iterated, None)


async def _unless_over(taking: Any) -> Any:
    """Take an item, if there is one."""
    with contextlib.suppress(StopAsyncIteration):
        return await taking


async def _reply(world: World) -> None:
    """Keep the reply of a peer."""
    world.kept["reply"] = await anext(_fan_out(world))


async def _take_part(world: World) -> Any:
    async with _fan_out(world) as call:
        replies = [reply.result() async for reply in call]
    assert replies == await call
    return replies


async def _cancel(world: World) -> None:
    call = _fan_out(world)
    call.cancel()
    await asyncio.wait(call.futures.values())


# --- serving -------------------------------------------------------------------------


async def _start_and_end(context: Any) -> None:
    """Run an application that has this context."""
    app = web.Application()
    app.cleanup_ctx.append(context)
    runner = web.AppRunner(app)
    await runner.setup()
    await runner.cleanup()


# --- an announced end ----------------------------------------------------------------


async def _preempted(_: World) -> None:
    """Announce the end of a worker that was made for it."""
    async with Cluster(1, names=["short-lived"]) as (worker,):
        preemption = asyncrpc.Preemption(
            worker, signals=(), graceful=False, exits=False
        )
        async with preemption:
            preemption.on_preempt(give_back)
            preemption.request("it is tested")
            await preemption.wait_requested()


def _preemption(world: World) -> asyncrpc.Preemption:
    return asyncrpc.Preemption(world.a, signals=())


# --- devices -------------------------------------------------------------------------


def _enter_turn(device: str | None = None) -> None:
    with devices.lock(device):
        pass


def _needs_torch_xla(function: Callable[[], Any]) -> Use:
    """Return how a function is used that says what it needs, where that is missing."""

    async def use(_: World) -> None:
        try:
            function()
        except asyncrpc.UsageError as error:
            assert "cannot be imported: No module named 'torch_xla'" in str(error)  # noqa: PT017

    return Use(lambda _: function, rightly=use, needs_worker=False)


def _optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.SGD([parameter])


def _linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


async def _with_groups(world: World, use: Callable[[Group], Any], name: str) -> Any:
    """Do something at both ranks of a group."""

    async def at(worker: asyncrpc.Worker) -> Any:
        with acting_as(worker):
            async with Group(worker, ["a", "b"], name=name) as group:
                return await use(group)

    return await asyncio.gather(at(world.a), at(world.other))


def _broadcast(world: World) -> Any:
    return _with_groups(
        world, lambda group: xla.broadcast_master_param(_linear(), group), "broadcast"
    )


def _reduce(world: World) -> Any:
    return _with_groups(
        world, lambda group: xla.reduce_gradients(_optimizer(), group), "reduce"
    )


_ALONE: Final = "a group of one"


def _with_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives a function a group where it is given `_ALONE`."""

    @functools.wraps(function)
    async def use(subject: Any, group: Any) -> None:
        if group is not _ALONE:
            await function(subject, group)
            return
        with closing(Group(asyncrpc.current_worker(), ["a"], name="alone")) as alone:
            await function(subject, alone)

    return use


async def _meet(world: World) -> Any:
    async def at(worker: asyncrpc.Worker) -> Any:
        with acting_as(worker):
            return await xla.rendezvous("tag", b"payload")

    return await asyncio.gather(at(world.a), at(world.other))


USES: Final[Mapping[str, Use]] = {
    **uses_batching.USES,
    **uses_observability.USES,
    **uses_processes.USES,
    **uses_clusters.USES,
    **uses_serving.USES,
    **uses_replicas.USES,
    **uses_testing.USES,
    # --- programs
    "run": Use(
        lambda _: in_thread(_run),
        needs_worker=False,
        right={"main": lambda _: _main},
        fits={"main": {"a coroutine"}, "debug": {"none", "true"}},
    ),
    "init_rpc": Use(
        lambda _: without_worker(asyncrpc.init_rpc),
        needs_worker=False,
        right={
            "name": lambda _: "new",
            "rendezvous": lambda _: asyncrpc.LocalRendezvous(1),
        },
        fits={
            "name": TEXT,
            "backend": {"none"},
            "rank": COUNTS | {"none"},
            "world_size": COUNTS | {"none"},
            "options": {"none"},
            "rendezvous": {"a map"},
        },
        finish=_started_and_ended,
    ),
    "shutdown": Use(
        lambda _: _shutdown,
        fits={"graceful": FLAG, "timeout_s": SECONDS | {"infinite"}},
        needs_worker=False,
    ),
    "rpc_sync": Use(
        lambda _: in_thread(asyncrpc.rpc_sync),
        right={"to": lambda _: "b", "func": lambda _: give_back},
        fits={
            "to": set(),
            "func": CALLABLES | {"a local function"},
            "args": SEQUENCES,
            "kwargs": {"none", "a map"},
            "timeout_s": SECONDS | {"infinite"},
        },
        says={"to": r"\bto\b|worker .* is unknown", "func": r"\bfunction\b"},
    ),
    "current_worker": Use(
        lambda _: asyncrpc.current_worker,
        fits={"name": {"none"}},
        says={"name": r"\bname\b"},
        finish=nothing,
    ),
    "inspection.why": Use(
        lambda _: asyncrpc.inspection.why,
        fits={"after_s": SECONDS - {"none"}, "worker": {"none", "another worker"}},
    ),
    "cancelled": Use(lambda _: asyncrpc.cancelled, needs_worker=False),
    "Tls": Use(
        lambda _: Tls,
        needs_worker=False,
        right={"certificate": lambda _: "own.pem", "ca": lambda _: "ca.pem"},
        fits={
            "certificate": TEXT,
            "key": TEXT | {"none"},
            "ca": TEXT,
            "verify_peer": FLAG,
            "server_hostname": TEXT | {"none"},
            "server_context": {"none"},
            "client_context": {"none"},
        },
    ),
    "MemberChanges.__anext__": Use(
        lambda world: world.a.members_changed().__anext__,
        rightly=_next_change,
        finish=_unless_over,
        needs_worker=False,
    ),
    "GroupCall.cancel": Use(
        lambda world: _fan_out(world).cancel, rightly=_cancel, needs_worker=False
    ),
    "GroupCall.__anext__": Use(
        lambda world: giving(_fan_out(world)), finish=_first, needs_worker=False
    ),
    "GroupCall.__aenter__": Use(
        lambda world: _fan_out(world).__aenter__, rightly=_take_part, needs_worker=False
    ),
    "GroupReply.result": Use(
        lambda world: world.kept["reply"].result, ready=_reply, needs_worker=False
    ),
    # --- an announced end
    "Preemption": Use(
        lambda _: asyncrpc.Preemption,
        needs_worker=False,
        fits={
            "worker": WORKERS | {"none"},
            "signals": {"an empty list"},
            "grace_s": (SECONDS - {"none"}) | {"infinite"},
            "graceful": FLAG,
            "lockstep": FLAG,
            "exits": FLAG,
        },
        finish=nothing,
    ),
    "Preemption.on_preempt": Use(
        lambda world: _preemption(world).on_preempt,
        needs_worker=False,
        right={"callback": lambda _: give_back},
        fits={"callback": CALLABLES | {"a local function", "raises in everything"}},
        finish=nothing,
    ),
    "Preemption.request": Use(
        lambda world: _preemption(world).request,
        rightly=_preempted,
        fits={"reason": TEXT | {"empty text"}},
        needs_worker=False,
    ),
    "Preemption.step": Use(lambda world: _preemption(world).step, needs_worker=False),
    "PreemptionStep.__aenter__": Use(
        lambda world: _preemption(world).step().__aenter__, needs_worker=False
    ),
    "Preemption.wait_requested": Use(
        lambda world: _preemption(world).wait_requested,
        rightly=_preempted,
        needs_worker=False,
    ),
    "Preemption.__aenter__": Use(
        lambda world: _preemption(world).__aenter__,
        rightly=_preempted,
        needs_worker=False,
    ),
    # --- traces
    "observability.trace_calls": Use(
        lambda _: observability.trace_calls,
        needs_worker=False,
        right={"worker": lambda world: world.a},
        fits={"worker": WORKERS, "tracer_provider": {"none"}},
    ),
    # --- serving
    "serving.serve_health": Use(
        lambda _: serving.serve_health,
        needs_worker=False,
        right={"workers": lambda world: [world.a], "port": lambda _: 0},
        fits={
            "workers": WORKERS,
            "port": {"an integer"},  # who is not root may not have it
            "host": {"empty text"},
        },
    ),
    "serving.worker_context": Use(
        lambda _: serving.worker_context,
        needs_worker=False,
        right={"worker": lambda world: world.a},
        fits={"worker": {"another worker", "a function", "raises in everything"}},
        finish=_start_and_end,
    ),
    "serving.middleware": Use(
        lambda _: serving.middleware,
        needs_worker=False,
        fits={
            "timeout_s": SECONDS,
            "retry_after_s": DURATIONS,
            "deadline_header": {"none", "text"},
        },
        finish=nothing,
    ),
    "serving.status_of": Use(
        lambda _: serving.status_of,
        needs_worker=False,
        right={"worker": lambda world: world.a},
        fits={"worker": WORKERS},
    ),
    "serving.dashboard": Use(
        lambda _: serving.dashboard,
        needs_worker=False,
        right={"worker": lambda world: world.a},
        fits={
            "worker": WORKERS,
            "token": {"text", "too large", "none"},
            "every_s": DURATIONS - {"zero"},
            "after_s": DURATIONS,
        },
    ),
    "serving.debug_handler": Use(
        lambda _: serving.debug_handler,
        right={"worker": lambda world: world.a, "token": lambda _: "t" * 16},
        fits={
            "worker": {"another worker"},
            "token": {"text", "too large"},
            "after_s": DURATIONS,
        },
        finish=nothing,
    ),
    "serving.health_routes": Use(lambda _: serving.health_routes, needs_worker=False),
    "serving.ModelHost": Use(
        lambda _: serving.ModelHost,
        needs_worker=False,
        right={"make_model": lambda _: "shop.model:make_model"},
        fits={
            "make_model": CALLABLES,
            "name": {"text"},
            "version": {"text", "empty text"},
            "linger_s": DURATIONS,
            "start_timeout_s": SECONDS,
            "options": {"none"},
        },
        finish=nothing,
    ),
    # --- devices
    "devices.DeviceName": Use(
        lambda _: DeviceName,
        needs_worker=False,
        right={"type": lambda _: "cuda"},
        fits={"type": {"text"}, "index": {"none", "an integer"}},
    ),
    "devices.DeviceName.parse": Use(
        lambda _: DeviceName.parse,
        needs_worker=False,
        right={"name": lambda _: "cuda:1"},
        fits={"name": {"an integer", "text"}},
        says={"name": "device"},
    ),
    "devices.run": Use(
        lambda _: devices.run,
        right={"function": lambda _: give_back},
        fits={
            "function": CALLABLES | {"a local function", "raises in everything"},
            "args": ANYTHING,
            "kwargs": ANYTHING,
        },
    ),
    "devices.lock": Use(
        lambda _: in_thread(_enter_turn),
        needs_worker=False,
        right={"device": lambda _: "xla:0"},
        fits={"device": {"none", "an integer", "text"}},
    ),
    "xla.device": Use(lambda _: xla.device, needs_worker=False),
    "xla.device_type": Use(lambda _: xla.device_type, needs_worker=False),
    "xla.global_ordinal": _needs_torch_xla(xla.global_ordinal),
    "xla.local_ordinal": _needs_torch_xla(xla.local_ordinal),
    "xla.world_size": _needs_torch_xla(xla.world_size),
    "xla.generator": Use(
        lambda _: xla.generator,
        needs_worker=False,
        right={"seed": lambda _: 1, "replica": lambda _: 0},
        fits={
            "seed": {"an integer", "a negative integer"},
            "replica": {"none", "an integer"},
        },
    ),
    "xla.with_rng_lock": Use(
        lambda _: xla.with_rng_lock,
        needs_worker=False,
        right={"make": lambda _: _linear},
        fits={"make": CALLABLES | {"a local function", "raises in everything"}},
    ),
    "xla.rendezvous": Use(
        lambda _: xla.rendezvous,
        right={"tag": lambda _: "tag", "replicas": lambda world: [world.a.rank]},
        fits={
            "tag": {"text", "empty text", "text with a surrogate"},
            "payload": {"bytes"},
            "replicas": {"an empty list"},
        },
        rightly=_meet,
    ),
    "xla.broadcast_master_param": Use(
        lambda _: _with_group(xla.broadcast_master_param),
        needs_worker=False,
        right={"module": lambda _: _linear(), "group": lambda _: _ALONE},
        rightly=_broadcast,
    ),
    "xla.reduce_gradients": Use(
        lambda _: _with_group(xla.reduce_gradients),
        needs_worker=False,
        right={"optimizer": lambda _: _optimizer(), "group": lambda _: _ALONE},
        rightly=_reduce,
    ),
    "xla.optimizer_step": Use(
        lambda _: xla.optimizer_step,
        needs_worker=False,
        right={"optimizer": lambda _: _optimizer()},
        rightly=_needs_torch_xla(lambda: xla.optimizer_step(_optimizer())).rightly,
    ),
}
