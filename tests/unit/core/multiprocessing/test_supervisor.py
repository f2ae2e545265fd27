"""The supervisor: all processes succeed, or none goes on; the cause is named."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.multiprocessing.supervisor import (
    Elapsed,
    Event,
    Exited,
    Failed,
    Kill,
    LaunchPhase,
    Reason,
    StopRequested,
    Supervisor,
    Terminate,
)
from asyncrpc.errors import LocalProtocolError

TERMINATED = -signal.SIGTERM
KILLED = -signal.SIGKILL


def test_successful_processes_end_the_launch() -> None:
    supervisor = Supervisor(2)
    assert supervisor.advance(Exited(1, 0, 1.0)) == []
    assert supervisor.alive == {0}
    assert supervisor.advance(Exited(0, 0, 2.0)) == []
    assert supervisor.phase is LaunchPhase.DONE
    assert supervisor.first_failed is None
    assert supervisor.reason is None
    assert supervisor.wakes_at_s is None


@pytest.mark.parametrize(
    "failure",
    [Failed(1, 1.0, 1.0), Exited(1, 3, 1.0), Exited(1, KILLED, 1.0)],
    ids=["exception", "exit code", "signal"],
)
def test_failed_process_stops_the_rest(failure: Failed | Exited) -> None:
    supervisor = Supervisor(3, grace_s=2.0)
    effects = supervisor.advance(failure)
    still_there = (0, 2) if isinstance(failure, Exited) else (0, 1, 2)
    assert effects == [Terminate(still_there)]
    assert supervisor.phase is LaunchPhase.STOPPING
    assert supervisor.reason is Reason.FAILURE
    assert supervisor.first_failed == 1
    assert supervisor.wakes_at_s == pytest.approx(3.0)


def test_processes_that_outlast_the_grace_are_killed_once() -> None:
    supervisor = Supervisor(3, grace_s=2.0)
    supervisor.advance(Exited(1, 3, 1.0))
    supervisor.advance(Exited(0, TERMINATED, 1.5))
    assert supervisor.advance(Elapsed(2.9)) == []
    assert supervisor.advance(Elapsed(3.0)) == [Kill((2,))]
    assert supervisor.advance(Elapsed(9.0)) == []
    supervisor.advance(Exited(2, KILLED, 9.0))
    assert supervisor.phase is LaunchPhase.DONE
    assert supervisor.first_failed == 1


def test_last_process_may_be_the_failed_one() -> None:
    supervisor = Supervisor(2)
    supervisor.advance(Exited(0, 0, 1.0))
    assert supervisor.advance(Exited(1, 3, 2.0)) == []
    assert supervisor.phase is LaunchPhase.DONE
    assert supervisor.first_failed == 1


def test_exception_counts_from_the_time_it_was_raised() -> None:
    """Rank 2 failed because rank 1 did, and was seen before it."""
    supervisor = Supervisor(3)
    supervisor.advance(Failed(2, raised_at_s=1.2, at_s=1.3))
    supervisor.advance(Failed(1, raised_at_s=1.1, at_s=1.4))
    assert supervisor.first_failed == 1


def test_exception_after_the_stop_is_a_consequence() -> None:
    supervisor = Supervisor(2)
    supervisor.advance(Exited(1, 3, 1.0))
    supervisor.advance(Failed(0, raised_at_s=1.1, at_s=1.1))
    supervisor.advance(Exited(0, 1, 1.2))
    assert supervisor.first_failed == 1


@pytest.mark.parametrize("seen_at_s", [1.0, 1.5])
def test_sigkill_precedes_the_exceptions_it_caused(seen_at_s: float) -> None:
    supervisor = Supervisor(2)
    supervisor.advance(Failed(0, raised_at_s=0.9, at_s=1.0))
    supervisor.advance(Exited(1, KILLED, seen_at_s))
    assert supervisor.first_failed == 1


def test_crash_seen_in_the_same_instant_is_a_cause() -> None:
    supervisor = Supervisor(2)
    supervisor.advance(Failed(0, raised_at_s=0.9, at_s=1.0))
    supervisor.advance(Exited(1, -signal.SIGSEGV, 1.0))
    assert supervisor.first_failed == 1


def test_crash_seen_after_the_stop_is_not_a_cause() -> None:
    supervisor = Supervisor(2)
    supervisor.advance(Failed(0, raised_at_s=0.9, at_s=1.0))
    supervisor.advance(Exited(1, -signal.SIGSEGV, 1.5))
    assert supervisor.first_failed == 0


def test_sigkill_by_the_supervisor_is_not_a_cause() -> None:
    supervisor = Supervisor(2, grace_s=2.0)
    supervisor.advance(Failed(0, raised_at_s=1.0, at_s=1.0))
    supervisor.advance(Elapsed(3.0))
    supervisor.advance(Exited(1, KILLED, 3.1))
    supervisor.advance(Exited(0, KILLED, 3.1))
    assert supervisor.first_failed == 0


def test_timeout_stops_all_without_a_failed_process() -> None:
    supervisor = Supervisor(2, stop_at_s=5.0)
    assert supervisor.wakes_at_s == pytest.approx(5.0)
    assert supervisor.advance(Elapsed(4.9)) == []
    assert supervisor.advance(Elapsed(5.0)) == [Terminate((0, 1))]
    supervisor.advance(Exited(0, TERMINATED, 5.1))
    supervisor.advance(Exited(1, KILLED, 5.1))
    assert supervisor.reason is Reason.TIMEOUT
    assert supervisor.first_failed is None
    assert supervisor.unfinished == (0, 1)


def test_stop_request_ends_all_within_its_own_grace() -> None:
    supervisor = Supervisor(2, grace_s=2.0)
    assert supervisor.advance(StopRequested(1.0, grace_s=0.5)) == [Terminate((0, 1))]
    assert supervisor.advance(Elapsed(1.5)) == [Kill((0, 1))]
    assert supervisor.reason is Reason.REQUEST


def test_second_stop_request_can_only_shorten_the_grace() -> None:
    supervisor = Supervisor(1)
    supervisor.advance(StopRequested(1.0, grace_s=2.0))
    assert supervisor.advance(StopRequested(1.1, grace_s=9.0)) == []
    assert supervisor.wakes_at_s == pytest.approx(3.0)
    assert supervisor.advance(StopRequested(1.2, grace_s=0.0)) == [Kill((0,))]


def test_stop_request_after_the_end_does_nothing() -> None:
    supervisor = Supervisor(1)
    supervisor.advance(Exited(0, 0, 1.0))
    assert supervisor.advance(StopRequested(2.0)) == []
    assert supervisor.phase is LaunchPhase.DONE
    assert supervisor.reason is None


def test_process_ends_once() -> None:
    supervisor = Supervisor(2)
    supervisor.advance(Exited(0, 0, 1.0))
    with pytest.raises(LocalProtocolError, match="rank 0"):
        supervisor.advance(Exited(0, 0, 1.0))
    with pytest.raises(LocalProtocolError, match="rank 0"):
        supervisor.advance(Failed(0, 1.0, 1.0))
    assert supervisor.phase is LaunchPhase.RUNNING


MOMENTS = st.tuples(
    st.sampled_from([0.0, 0.5, 3.0, 60.0]),
    st.integers(0, 4),
    st.sampled_from(["exit", "raise", "wait", "request"]),
    st.sampled_from([0, 1, TERMINATED, KILLED]),
)


@given(nprocs=st.integers(1, 5), moments=st.lists(MOMENTS, max_size=12))
def test_ordered_stop_ends_every_process_in_bounded_time(
    nprocs: int, moments: list[tuple[float, int, str, int]]
) -> None:
    """Once a stop is ordered, the grace is bounded and its end reaches all that run.

    And nobody is signalled who has ended, or without a reason.
    """
    supervisor = Supervisor(nprocs, grace_s=2.0, stop_at_s=50.0)
    now_s = 0.0
    for wait_s, rank, kind, exit_code in moments:
        now_s += wait_s
        if rank not in supervisor.alive:
            continue
        events: dict[str, Event] = {
            "exit": Exited(rank, exit_code, now_s),
            "raise": Failed(rank, now_s, now_s),
            "wait": Elapsed(now_s),
            "request": StopRequested(now_s, 1.0),
        }
        for effect in supervisor.advance(events[kind]):
            assert effect.ranks == tuple(sorted(supervisor.alive))
            assert supervisor.reason is not None
        if supervisor.phase is LaunchPhase.STOPPING:
            assert supervisor.wakes_at_s is not None
            assert supervisor.wakes_at_s <= now_s + 2.0
    supervisor.advance(Elapsed(now_s + 60.0))
    supervisor.advance(Elapsed(now_s + 70.0))
    assert supervisor.phase in {LaunchPhase.KILLING, LaunchPhase.DONE}
    for rank in sorted(supervisor.alive):
        supervisor.advance(Exited(rank, KILLED, now_s + 70.0))
    assert supervisor.phase is LaunchPhase.DONE
