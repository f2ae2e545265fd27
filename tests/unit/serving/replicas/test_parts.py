"""Latencies, budgets, scores, attempts and notes: each by itself."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc import UsageError
from asyncrpc.serving import ReplicaOptions
from asyncrpc.serving.replicas.call import key_bytes
from asyncrpc.serving.replicas.machine import routing
from asyncrpc.serving.replicas.machine.attempts import (
    HEALTH,
    STEPS,
    AttemptFailure,
    Health,
    NextStep,
    step_after,
)
from asyncrpc.serving.replicas.machine.routing import (
    LatencyWindow,
    ShareBudget,
    score_of,
    unit_of,
)
from asyncrpc.serving.replicas.messages import AnswerNote, read_note

# --- latencies -----------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [0.5, 0.95, 0.99])
def test_latency_quantile_is_right_to_a_bucket(quantile: float) -> None:
    rng = random.Random(0)
    for _ in range(5):
        window = LatencyWindow(quantile)
        latencies = [0.01 * rng.lognormvariate(0.0, 1.0) for _ in range(500)]
        for latency_s in latencies:
            window.record(latency_s)
        exact = sorted(latencies)[math.ceil(quantile * len(latencies)) - 1]
        assert window.quantile_s == pytest.approx(exact, rel=0.1)


def test_latency_quantile_is_unknown_for_few_calls() -> None:
    window = LatencyWindow(0.95)
    for _ in range(routing.CALLS_MIN - 1):
        assert window.quantile_s == math.inf
        window.record(0.01)
    for _ in range(routing.REFRESH_EVERY):
        window.record(0.01)
    assert window.quantile_s == pytest.approx(0.01, rel=0.1)


def test_old_latencies_are_forgotten() -> None:
    window = LatencyWindow(0.95)
    for _ in range(3000):
        window.record(1.0)
    assert routing.HALF_MAX <= window.count <= 2 * routing.HALF_MAX
    for _ in range(2 * routing.HALF_MAX + routing.REFRESH_EVERY):
        window.record(0.001)
        window.quantile_s  # noqa: B018  (kept between two calls)
    assert window.quantile_s == pytest.approx(0.001, rel=0.1)


@given(st.floats(0.0, 1e6))
def test_latency_bucket_ends_after_its_values(latency_s: float) -> None:
    bucket = routing.bucket_of(latency_s)
    assert 0 <= bucket < routing.BUCKETS
    end_s = routing.end_of(bucket)
    if routing.FIRST_S < latency_s < routing.end_of(routing.BUCKETS - 1):
        assert latency_s <= end_s * (1 + 1e-9)
        assert routing.end_of(bucket - 1) <= latency_s * (1 + 1e-9)


# --- budgets -------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=300), st.floats(0.0, 1.0), st.integers(0, 20))
def test_budget_never_spends_more_than_was_paid(
    takes: list[bool], share: float, first: int
) -> None:
    budget = ShareBudget(share, most=50.0, first=float(first))
    paid = taken = 0
    for is_take in takes:
        if is_take:
            taken += budget.take()
        else:
            budget.pay(0.0)
            paid += 1
        assert taken <= first + share * paid + 1e-9
        assert 0 <= budget.remaining <= max(50.0, first)
    assert budget.granted == taken
    assert budget.granted + budget.refused == sum(takes)


def test_budget_is_paid_by_time_and_never_backwards() -> None:
    budget = ShareBudget(0.0, most=3.0, per_s=0.5)
    budget.pay(100.0)
    assert not budget.take()
    budget.pay(102.0)
    assert budget.take()
    assert not budget.take()
    budget.pay(101.0)
    assert not budget.take()
    budget.pay(1000.0)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]


# --- scores --------------------------------------------------------------------------


@given(st.binary(max_size=40), st.text(max_size=10))
def test_unit_is_between_0_and_1_and_reproducible(key: bytes, salt: str) -> None:
    unit = unit_of(key, salt)
    assert 0 < unit < 1
    assert unit_of(key, salt) == unit
    assert 0 <= score_of(key, salt) < math.inf


def test_unit_depends_on_the_boundary_of_a_key() -> None:
    assert unit_of(b"ab", "c") != unit_of(b"a", "bc")


def test_units_are_evenly_distributed() -> None:
    units = [unit_of(str(number).encode()) for number in range(4000)]
    assert statistics.mean(units) == pytest.approx(0.5, abs=0.02)
    assert statistics.pstdev(units) == pytest.approx(math.sqrt(1 / 12), abs=0.02)


def test_keys_of_different_kinds_are_different() -> None:
    keys = [key_bytes(key) for key in ("1", 1, b"1", -1, "-1", "\ud800", "")]
    assert len(set(keys)) == len(keys)
    assert key_bytes(None) is None


@pytest.mark.parametrize("wrong", [1.0, True, object(), ["a"], ("a",)])
def test_key_is_text_bytes_or_an_integer(wrong: Any) -> None:
    with pytest.raises(UsageError, match="key must be"):
        key_bytes(wrong)


# --- attempts ------------------------------------------------------------------------


def test_call_that_may_have_run_is_retried_only_if_idempotent() -> None:
    """Every failure, of both kinds of functions, with and without attempts left."""
    safe = {
        AttemptFailure.DRAINING,
        AttemptFailure.UNREACHED,
        AttemptFailure.OVERLOADED,
    }
    for failure, idempotent, left in itertools.product(
        AttemptFailure, (True, False), (0, 2)
    ):
        step = step_after(failure, is_idempotent=idempotent, attempts_left=left)
        may = failure in safe or (failure is AttemptFailure.LOST and idempotent)
        if not may:
            assert step is NextStep.RAISE
        elif failure in {AttemptFailure.DRAINING, AttemptFailure.UNREACHED}:
            assert step is NextStep.MOVE
        else:
            assert step is (NextStep.RETRY if left else NextStep.RAISE)
    assert STEPS.keys() == HEALTH.keys() == set(AttemptFailure)


def test_busy_replica_is_not_an_unhealthy_one() -> None:
    unknown = {
        failure for failure, health in HEALTH.items() if health is Health.UNKNOWN
    }
    assert unknown == {
        AttemptFailure.DRAINING,
        AttemptFailure.OVERLOADED,
        AttemptFailure.MISUSED,
    }
    assert Health.GOOD not in HEALTH.values()


# --- notes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "note"),
    [
        ([3.0, False, None], AnswerNote(3.0, is_draining=False, version=None)),
        ([3, True, 7], AnswerNote(3.0, is_draining=True, version=7)),
        ([0, False, None, "later"], AnswerNote(0.0, is_draining=False, version=None)),
        ([3.0, False], None),
        ([-1, False, None], None),
        ([float("nan"), False, None], None),
        ([True, False, None], None),
        ([1, 0, None], None),
        ([1, False, "7"], None),
        ([1, False, True], None),
        ({"load": 1}, None),
        ("load", None),
        (7, None),
    ],
)
def test_replica_note_is_read_or_ignored(
    metadata: Any, note: AnswerNote | None
) -> None:
    assert read_note(metadata) == note


# --- options -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts_max": 0},
        {"attempts_max": 1.0},
        {"retry_share": -0.1},
        {"hedge_quantile": 1.1},
        {"hedge_quantile": "p95"},
        {"hedge_share": None},
        {"eject_after": -1},
        {"eject_s": float("inf")},
        {"eject_share": float("nan")},
        {"warm_s": -1},
        {"key_load_max": 0.5},
        {"ready_timeout_s": float("inf")},
    ],
)
def test_wrong_option_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        ReplicaOptions(**wrong)
