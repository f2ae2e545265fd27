"""A call that fails before its function runs has one outcome, whichever way it is made.

The text says it, once, and the attribute says the same.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import pytest

import asyncrpc
from asyncrpc import CallError, Options, Outcome, Policy, RejectedError, RRef, Worker
from asyncrpc.compat import rpc
from asyncrpc.errors import CallKindError, DecodeError
from asyncrpc.testing import Cluster, acting_as
from tests.integration.compat.playing import play
from tests.integration.core.groups import processes

Use: TypeAlias = Callable[[Worker, Any, tuple[Any, ...]], Awaitable[Any]]

STRICT: Final = Options(
    policy=Policy.STRICT, allow=("builtins:dict", f"{__name__}:Unexposed")
)
SAID: Final = "(outcome: not executed)"


def fail_to_rebuild() -> None:
    raise ValueError("no such value here")


class Unreadable:
    """A value that can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return fail_to_rebuild, ()


def function(x: Any = None) -> Any:
    return x


async def coroutine(x: Any = None) -> Any:
    return x


def generator(x: Any = None) -> Any:
    yield x


async def async_generator(x: Any = None) -> Any:
    yield x


class Methods:
    """Its methods are the functions above."""

    function = staticmethod(function)
    coroutine = staticmethod(coroutine)
    generator = staticmethod(generator)
    async_generator = staticmethod(async_generator)


class Unexposed(Methods):
    """A strict worker may make it, and not call its methods."""


def absent() -> Any:
    """Return a function of this process whose module no peer can import."""
    module = types.ModuleType("tests_of_outcomes_only_here")
    module.__file__ = "/only/here.py"  # so its functions travel by name
    exec("def f(): pass", module.__dict__)  # noqa: S102
    sys.modules[module.__name__] = module
    module.f.__module__ = module.__name__
    return module.f


async def items_of(peer: asyncrpc.Peer, target: Any, args: Any) -> list[Any]:
    return [item async for item in peer.stream(target, *args)]


USES: Final[dict[str, Use]] = {
    "call": lambda a, f, x: a.peer("b").call(f, *x),
    "remote": lambda a, f, x: a.peer("b").remote(f, *x).to_here(),
    "rpc_sync": lambda _, f, x: asyncio.to_thread(asyncrpc.rpc_sync, "b", f, x),
    "rpc_async": lambda _, f, x: asyncrpc.rpc_async("b", f, x),
    "asyncrpc.remote": lambda _, f, x: asyncrpc.remote("b", f, x).to_here(),
}
STREAM: Final[dict[str, Use]] = {"stream": lambda a, f, x: items_of(a.peer("b"), f, x)}
METHODS: Final[dict[str, Callable[[RRef[Any], str, Any], Awaitable[Any]]]] = {
    "rpc_async": lambda ref, name, x: getattr(ref.rpc_async(), name)(*x),
    "remote": lambda ref, name, x: getattr(ref.remote(), name)(*x).to_here(),
    "rpc_sync": lambda ref, name, x: asyncio.to_thread(
        lambda: getattr(ref.rpc_sync(), name)(*x)
    ),
}


async def check(use: Awaitable[Any], error: type[CallError], name: str) -> str:
    """Check how a use fails; return its text without its function and outcome."""
    with pytest.raises(error) as caught:
        await use
    assert caught.value.outcome is Outcome.NOT_EXECUTED
    text = str(caught.value)
    assert text.startswith(f"{name} on 'b': ")
    assert text.endswith(SAID)
    assert text.count("(outcome: ") == 1
    return caught.value.problem


@pytest.mark.parametrize(
    ("target", "args", "error", "uses"),
    [
        pytest.param(function, (Unreadable(),), DecodeError, USES | STREAM, id="read"),
        pytest.param(function, (), CallKindError, STREAM, id="function"),
        pytest.param(coroutine, (), CallKindError, STREAM, id="coroutine"),
        pytest.param(generator, (), CallKindError, USES, id="generator"),
        pytest.param(async_generator, (), CallKindError, USES, id="async generator"),
    ],
)
async def test_refused_call_has_a_fixed_outcome(
    target: Any, args: Any, error: type[CallError], uses: dict[str, Use]
) -> None:
    async with Cluster(2) as (a, _):
        with acting_as(a):
            name = target.__name__
            texts = {
                await check(u(a, target, args), error, name) for u in uses.values()
            }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("function", (Unreadable(),), DecodeError),
        ("generator", (), CallKindError),
        ("async_generator", (), CallKindError),
    ],
)
async def test_refused_method_has_a_fixed_outcome(
    name: str, args: Any, error: type[CallError]
) -> None:
    async with Cluster(2) as (a, _):
        with acting_as(a):
            rref = a.peer("b").remote(Methods)
            texts = {
                await check(use(rref, name, args), error, name)
                for use in METHODS.values()
            }
            del rref
    assert len(texts) == 1


async def test_forbidden_call_has_a_fixed_outcome() -> None:
    async with Cluster(2, options=STRICT) as (a, _):
        with acting_as(a):
            for use in (USES | STREAM).values():
                await check(use(a, function, ()), RejectedError, "function")
            rref = a.peer("b").remote(Unexposed)
            for method in METHODS.values():
                await check(method(rref, "function", ()), RejectedError, "function")
            del rref


async def test_failed_import_has_a_fixed_outcome() -> None:
    """For the function, and for methods of the value that it would make."""
    target = absent()
    async with processes("b") as a:
        with acting_as(a):
            texts = {
                await check(use(a, target, ()), DecodeError, "f")
                for use in (USES | STREAM).values()
            }
            rref = a.peer("b").remote(target)
            for method in METHODS.values():
                texts.add(await check(method(rref, "function", ()), DecodeError, "f"))
            del rref
    assert len(texts) == 1


@pytest.mark.parametrize("target", [function, coroutine, generator, async_generator])
async def test_wrong_arguments_are_raised_as_by_the_function(target: Any) -> None:
    """They are the function's to refuse, so its refusal counts as its running."""
    uses = STREAM if "generator" in target.__name__ else USES
    async with Cluster(2) as (a, _):
        with acting_as(a):
            rref = a.peer("b").remote(Methods)
            works = [use(a, target, (1, 2)) for use in uses.values()]
            if uses is USES:
                works += [m(rref, target.__name__, (1, 2)) for m in METHODS.values()]
            for work in works:
                with pytest.raises(TypeError, match="takes from 0 to 1") as caught:
                    await work
                assert isinstance(caught.value, CallError)
                assert caught.value.outcome is Outcome.EXECUTED
            del rref


def facade_says_it_once() -> None:
    target = absent()
    rref: Any = rpc.remote("worker1", Methods)
    for f, args, words in (
        (target, (), "cannot import"),
        (function, (Unreadable(),), "could not be rebuilt"),
        (generator, (), "it is a generator"),
    ):
        uses: tuple[Callable[[Any, Any], Any], ...] = (
            lambda f, x: rpc.rpc_sync("worker1", f, x),
            lambda f, x: rpc.rpc_async("worker1", f, x).wait(),
            lambda f, x: rpc.remote("worker1", f, x).to_here(),
        )
        for use in uses:
            with pytest.raises(RuntimeError, match=words) as caught:
                use(f, args)
            assert str(caught.value).count(SAID) == 1
    with pytest.raises(RuntimeError, match="could not be rebuilt") as caught:
        rref.rpc_sync().function(Unreadable())
    assert str(caught.value).count(SAID) == 1


def test_facade_states_the_outcome_once() -> None:
    play(facade_says_it_once)
