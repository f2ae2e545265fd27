"""The twelve cases that PyTorch's note on its RRef protocol leaves open.

Source: PyTorch, "Remote Reference Protocol" (docs/source/rpc/rref.rst).  What is
answered here, and why, is in docs/reference/rref-protocol.md, under the same numbers.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import asyncrpc
from asyncrpc import DeadlineExceededError, OwnerLostError, RejectedError, RRef, Worker
from asyncrpc.errors import ConnectionLostError, EncodeError, RRefDeletedError
from asyncrpc.testing import Cluster, acting_as
from asyncrpc.testing.cluster import sim_worker
from asyncrpc.testing.network import Network
from tests.integration.core import remote
from tests.integration.core import rref_parts as parts
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import processes
from tests.integration.core.rref_parts import Counter, all_freed, counts, until
from tests.simulated import play

ROOT = Path(__file__).parents[3]
SEEDS = range(10)


@pytest.fixture
async def trio(trio: Trio) -> AsyncIterator[Trio]:
    """Three workers that own and hold nothing once the test has ended."""
    yield trio
    parts.kept.clear()
    await all_freed(*trio)


def holders_at(owner: Worker) -> dict[str, int]:
    """Return who holds the one value of a worker."""
    (record,) = [rref for rref in owner.rrefs() if rref.is_owner]
    return dict(record.holders)


# --- 1: a user's process dies --------------------------------------------------------


async def test_case_01_a_dead_users_holdings_are_dropped() -> None:
    async with (cluster := processes("b", "c")) as a:
        with acting_as(a):
            rref = RRef(Counter(7))
        await a.peer("b").call(parts.keep, rref)
        await a.peer("c").call(parts.keep, rref)
        assert holders_at(a) == {"b": 1, "c": 1}
        cluster.kill("b")
        await until(lambda: holders_at(a) == {"c": 1})
        del rref
        gc.collect()
        assert await a.peer("c").call(parts.states) == ["confirmed"]
        await a.peer("c").call(parts.let_go)
        await all_freed(a)


# --- 2: the owner dies ---------------------------------------------------------------


async def test_case_02_handles_of_a_dead_owner_fail_at_once() -> None:
    async with (cluster := processes("b", "c")) as a:
        rref = a.peer("b").remote(Counter, 7)
        assert (await rref).count == 7
        await a.peer("c").call(parts.keep_async, rref)
        cluster.kill("b")
        await until(lambda: [reference.state for reference in a.rrefs()] == ["lost"])
        async with asyncio.timeout(30):
            while await a.peer("c").call(parts.states) != ["lost"]:  # noqa: ASYNC110  (nothing tells)
                await asyncio.sleep(0.01)
        for use in (rref.to_here, rref.rpc_async().add):
            with pytest.raises(OwnerLostError, match="'b'"):
                await use()
        with pytest.raises(EncodeError, match=r"args\[0\]: the owner 'b'"):
            await a.peer("c").call(parts.look, rref)
        del rref, use
        await all_freed(a)


# --- 3: the creator dies -------------------------------------------------------------


async def test_case_03_value_of_a_dead_creator_is_freed() -> None:
    async with (cluster := processes("b")) as a:
        await a.peer("b").call(parts.make_on, "a", 7)
        await a.peer("b").call(parts.make_for_ever, "a")
        await until(lambda: counts(a)["owned"] == 2)
        cluster.kill("b")
        await all_freed(a)


async def test_case_03_waiter_for_a_dead_creators_value_gets_an_error() -> None:
    """Another worker that was lent it; and nothing of the creator's own wait stays."""
    async with (cluster := processes("b", "c")) as a:
        await a.peer("b").call(parts.lend_for_ever, "a", "c")
        await until(lambda: holders_at(a) == {"b": 1, "c": 1})
        cluster.kill("b")
        [text] = await a.peer("c").call(parts.fetched)
        assert text.startswith("RRefDeletedError: ")
        assert "never made: its creator 'b' was lost meanwhile" in text
        await all_freed(a)


@pytest.mark.parametrize("seed", SEEDS)
def test_case_03_waiter_for_a_value_never_made_gets_an_error(seed: int) -> None:
    """The creator lends what it is making; its own request never arrives."""

    async def scenario(network: Network) -> None:
        async with Cluster(3, network=network, options=parts.SIM_OPTIONS) as (a, b, c):
            for worker, to in ((b, "a"), (b, "c"), (c, "a")):
                await worker.peer(to).call(asyncio.sleep, 0)
            network.between("a", "b").partition()
            rref = b.peer("a").remote(Counter)
            lent = asyncio.create_task(b.peer("c").call(parts.count_of, rref))
            await until(
                lambda: [reference.state for reference in a.rrefs()] == ["unborn"]
            )
            await asyncio.sleep(network.rng.uniform(0.0, 0.5))
            network.crash("b")
            await b.shutdown(drain_timeout_s=0)
            with pytest.raises(asyncrpc.AsyncRpcError):
                await lent
            del rref, lent
            await all_freed(a, c)

    play(scenario, seed)


# --- 4: releases that do not arrive --------------------------------------------------


async def test_case_04_a_release_survives_a_broken_connection(trio: Trio) -> None:
    a, b, _ = trio
    rrefs = [a.peer("b").remote(Counter, n) for n in range(20)]
    await asyncio.gather(*rrefs)
    while rrefs:
        link = b.parts.directory.find("a").link or a.parts.directory.find("b").link
        if link is not None:
            link.connection.fail(ConnectionLostError("cut by the test"))
        del rrefs[-5:]
        await asyncio.sleep(0)


# --- 5: late and repeated registrations ----------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_case_05_broken_connection_revives_no_released_value(seed: int) -> None:
    async def scenario(network: Network) -> None:
        links = [network.between(*pair) for pair in ("ab", "bc", "ac")]
        async with Cluster(3, network=network, options=parts.SIM_OPTIONS) as (a, b, c):
            for worker, to in ((a, "b"), (a, "c"), (b, "c")):
                await worker.peer(to).call(asyncio.sleep, 0)

            async def pass_on(number: int) -> None:
                rref: RRef[Counter] = a.peer("b").remote(Counter, number)
                await a.peer("c").call(parts.keep_async if (number % 2) else look, rref)
                assert (await rref).count == number

            async def cut() -> None:
                for _ in range(20):
                    await asyncio.sleep(network.rng.uniform(0.0, 0.02))
                    network.rng.choice(links).drop_connections()

            look = parts.look_async
            async with asyncio.TaskGroup() as group:
                group.create_task(cut())
                for number in range(20):
                    group.create_task(pass_on(number))
            await until(lambda: counts(c)["held"] == counts(b)["owned"] == 10)
            await a.peer("c").call(parts.let_go_async)
            await all_freed(a, b, c)

    play(scenario, seed)


# --- 6: a worker starts again --------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_case_06_ids_of_a_restarted_worker_are_new(seed: int) -> None:
    async def scenario(network: Network) -> None:
        names = {name: f"mem://{name}" for name in "ab"}
        a, old, new = (
            sim_worker(name, network, rendezvous=names, options=parts.SIM_OPTIONS)
            for name in "abb"
        )
        async with a:
            await old.__aenter__()
            before = await a.peer("b").call(parts.make, 1)
            await old.peer("a").call(parts.make_on, "b", 1)
            network.crash("b", silent=network.rng.random() < 0.5)
            await old.shutdown(drain_timeout_s=0)
            network.restart("b")
            async with new:
                await new.peer("a").call(asyncio.sleep, 0)
                after = await a.peer("b").call(parts.make, 2)
                assert before.rref_id.creator != after.rref_id.creator
                assert (await after).count == 2
                with pytest.raises(OwnerLostError):
                    await before
                del before
                assert (await after).count == 2
                del after
                parts.kept.clear()
                await all_freed(a, new)

    play(scenario, seed)


# --- 7: forks that are counted and never delivered -----------------------------------


async def test_case_07_a_fork_that_never_left_is_taken_back(trio: Trio) -> None:
    a, b, _ = trio
    await a.peer("b").call(asyncio.sleep, 0)
    with acting_as(a):
        rref = RRef(Counter())
    with pytest.raises(EncodeError):
        await a.peer("b").call(parts.ignore, rref, threading.Lock())
    assert holders_at(a) == {}
    expired = a.peer("b").using(timeout_s=0.0)
    with pytest.raises(DeadlineExceededError):
        await expired.call(parts.ignore, rref)
    assert holders_at(a) == {}
    call = a.parts.start_call("c", parts.ignore, (rref,))  # which is not connected yet
    call.cancel()
    await asyncio.wait([call])
    await b.shutdown(drain_timeout_s=0)
    with pytest.raises(asyncrpc.WorkerLostError):
        await a.peer("b").call(parts.ignore, rref)
    await until(lambda: holders_at(a) == {})


# --- 8: circles ----------------------------------------------------------------------


async def circle(a: Worker, b: Worker) -> None:
    """Let a value of `a` refer to one of `b` that refers back; hold neither."""
    with acting_as(a):
        here = RRef(parts.Node())
    there: RRef[Any] = a.peer("b").remote(parts.Node)
    here.local_value().point_to(there)
    await there.rpc_async().point_to(here)
    del here, there
    gc.collect()
    await a.peer("b").call(asyncio.sleep, 0)
    assert counts(a)["owned"] == counts(b)["owned"] == 1


def value_at(worker: Worker) -> Any:
    service: Any = worker.parts.references
    (future,) = service.values._known.values()  # noqa: SLF001  (no handle is left to ask)
    return future.result()


async def test_case_08_cycle_is_freed_when_a_handle_is_released(trio: Trio) -> None:
    a, b, _ = trio
    await circle(a, b)
    value_at(b).release()


async def test_case_08_cycle_is_freed_when_a_worker_leaves(trio: Trio) -> None:
    a, b, _ = trio
    await circle(a, b)
    await b.shutdown()


async def test_case_08_released_handle_raises_on_use(trio: Trio) -> None:
    a, b, c = trio
    rref = a.peer("b").remote(Counter, 1)
    with acting_as(a):
        own = RRef(Counter(2))
    copy = await a.peer("a").call(parts.give, own)
    await rref
    for handle in (rref, own, rref):
        handle.release()
    await all_freed(b, c)
    assert counts(a)["owned"] == 1  # for the copy
    for use in (rref.to_here, own.to_here, rref.rpc_async().add):
        with pytest.raises(RRefDeletedError, match=r"RRef\.release\(\); use another"):
            await use()
    with pytest.raises(RRefDeletedError, match="release"):
        own.local_value()
    with pytest.raises(EncodeError, match="release"):
        await a.peer("c").call(parts.look, rref)
    assert not rref.confirmed_by_owner()
    assert copy.local_value().count == 2


# --- 9: finalizers -------------------------------------------------------------------


async def test_case_09_a_handle_may_die_in_any_thread(a: Worker) -> None:
    rrefs: list[RRef[Any]] = [a.peer("b").remote(Counter) for _ in range(200)]
    with acting_as(a):
        rrefs += [RRef(Counter()) for _ in range(200)]
    await asyncio.gather(*rrefs)
    cut = [rrefs[at::4] for at in range(4)]
    rrefs.clear()

    def drop(mine: list[RRef[Any]]) -> None:
        while mine:
            mine.pop()

    threads = [threading.Thread(target=drop, args=(mine,)) for mine in cut]
    for thread in threads:
        thread.start()
    await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))


PROGRAM = """
import asyncio, sys
import asyncrpc
from asyncrpc.testing import Cluster
from tests.integration.core.rref_parts import Counter

async def main():
    # On a busy machine any callback is slow, which development mode would tell of.
    asyncio.get_running_loop().slow_callback_duration = 600.0
    async with Cluster(2) as (a, b):
        early, late = [a.peer("b").remote(Counter) for _ in range(2)]
        await asyncio.gather(early, late)
        return early, late

early, late = asyncrpc.run(main())
del early  # after its loop was closed
print("closed")
# and `late` when the interpreter exits
"""


def test_case_09_a_handle_may_outlive_its_loop_and_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


# --- 10: timeouts --------------------------------------------------------------------


async def test_case_10_owner_reports_a_value_not_made_in_time(trio: Trio) -> None:
    a, b, _ = trio
    remote.watches["late"] = watch = remote.Watch()
    rref = a.peer("b").using(timeout_s=0.5).remote(remote.wait_for_ever, "late")
    with pytest.raises(DeadlineExceededError) as caught:
        await rref
    assert caught.value.outcome is not asyncrpc.Outcome.NOT_EXECUTED  # it had begun
    await watch.ended.wait()  # and it was stopped
    assert rref.confirmed_by_owner()
    assert b.rrefs()[0].type_name == "DeadlineExceededError"
    del rref, caught, remote.watches["late"]


async def test_case_10_late_fetch_harms_no_reference(a: Worker) -> None:
    remote.watches["slow"] = watch = remote.Watch()
    rref = a.peer("b").remote(remote.pass_gate, "slow")
    await watch.begun.wait()
    with pytest.raises(DeadlineExceededError):
        await rref.to_here(timeout_s=0.05)
    watch.gate.set()
    assert await rref == "through"
    del rref, remote.watches["slow"]


# --- 11: partitions ------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_case_11_parted_workers_agree_on_released_references(seed: int) -> None:
    options = replace(
        parts.SIM_OPTIONS,
        liveness=replace(parts.SIM_OPTIONS.liveness, heartbeat_s=1.0, lost_after_s=4.0),
    )

    async def scenario(network: Network) -> None:
        async with Cluster(3, network=network, options=options) as (a, b, c):
            theirs = a.peer("b").remote(Counter, 1)
            mine = await a.peer("a").call(parts.make, 2)
            await b.peer("a").call(asyncio.sleep, 0)
            assert (await theirs).count == 1
            await a.peer("b").call(parts.keep_async, mine)
            await a.peer("c").call(parts.keep_async, mine)
            del mine
            network.between("a", "b").partition()
            await asyncio.sleep(network.rng.uniform(30.0, 40.0))
            # c holds on: only whoever was parted from the owner has lost.
            assert (counts(a)["owned"], holders_at(a)) == (1, {"c": 1})
            assert counts(b)["owned"] == 0
            with pytest.raises(OwnerLostError, match="'b'"):
                await theirs
            with pytest.raises(OwnerLostError, match="'a'"):
                await parts.kept["b"][0]
            network.between("a", "b").heal()
            # They talk again, and the old handles stay lost.
            fresh = a.peer("b").remote(Counter, 3)
            assert (await fresh).count == 3
            with pytest.raises(OwnerLostError):
                await theirs
            await c.peer("b").call(parts.keep_async, parts.kept["c"][0])
            assert (await parts.kept["b"][1]).count == 2
            with pytest.raises(OwnerLostError):
                await parts.kept["b"][0]
            await until(lambda: holders_at(a) == {"b": 1, "c": 1})
            parts.kept.clear()
            del theirs, fresh
            await all_freed(a, b, c)

    play(scenario, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_case_11_a_partition_shorter_than_the_lease_loses_nothing(seed: int) -> None:
    options = replace(
        parts.SIM_OPTIONS,
        liveness=replace(
            parts.SIM_OPTIONS.liveness, heartbeat_s=1.0, lost_after_s=30.0
        ),
    )

    async def scenario(network: Network) -> None:
        async with Cluster(2, network=network, options=options) as (a, b):
            theirs = a.peer("b").remote(Counter, 1)
            dropped = a.peer("b").remote(Counter, 2)
            await asyncio.gather(theirs, dropped)
            network.between("a", "b").partition()
            await asyncio.sleep(network.rng.uniform(0.0, 5.0))
            del dropped
            await asyncio.sleep(network.rng.uniform(0.0, 15.0))
            network.between("a", "b").heal()
            assert (await theirs).count == 1
            await until(lambda: counts(b)["owned"] == 1)
            del theirs
            await all_freed(a, b)

    play(scenario, seed)


# --- 12: memory ----------------------------------------------------------------------


async def test_case_12_values_beyond_the_limit_are_refused() -> None:
    options = asyncrpc.Options(
        limits=asyncrpc.LimitOptions(references_max=10), drain_timeout_s=2.0
    )
    async with Cluster(2, options=options) as (a, b):
        rrefs = [a.peer("b").remote(Counter) for _ in range(10)]
        await asyncio.gather(*rrefs)
        refused = a.peer("b").remote(Counter)
        with pytest.raises(RejectedError, match=r"references_max.*Worker\.rrefs") as no:
            await refused
        assert no.value.outcome is asyncrpc.Outcome.NOT_EXECUTED
        assert counts(b)["owned"] == 10
        own = [a.peer("a").remote(Counter) for _ in range(11)]
        with pytest.raises(RejectedError, match="references_max"):
            await own[-1]
        await asyncio.gather(*own[:-1])
        del rrefs[5:], refused, no
        await until(lambda: counts(b)["owned"] == 5)
        again = a.peer("b").remote(Counter, 1)
        assert (await again).count == 1
        del rrefs, own, again
        await all_freed(a, b)
    with pytest.raises(asyncrpc.UsageError, match="references_max"):
        asyncrpc.Options(limits=asyncrpc.LimitOptions(references_max=0))


async def test_case_12_held_references_can_be_listed(trio: Trio) -> None:
    a, b, c = trio
    rref = a.peer("b").remote(Counter)
    await rref
    await a.peer("c").call(parts.keep, rref)
    (owned,) = b.rrefs()
    assert owned.rref_id == rref.rref_id
    assert (owned.owner, owned.creator, owned.is_owner) == ("b", "a", True)
    assert (owned.state, owned.type_name) == ("live", "Counter")
    await until(lambda: holders_at(b) == {"a": 1, "c": 1})
    await until(lambda: a.rrefs()[0].lent == 0)  # the loan to c is over
    (held,) = a.rrefs()
    assert (held.owner, held.creator, held.is_owner) == ("b", "a", False)
    assert (held.state, held.handles) == ("confirmed", 1)
    assert 0 <= held.age_s < 60
    assert 0 <= owned.age_s < 60
    parts.kept.clear()
    del rref
    await all_freed(a, b, c)
    assert a.rrefs() == b.rrefs() == c.rrefs() == []
    assert counts(a) == parts.NOTHING
