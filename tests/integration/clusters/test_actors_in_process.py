"""Actors on workers of one process: methods, turns, parts of arguments, states."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import Actor, Options, Policy, Worker
from asyncrpc.clusters.actors import exclusive
from asyncrpc.clusters.actors.spawning import spawn_on
from asyncrpc.errors import (
    CallError,
    CallKindError,
    DeadlineExceededError,
    EncodeError,
    NotStartedError,
    OverloadedError,
    OwnerLostError,
    RejectedError,
    RemoteError,
    RRefDeletedError,
    UsageError,
)
from asyncrpc.testing import Cluster, acting_as
from tests.inner_state import calls_waiting_for_turn
from tests.integration.clusters import actor_classes as made
from tests.integration.clusters.actor_classes import Counter, Gate

Workers = list[Worker]


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    async with Cluster(3, network="uds") as workers:
        yield workers


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop run until a condition holds, which may be a call."""
    while True:
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        if holds:
            return
        await asyncio.sleep(0)


async def is_so(reply: Awaitable[Any], wanted: Any) -> bool:
    return bool(await reply == wanted)


async def held_for(here: Worker, actor: Actor[Any]) -> Any:
    """Return what a worker holds for an actor."""
    await here.peer(actor.worker).call(made.look_at, actor.rref)
    return made.looked_at.pop()


def held(worker: Worker) -> int:
    gc.collect()
    return sum(record.is_owner for record in worker.rrefs())


async def test_all_and_one_are_called_in_order(workers: Workers) -> None:
    here = workers[0]
    counters = await spawn_on(here, ["b", "c", "b"], Counter, [1])
    assert await counters.add(2) == [3, 3, 3]
    assert await counters[1].add(2) == 5
    assert await counters[1:].add(1) == [6, 4]
    assert await counters[::-1].add(0) == [4, 6, 3]
    assert [counter.worker for counter in counters] == ["b", "c", "b"]
    assert len(counters) == 3
    assert repr(counters) == "<3 Actors of Counter on 'b', 'c'>"
    assert repr(counters[-1]) == "<Actor Counter[2] on 'b'>"
    assert repr(counters.add) == "<method add of 3 actors>"


async def test_methods_are_called_by_themselves_and_by_name(workers: Workers) -> None:
    counters = await spawn_on(workers[0], ["b", "c"], made.LoudCounter)
    assert await counters.method(Counter.add)(1) == [100, 100]
    assert await counters[0].method("add")(1) == 200
    assert await counters[0].method(made.LoudCounter.add)(1) == 300
    assert await counters[0].method("save")() == "its own"
    assert await counters.method("save")() == ["its own"] * 2
    with pytest.raises(UsageError, match="method must be a method of LoudCounter"):
        counters.method(Gate.open)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a method of LoudCounter"):
        counters[0].method(3)  # type: ignore[call-overload]


async def test_plain_methods_run_in_threads(workers: Workers) -> None:
    (counter,) = await spawn_on(workers[0], ["b"], Counter, [4])
    assert (await counter.name()).startswith("4 by asyncrpc-b-")


async def test_replies_come_as_calls_end(workers: Workers) -> None:
    gates = await spawn_on(workers[0], ["b", "c"], Gate)
    came = []
    async with aclosing(gates.enter.as_completed("x")) as replies:
        await gates[1].open()
        async for reply in replies:
            came.append((reply.actor.index, reply.result(), reply.error))
            await gates[0].open()
    assert came == [(1, "x", None), (0, "x", None)]


async def test_error_of_one_reply_leaves_the_others(workers: Workers) -> None:
    counters = await spawn_on(workers[0], ["b", "c"], Counter)
    errors = [reply.error async for reply in counters.fail.as_completed()]
    assert [type(error).__mro__[1:3] for error in errors] == [
        (RemoteError, CallError)
    ] * 2
    async for reply in counters.fail.as_completed():
        with pytest.raises(ValueError, match="no such number"):
            reply.result()


async def test_left_loop_cancels_the_other_calls(workers: Workers) -> None:
    gates = await spawn_on(workers[0], ["b", "c"], Gate)
    await gates[0].open()
    async for reply in gates.enter.as_completed("x"):
        assert reply.actor is gates[0]
        break
    await until(lambda: is_so(gates[1].seen(), (["x"], ["x"])))


async def test_first_error_cancels_the_others_and_names_its_actor(
    workers: Workers,
) -> None:
    gates = await spawn_on(workers[0], ["b", "c"], Gate)
    waiting = asyncio.create_task(
        gates.enter(asyncrpc.scatter(["x", threading.Lock()]))
    )
    with pytest.raises(EncodeError) as caught:
        await waiting
    assert caught.value.function == "Gate[1].enter"
    assert "From <Actor Gate[1] on 'c'>" in caught.value.__notes__
    await until(lambda: is_so(gates[0].seen(), (["x"], ["x"])))


async def test_cancelled_call_is_cancelled_on_every_worker(workers: Workers) -> None:
    gates = await spawn_on(workers[0], ["b", "c"], Gate)
    waiting = asyncio.create_task(gates.enter("x"))
    await until(lambda: is_so(gates.seen(), [(["x"], [])] * 2))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: is_so(gates.seen(), [(["x"], ["x"])] * 2))


async def test_deadline_holds_for_actors(workers: Workers) -> None:
    (gate,) = await spawn_on(workers[0], ["b"], made.ExclusiveGate)
    with pytest.raises(DeadlineExceededError) as caught:
        async with asyncrpc.deadline(0.01):
            await gate.enter("x")
    assert caught.value.function == "ExclusiveGate[0].enter"
    await gate.open()
    assert await gate.enter("y") == "y"


async def test_generators_stream(workers: Workers) -> None:
    for cls in (Counter, made.LoudCounter):
        counters = await spawn_on(workers[0], ["b", "c"], cls, [1])
        assert [row async for row in counters[0].rows(3)] == [1, 2, 3]
        assert [line async for line in counters[1].lines(2)] == ["1", "2"]
        with pytest.raises(UsageError, match=r"actors\[0\].rows"):
            _ = counters.rows
        with pytest.raises(UsageError, match="a plain generator"):
            counters.method(Counter.lines)
    (counter,) = await spawn_on(workers[0], ["b"], Counter)
    async with aclosing(counter.rows(1 << 40)) as rows:
        async for row in rows:
            assert row == 0
            break
    with pytest.raises(TypeError) as caught:
        await anext(counter.rows("x"))
    assert caught.value.function == "Counter[0].rows"  # type: ignore[attr-defined]


async def test_arguments_are_split(workers: Workers) -> None:
    scatter = asyncrpc.scatter
    sums = await spawn_on(workers[0], ["b", "c"], made.Summing, [scatter(range(2))])
    rows = torch.arange(5.0)
    assert await sums.sum(scatter(rows)) == [3.0, 1007.0]
    assert await sums.sum(rows, scale=scatter([0.0, 1.0])) == [0.0, 1010.0]
    assert await sums[1:].sum(scatter(rows)) == [1010.0]
    with pytest.raises(UsageError, match="scatter has 1 values for 2 actors"):
        await sums.sum(scatter([rows]))
    with pytest.raises(UsageError, match="scatter has 1 rows for 2 actors"):
        await sums.sum(scatter(rows[:1]))
    with pytest.raises(EncodeError, match="or go to one actor"):
        await sums[0].sum(scatter(rows))
    with pytest.raises(EncodeError, match="inside another value"):
        await sums.sum([scatter(rows)])
    with pytest.raises(UsageError, match="a dimension to split"):
        scatter(torch.tensor(1.0))
    with pytest.raises(UsageError, match="values must be a sequence or a tensor"):
        scatter({1, 2})  # type: ignore[call-overload]


async def test_states_are_saved_and_loaded(workers: Workers) -> None:
    here = workers[0]
    counters = await spawn_on(here, ["b", "c"], Counter, [3])
    assert await counters.save() == [{"n": 3}, {"n": 3}]
    await counters.load([{"n": 5}, {"n": 6}])
    assert await counters.add(0) == [5, 6]
    await counters[0].load(await counters[1].save())
    assert await counters.add(0) == [6, 6]
    slotted = await spawn_on(here, ["b"], made.Slotted, [4])
    states = await slotted.save()
    await slotted.fill(1.0)
    await slotted.load(await slotted.save())
    assert await slotted.total() == [4.0]
    await slotted.load(states)
    assert await slotted.total() == [0.0]
    (versioned,) = await spawn_on(here, ["b"], made.Versioned)
    state = await versioned.save()
    assert state == {"version": 2, "n": 1}
    await versioned.load(state | {"n": 4})
    assert await versioned.number() == 4
    with pytest.raises(UsageError, match="states must be 2, one for each"):
        await counters.load([{}])
    with pytest.raises(UsageError, match="a sequence of states"):
        await counters.load(3)  # type: ignore[arg-type]
    with pytest.raises(AssertionError) as caught:
        await versioned.load({"version": 1})
    assert caught.value.function == "Versioned[0].load"  # type: ignore[attr-defined]


# --- one call at a time --------------------------------------------------------------


async def test_exclusive_calls_run_one_at_a_time_in_order(workers: Workers) -> None:
    (queue,) = await spawn_on(workers[0], ["b"], made.Queue)
    calls = [(queue.run, queue.work)[at % 2](at) for at in range(20)]
    assert await asyncio.gather(*calls) == list(range(20))
    assert await queue.seen() == (1, list(range(20)))
    assert await queue.both(7) == [7, 7]  # by `self`: it has the turn
    assert [item async for item in queue.stream(3)] == [0, 1, 2]
    assert (await queue.save())["running"] == 0


async def test_exclusive_plain_methods_have_the_callers_modes(
    workers: Workers,
) -> None:
    (queue,) = await spawn_on(workers[0], ["b"], made.Queue)
    assert await queue.records()
    with torch.no_grad():
        assert not await queue.records()
    assert await queue.records()


async def test_cancelled_call_leaves_the_queue(workers: Workers) -> None:
    (gate,) = await spawn_on(workers[0], ["b"], made.ExclusiveGate)
    first = asyncio.create_task(gate.enter("first"))
    second = asyncio.create_task(gate.enter("second"))
    third = asyncio.create_task(gate.seen())
    taker = await held_for(workers[0], gate)
    await until(lambda: calls_waiting_for_turn(taker) == 2)
    second.cancel()
    await until(lambda: calls_waiting_for_turn(taker) == 1)
    first.cancel()
    assert await third == (["first"], ["first"])


async def test_turn_of_a_cancelled_thread_lasts_until_it_ends(
    workers: Workers,
) -> None:
    made.thread_begun.clear()
    made.thread_may_end.clear()
    (gate,) = await spawn_on(workers[0], ["b"], made.ExclusiveGate)
    stuck = asyncio.create_task(gate.stuck())
    await asyncio.to_thread(made.thread_begun.wait)
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    following = asyncio.create_task(gate.seen())
    taker = await held_for(workers[0], gate)
    await until(lambda: calls_waiting_for_turn(taker) == 1)
    made.thread_may_end.set()
    assert await following == ([], [])


async def test_queue_of_an_exclusive_actor_is_bounded(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exclusive, "WAITING_MAX", 2)
    (gate,) = await spawn_on(workers[0], ["b"], made.ExclusiveGate)
    calls = [asyncio.create_task(gate.enter(f"{at}")) for at in range(3)]
    taker = await held_for(workers[0], gate)
    await until(lambda: calls_waiting_for_turn(taker) == 2)
    with pytest.raises(OverloadedError, match="2 calls of this exclusive actor wait"):
        await gate.enter("3")
    exclusive.actor_of(taker).is_open.set()
    assert await asyncio.gather(*calls) == ["0", "1", "2"]


async def test_marked_methods_exclude_each_other_alone(workers: Workers) -> None:
    (half,) = await spawn_on(workers[0], ["b"], made.HalfExclusive)
    holding = [asyncio.create_task(half.hold()) for _ in range(2)]
    await until(lambda: is_so(half.count(), 1))
    assert (await half.plain()).startswith("asyncrpc-b-")
    assert await half.at_once() == threading.current_thread().name
    assert [row async for row in half.rows()] == [1]
    assert [line async for line in half.lines()] == [2]
    await half.open()
    assert await asyncio.gather(*holding) == [1, 2]


async def test_plain_generators_have_no_turns(workers: Workers) -> None:
    with pytest.raises(UsageError, match="make it an asynchronous one"):
        await spawn_on(workers[0], ["b"], made.StepsInTurn)


# --- life ----------------------------------------------------------------------------


async def test_error_of_one_constructor_undoes_all(workers: Workers) -> None:
    here, b, c = workers
    with pytest.raises(ValueError, match="cannot count on c") as caught:
        await spawn_on(here, ["b", "c", "b", "b"], Counter, [0], {"fails_on": "c"})
    error: Any = caught.value
    assert error.function == "Counter[1].__init__"
    assert "Actor Counter[1] on 'c' was not made" in error.__notes__
    assert "in __init__" in error.remote_traceback
    await until(lambda: not (held(b) or held(c)))


async def test_objects_live_as_long_as_their_actors(workers: Workers) -> None:
    here, b, _ = workers
    counters = await spawn_on(here, ["b", "b", "b"], Counter)
    one = counters[0]
    assert held(b) == 3
    counters[1].release()
    with pytest.raises(RRefDeletedError, match="given back"):
        await counters[1].add(1)
    del counters
    await until(lambda: held(b) == 1)
    assert await one.add(1) == 1
    for _ in range(2):
        one.release()
    await until(lambda: not held(b))


async def test_actors_travel_in_calls(workers: Workers) -> None:
    here = workers[0]
    counters = await spawn_on(here, ["b", "c"], Counter)
    assert await here.peer("c").call(made.add_by, counters[0], 5) == 5
    assert await here.peer("b").call(made.add_by, counters[0], 5) == 10
    assert await here.peer("c").call(made.add_to_all, counters, 1) == [11, 1]
    for thing in (counters, counters[0]):
        with pytest.raises(UsageError, match="an RRef cannot be pickled"):
            pickle.dumps(thing)


async def test_attribute_that_is_no_method_is_refused_at_once(workers: Workers) -> None:
    (counter,) = counters = await spawn_on(workers[0], ["b"], Counter)
    for actor in (counter, counters):
        with pytest.raises(AttributeError, match="no method 'ad'; did you mean 'add'"):
            _ = actor.ad
        with pytest.raises(AttributeError, match=r"no method 'n'$"):
            _ = actor.n
        with pytest.raises(AttributeError, match=r"Counter\.unit is not a method"):
            _ = actor.unit
        for name in ("_private", "__class_getitem__", "__getstate__"):
            with pytest.raises(AttributeError, match="is private"):
                actor.method(name)
        assert not hasattr(actor, "_private")
    with pytest.raises(TypeError):
        await counter()  # type: ignore[operator]
    with pytest.raises(IndexError, match="index 1 is out of range of 1 actors"):
        _ = counters[1]
    with pytest.raises(UsageError, match="at must be an index or a slice"):
        _ = counters["add"]  # type: ignore[call-overload]


async def test_wrong_arguments_cost_their_own_call_only(workers: Workers) -> None:
    (counter,) = await spawn_on(workers[0], ["b"], Counter)
    with pytest.raises(TypeError):
        await counter.add()
    with pytest.raises(CallError, match="function") as caught:
        await counter.add(lambda: 1)
    assert caught.value.function == "Counter[0].add"
    with pytest.raises(CallKindError):
        await asyncrpc_call(counter)
    assert await counter.add(1) == 1


async def asyncrpc_call(counter: Actor[Any]) -> object:
    return await counter.rref.rpc_async().rows(3)


async def test_another_loop_is_refused(workers: Workers) -> None:
    counters = await spawn_on(workers[0], ["b"], Counter)
    for use in (counters.add, counters[0].add):
        with pytest.raises(UsageError, match="event loop"):
            await asyncio.to_thread(asyncio.run, use(1))
    assert await counters.add(1) == [1]


async def test_actors_of_an_ended_worker_say_so() -> None:
    async with Cluster(2) as (a, _):
        (counter,) = counters = await spawn_on(a, ["b"], Counter)
    for use in (counters.add(1), counters.save(), anext(counter.rows(1))):
        with pytest.raises((NotStartedError, OwnerLostError)):
            await use


async def test_strict_workers_offer_exposed_classes_alone() -> None:
    allow = ("asyncrpc.clusters.actors.owner:*",)
    strict = Options(policy=Policy.STRICT, allow=allow)
    async with Cluster(2, options=strict) as (a, _):
        with acting_as(a):
            exposed = await spawn_on(a, ["b"], made.Exposed)
            assert await exposed.twice(4) == [8]
            assert [row async for row in exposed[0].rows()] == [1]
            assert await exposed.save() == [None]
            with pytest.raises(RejectedError):
                await spawn_on(a, ["b"], Counter)
            with pytest.raises(RejectedError, match="not exposed"):
                await spawn_on(a, ["b"], dict)
    async with Cluster(2, options=Options(policy=Policy.STRICT)) as (a, _):
        with pytest.raises(RejectedError, match=r"list it in Options\.allow"):
            await spawn_on(a, ["b"], made.Exposed)
