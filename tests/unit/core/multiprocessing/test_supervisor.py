"""The supervisor: all processes succeed, or none goes on; the cause is named."""

from __future__ import annotations

import signal
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.multiprocessing.supervisor import (
    Elapsed,
    Event,
    Exited,
    Failed,
    Kill,
    LaunchPhase,
    StopRequested,
    Supervisor,
    Terminate,
)
from asyncrpc.errors import LocalProtocolError
from tests.unit.stories import Actions, Words, cases

TERMINATED = -signal.SIGTERM
KILLED = -signal.SIGKILL


STORIES = """
successful processes end the launch:
    begin 2; exited 1 0 1.0; alive = {0}; exited 0 0 2.0
    phase = DONE; first-failed = None; reason = None; wakes = None
exception stops the rest:
    begin 3 grace_s:2.0; failed 1 1.0 1.0 = terminate 0 1 2
    phase = STOPPING; reason = FAILURE; first-failed = 1; wakes = 3.0
exit code stops the rest:
    begin 3 grace_s:2.0; exited 1 3 1.0 = terminate 0 2
    phase = STOPPING; reason = FAILURE; first-failed = 1; wakes = 3.0
signal stops the rest:
    begin 3 grace_s:2.0; exited 1 killed 1.0 = terminate 0 2
    phase = STOPPING; reason = FAILURE; first-failed = 1; wakes = 3.0
processes that outlast the grace are killed once:
    begin 3 grace_s:2.0; exited 1 3 1.0 = terminate 0 2; exited 0 terminated 1.5
    elapsed 2.9; elapsed 3.0 = kill 2; elapsed 9.0
    exited 2 killed 9.0; phase = DONE; first-failed = 1
last process may be the failed one:
    begin 2; exited 0 0 1.0; exited 1 3 2.0; phase = DONE; first-failed = 1
exception counts from the time it was raised:  # 2 failed because 1 did, and seen first
    begin 3; failed 2 1.2 1.3 = terminate 0 1 2; failed 1 1.1 1.4; first-failed = 1
exception after the stop is a consequence:
    begin 2; exited 1 3 1.0 = terminate 0; failed 0 1.1 1.1; exited 0 1 1.2
    first-failed = 1
sigkill precedes the exceptions it caused:
    begin 2; failed 0 0.9 1.0 = terminate 0 1; exited 1 killed 1.0; first-failed = 1
sigkill that is seen later precedes them, too:
    begin 2; failed 0 0.9 1.0 = terminate 0 1; exited 1 killed 1.5; first-failed = 1
crash seen in the same instant is a cause:
    begin 2; failed 0 0.9 1.0 = terminate 0 1; exited 1 crashed 1.0; first-failed = 1
crash seen after the stop is not a cause:
    begin 2; failed 0 0.9 1.0 = terminate 0 1; exited 1 crashed 1.5; first-failed = 0
sigkill by the supervisor is not a cause:
    begin 2 grace_s:2.0; failed 0 1.0 1.0 = terminate 0 1; elapsed 3.0 = kill 0 1
    exited 1 killed 3.1; exited 0 killed 3.1; first-failed = 0
timeout stops all without a failed process:
    begin 2 stop_at_s:5.0; wakes = 5.0; elapsed 4.9; elapsed 5.0 = terminate 0 1
    exited 0 terminated 5.1; exited 1 killed 5.1
    reason = TIMEOUT; first-failed = None; unfinished = (0, 1)
stop request ends all within its own grace:
    begin 2 grace_s:2.0; stop 1.0 grace_s:0.5 = terminate 0 1; elapsed 1.5 = kill 0 1
    reason = REQUEST
second stop request can only shorten the grace:
    begin 1; stop 1.0 grace_s:2.0 = terminate 0; stop 1.1 grace_s:9.0; wakes = 3.0
    stop 1.2 grace_s:0.0 = kill 0
stop request after the end does nothing:
    begin 1; exited 0 0 1.0; stop 2.0; phase = DONE; reason = None
process ends once:
    begin 2; exited 0 0 1.0; exited 0 0 1.0 ! local rank 0
    failed 0 1.0 1.0 ! local rank 0; phase = RUNNING
"""
WORDS = Words(
    names={"terminated": TERMINATED, "killed": KILLED, "crashed": -signal.SIGSEGV},
    effects={
        "terminate": lambda *ranks: Terminate(ranks),
        "kill": lambda *ranks: Kill(ranks),
    },
    errors={"local": LocalProtocolError},
)


@cases(STORIES)
def test_supervisor_follows_the_story(steps: list[str]) -> None:
    launches: list[Supervisor] = []

    def begin(nprocs: int, **options: float) -> None:
        launches.append(Supervisor(nprocs, **options))

    def feed(event: Callable[..., Event]) -> Callable[..., object]:
        return lambda *args, **options: launches[0].advance(event(*args, **options))

    def name_of(attribute: str) -> Callable[[], str]:
        return lambda: getattr(getattr(launches[0], attribute), "name", "None")

    actions: Actions = {
        "begin": begin,
        "exited": feed(Exited),
        "failed": feed(Failed),
        "elapsed": feed(Elapsed),
        "stop": feed(StopRequested),
        "phase": name_of("phase"),
        "reason": name_of("reason"),
        "alive": lambda: str(set(launches[0].alive)),
        "first-failed": lambda: str(launches[0].first_failed),
        "wakes": lambda: str(launches[0].wakes_at_s),
        "unfinished": lambda: str(launches[0].unfinished),
    }
    WORDS.play(steps, actions)


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
