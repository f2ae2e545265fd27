"""Who is suspected, who is lost, and who never is.

A `Peer` plays the other side and the wait for evidence; time is a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrpc.core.links.machine.detector import (
    TICKS,
    Detector,
    Evidence,
    SilenceAction,
    Verdict,
)
from asyncrpc.core.sidecar.pulse import FRESH_S

HEARTBEAT_S = 2.0
LOST_AFTER_S = 10.0
NEVER_S = 1e9
PATIENT = [kind for kind in Evidence if kind not in (Evidence.GONE, Evidence.BUSY)]


def new(
    now_s: float = 0.0,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    lost_after_s: float = LOST_AFTER_S,
) -> Detector:
    return Detector(now_s, heartbeat_s=heartbeat_s, lost_after_s=lost_after_s)


@dataclass
class Peer:
    """A peer as its detector sees it, and the answers to what is asked about it.

    Attributes:
        evidence: what is answered, by the time of the question; None: nothing ever.
        delay_s: how long that takes.
        answers: whether it answers a PING, and how quickly.
    """

    detector: Detector
    now_s: float = 0.0
    evidence: Callable[[float], Evidence | None] = lambda _now_s: None
    delay_s: float = 0.0
    answers_s: float | None = None
    due: list[tuple[float, Evidence | None]] = field(default_factory=list)
    actions: list[tuple[float, SilenceAction]] = field(default_factory=list)
    lost_s: float = NEVER_S

    def act(self, action: SilenceAction) -> None:
        if action is SilenceAction.NONE:
            return
        self.actions.append((self.now_s, action))
        if action is SilenceAction.ASK_EVIDENCE:
            evidence = self.evidence(self.now_s)
            if evidence is not None:
                self.due.append((self.now_s + self.delay_s, evidence))
        elif action is SilenceAction.SEND_PING and self.answers_s is not None:
            self.due.append((self.now_s + self.answers_s, None))

    def deliver(self) -> None:
        """Hand over what has come, in its order."""
        come = sorted(
            (answer for answer in self.due if answer[0] <= self.now_s), key=_when
        )
        self.due = [answer for answer in self.due if answer[0] > self.now_s]
        for _, evidence in come:
            if evidence is None:
                self.detector.on_receipt(self.now_s)
            else:
                self.detector.on_evidence(self.now_s, evidence)
        self.look()

    def look(self) -> None:
        if self.detector.verdict is Verdict.LOST and self.lost_s == NEVER_S:
            self.lost_s = self.now_s

    def tick(self, pause_s: float | None = None) -> None:
        """Let time pass to the next tick, which may come late."""
        self.now_s += self.detector.tick_s if pause_s is None else pause_s
        late = pause_s is not None
        if not late:
            self.deliver()
        self.act(self.detector.on_tick(self.now_s))
        self.deliver()  # after a stall the timers are first, and then the sockets

    def run(self, until_s: float) -> Peer:
        while self.now_s + self.detector.tick_s <= until_s:
            self.tick()
        return self

    def times_of(self, action: SilenceAction) -> list[float]:
        return [when_s for when_s, entry in self.actions if entry is action]


def _when(answer: tuple[float, Evidence | None]) -> float:
    return answer[0]


def always(evidence: Evidence | None) -> Callable[[float], Evidence | None]:
    return lambda _now_s: evidence


class TestSilence:
    def test_heard_peer_is_asked_nothing(self) -> None:
        peer = Peer(new())
        for _ in range(100):
            peer.detector.on_receipt(peer.now_s)
            peer.tick()
        assert peer.actions == []
        assert peer.detector.verdict is Verdict.ALIVE

    def test_silent_peer_is_pinged_once_after_a_heartbeat(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.BUSY)).run(60.0)
        assert peer.times_of(SilenceAction.SEND_PING) == [HEARTBEAT_S]

    def test_ping_answer_ends_the_silence(self) -> None:
        peer = Peer(new(), answers_s=0.1).run(60.0)
        assert peer.detector.verdict is Verdict.ALIVE
        assert peer.times_of(SilenceAction.ASK_EVIDENCE) == []
        pauses = _pauses(peer.times_of(SilenceAction.SEND_PING))
        assert pauses
        assert all(HEARTBEAT_S <= pause <= 1.5 * HEARTBEAT_S for pause in pauses)

    def test_unanswered_ping_makes_a_suspect_a_heartbeat_later(self) -> None:
        peer = Peer(new())
        verdicts = [peer.run(end_s).detector.verdict for end_s in (3.9, 4.0)]
        assert verdicts == [Verdict.ALIVE, Verdict.SUSPECT]
        assert peer.times_of(SilenceAction.ASK_EVIDENCE) == [2 * HEARTBEAT_S]

    @pytest.mark.parametrize("delay_s", [0.0, 0.3, HEARTBEAT_S])
    def test_evidence_is_requested_again_at_every_heartbeat(
        self, delay_s: float
    ) -> None:
        peer = Peer(new(), evidence=always(Evidence.BUSY), delay_s=delay_s).run(60.0)
        pauses = _pauses(peer.times_of(SilenceAction.ASK_EVIDENCE))
        assert len(pauses) > 20
        assert all(HEARTBEAT_S <= pause <= 1.25 * HEARTBEAT_S for pause in pauses)

    def test_receipt_clears_a_suspect(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.STOPPED)).run(LOST_AFTER_S - 0.5)
        peer.detector.on_receipt(peer.now_s)
        assert peer.detector.verdict is Verdict.ALIVE
        peer.run(2 * LOST_AFTER_S - 0.6)
        assert peer.lost_s == NEVER_S
        peer.run(2 * LOST_AFTER_S)
        assert peer.lost_s == pytest.approx(2 * LOST_AFTER_S - 0.5)


class TestEvidence:
    def test_ended_process_is_lost_at_once(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.GONE)).run(60.0)
        assert peer.lost_s == 2 * HEARTBEAT_S
        assert peer.detector.reason == Evidence.GONE.value

    @pytest.mark.parametrize("evidence", PATIENT)
    def test_peer_with_uncertain_evidence_is_lost_when_its_time_is_up(
        self, evidence: Evidence
    ) -> None:
        peer = Peer(new(), evidence=always(evidence)).run(60.0)
        assert peer.lost_s == LOST_AFTER_S
        assert "10.0 s" in peer.detector.reason

    @pytest.mark.parametrize("broken", [False, True])
    def test_busy_peer_is_never_lost(self, *, broken: bool) -> None:
        peer = Peer(new(), evidence=always(Evidence.BUSY), delay_s=0.7)
        if broken:
            peer.act(peer.detector.on_break(0.0))
        peer.run(3600.0)
        assert peer.lost_s == NEVER_S
        assert peer.detector.verdict is Verdict.SUSPECT

    @pytest.mark.parametrize("evidence", PATIENT)
    def test_silence_counts_from_end_of_a_busy_time(self, evidence: Evidence) -> None:
        def evidence_at(now_s: float) -> Evidence:
            return Evidence.BUSY if now_s <= 40.0 else evidence

        assert Peer(new(), evidence=evidence_at).run(60.0).lost_s == 40.0 + LOST_AFTER_S

    def test_peer_without_evidence_is_lost_when_its_time_is_up(self) -> None:
        peer = Peer(new()).run(60.0)
        assert peer.lost_s == LOST_AFTER_S
        assert Evidence.UNKNOWN.value in peer.detector.reason

    def test_late_evidence_counts(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.BUSY), delay_s=5.0).run(300.0)
        assert peer.lost_s == NEVER_S

    @pytest.mark.parametrize("evidence", [*PATIENT, Evidence.BUSY])
    def test_evidence_older_than_a_receipt_is_ignored(self, evidence: Evidence) -> None:
        peer = Peer(new()).run(2 * HEARTBEAT_S)
        heard_s = peer.now_s
        peer.detector.on_receipt(heard_s)
        peer.run(heard_s + 1.0)
        assert peer.detector.on_evidence(peer.now_s, evidence) is Verdict.ALIVE
        assert peer.run(60.0).lost_s == heard_s + LOST_AFTER_S

    def test_newly_busy_peer_is_not_taken_for_a_broken_network(self) -> None:
        heartbeat_s = 0.25
        peer = Peer(
            new(heartbeat_s=heartbeat_s, lost_after_s=0.5),
            evidence=lambda now_s: (
                Evidence.TICKING if now_s <= FRESH_S else Evidence.BUSY
            ),
        )
        assert peer.run(60.0).lost_s == NEVER_S

    def test_lost_verdict_is_final(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.GONE)).run(60.0)
        detector, reason = peer.detector, peer.detector.reason
        detector.on_receipt(61.0)
        detector.on_resumed(61.0)
        assert detector.on_break(61.0) is SilenceAction.NONE
        assert detector.on_tick(61.0) is SilenceAction.NONE
        assert detector.on_evidence(61.0, Evidence.BUSY) is Verdict.LOST
        assert (detector.verdict, detector.reason) == (Verdict.LOST, reason)

    def test_lost_peer_is_reported_once(self) -> None:
        assert Peer(new()).run(60.0).times_of(SilenceAction.LOST) == [LOST_AFTER_S]


class TestBroken:
    def test_broken_connection_requests_evidence_at_once(self) -> None:
        detector = new()
        assert detector.on_break(0.3) is SilenceAction.ASK_EVIDENCE
        assert detector.on_evidence(0.3, Evidence.GONE) is Verdict.LOST

    def test_broken_connection_sends_no_ping(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.BUSY))
        peer.act(peer.detector.on_break(0.0))
        assert peer.run(60.0).times_of(SilenceAction.SEND_PING) == []

    def test_silence_counts_from_the_break(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.UNREACHABLE)).run(0.5)
        peer.act(peer.detector.on_break(0.5))
        assert peer.run(60.0).lost_s == 0.5 + LOST_AFTER_S
        assert "without a connection" in peer.detector.reason

    def test_silence_before_the_break_counts(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.UNREACHABLE)).run(8.0)
        peer.act(peer.detector.on_break(8.0))
        assert peer.run(60.0).lost_s == LOST_AFTER_S

    def test_second_break_changes_nothing(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.UNREACHABLE))
        peer.act(peer.detector.on_break(0.0))
        peer.run(5.0)
        assert peer.detector.on_break(5.0) is SilenceAction.NONE
        assert peer.run(60.0).lost_s == LOST_AFTER_S

    def test_break_gives_no_more_time_to_answer(self) -> None:
        peer = Peer(new(lost_after_s=2 * HEARTBEAT_S)).run(1.75 * HEARTBEAT_S)
        asked_s = peer.times_of(SilenceAction.ASK_EVIDENCE)[0]
        peer.act(peer.detector.on_break(peer.now_s))
        assert peer.run(60.0).lost_s == asked_s + HEARTBEAT_S

    def test_resumed_connection_ends_the_suspicion(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.UNREACHABLE), answers_s=0.1)
        peer.act(peer.detector.on_break(0.0))
        peer.run(9.0)
        peer.detector.on_resumed(9.0)
        assert peer.detector.verdict is Verdict.ALIVE
        assert not peer.detector.is_broken
        assert peer.run(60.0).lost_s == NEVER_S

    def test_late_bytes_of_a_broken_connection_are_not_a_receipt(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.UNREACHABLE))
        peer.act(peer.detector.on_break(0.0))
        for _ in range(15):
            peer.run(peer.now_s + 1.0)
            peer.detector.on_receipt(peer.now_s)
        assert peer.lost_s == LOST_AFTER_S


class TestOwnStall:
    def test_time_of_an_own_stall_does_not_count(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.UNREACHABLE)).run(8.0)
        peer.tick(pause_s=30.0)
        assert peer.lost_s == NEVER_S
        peer.run(60.0)
        assert peer.lost_s == pytest.approx(
            30.0 + LOST_AFTER_S, abs=peer.detector.tick_s
        )

    def test_own_stall_is_not_a_silence_of_the_peer(self) -> None:
        peer = Peer(new())
        peer.tick(pause_s=30.0)
        assert peer.actions == []
        assert peer.detector.verdict is Verdict.ALIVE

    def test_question_before_an_own_stall_keeps_its_time_for_an_answer(self) -> None:
        peer = Peer(new()).run(2 * HEARTBEAT_S - 0.1)
        peer.evidence, peer.delay_s = always(Evidence.BUSY), 36.2
        peer.run(LOST_AFTER_S - 0.5)
        peer.due = peer.due[:1]  # the answer to the first question, at 40.2 s
        peer.tick(pause_s=30.0)
        assert peer.run(41.0).lost_s == NEVER_S

    def test_own_stall_on_a_broken_connection_requests_evidence_at_once(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.STOPPED))
        peer.act(peer.detector.on_break(0.0))
        peer.tick()
        peer.tick(pause_s=30.0)
        assert peer.times_of(SilenceAction.ASK_EVIDENCE) == [0.0, peer.now_s]

    def test_evidence_from_before_an_own_stall_is_not_used(self) -> None:
        peer = Peer(new(), evidence=always(Evidence.STOPPED)).run(LOST_AFTER_S - 0.5)
        peer.evidence = always(Evidence.BUSY)
        peer.tick(pause_s=30.0)
        assert peer.run(300.0).lost_s == NEVER_S

    def test_busy_loop_is_not_an_own_stall(self) -> None:
        """Ticks that are late by a little do not keep a dead peer alive."""
        peer = Peer(new(), evidence=always(Evidence.UNREACHABLE))
        while peer.now_s < LOST_AFTER_S:
            peer.tick(pause_s=1.9 * peer.detector.tick_s)
        assert peer.lost_s <= LOST_AFTER_S + 2 * peer.detector.tick_s


# --- whatever happens ----------------------------------------------------------------

EVENTS = ("pass", "hear", "break", "resume", *Evidence)


def _histories(length: int) -> Iterator[tuple[str | Evidence, ...]]:
    return itertools.product(EVENTS, repeat=length)


def test_every_history_of_four_events_keeps_the_rules() -> None:
    """All of them: 10,000 histories, each event a heartbeat after the one before."""
    for history in _histories(4):
        rules = Rules(new(heartbeat_s=1.0, lost_after_s=2.0))
        for event in history:
            for _ in range(TICKS):
                rules.tick(1.0 / TICKS)
            rules.happen(event)


@dataclass
class Rules:
    """What must hold of a detector whatever happens, checked as it does."""

    detector: Detector
    now_s: float = 0.0
    cleared_s: float = 0.0
    is_gone: bool = False
    was_lost: bool = False

    def tick(self, pause_s: float) -> None:
        self.now_s += pause_s
        action = self.detector.on_tick(self.now_s)
        assert (action is SilenceAction.LOST) is (self.is_lost and not self.was_lost)
        assert action is not SilenceAction.SEND_PING or not self.detector.is_broken
        self.check()

    def happen(self, event: str | Evidence) -> None:
        detector = self.detector
        is_heard = event == "resume" or (event == "hear" and not detector.is_broken)
        is_suspect = detector.verdict is Verdict.SUSPECT
        if is_heard or (is_suspect and event is Evidence.BUSY):
            self.cleared_s = self.now_s
        self.is_gone = self.is_gone or (event is Evidence.GONE and not self.is_lost)
        _happen(detector, event, self.now_s)
        self.check()
        if is_heard and not self.is_lost:
            assert detector.verdict is Verdict.ALIVE

    @property
    def is_lost(self) -> bool:
        return self.detector.verdict is Verdict.LOST

    def check(self) -> None:
        assert self.is_lost or not self.was_lost
        assert self.is_lost or not self.is_gone
        if self.is_lost and not self.was_lost and not self.is_gone:
            assert self.now_s - self.cleared_s >= 2.0
        assert bool(self.detector.reason) is self.is_lost
        self.was_lost = self.is_lost


def _happen(detector: Detector, event: str | Evidence, now_s: float) -> None:
    match event:
        case Evidence():
            detector.on_evidence(now_s, event)
        case "hear":
            detector.on_receipt(now_s)
        case "break":
            detector.on_break(now_s)
        case "resume":
            detector.on_resumed(now_s)


heartbeats = st.floats(0.1, 10.0)
patiences = st.floats(2.0, 20.0)  # in heartbeats


@given(
    heartbeat_s=heartbeats,
    patience=patiences,
    evidence=st.sampled_from(
        [Evidence.GONE, Evidence.UNREACHABLE, Evidence.UNKNOWN, None]
    ),
    delay=st.floats(0.0, 1.0),
    chatter=st.floats(0.0, 5.0),
    breaks=st.none() | st.floats(0.0, 30.0),
)
def test_dead_peer_is_lost_in_time(
    *,
    heartbeat_s: float,
    patience: float,
    evidence: Evidence | None,
    delay: float,
    chatter: float,
    breaks: float | None,
) -> None:
    """Whatever is found out, and whether or when its connection breaks."""
    detector = new(heartbeat_s=heartbeat_s, lost_after_s=patience * heartbeat_s)
    peer = Peer(detector, evidence=always(evidence), delay_s=delay * heartbeat_s)
    while peer.now_s < chatter * heartbeat_s:
        detector.on_receipt(peer.now_s)
        peer.tick()
    died_s = peer.now_s
    detector.on_receipt(died_s)
    if breaks is not None:
        peer.run(died_s + breaks * heartbeat_s)
        peer.act(detector.on_break(peer.now_s))
        peer.deliver()
    limit_s = died_s + (patience + 1) * heartbeat_s
    peer.run(limit_s + 1e-6)
    assert peer.lost_s <= limit_s + 1e-6


@given(
    answers=st.lists(st.sampled_from([*PATIENT, Evidence.BUSY, None]), max_size=60),
    delays=st.lists(st.floats(0.0, 3.0), min_size=1),
    breaks_s=st.none() | st.floats(0.0, 60.0),
)
def test_loss_never_counts_time_before_a_busy_answer(
    answers: list[Evidence | None], delays: list[float], breaks_s: float | None
) -> None:
    """At whatever time evidence comes, and in whatever order."""
    coming, taking = iter(answers), itertools.cycle(delays)
    peer = Peer(new(), evidence=lambda _now_s: next(coming, Evidence.BUSY))
    cleared_s = 0.0
    while peer.now_s < 120.0 and peer.lost_s == NEVER_S:
        peer.delay_s = next(taking)
        if breaks_s is not None and peer.now_s >= breaks_s:
            peer.act(peer.detector.on_break(peer.now_s))
        due = [answer for answer in peer.due if answer[1] is Evidence.BUSY]
        peer.tick()
        if any(when_s <= peer.now_s for when_s, _ in due):
            cleared_s = peer.now_s
    assert peer.lost_s - cleared_s >= LOST_AFTER_S


@given(
    stalls=st.lists(st.tuples(st.integers(1, 30), st.floats(1.0, 300.0)), max_size=12),
    answers=st.floats(0.01, 0.9),
    evidence=st.sampled_from([*PATIENT, Evidence.BUSY, None]),
    delay=st.floats(0.0, 3.0),
)
def test_own_stalls_never_lose_a_peer_that_answers(
    stalls: list[tuple[int, float]],
    answers: float,
    evidence: Evidence | None,
    delay: float,
) -> None:
    """Not even if all evidence is wrong, as it is when nobody was there to read it."""
    peer = Peer(
        new(),
        evidence=always(evidence),
        delay_s=delay,
        answers_s=answers * HEARTBEAT_S,
    )
    for ticks, pause_s in stalls:
        for _ in range(ticks):
            peer.tick()
        peer.tick(pause_s=pause_s)
    peer.run(peer.now_s + 30.0)
    assert peer.detector.verdict is Verdict.ALIVE


def _pauses(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]
