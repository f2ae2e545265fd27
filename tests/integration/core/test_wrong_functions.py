"""Functions that give or raise what they should not: the caller hears, and no more.

In every way that a function can run.  Each wrong call is made twice, and comes to the
same; around them a call, a stream, training and a collective go on between the same two
workers.  Afterwards nothing is left of them, and the connection is the one it was.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrpc import CallError, Options, Outcome, Policy, RemoteError, RRef, Worker
from asyncrpc.errors import DecodeError, EncodeError
from asyncrpc.testing import Cluster
from tests.integration.core import misbehaving, ways
from tests.integration.core.company import LIMIT_S, PATIENT, company, told_by, work
from tests.integration.core.groups import processes
from tests.integration.core.misbehaving import BAD, FINE, RAISED
from tests.integration.core.ways import CALLS, Way

OPTIONS = Options(drain_timeout_s=2.0, liveness=PATIENT)
STRICT = Options(
    drain_timeout_s=2.0,
    policy=Policy.STRICT,
    allow=(
        "builtins:len",
        "tests.integration.core.ways:*",
        "tests.integration.core.company:*",
        "torch.nn.modules.linear:Linear",
    ),
)


NAMES = {"sys.exit": "SystemExit", "endless recursion": "RecursionError"}


async def error_of(way: Way, worker: Worker, kind: str) -> CallError | None:
    """Return what the caller is told, which is the same each time."""
    errors: list[CallError | None] = []
    for _ in range(2):
        try:
            await asyncio.wait_for(way(worker, kind), LIMIT_S)
        except CallError as error:
            errors.append(error.with_traceback(None))
        else:
            errors.append(None)
    first, second = errors
    assert type(first) is type(second), kind
    assert told_by(first) == told_by(second), kind
    return first


def is_said_well(error: CallError | None, kind: str) -> None:
    """The text says that the value is at fault, and that the function ran."""
    assert isinstance(error, EncodeError | DecodeError), (kind, error)
    assert error.outcome is Outcome.EXECUTED, (kind, error)
    said = (
        "cannot be sent: ",
        "the message is not a value: ",
        "could not be rebuilt: ",
    )
    assert any(words in str(error) for words in said), (kind, error)
    assert "(outcome: not executed)" not in str(error), (kind, error)


def is_told_on(error: CallError | None, kind: str) -> None:
    """The caller hears what was raised, by its name."""
    assert isinstance(error, RemoteError), (kind, error)
    assert error.outcome is Outcome.EXECUTED, (kind, error)
    name = NAMES.get(kind, "ValueError")
    if kind in misbehaving.ERRORS and kind not in NAMES and "inside" not in kind:
        name = type(misbehaving.ERRORS[kind]()).__name__
    where = f"{[cls.__name__ for cls in type(error).__mro__]} {error}"
    assert name in where, (kind, where)


async def misuse(worker: Worker, way: Way) -> None:
    """Have a function misbehave in every manner, in one way to run it."""
    for kind in FINE:
        assert await error_of(way, worker, kind) is None, kind
    for kind in BAD:
        is_said_well(await error_of(way, worker, kind), kind)
    for kind in RAISED:
        is_told_on(await error_of(way, worker, kind), kind)


@pytest.mark.parametrize("way", CALLS)
async def test_wrong_function_fails_its_call_alone(way: str) -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        await misuse(a, CALLS[way])


@pytest.mark.parametrize("way", ["thread", "coroutine", "on loop", "generator"])
async def test_training_survives_wrong_functions(way: str) -> None:
    async with Cluster(2, network="tcp", options=OPTIONS) as (a, _), work(a):
        await misuse(a, CALLS[way])


@pytest.mark.slow
async def test_wrong_function_fails_its_call_across_processes() -> None:
    async with processes("b", options=OPTIONS) as a, company(a), work(a):
        for way in CALLS.values():
            await misuse(a, way)


@pytest.mark.parametrize(
    "way", ["thread", "coroutine", "generator", "remote", "method"]
)
async def test_wrong_function_fails_its_call_under_strict(way: str) -> None:
    """Valid results may be refused here; nothing else is let through."""
    async with Cluster(2, options=STRICT) as (a, _), company(a):
        for kind in FINE | BAD:
            error = await error_of(CALLS[way], a, kind)
            if error is not None or kind in BAD:
                is_said_well(error, kind)
        for kind in RAISED:
            error = await error_of(CALLS[way], a, kind)
            assert isinstance(error, RemoteError), (kind, error)
            assert error.outcome is Outcome.EXECUTED, (kind, error)


@pytest.mark.parametrize("way", ["thread", "generator"])
@pytest.mark.parametrize("kind", misbehaving.TOO_MUCH)
async def test_oversized_result_fails_its_call(way: str, kind: str) -> None:
    async with Cluster(2, network="uds", options=OPTIONS) as (a, _), company(a):
        error = await error_of(CALLS[way], a, kind)
        is_said_well(error, kind)
        if kind == "long text":
            assert "the limit is 67108864" in str(error)


async def test_missing_future_of_a_marked_function_is_an_error() -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        for kind in (FINE | BAD).keys() - {"foreign future"}:
            error = await error_of(ways.calling(ways.by_no_future), a, kind)
            assert isinstance(error, RuntimeError), (kind, error)
        for kind in RAISED:
            is_told_on(await error_of(ways.calling(ways.by_no_future), a, kind), kind)


async def value_of(worker: Worker, kind: str) -> None:
    """Ask for the value of a constructor that raises."""
    await worker.peer("b").remote(ways.Maker, kind).to_here()


async def test_constructor_that_raises_fails_value_and_methods() -> None:
    """The caller gets the error of the constructor."""
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        for kind in RAISED:
            is_told_on(await error_of(value_of, a, kind), kind)
            error = await error_of(ways.by_constructor, a, kind)
            assert isinstance(error, RemoteError), (kind, error)
            assert error.outcome is Outcome.NOT_EXECUTED  # the method


async def method_of(worker: Worker, _kind: str) -> None:
    """Call a method of a value that is still being made when it is called."""
    await worker.peer("b").remote(ways.Propertied).rpc_async().method()


async def method_of_made(worker: Worker, _kind: str) -> None:
    rref = await settled_rref(worker)
    await rref.rpc_async().method()


async def settled_rref(worker: Worker) -> RRef[Any]:
    rref: RRef[Any] = worker.peer("b").remote(ways.Propertied)
    await rref
    return rref


@pytest.mark.parametrize("way", [method_of, method_of_made])
async def test_property_that_raises_fails_the_method_call(way: Way) -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        is_told_on(await error_of(way, a, "value"), "value")
