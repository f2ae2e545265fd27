"""What is wrong with one call costs that call, and is said the same way each time.

Around each wrong call another is in flight between the same workers, and goes on.
"""

from __future__ import annotations

import asyncio
import os
import sys
import types
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import (
    CallError,
    Outcome,
    Policy,
    RejectedError,
    RemoteError,
    UsageError,
    Worker,
)
from asyncrpc.errors import DecodeError, EncodeError, NotStartedError
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import company
from tests.integration.core.company import calls_over
from tests.integration.core.conftest import Trio

TOO_LONG = (64 << 20) + 1  # characters: more than the control part of a message holds


async def around(worker: asyncrpc.Worker, wrong: Callable[[], Awaitable[None]]) -> None:
    """Do what is wrong while another call is in flight, which must go on."""
    peer = worker.peer("b")
    held = asyncio.ensure_future(peer.call(company.hold, "around"))
    assert await peer.call(len, "ab") == 2  # so the other has arrived
    try:
        await wrong()
    finally:
        company.let_go("around")
    assert await held == "around"
    assert await peer.call(len, "abc") == 3
    assert not calls_over(await worker.parts.link_to("b"))


def only_here(kind: str) -> Callable[..., Any]:
    """Return a function that no peer can import: its file is not there."""
    name = f"only_at_the_caller_{kind}"
    module = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    exec("def function(x=None): return x", module.__dict__)  # noqa: S102
    sys.modules[name] = module
    module.function.__module__ = name
    return module.function  # type: ignore[no-any-return]


class Forgotten:
    """Stands for a process: forgets a module while the peer looks for it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__module__
        self._module = sys.modules[self._name]

    def __enter__(self) -> None:
        del sys.modules[self._name]

    def __exit__(self, *_: object) -> None:
        sys.modules[self._name] = self._module


ORDERS = [
    "call call call",
    "stream stream",
    "call remote",
    "remote call",
    "call stream",
]


async def use(peer: asyncrpc.Peer, how: str, function: Any, *args: Any) -> None:
    """Call a function in one of three ways, and take what comes."""
    if how == "call":
        await peer.call(function, *args)
    elif how == "remote":
        await peer.remote(function, *args).to_here()
    else:
        async for _ in peer.stream(function, *args):
            pass


@pytest.mark.parametrize("order", ORDERS)
async def test_failed_import_gives_one_error_each_time(wired: Trio, order: str) -> None:
    a = wired[0]
    function = only_here(order.replace(" ", "_"))
    a.parts.describe(function, (), {})  # named here, before the module is gone

    async def wrong() -> None:
        texts = set()
        with Forgotten(function):
            for how in order.split():
                with pytest.raises(DecodeError, match="cannot import") as caught:
                    await use(a.peer("b"), how, function)
                assert caught.value.outcome is not Outcome.UNKNOWN
                texts.add(caught.value.problem)
        assert len(texts) == 1

    await around(a, wrong)


async def hidden() -> int:
    return 1


@pytest.mark.parametrize("order", ORDERS)
async def test_unexposed_function_is_rejected_each_time(order: str) -> None:
    options = asyncrpc.Options(
        policy=Policy.STRICT, allow=(f"{company.__name__}:hold", "builtins:len")
    )
    async with Cluster(2, options=options) as (a, _):

        async def wrong() -> None:
            for how in order.split():
                with pytest.raises(RejectedError, match="expose"):
                    await use(a.peer("b"), how, hidden)

        await around(a, wrong)


@pytest.mark.parametrize("wrong_function", [5, "name", None, 2.5, [len]])
async def test_non_callable_is_refused_at_once(a: Worker, wrong_function: Any) -> None:

    async def wrong() -> None:
        for how in ("call", "remote", "stream"):
            for _ in range(2):
                with pytest.raises(UsageError, match="must be callable"):
                    await use(a.peer("b"), how, wrong_function, 1)

    await around(a, wrong)


async def test_tensor_of_65_dimensions_is_refused_by_the_caller(wired: Trio) -> None:
    a = wired[0]
    deepest = torch.ones([1] * 64)

    async def wrong() -> None:
        for _ in range(2):
            with pytest.raises(EncodeError, match="65 dimensions"):
                await a.peer("b").call(torch.neg, deepest.unsqueeze(0))

    await around(a, wrong)
    assert (await a.peer("b").call(torch.neg, deepest)).dim() == 64


def returns_deep() -> torch.Tensor:
    return torch.ones([1] * 65)


def returns_long() -> str:
    return "n" * TOO_LONG


async def returns_long_async() -> str:
    return "n" * TOO_LONG


@pytest.mark.parametrize("function", [returns_deep, returns_long, returns_long_async])
async def test_unsendable_result_becomes_an_error(wired: Trio, function: Any) -> None:
    a = wired[0]

    async def wrong() -> None:
        for _ in range(2):
            with pytest.raises(EncodeError) as caught:
                await a.peer("b").call(function)
            assert caught.value.outcome is Outcome.EXECUTED

    await around(a, wrong)


class SilentError(Exception):
    """Cannot be put into words."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    def __repr__(self) -> str:
        raise SystemExit("no text")


def raises(kind: str) -> None:
    if kind == "text":
        raise ValueError("x" * TOO_LONG)
    if kind == "texts":
        raise ValueError(*("x" * (1 << 20) for _ in range(70)))
    if kind == "state":
        error = ValueError("short")
        error.held = "x" * (60 << 20)  # type: ignore[attr-defined]
        raise error
    if kind == "notes":
        noted = ValueError("short")
        for _ in range(3000):
            noted.add_note("y" * (64 << 10))
        raise noted
    if kind == "name":
        raise type("E" * (1 << 20), (Exception,), {})("short")
    if kind == "silent":
        raise SilentError
    if kind == "chain":
        try:
            raises("texts")
        except ValueError as error:
            raise KeyError(*error.args) from error
    raise {
        "exit": SystemExit,
        "interrupt": KeyboardInterrupt,
        "generator": GeneratorExit,
        "memory": MemoryError,
        "recursion": RecursionError,
        "base": BaseException,
        "cancelled": asyncio.CancelledError,
    }[kind]("short")


async def raises_async(kind: str) -> None:
    raises(kind)


@asyncrpc.on_loop
def raises_on_loop(kind: str) -> None:
    raises(kind)


def raises_in_a_generator(kind: str) -> Any:
    yield 1
    raises(kind)


async def raises_in_an_async_generator(kind: str) -> Any:
    yield 1
    raises(kind)


KINDS = [
    *("text", "texts", "state", "notes", "name", "silent", "chain", "exit"),
    *("interrupt", "generator", "memory", "recursion", "base", "cancelled"),
]


@pytest.mark.parametrize("kind", KINDS)
async def test_exception_of_any_kind_is_answered(a: Worker, kind: str) -> None:

    async def wrong() -> None:
        for function in (raises, raises_async, raises_on_loop):
            with pytest.raises(RemoteError):
                await a.peer("b").call(function, kind)
        for generator in (raises_in_a_generator, raises_in_an_async_generator):
            with pytest.raises(RemoteError):
                await use(a.peer("b"), "stream", generator, kind)

    await around(a, wrong)


class Raising:
    """A value whose own code raises when it is read."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return raises, (self.kind,)


def gives(kind: str) -> Raising:
    return Raising(kind)


async def streams(kind: str) -> Any:
    yield 1
    yield Raising(kind)


@pytest.mark.parametrize(
    "kind", ["exit", "memory", "recursion", "base", "silent", "generator", "interrupt"]
)
async def test_value_raising_when_encoded_fails_its_call(a: Worker, kind: str) -> None:

    async def wrong() -> None:
        peer = a.peer("b")
        for _ in range(2):
            with pytest.raises(CallError) as caught:
                await peer.call(len, [Raising(kind)])
            assert caught.value.outcome is Outcome.NOT_EXECUTED
            with pytest.raises(CallError) as answered:
                await peer.call(gives, kind)
            assert answered.value.outcome is Outcome.EXECUTED
            with pytest.raises(CallError):
                await use(peer, "stream", streams, kind)
            with pytest.raises(asyncrpc.AsyncRpcError):
                await peer.remote(len, [Raising(kind)]).to_here()

    await around(a, wrong)


def needs_two(first: int, second: int) -> int:
    return first + second


async def counts(to: int) -> Any:
    for number in range(to):
        yield number


async def test_wrong_arguments_raise_type_error_each_time(a: Worker) -> None:

    async def wrong() -> None:
        for _ in range(2):
            with pytest.raises(TypeError, match="argument"):
                await use(a.peer("b"), "stream", counts)
            with pytest.raises(TypeError, match="argument"):
                await use(a.peer("b"), "call", needs_two, 1)

    await around(a, wrong)


@pytest.mark.parametrize("wrong", ["a", float("nan"), [1], True, b"1"])
async def test_timeout_that_is_not_a_number_is_named(trio: Trio, wrong: Any) -> None:
    with pytest.raises(UsageError, match="timeout_s must be a number of seconds"):
        trio[0].peer("b").using(timeout_s=wrong)


async def test_backward_names_the_wrong_argument(trio: Trio) -> None:
    with acting_as(trio[0]):
        context = asyncrpc.autograd.context()
    async with context:
        with pytest.raises(UsageError, match="context must be"):
            await asyncrpc.autograd.backward(None, [torch.ones(1)])  # type: ignore[arg-type]
        for roots, said in (
            (None, "roots must be"),
            (5, "roots must be"),
            ("loss", "roots must be"),
            ([None], "must be a tensor, not None"),
            ([1.0], "must be a tensor, not 1.0"),
        ):
            with pytest.raises(UsageError, match=said):
                await asyncrpc.autograd.backward(context, roots)  # type: ignore[arg-type]


def in_a_forked_child(attempt: Callable[[], Awaitable[Any]]) -> str:
    """Fork, make an attempt in the child, and return what it raised there."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            attempt().__await__().send(None)
            os.write(writer, b"it went on")
        except BaseException as error:  # noqa: BLE001  (told to the parent)
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
async def test_a_forked_child_has_no_worker(wired: Trio) -> None:
    a = wired[0]
    peer = a.peer("b")
    assert await peer.call(len, "ab") == 2

    async def stream() -> None:
        async for _ in peer.stream(counts, 3):
            pass

    attempts: list[Callable[[], Awaitable[Any]]] = [
        lambda: peer.call(len, "ab"),
        lambda: use(peer, "remote", len, "ab"),
        stream,
        lambda: a.find("b"),
    ]
    for attempt in attempts:
        report = in_a_forked_child(attempt)
        assert report.startswith(NotStartedError.__name__), report
        assert "forked" in report
        assert await peer.call(len, "abc") == 3
