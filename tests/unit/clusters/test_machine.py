"""The machine of one worker of a cluster: every order of events, and each end."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from asyncrpc.clusters import machine as m
from asyncrpc.clusters.restarts import RestartBudget, RestartLimits

STATE = m.ClusterWorkerState


def machine(restarts_max: int | None = 2, *, together: bool = False) -> m.WorkerMachine:
    if restarts_max is None:
        return m.WorkerMachine(None)
    limits = RestartLimits(
        restarts_max=restarts_max, window_s=None, backoff_s=1.0, together=together
    )
    return m.WorkerMachine(RestartBudget(limits))


def running(restarts_max: int | None = 2, *, together: bool = False) -> m.WorkerMachine:
    worker = machine(restarts_max, together=together)
    worker.advance(m.StartAsked())
    worker.advance(m.LifeReady(worker.life))
    return worker


def gone(worker: m.WorkerMachine, at_s: float = 0.0) -> m.LifeEnded:
    return m.LifeEnded(worker.life, "why", at_s)


def test_worker_starts_and_stops() -> None:
    worker = machine()
    assert worker.advance(m.StartAsked()) == [m.StartLife(1)]
    assert worker.advance(m.LifeReady(1)) == [m.TellChange("ready", 1)]
    assert worker.advance(m.StopAsked()) == [m.StopLife(1)]
    assert worker.advance(gone(worker)) == [m.TellChange("stopped", 1)]
    assert worker.state is STATE.ENDED


def test_worker_that_was_never_ready_is_not_restarted() -> None:
    worker = machine()
    worker.advance(m.StartAsked())
    assert worker.advance(gone(worker)) == [m.TellChange("failed", 1, "why")]
    assert worker.state is STATE.ENDED


def test_lost_worker_restarts_after_the_backoff_until_none_is_left() -> None:
    worker = running(restarts_max=2)
    for life, backoff_s in ((1, 1.0), (2, 2.0)):
        assert worker.advance(gone(worker, 10.0)) == [m.TellChange("lost", life, "why")]
        assert worker.wakes_at_s == 10.0 + backoff_s
        assert worker.advance(m.TimeCame(10.0)) == []
        assert worker.advance(m.TimeCame(13.0)) == [m.StartLife(life + 1)]
        worker.advance(m.LifeReady(worker.life))
    assert worker.advance(gone(worker)) == [m.TellChange("failed", 3, "why")]


def test_lost_worker_without_limits_stays_away() -> None:
    worker = running(restarts_max=None)
    assert worker.advance(gone(worker)) == [m.TellChange("failed", 1, "why")]


@pytest.mark.parametrize("at_first", [m.StopAsked(), m.RestartAsked()])
def test_last_wish_counts_while_a_worker_stops(at_first: m.Event) -> None:
    for wish in (m.StopAsked(), m.RestartAsked(), m.StartAsked()):
        worker = running()
        worker.advance(at_first)
        assert worker.advance(wish) == []
        ends = isinstance(wish, m.StopAsked)
        wanted = [m.TellChange("stopped", 1)] if ends else [m.StartLife(2)]
        assert worker.advance(gone(worker)) == wanted


def test_asked_restart_uses_no_restart_of_the_limits() -> None:
    worker = running(restarts_max=1)
    for _ in range(5):
        worker.advance(m.RestartAsked())
        worker.advance(gone(worker))
        worker.advance(m.LifeReady(worker.life))
    assert worker.advance(gone(worker))[0].kind == "lost"  # type: ignore[union-attr]


def test_loss_of_one_restarts_all_together() -> None:
    worker, other = running(together=True), running(together=True)
    lost = m.TellChange("lost", 1, "why")
    assert worker.advance(gone(worker, 10.0)) == [lost, m.RestartOthers(11.0)]
    assert other.advance(m.OtherLost("with it", 11.0)) == [m.StopLife(1)]
    assert other.advance(gone(other, 10.5)) == [m.TellChange("lost", 1, "with it")]
    assert other.state is STATE.WAITING
    assert other.wakes_at_s == 11.0
    assert other.advance(m.TimeCame(11.0)) == [m.StartLife(2)]


@pytest.mark.parametrize("wish", [m.StopAsked(), m.RestartAsked()])
def test_wish_of_the_program_counts_more_than_a_loss(wish: m.Event) -> None:
    worker = running(together=True)
    worker.advance(m.OtherLost("with it", 11.0))
    worker.advance(wish)
    ends = isinstance(wish, m.StopAsked)
    wanted = [m.TellChange("stopped", 1)] if ends else [m.StartLife(2)]
    assert worker.advance(gone(worker)) == wanted


def events_for(worker: m.WorkerMachine) -> Iterator[m.Event]:
    yield from (m.StartAsked(), m.StopAsked(), m.RestartAsked())
    yield m.OtherLost("another", 5.0)
    for life in (worker.life - 1, worker.life):
        yield from (m.LifeReady(life), m.LifeEnded(life, "why", 0.0))
    yield m.TimeCame(worker.wakes_at_s or 0.0)


def test_worker_has_one_process_at_a_time_in_every_order_of_events() -> None:
    begun = machine(restarts_max=2, together=True)
    seen, waiting = {like(begun, 0): begun}, [(begun, 0)]
    while waiting:
        worker, processes = waiting.pop()
        for event in events_for(worker):
            ends = isinstance(event, m.LifeEnded) and event.life == worker.life
            if ends and not processes:
                continue  # nothing ends twice
            after = copy.deepcopy(worker)
            effects = after.advance(event)
            started = sum(isinstance(effect, m.StartLife) for effect in effects)
            left = processes - ends
            assert left + started <= 1
            assert left or not any(isinstance(effect, m.StopLife) for effect in effects)
            busy = after.state in {STATE.STARTING, STATE.RUNNING, STATE.STOPPING}
            assert left + started == busy
            assert (after.wakes_at_s is not None) == (after.state is STATE.WAITING)
            if (key := like(after, left + started)) not in seen:
                seen[key] = after
                waiting.append((after, left + started))
    assert {worker.state for worker in seen.values()} == set(STATE)


def like(worker: m.WorkerMachine, processes: int) -> str:
    """Return what tells a machine from others; which life it is does not matter."""
    values = {name: value for name, value in vars(worker).items() if name != "life"}
    return f"{values} {processes}"


def test_old_restarts_are_forgotten_after_the_window() -> None:
    budget = RestartBudget(RestartLimits(restarts_max=1, window_s=10.0, backoff_s=1.0))
    assert budget.take(0.0) == 1.0
    assert budget.take(9.9) is None
    assert budget.take(10.0) == 11.0


def test_backoff_has_a_limit_however_many_restarts_there_were() -> None:
    limits = RestartLimits(restarts_max=5000, window_s=None, backoff_max_s=60.0)
    budget = RestartBudget(limits)
    assert max(budget.take(0.0) or 0.0 for _ in range(5000)) == 60.0
