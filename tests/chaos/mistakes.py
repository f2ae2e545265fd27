"""The mistakes: wrong calls, each of which has to end with the error that it deserves.

Or else with that of a fault that was really made between the workers that it needs,
which is for `losses` to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import (
    DeadlineExceededError,
    Outcome,
    Peer,
    RejectedError,
    RemoteError,
    RRef,
    UsageError,
)
from asyncrpc.errors import (
    DecodeError,
    EncodeError,
    NoGradientPathError,
    OutMismatchError,
    RRefDeletedError,
    UnknownWorkerError,
)
from tests.chaos import wrongs
from tests.chaos.called import Counter, count_to, double, keep, run, sleep
from tests.chaos.load import Kind, Load, Wanted
from tests.chaos.log import MISTAKE, now_s
from tests.chaos.unexposed import unexposed

WAYS: Final = ("call", "stream", "remote")
MODULES: Final = 4  # of a process, which no other has
NOT_EXECUTED: Final = Outcome.NOT_EXECUTED
EXECUTED: Final = Outcome.EXECUTED
_STRICT: Final = ("strict",)


async def use(peer: Peer, way: str, function: Any, *args: Any) -> Any:
    """Call a function in one of three ways, and take what comes."""
    if way == "call":
        return await peer.call(function, *args)
    if way == "remote":
        return await peer.remote(function, *args)
    return [item async for item in peer.stream(function, *args)]


def several(load: Load) -> list[str]:
    """Return some ways to call, one after the other; they may be the same."""
    return load.rng.choices(WAYS, k=load.rng.choice([2, 3]))


def is_strict(load: Load, to: str) -> bool:
    """Say whether one end of a call takes no pickles."""
    return bool({to, load.worker.name} & load.strict)


# --- functions that are none ---------------------------------------------------------


async def not_importable(load: Load, to: str) -> None:
    number = load.rng.randrange(MODULES)
    name = f"only_at_{load.worker.name}_{load.worker.incarnation:x}_{number}"
    function = wrongs.only_here(name)
    wanted = Wanted((DecodeError,), ("cannot import",))
    if to in load.strict:  # which does not say what it has
        wanted = Wanted((RejectedError,), ("may not be called",))
    await _in_ways(load, "function: not importable", to, wanted, function)


async def not_exposed(load: Load, to: str) -> None:
    if to not in load.strict:
        to = load.rng.choice(sorted(load.strict - {load.worker.name}) or [to])
    if to in load.strict:
        wanted = Wanted((RejectedError,), ("mark it with @asyncrpc.expose",))
        await _in_ways(load, "function: not exposed", to, wanted, unexposed, "never")


async def not_callable(load: Load, to: str) -> None:
    function = load.rng.choice([5, "name", None, 2.5, [len]])
    wanted = Wanted((UsageError,), ("must be callable",))
    await _in_ways(load, "function: not callable", to, wanted, function)


async def _in_ways(
    load: Load, what: str, to: str, wanted: Wanted, function: Any, *args: Any
) -> None:
    peer = load.worker.peer(to)
    for way in several(load):
        await load.mistake(
            what,
            (to,),
            wanted,
            lambda _, way=way: use(peer, way, function, *args),  # type: ignore[misc]
            claims=False,
        )


async def wrong_way(load: Load, to: str) -> None:
    peer = load.worker.peer(to)
    wanted = Wanted((RejectedError,), ("use `stream`", "use `call`"), NOT_EXECUTED)
    calls: list[Callable[[str], Awaitable[Any]]] = [
        lambda it: peer.call(count_to, it, 3),
        lambda it: use(peer, "stream", run, it),
    ]
    await load.mistake("function: wrong way", (to,), wanted, load.rng.choice(calls))


# --- arguments and results -----------------------------------------------------------


# Here a KeyboardInterrupt is the user's own, and ends the program.
HERE: Final = [kind for kind in wrongs.KINDS if kind != "KeyboardInterrupt"]


async def unsendable(load: Load, to: str) -> None:
    makes: dict[str, Callable[[], Any]] = {
        "a lock": threading.Lock,
        "a generator": lambda: (number for number in range(3)),
        "65 dimensions": lambda: torch.ones([1] * 65),
        "raises": lambda: wrongs.RaisesWhenWritten(load.rng.choice(HERE)),
        "deep": lambda: [wrongs.RaisesWhenWritten("RecursionError"), torch.ones(9)],
    }
    if load.rng.random() < 0.1:
        makes = {"too long": lambda: "n" * wrongs.TOO_LONG}
    value = load.rng.choice(list(makes.values()))()
    wanted = Wanted((EncodeError,), ("cannot be sent",), NOT_EXECUTED)
    await _with_argument(load, "argument: cannot travel", to, wanted, value)


async def unreadable(load: Load, to: str) -> None:
    value = wrongs.RaisesWhenRead(load.rng.choice(wrongs.KINDS))
    wanted = Wanted((DecodeError,), ("rebuilt", "cannot be read", "not a value"))
    if is_strict(load, to):
        wanted = Wanted((EncodeError, RejectedError), _STRICT)
    await _with_argument(load, "argument: raises if read", to, wanted, value)


async def _with_argument(
    load: Load, what: str, to: str, wanted: Wanted, value: Any
) -> None:
    peer = load.worker.peer(to)
    for way in load.rng.choices(["call", "remote"], k=2):
        await load.mistake(
            what,
            (to,),
            wanted,
            lambda it, way=way: use(peer, way, wrongs.takes, it, value),  # type: ignore[misc]
            claims=way == "call",
        )


async def wrong_result(load: Load, to: str) -> None:
    peer, kind = load.worker.peer(to), load.rng.choice(list(wrongs.RESULTS))
    if kind == "too long" and load.rng.random() < 0.7:  # it takes 64 MiB
        kind = "65 dimensions"
    function = load.rng.choice([wrongs.returns, wrongs.returns_async])
    texts = ("cannot be sent", "KeyboardInterrupt")
    wanted = Wanted((EncodeError, RemoteError), texts, EXECUTED)
    await load.mistake(
        "result: cannot travel", (to,), wanted, lambda it: peer.call(function, it, kind)
    )


async def unreadable_result(load: Load, to: str) -> None:
    peer, kind = load.worker.peer(to), load.rng.choice(wrongs.KINDS)
    texts = ("rebuilt", "cannot be read", "not a value")
    wanted = Wanted((DecodeError,), texts, EXECUTED)
    if is_strict(load, to):
        wanted = Wanted((EncodeError, RejectedError), _STRICT, EXECUTED)
    calls: list[Callable[[str], Awaitable[Any]]] = [
        lambda it: peer.call(wrongs.gives, it, kind),
        lambda it: use(peer, "stream", wrongs.streams, it, kind),
    ]
    what = "result: raises if read"
    await load.mistake(what, (to,), wanted, load.rng.choice(calls))


async def wrong_arguments(load: Load, to: str) -> None:
    peer = load.worker.peer(to)
    wanted = Wanted((TypeError,), ("argument",))
    calls: list[Callable[[str], Awaitable[Any]]] = [
        lambda it: use(peer, "call", wrongs.takes, it),
        lambda it: use(peer, "call", sleep, it),
        lambda it: use(peer, "call", run, it, 1, 2),
        lambda it: use(peer, "stream", count_to, it),
        lambda _: use(peer, "remote", Counter),
    ]
    make = load.rng.choice(calls)
    await load.mistake("arguments: do not fit", (to,), wanted, make, claims=False)


async def wrong_out(load: Load, to: str) -> None:
    peer = load.worker.peer(to).using(out=torch.empty(7))
    wanted = Wanted((OutMismatchError,), ("out=",), EXECUTED)
    await load.mistake(
        "out=: another shape",
        (to,),
        wanted,
        lambda it: peer.call(double, it, torch.ones(5)),
    )


# --- functions that raise ------------------------------------------------------------

_TEXTS: Final = {
    "hostile text": ("two\nlines",),
    "many texts": ("xxx",),
    "no text": ("could not be read",),
    "chain": ("199",),
}


async def raising(load: Load, to: str) -> None:
    peer, kind = load.worker.peer(to), load.rng.choice(wrongs.KINDS)
    way = load.rng.choice(WAYS)
    functions: dict[str, list[Callable[..., Any]]] = {
        "call": [wrongs.raises, wrongs.raises_async, wrongs.raises_on_loop],
        "remote": [wrongs.raises, wrongs.raises_async, wrongs.raises_on_loop],
        "stream": [wrongs.raises_in_a_generator, wrongs.raises_in_an_async_generator],
    }
    function = load.rng.choice(functions[way])
    wanted = Wanted((RemoteError,), _TEXTS.get(kind, ("short", kind)), EXECUTED)
    await load.mistake(
        f"function: raises, {way}",
        (to,),
        wanted,
        lambda it: use(peer, way, function, it, kind),
        claims=way != "remote",
    )


# --- times ---------------------------------------------------------------------------

NO_TIMES: Final[tuple[Any, ...]] = ("a", float("nan"), [1], b"1", {})


async def no_time(load: Load, to: str) -> None:
    peer, timeout_s = load.worker.peer(to), load.rng.choice(NO_TIMES)

    async def within(call_id: str) -> Any:
        async with asyncrpc.deadline(timeout_s):
            return await peer.call(run, call_id)

    async def using(call_id: str) -> Any:
        return await peer.using(timeout_s=timeout_s).call(run, call_id)

    wanted = Wanted((UsageError,), ("number of seconds",))
    make = load.rng.choice([within, using])
    await load.mistake("timeout: no number", (to,), wanted, make)


async def no_time_left(load: Load, to: str) -> None:
    peer = load.worker.peer(to).using(timeout_s=0)

    async def within(call_id: str) -> Any:
        async with asyncrpc.deadline(0):
            return await load.worker.peer(to).call(run, call_id)

    calls: list[Callable[[str], Awaitable[Any]]] = [
        within,
        lambda it: peer.call(run, it),
        lambda it: use(peer, "stream", count_to, it, 3),
        lambda it: use(peer, "remote", run, it),
    ]
    wanted = Wanted((DeadlineExceededError,), ("it did not begin within 0 s",))
    which = load.rng.randrange(len(calls))
    await load.mistake("deadline: over", (to,), wanted, calls[which], claims=which < 3)


# --- references, streams, workers, gradients, collectives ----------------------------


async def released(load: Load, to: str) -> None:
    since_s, call_id = now_s(), load.excused("remote", to)
    rref: RRef[Counter] = load.worker.peer(to).remote(Counter, call_id)
    await load.expect(
        "add", (to,), lambda it: rref.rpc_async().add(it), since_s=since_s
    )
    rref.release()
    uses: list[Callable[[str], Awaitable[Any]]] = [
        lambda it: rref.rpc_async().add(it),
        lambda _: rref.to_here(),
        lambda it: rref.remote().add(it).to_here(),
        lambda it: load.worker.peer(to).call(keep, it, rref),
    ]
    wanted = Wanted((RRefDeletedError, EncodeError), ("by RRef.release()",))
    for make in load.rng.sample(uses, 2):
        await load.mistake("reference: released", (to,), wanted, make)


class StreamEndedError(Exception):
    """A stream that was closed has no further item."""


async def closed_stream(load: Load, to: str) -> None:
    items = load.worker.peer(to).stream(count_to, load.excused("stream", to), 50)

    async def take_one(_: str) -> None:
        try:
            await anext(items)
        except StopAsyncIteration:
            raise StreamEndedError("closed") from None

    with contextlib.suppress(Exception):  # lost, perhaps; it has to be closed anyway
        async with asyncrpc.deadline(2.0):
            await anext(items)
    await items.aclose()
    wanted = Wanted((StreamEndedError,), ("closed",))
    await load.mistake("stream: closed", (to,), wanted, take_one)


async def nobody(load: Load, to: str) -> None:
    async def call(call_id: str) -> Any:
        return await load.worker.peer("nobody").call(run, call_id)

    wanted = Wanted((UnknownWorkerError,), ("known: ",))
    await load.mistake("worker: unknown", (to,), wanted, call)


async def no_root(load: Load, to: str) -> None:
    context = asyncrpc.autograd.context()
    async with context:
        value = torch.ones(3, requires_grad=True)
        peer, since_s = load.worker.peer(to), now_s()
        _, result = await load.enter(
            "double", (to,), lambda it: peer.call(double, it, value)
        )
        for roots, text in _wrong_roots(load, result):
            wanted = Wanted((UsageError, NoGradientPathError), (text,))
            await load.mistake(
                "backward: no root",
                (to,),
                wanted,
                lambda _, roots=roots: asyncrpc.autograd.backward(context, roots),  # type: ignore[misc]
            )
        await load.enter(
            "backward",
            (to,),
            lambda _: asyncrpc.autograd.backward(context, [result.sum()]),
            since_s=since_s,
            claims=False,
        )
        gradient = asyncrpc.autograd.get_gradients(context)[value]
        if gradient.tolist() != [2.0] * 3:
            load.find(f"a gradient is {gradient.tolist()}")


def _wrong_roots(load: Load, result: torch.Tensor) -> list[tuple[Any, str]]:
    roots: list[tuple[Any, str]] = [
        (None, "roots must be"),
        ("loss", "roots must be"),
        ([None], "must be a tensor, not None"),
        ([1.0], "must be a tensor, not 1.0"),
        ([], "at least one root"),
        ([torch.ones(1)], "does not require a gradient"),
        ([result], "not a real scalar"),
    ]
    return load.rng.sample(roots, 2)


async def odd_shape(load: Load, to: str) -> None:
    others = [name for name in load.peers if name != to]
    members = [load.worker.name, to, load.rng.choice(others or [to])]
    members = sorted(set(members))
    odd = load.rng.choice(members)

    async def reduce(call_id: str) -> list[str]:
        ends = await asyncio.gather(
            *(
                load.worker.peer(name).call(
                    wrongs.take_part, f"{call_id}/{name}", call_id, members, odd
                )
                for name in members
            ),
            return_exceptions=True,
        )
        errors = [end for end in ends if isinstance(end, BaseException)]
        # One that is late leaves the group, of which the others are told.
        errors.sort(key=lambda error: not isinstance(error, TimeoutError))
        if errors:
            raise errors[0]
        return [str(end) for end in ends]

    parties = (to, *(name for name in members if name not in (to, load.worker.name)))
    call_id, answers = await load.enter(
        f"{MISTAKE} collective: two shapes", parties, reduce, claims=False
    )
    if set(answers) != {f"CollectiveError, then {len(members)}"}:
        load.find(f"a collective of two shapes {call_id}: {answers}")


async def cut_short(load: Load, to: str) -> None:
    """Make another mistake, and cancel it at any moment."""
    kinds = [kind for kind in MISTAKES if kind is not cut_short]
    task: asyncio.Task[None] = asyncio.ensure_future(load.rng.choice(kinds)(load, to))
    await asyncio.wait([task], timeout=load.rng.expovariate(20.0))
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


MISTAKES: Final[dict[Kind, int]] = {
    not_importable: 4,
    not_exposed: 2,
    not_callable: 1,
    wrong_way: 1,
    unsendable: 4,
    unreadable: 4,
    wrong_result: 4,
    unreadable_result: 4,
    wrong_arguments: 3,
    wrong_out: 2,
    raising: 12,
    no_time: 2,
    no_time_left: 3,
    released: 3,
    closed_stream: 2,
    nobody: 1,
    no_root: 3,
    odd_shape: 3,
    cut_short: 6,
}
