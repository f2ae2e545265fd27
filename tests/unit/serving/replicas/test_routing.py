"""Which replica gets a call: by load, key, canary share, health; no loop, no clock."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Final

import pytest

from asyncrpc.serving import ReplicaOptions
from asyncrpc.serving.replicas.machine.attempts import Health
from asyncrpc.serving.replicas.machine.routing import (
    EJECTION_FACTOR_MAX,
    FUNCTIONS_MAX,
    LOAD_HALF_LIFE_S,
    ReplicaRecord,
    Routing,
)
from asyncrpc.serving.replicas.machine.states import ReplicaEvent, ReplicaState

AT_ONCE: Final = ReplicaOptions(warm_s=0.0)
READY, WARMING, EJECTED = (
    ReplicaState.READY,
    ReplicaState.WARMING,
    ReplicaState.EJECTED,
)


def routing_of(
    count: int, options: ReplicaOptions = AT_ONCE
) -> tuple[Routing, list[ReplicaRecord]]:
    routing = Routing(options)
    records = [routing.add(f"model-{number}", number) for number in range(count)]
    for record in records:
        routing.make_ready(record, 0.0, age_s=float("inf"))
    return routing, records


def chosen(routing: Routing, now_s: float = 0.0, *, calls: int = 1000) -> Counter[str]:
    draw = random.Random(0).random
    choices = (routing.choose(now_s, draw) for _ in range(calls))
    return Counter(replica.name for replica in choices if replica is not None)


def fail(routing: Routing, record: ReplicaRecord, now_s: float, times: int = 5) -> bool:
    for _ in range(times):
        routing.begin(record)
        if routing.end(record, Health.BAD, now_s):
            return True
    return False


# --- load ----------------------------------------------------------------------------


def test_less_loaded_of_two_replicas_is_chosen() -> None:
    for first, second in itertools.product(range(4), repeat=2):
        routing, (left, other) = routing_of(2)
        left.outstanding, other.outstanding = first, second
        counts = chosen(routing, calls=50)
        if first == second:
            assert len(counts) == 2
        else:
            assert counts == {(left if first < second else other).name: 50}


def test_most_loaded_replica_is_never_chosen() -> None:
    routing, records = routing_of(5)
    records[3].outstanding = 9
    assert records[3].name not in chosen(routing)
    assert len(chosen(routing)) == 4


def test_load_from_other_routers_fades() -> None:
    _, (record,) = routing_of(1)
    record.outstanding = 3
    record.tell_load(10.0, 5.0)
    assert record.load(5.0) == 10.0
    record.outstanding = 1  # two of ours have ended since
    assert record.load(5.0) == 8.0
    assert record.load(5.0 + LOAD_HALF_LIFE_S) == 1 + 7.0 / 2
    assert record.load(5.0 + 100 * LOAD_HALF_LIFE_S) == 1.0
    record.tell_load(0.0, 6.0)  # an answer overtook the request of another call
    assert record.load(6.0) == 1.0


def test_heavier_replica_bears_more() -> None:
    routing, (first, other) = routing_of(2)
    first.weight = 3.0
    first.outstanding, other.outstanding = 4, 1
    assert set(chosen(routing)) == {first.name}
    first.outstanding = 6
    assert set(chosen(routing)) == {other.name}


def test_tried_replica_is_not_chosen_again() -> None:
    routing, records = routing_of(3)
    draw = random.Random(0).random
    for tried in itertools.combinations(records, 2):
        choice = routing.choose(0.0, draw, tried=tried)
        assert choice is not None
        assert choice not in tried
    assert routing.choose(0.0, draw, tried=records) is None
    assert Routing(AT_ONCE).choose(0.0, draw) is None


@pytest.mark.parametrize("state", list(ReplicaState))
def test_replicas_in_other_states_get_no_calls(state: ReplicaState) -> None:
    """But an ejected one does where there is no other."""
    path = {
        ReplicaState.JOINING: [],
        WARMING: [ReplicaEvent.SAID_READY],
        READY: [ReplicaEvent.SAID_READY, ReplicaEvent.WARMED],
        EJECTED: [ReplicaEvent.SAID_READY, ReplicaEvent.FAILED],
        ReplicaState.DRAINING: [ReplicaEvent.SAID_DRAINING],
        ReplicaState.LOST: [ReplicaEvent.GONE],
    }[state]
    routing, _ = routing_of(0, ReplicaOptions(warm_s=10.0))
    record = routing.add("model", 1)
    record.until_s = 100.0
    for event in path:
        routing.advance(record, event)
    assert record.life.state is state
    choice = routing.choose(0.0, lambda: 0.0)
    assert (choice is record) is (state in {WARMING, READY, EJECTED})
    routing.make_ready(routing.add("other", 1), 0.0, age_s=10.0)
    names = set(chosen(routing))
    assert ("model" in names) is (state in {WARMING, READY})


# --- slow start ----------------------------------------------------------------------


def test_cold_replica_warms_up() -> None:
    routing, _ = routing_of(3, ReplicaOptions(warm_s=10.0))
    late = routing.add("late", 1)
    routing.make_ready(late, 100.0, age_s=0.0)
    shares = []
    for age_s in (0.0, 1.0, 5.0, 9.0, 10.0):
        counts = chosen(routing, 100.0 + age_s, calls=8000)
        shares.append(counts["late"] / 2000)  # 1: as much as the others
    assert shares == sorted(shares)
    assert 0.05 <= shares[0] <= 0.2
    assert 0.85 <= shares[-1] <= 1.15
    assert late.life.state is READY


def test_cold_replicas_are_all_used_if_none_is_warm() -> None:
    routing = Routing(ReplicaOptions(warm_s=10.0))
    for number in range(3):
        routing.make_ready(routing.add(f"m{number}", 1), 0.0, age_s=0.0)
    counts = chosen(routing)
    assert sum(counts.values()) == 1000
    assert min(counts.values()) > 250


def test_replica_warmed_by_others_is_warm() -> None:
    routing = Routing(ReplicaOptions(warm_s=10.0))
    record = routing.add("m", 1)
    routing.make_ready(record, 3.0, age_s=60.0)
    assert record.life.state is READY


# --- keys ----------------------------------------------------------------------------


def test_keys_move_only_with_a_lost_replica() -> None:
    routing, records = routing_of(5)
    keys = [str(number).encode() for number in range(500)]

    def places() -> dict[bytes, str]:
        choices = {key: routing.choose(0.0, random.random, key=key) for key in keys}
        return {
            key: replica.name for key, replica in choices.items() if replica is not None
        }

    before = places()
    assert min(Counter(before.values()).values()) > 60
    assert places() == before
    routing.remove(records[2].name)
    after = places()
    moved = {key for key in keys if before[key] != after[key]}
    assert moved == {key for key in keys if before[key] == records[2].name}
    assert len({after[key] for key in moved}) == 4
    back = routing.add(records[2].name, 77)  # another life of the name
    routing.make_ready(back, 0.0, age_s=60.0)
    assert places() == before


def test_keys_are_spread_by_weight() -> None:
    routing, records = routing_of(3)
    records[0].weight = 2.0
    keys = [str(number).encode() for number in range(4000)]
    counts = Counter(
        replica.name
        for key in keys
        if (replica := routing.choose(0.0, random.random, key=key)) is not None
    )
    assert counts[records[0].name] == pytest.approx(2000, rel=0.1)
    assert counts[records[1].name] == pytest.approx(1000, rel=0.15)


def test_key_of_an_overloaded_replica_goes_to_the_next() -> None:
    routing, _ = routing_of(4, ReplicaOptions(warm_s=0.0, key_load_max=2.0))
    own = routing.choose(0.0, random.random, key=b"k")
    assert own is not None
    second = routing.choose(0.0, random.random, key=b"k", tried=[own])
    own.outstanding = 1
    assert routing.choose(0.0, random.random, key=b"k") is second
    for record in routing.records:
        record.outstanding = 3  # all have the same: none has too much
    assert routing.choose(0.0, random.random, key=b"k") is own
    own.outstanding = 20
    assert routing.choose(0.0, random.random, key=b"k") is second


# --- canaries ------------------------------------------------------------------------


def test_canary_gets_its_share_and_keys_agree_between_routers() -> None:
    first, records = routing_of(4)
    other, others = routing_of(4)
    for routing, replicas in ((first, records), (other, others)):
        routing.set_canary(replicas[1], 0.25)
    assert chosen(first, calls=4000)[records[1].name] == pytest.approx(1000, rel=0.1)
    for number in range(300):
        key = str(number).encode()
        place = first.choose(0.0, random.random, key=key)
        there = other.choose(0.0, random.random, key=key)
        assert place is not None
        assert there is not None
        assert place.name == there.name
    first.set_canary(records[1], 0.0)
    assert chosen(first, calls=4000)[records[1].name] == pytest.approx(1000, rel=0.15)


def test_lone_canary_ignores_its_share() -> None:
    routing, records = routing_of(2)
    routing.set_canary(records[0], 0.01)
    routing.remove(records[1].name)
    assert chosen(routing) == {records[0].name: 1000}


# --- ejection ------------------------------------------------------------------------


def test_ejection_takes_failures_in_a_row() -> None:
    routing, (record, _) = routing_of(2)
    for _ in range(20):
        assert not fail(routing, record, 0.0, times=4)
        routing.begin(record)
        assert not routing.end(record, Health.GOOD, 0.0)
    assert not fail(routing, record, 0.0, times=4)
    routing.begin(record)
    routing.end(record, Health.UNKNOWN, 0.0)  # neither good nor bad
    assert fail(routing, record, 0.0, times=1)
    assert record.life.state is EJECTED
    assert record.outstanding == 0


def test_ejection_time_grows_and_is_forgiven() -> None:
    routing, records = routing_of(2)
    record = records[0]
    now_s, waits = 0.0, []
    for _ in range(12):
        assert fail(routing, record, now_s)
        waits.append(record.until_s - now_s)
        now_s = record.until_s
        routing.choose(now_s, lambda: 0.0)
        assert record.life.takes_calls
    assert waits == [10.0 * min(n, EJECTION_FACTOR_MAX) for n in range(1, 13)]
    assert fail(routing, record, now_s + 1000.0)
    assert record.until_s - now_s - 1000.0 == 10.0


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (3, 1), (7, 2), (10, 3)])
def test_ejected_replicas_are_limited(count: int, most: int) -> None:
    routing, records = routing_of(count)
    for record in records:
        fail(routing, record, 0.0, times=50)
    assert Counter(replica.life.state for replica in records)[EJECTED] == most
    assert len(chosen(routing)) == count - most


def test_ejection_can_be_turned_off() -> None:
    routing, (record, _) = routing_of(2, ReplicaOptions(warm_s=0.0, eject_after=0))
    assert not fail(routing, record, 0.0, times=100)


# --- lives ---------------------------------------------------------------------------


def test_new_life_of_a_replica_starts_afresh() -> None:
    routing, (record,) = routing_of(1)
    record.outstanding = 5
    new = routing.add(record.name, 99)
    assert record.life.state is ReplicaState.LOST
    assert (new.outstanding, new.life.state) == (0, ReplicaState.JOINING)
    assert routing.get(record.name) is new
    routing.end(record, Health.BAD, 0.0)  # what was there ends
    assert new.failures == 0


# --- latencies -----------------------------------------------------------------------


def test_latencies_are_kept_for_a_limited_number_of_functions() -> None:
    routing, _ = routing_of(2)
    for number in range(FUNCTIONS_MAX + 5):
        for _ in range(40):
            routing.record_latency(f"f{number}", 0.001 * (1 + number % 3))
    assert routing.hedge_after_s("f0") == pytest.approx(0.001, rel=0.1)
    assert routing.hedge_after_s("f2") == pytest.approx(0.003, rel=0.1)
    assert routing.hedge_after_s(f"f{FUNCTIONS_MAX}") is None
    assert routing.hedge_after_s("unknown") is None


def test_missing_quantile_prevents_hedging() -> None:
    routing, _ = routing_of(2, ReplicaOptions(hedge_quantile=None))
    for _ in range(100):
        routing.record_latency("f", 0.001)
    assert routing.hedge_after_s("f") is None
