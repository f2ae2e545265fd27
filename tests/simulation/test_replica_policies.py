"""What the choice among replicas is for: the tail of the latencies, and its price."""

from __future__ import annotations

import pytest

from asyncrpc.serving import ReplicaOptions
from tests.simulation.replica_queues import (
    PAUSING,
    POLICIES,
    STRAGGLING,
    Outcome,
    Policy,
    Traffic,
    play,
    two_choices,
)

CALLS = 20_000
BY_NAME = {policy.name: policy for policy in POLICIES}
UNHEDGED, HEDGED = BY_NAME["two choices"], BY_NAME["two choices, hedged"]
seeds = pytest.mark.parametrize("seed", range(3))


def served(policy: Policy, traffic: Traffic, seed: int) -> Outcome:
    return play(policy, traffic, calls=CALLS, seed=seed)


@seeds
def test_hedging_cuts_the_latency_tail_of_stragglers(seed: int) -> None:
    """At least 80 % off p99.9, for at most 5 % more calls, and no more work."""
    before = served(UNHEDGED, STRAGGLING, seed)
    after = served(HEDGED, STRAGGLING, seed)
    assert after.quantile_s(0.999) <= 0.2 * before.quantile_s(0.999)
    assert 0 < after.extra_calls <= 0.05
    assert after.worked_s <= 1.05 * before.worked_s


@seeds
def test_hedging_shortens_pauses(seed: int) -> None:
    """Less than with stragglers: a pause makes many calls late at the same time."""
    unhedged, hedged = served(UNHEDGED, PAUSING, seed), served(HEDGED, PAUSING, seed)
    assert hedged.quantile_s(0.999) <= 0.5 * unhedged.quantile_s(0.999)
    assert hedged.extra_calls <= 0.05


@seeds
def test_two_choices_leave_a_slow_replica_alone(seed: int) -> None:
    """Random and round robin give it more than it can do, and its queue grows."""
    traffic = Traffic(slow_replica=3.0)
    outcome = served(UNHEDGED, traffic, seed)
    for name in ("random", "round robin"):
        other = served(BY_NAME[name], traffic, seed)
        assert outcome.quantile_s(0.99) <= 0.1 * other.quantile_s(0.99)


@seeds
def test_hedged_calls_keep_their_budget_when_all_replicas_are_slow(seed: int) -> None:
    """Twice the load that the replicas can bear: hedging adds its share and no more."""
    traffic = Traffic(load=2.0)
    outcome = served(HEDGED, traffic, seed)
    assert outcome.extra_calls <= 0.05


def test_larger_hedge_share_is_used() -> None:
    options = ReplicaOptions(warm_s=0.0, hedge_quantile=0.8, hedge_share=0.3)
    eager = Policy("eager", two_choices, options)
    outcome = served(eager, STRAGGLING, 0)
    assert 0.1 < outcome.extra_calls <= 0.3
