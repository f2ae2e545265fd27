"""Both ends of a connection agree on the transport that it goes on over.

Every order of events is visited: what breaks, is tried, arrives, is answered, is given
up.  `reconnect_world` plays the ends and the network.
"""

from __future__ import annotations

import pytest

from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.links.machine.reconnect import (
    ADVICE,
    ANSWER_S,
    ATTEMPTS_MAX,
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    NO_SUCH,
    SUPERSEDED,
    Advice,
    CandidateVerdict,
    Reconnect,
    ReconnectEvent,
    ReconnectState,
    answer_limit_s,
    reason_of_refusal,
    reason_of_verdict,
)
from tests.unit.core.links.machine.reconnect_world import End, World

WHOLE, BROKEN = ReconnectState.WHOLE, ReconnectState.BROKEN
CLAIMED, ENDED = ReconnectState.CLAIMED, ReconnectState.ENDED


def in_state(state: ReconnectState) -> Reconnect:
    machine = Reconnect()
    machine.state = state
    return machine


# --- the table -----------------------------------------------------------------------


@pytest.mark.parametrize("state", ReconnectState)
def test_broken_connection_alone_takes_a_new_transport(state: ReconnectState) -> None:
    assert in_state(state).on(ReconnectEvent.RESUMED) == (state is BROKEN)


# --- attempts ------------------------------------------------------------------------


@pytest.mark.parametrize("state", ReconnectState)
@pytest.mark.parametrize("under_way", range(ATTEMPTS_MAX + 2))
def test_broken_connection_alone_makes_attempts_up_to_a_limit(
    state: ReconnectState, under_way: int
) -> None:
    may_try = in_state(state).may_try(under_way)
    assert may_try == (state is BROKEN and under_way < ATTEMPTS_MAX)


@pytest.mark.parametrize("state", ReconnectState)
def test_broken_connection_claims_one_candidate_at_time(state: ReconnectState) -> None:
    machine = in_state(state)
    assert machine.claim() == (1 if state is BROKEN else 0)
    assert machine.claim() == 0


def test_candidates_are_numbered() -> None:
    machine = in_state(BROKEN)
    numbers = []
    for _ in range(3):
        numbers.append(machine.claim())
        machine.on(ReconnectEvent.RELEASE)
    assert numbers == [1, 2, 3]


def test_pauses_grow_up_to_a_limit_and_restart_with_each_break() -> None:
    machine = Reconnect()
    assert machine.on_broken(0.0, None)
    pauses_s = []
    for _ in range(12):
        pauses_s.append(machine.pause_s)
        assert machine.on_pause_over(1e9, is_excused=False) == ""
    assert pauses_s[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses_s[-1] == LAST_PAUSE_S
    machine.on(ReconnectEvent.RESUMED)
    machine.on_broken(0.0, None)
    assert machine.pause_s == FIRST_PAUSE_S


def test_lane_is_given_up_after_its_time() -> None:
    machine = Reconnect()
    machine.on_broken(100.0, 20.0)
    assert machine.on_pause_over(119.9, is_excused=False) == ""
    reason = machine.on_pause_over(120.0, is_excused=False)
    assert reason == "it could not be resumed in 20 s"


def test_time_without_any_way_to_the_peer_does_not_count() -> None:
    machine = Reconnect()
    machine.on_broken(100.0, 20.0)
    assert machine.on_pause_over(150.0, is_excused=True) == ""
    assert machine.on_pause_over(169.9, is_excused=False) == ""
    assert machine.on_pause_over(170.0, is_excused=False)


def test_break_of_an_ended_connection_begins_nothing() -> None:
    assert not in_state(ENDED).on_broken(0.0, None)


def test_answer_limit_grows_with_the_time_of_the_dial() -> None:
    assert answer_limit_s(0.0) == ANSWER_S
    assert answer_limit_s(2.0) == ANSWER_S + 6.0


# --- dials beside a transport that is there ------------------------------------------


def test_probe_runs_once_at_a_time() -> None:
    machine = Reconnect()
    assert machine.probe()
    assert not machine.probe()
    machine.on_probed()
    assert machine.probe()


def test_break_at_the_peer_counts_unless_resumed_since() -> None:
    machine = in_state(BROKEN)
    assert machine.is_broken_since(0)
    machine.claim()
    assert not machine.is_broken_since(0)
    assert machine.is_broken_since(1)


@pytest.mark.parametrize("state", ReconnectState)
def test_claimed_connection_reads_nothing_from_its_old_transport(
    state: ReconnectState,
) -> None:
    assert in_state(state).reads_on == (state is not CLAIMED)


@pytest.mark.parametrize("evidence", Evidence)
def test_refused_dial_is_final_unless_the_process_is_alive(evidence: Evidence) -> None:
    is_lost = reason_of_refusal(evidence, "refused") != ""
    assert is_lost == (ADVICE[evidence] is not Advice.WAIT)


# --- answers and offers --------------------------------------------------------------


@pytest.mark.parametrize("state", ReconnectState)
@pytest.mark.parametrize("verdict", ["", NO_SUCH, SUPERSEDED])
@pytest.mark.parametrize("is_same_life", [True, False])
@pytest.mark.parametrize("is_candidate", [True, False])
def test_connection_resumes_over_its_candidate_and_same_peer_only(
    state: ReconnectState, verdict: str, *, is_same_life: bool, is_candidate: bool
) -> None:
    answer = in_state(state).on_answer(
        verdict, is_same_life=is_same_life, is_candidate=is_candidate
    )
    may_resume = not verdict and is_same_life and is_candidate and state is CLAIMED
    assert (answer is CandidateVerdict.RESUME) == may_resume
    assert (answer is CandidateVerdict.REFUSED) == bool(verdict)
    assert (answer is CandidateVerdict.REPLACED) == (not verdict and not is_same_life)


@pytest.mark.parametrize("state", ReconnectState)
@pytest.mark.parametrize("attempt", range(4))
def test_later_attempts_alone_are_accepted(state: ReconnectState, attempt: int) -> None:
    machine = in_state(state)
    machine.attempt = 2
    verdict = machine.on_offer(attempt)
    if state is ENDED:
        assert verdict == NO_SUCH
    else:
        assert verdict == ("" if attempt > 2 else SUPERSEDED)
    assert machine.attempt == max(2, attempt if not verdict else 0)


def test_verdict_ends_a_connection_unless_superseded() -> None:
    assert reason_of_verdict("") == ""
    assert reason_of_verdict(SUPERSEDED) == ""
    assert reason_of_verdict(NO_SUCH) == NO_SUCH


def test_every_kind_of_evidence_has_advice() -> None:
    assert set(ADVICE) == set(Evidence)
    assert [
        evidence for evidence, advice in ADVICE.items() if advice is Advice.GIVE_UP
    ] == [Evidence.GONE]


# --- two ends ------------------------------------------------------------------------


def visited(first: World) -> tuple[set[World], list[World]]:
    """Return every world that can come of this one, and those where all is quiet."""
    seen, todo, ends = {first}, [first], []
    while todo:
        world = todo.pop()
        successors = set(world.successors())
        if not successors:
            ends.append(world)
        todo += successors - seen
        seen |= successors
    return seen, ends


@pytest.mark.parametrize(
    ("attempts", "breaks"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 3)]
)
def test_both_ends_finally_read_from_the_same_transport_or_wait(
    attempts: int, breaks: int
) -> None:
    seen, ends = visited(World(End(), End(), attempts=attempts, breaks=breaks))
    assert len(seen) > 10
    for world in ends:
        dialer, acceptor = world.dialer, world.acceptor
        if dialer.state is WHOLE:
            assert acceptor.transport == dialer.transport
            assert acceptor.state is WHOLE
        else:
            assert acceptor.transport in {-1, dialer.candidate}


@pytest.mark.parametrize(("attempts", "breaks"), [(3, 2), (4, 3)])
def test_end_never_returns_to_an_earlier_transport(attempts: int, breaks: int) -> None:
    seen, _ = visited(World(End(), End(), attempts=attempts, breaks=breaks))
    for world in seen:
        for after in world.successors():
            for before, now in (
                (world.dialer, after.dialer),
                (world.acceptor, after.acceptor),
            ):
                assert now.attempt >= before.attempt
                assert now.transport == -1 or now.transport >= before.transport


def test_next_attempt_succeeds_if_nothing_breaks() -> None:
    seen, _ = visited(World(End(), End(), attempts=2, breaks=2))
    quiet = [
        world
        for world in seen
        if world.dialer.state is BROKEN and not world.offers and not world.answers
    ]
    assert len(quiet) > 5
    for world in quiet:
        calm = World(world.dialer, world.acceptor, dead=world.dead, attempts=1)
        _, ends = visited(calm)
        assert all(end.dialer.state is WHOLE for end in ends)
