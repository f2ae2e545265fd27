"""How workers, their options, calls and references are used."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import (
    DeviceOptions,
    LimitOptions,
    LivenessOptions,
    LocalRendezvous,
    MessageLimits,
    NetworkOptions,
    Options,
    Worker,
    autograd,
)
from asyncrpc.collectives import rendezvous
from asyncrpc.core.options import CallOptions
from tests.integration.misuse.traffic import make_parameter, scale
from tests.integration.misuse.uses_values import (
    CALLABLES,
    COUNT,
    UNKNOWN,
    give_back,
    value_uses,
)
from tests.integration.misuse.using import ANYTHING, Use, nothing
from tests.integration.misuse.wrong import SECONDS, World


def _named(function: Callable[..., Any], **more: Any) -> Use:
    """Return how a function of the current worker is used, with torch's arguments."""
    return Use(
        lambda _: function,
        right={"to": lambda _: "b", "func": lambda _: give_back},
        fits={
            "to": set(),
            "func": CALLABLES | {"a local function"},
            "args": {"an empty list", "a list of numbers", "a list of text"},
            "kwargs": {"none", "a map"},
            "timeout_s": SECONDS | {"infinite"},
        },
        says={"to": UNKNOWN, "func": r"\bfunction\b"},
        **more,
    )


def _rref(world: World) -> asyncrpc.RRef[Any]:
    return asyncrpc.RRef(torch.ones(3))


def _future(world: World) -> asyncrpc.CallFuture[Any]:
    future = asyncrpc.rpc_async("b", give_back)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _marked() -> None:
    """Be marked."""


def _mark(mark: Callable[[Any], Any]) -> Use:
    """Return how a decorator of functions is used."""
    parameter = next(iter(inspect.signature(mark).parameters))
    return Use(
        lambda _: mark,
        needs_worker=False,
        right={parameter: lambda _: _marked},
        fits={parameter: {"a local function", "raises in everything"}},
        finish=nothing,
    )


TEXTS: Final = {"a list of text"}
OPTIONS_FIT: Final[Mapping[str, set[str]]] = {
    "secret": {"none", "text", "empty text", "bytes", "too large"},
    "secret_file": {"none", "text", "too large"},
    "token": {"none", "text", "empty text", "too large"},
    "tls": {"none"},
    "policy": set(),
    "allow": TEXTS | {"an empty list"},
    "interface": {"none", "text", "empty text", "text with a surrogate", "too large"},
    "listen": {"none", "an empty list"},
    "advertise": {"none", "an empty list"},
    "names": {"none", "an empty list", "a list of text"},
    "rpc_timeout_s": SECONDS | {"infinite"},
    "stall_after_s": SECONDS | {"infinite"},
    "sidecar": set(),
    "membership": set(),
    "codecs": set(),
    "maps": set(),
    "exclusive": {"none", "true"},
    "bulk_lanes": {"none", "an integer"},
    "spin": set(),
    **{name: set() for name in ("network", "liveness", "limits", "devices", "message")},
    "on_loop_bytes_max": {"an integer", "an integer of 70 bits"},
    "lost_after_s": {"an integer", "infinite", "an integer of 70 bits"},
    "heartbeat_s": {"an integer", "a fraction"},
}
POSITIVE: Final = (SECONDS | {"infinite"}) - {"none"}


def _options(record: Any) -> Use:
    """Return how a record of options is made."""
    fits = {}
    for name in record.__dataclass_fields__:
        fits[name] = OPTIONS_FIT.get(name, POSITIVE if name.endswith("_s") else COUNT)
    return Use(lambda _: record, fits=fits, needs_worker=False)


ANY_SECONDS: Final = SECONDS | {"infinite"}


def _method(name: str, **about: Any) -> Use:
    """Return how a method of the worker `a` is used."""
    return Use(lambda world: getattr(world.a, name), **about)


def _of_rref(name: str, **about: Any) -> Use:
    """Return how a method of a reference to a value of `a` is used."""
    return Use(lambda world: getattr(_rref(world), name), **about)


async def _meet(world: World) -> None:
    await asyncio.gather(world.a.barrier(), world.other.barrier())


async def _meet_at(world: World) -> None:
    await asyncio.gather(
        *(rendezvous(worker, "tag") for worker in (world.a, world.other))
    )


def _using(make: Callable[[World], Any]) -> Use:
    # The values of options that there are: `CallOptions`.
    says = {"options": "no call option 'wrong'; the options are timeout_s, out, "}
    return Use(make, says=says, needs_worker=False, finish=nothing)


def _options_of(target: Any) -> Callable[..., Any]:
    """Return what calls with options; `using` does not have their names."""

    def use(**options: Any) -> Any:
        return target.using(**options).call(give_back)

    use.__signature__ = inspect.signature(CallOptions)  # type: ignore[attr-defined]
    return use


async def _closed(events: Any) -> None:
    events.close()


async def _revoked(token: str) -> None:
    assert asyncrpc.current_worker().tokens.revoke(token)


async def _ended(starting: Any) -> None:
    await (await starting).shutdown()


async def _start_and_end(_: World) -> None:
    async with Worker("new", rendezvous=LocalRendezvous(1)) as worker:
        await worker.shutdown(graceful=True, timeout_s=60, drain_timeout_s=1)


async def _wait_in_thread(timeout_s: Any = None) -> Any:
    future = asyncrpc.rpc_async("b", give_back)
    try:
        return await asyncio.to_thread(future.wait, timeout_s)
    finally:
        await future


async def _go_back(world: World) -> None:
    parameter = asyncrpc.RRef(make_parameter())
    async with autograd.context() as context:
        await asyncrpc.RRef(scale(parameter, torch.ones(4))).backward(context)


USES: Final[Mapping[str, Use]] = {
    # --- workers
    "Worker": Use(
        lambda _: Worker,
        needs_worker=False,
        right={"name": lambda _: "new", "rendezvous": lambda _: LocalRendezvous(1)},
        fits={
            "name": {"text"},
            "rendezvous": {"a map"},
            "rank": {"none", "an integer", "an integer of 70 bits"},
            "world_size": {"none", "an integer", "an integer of 70 bits"},
            "options": {"none"},
            "network": {"none"},
        },
        finish=nothing,
    ),
    "Worker.peer": _method("peer", right={"to": lambda _: "b"}, says={"to": UNKNOWN}),
    "Worker.find": _method(
        "find",
        right={"name": lambda _: "b"},
        fits={"timeout_s": ANY_SECONDS},
        says={"name": UNKNOWN},
    ),
    "Worker.members_changed": _method("members_changed", finish=nothing),
    "Worker.rrefs": _method("rrefs"),
    "Worker.subscribe": _method(
        "subscribe",
        fits={"items_max": {"an integer"}, "with_recent": {"true"}},
        needs_worker=False,  # it may be asked for before the start, to miss nothing
        finish=_closed,
    ),
    "Worker.group": _method(
        "group",
        right={"peers": lambda _: ["b"]},
        fits={"peers": {"an empty list"}},
        says={"peers": r"\bpeers\b|worker .* is unknown"},
    ),
    "Worker.empty": _method(
        "empty",
        right={"shape": lambda _: (3,)},
        fits={"shape": {"an integer", "an empty list"}},
    ),
    "JoinTokens.issue": Use(
        lambda world: world.a.tokens.issue,
        right={"valid_s": lambda _: 60},
        fits={"valid_s": SECONDS - {"none"}, "name": {"none", "text", "too large"}},
        finish=_revoked,
    ),
    "JoinTokens.revoke": Use(
        lambda world: world.a.tokens.revoke,
        right={"token": lambda world: world.a.tokens.issue(valid_s=60)},
        finish=nothing,
    ),
    "Worker.barrier": _method(
        "barrier", fits={"timeout_s": ANY_SECONDS}, rightly=_meet
    ),
    "collectives.rendezvous": Use(
        lambda _: rendezvous,
        right={
            "worker": lambda world: world.a,
            "tag": lambda _: "tag",
            "members": lambda world: [world.a.rank],
        },
        fits={
            "worker": {"another worker"},
            "tag": {"text", "empty text", "text with a surrogate"},
            "payload": {"bytes"},
            "members": {"none"},
            "timeout_s": ANY_SECONDS,
        },
        says={"members": rf"{UNKNOWN}|\bmembers\b"},
        rightly=_meet_at,
    ),
    "Worker.__aenter__": Use(
        lambda _: Worker("new", rendezvous=LocalRendezvous(1)).__aenter__,
        finish=_ended,
        needs_worker=False,
    ),
    "Worker.shutdown": _method(
        "shutdown",
        fits={
            "graceful": {"true"},
            "timeout_s": ANY_SECONDS,
            "drain_timeout_s": ANY_SECONDS,
        },
        rightly=_start_and_end,
        needs_worker=False,
    ),
    # --- calls
    **value_uses(),
    "Peer.using": _using(lambda world: world.peer.using),
    "PeerGroup.using": _using(lambda world: world.a.group(["b"]).using),
    "CallOptions": Use(
        lambda world: _options_of(world.peer),
        fits={
            "timeout_s": ANY_SECONDS,
            # The result does not fit into these, which only its coming shows.
            "out": {"none", "a tensor", "a tensor of integers", "too many dimensions"},
            "codec": {"none", "empty text"},
            "idempotent": {"true"},
            "device_map": {"none", "a map"},
        },
        says={"device_map": r"\bdevice"},
    ),
    "rpc_async": _named(asyncrpc.rpc_async),
    "remote": _named(asyncrpc.remote),
    "deadline": Use(
        lambda _: asyncrpc.deadline,
        needs_worker=False,
        right={"timeout_s": lambda _: 60},
        fits={"timeout_s": SECONDS},
    ),
    "get_worker_info": Use(
        lambda _: asyncrpc.get_worker_info,
        fits={"worker_name": {"none"}},
        says={"worker_name": UNKNOWN.replace("name", "worker_name")},
    ),
    "CallFuture.wait": Use(
        lambda _: _wait_in_thread,
        is_found_there=True,  # what waits is a call
        right={"timeout_s": lambda _: 60},
        fits={"timeout_s": ANY_SECONDS},
    ),
    "CallFuture.cancel": Use(
        lambda world: _future(world).cancel,
        fits={"msg": ANYTHING},
        needs_worker=False,
        finish=nothing,
    ),
    # --- references
    "RRef": Use(
        lambda _: asyncrpc.RRef, right={"value": lambda _: 1}, fits={"value": ANYTHING}
    ),
    "RRef.to_here": _of_rref(
        "to_here",
        fits={
            "timeout_s": SECONDS | {"infinite"},
            "out": {"none", "a tensor", "a tensor of integers", "too many dimensions"},
        },
    ),
    "RRef.rpc_async": _of_rref(
        "rpc_async",
        needs_worker=False,
        fits={"timeout_s": SECONDS | {"infinite"}},
        finish=nothing,
    ),
    "RRef.rpc_sync": _of_rref(
        "rpc_sync",
        needs_worker=False,
        fits={"timeout_s": SECONDS | {"infinite"}},
        finish=nothing,
    ),
    "RRef.remote": _of_rref(
        "remote",
        needs_worker=False,
        fits={"timeout_s": SECONDS | {"infinite"}},
        finish=nothing,
    ),
    "RRef.backward": _of_rref(
        "backward",
        right={"context": lambda _: autograd.context()},
        fits={"retain_graph": {"true"}},
        rightly=_go_back,
        needs_worker=False,
    ),
    "RRef.local_value": _of_rref("local_value", needs_worker=False),
    "RRef.release": _of_rref("release", needs_worker=False),
    "RRef.owner": _of_rref("owner", needs_worker=False),
    "RRef.owner_name": _of_rref("owner_name", needs_worker=False),
    "RRef.is_owner": _of_rref("is_owner", needs_worker=False),
    "RRef.confirmed_by_owner": _of_rref("confirmed_by_owner", needs_worker=False),
    # --- options
    "Options": _options(Options),
    "NetworkOptions": _options(NetworkOptions),
    "LivenessOptions": _options(LivenessOptions),
    "LimitOptions": _options(LimitOptions),
    "MessageLimits": _options(MessageLimits),
    "DeviceOptions": _options(DeviceOptions),
    "LocalRendezvous": Use(
        lambda _: LocalRendezvous,
        needs_worker=False,
        right={"world_size": lambda _: 1},
        fits={"world_size": {"an integer", "an integer of 70 bits"}},
    ),
    "JoinRendezvous": Use(
        lambda _: asyncrpc.JoinRendezvous,
        needs_worker=False,
        right={"addresses": lambda _: ["tcp://localhost:1"]},
    ),
    # --- marks
    "on_loop": _mark(asyncrpc.on_loop),
    "async_execution": _mark(asyncrpc.async_execution),
    "idempotent": _mark(asyncrpc.idempotent),
    "expose": _mark(asyncrpc.expose),
    "exclusive": _mark(asyncrpc.exclusive),
    "share": Use(
        lambda _: asyncrpc.share,
        needs_worker=False,
        right={"value": lambda _: torch.ones(3)},
        fits={"value": {"a tensor", "a tensor of integers", "too many dimensions"}},
    ),
}
