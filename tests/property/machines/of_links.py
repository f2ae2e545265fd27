"""Connections: how they come, break, go on and end."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from asyncrpc.core.calls.machine import calls
from asyncrpc.core.links.machine import dialing, pool, reconnect
from asyncrpc.core.wire import resume
from tests.property.machines.spec import Machine, guards
from tests.property.machines.walk import led, paths_to_all

_UNIT: Final = "tests/unit/core/links/machine"

# --- which connection ----------------------------------------------------------------


def _feed_peer(machine: Any, event: Any) -> None:
    match event.name:
        case "WANT":
            machine.want()
        case "DIAL_FAILED":
            machine.on_dial_failed()
        case "DIALED":
            machine.on_open("ours", dialed=True)
        case "ACCEPTED":
            machine.on_open("theirs", dialed=False)
        case "PROVEN":
            machine.on_proven(machine.connection)
        case "LOST":
            machine.on_lost(machine.connection or "another")


PEER: Final = Machine(
    name="The connection to a peer",
    about="Selects one connection to a peer if both sides dial.",
    source=pool,
    states="PeerState",
    starts=("IDLE",),
    begin=lambda build, _: build.PeerConnection(1),
    feed=_feed_peer,
    stories="""
a call dials: IDLE -WANT-> DIALING -DIALED-> OPEN -LOST-> IDLE
a dial fails: IDLE -WANT-> DIALING -DIAL_FAILED-> IDLE -WANT-> DIALING
the peer dials: IDLE -ACCEPTED-> TAKEN -PROVEN-> OPEN -LOST-> IDLE
the peer does not use what it dialed: TAKEN -LOST-> IDLE
both dial, and the peer's survives:
    DIALING -ACCEPTED-> TAKEN -DIAL_FAILED-> TAKEN -PROVEN-> OPEN
both dial, and the peer repeats its dial: TAKEN -ACCEPTED-> TAKEN
both dial, and ours survives after all: TAKEN -DIALED-> OPEN -PROVEN-> OPEN
a dial that nobody waits for is taken: IDLE -DIALED-> OPEN -WANT-> OPEN
ours takes the place of ours: OPEN -DIALED-> OPEN
the peer has lost it before us: OPEN -ACCEPTED-> TAKEN -WANT-> TAKEN
one dial at a time: DIALING -WANT-> DIALING -LOST-> DIALING
""",
    tests=(f"{_UNIT}/test_pool.py",),
    guards=guards(r"""
the-larger-refuses-the-smaller:
    accept=attempt > 0 or not is_smaller => accept=attempt > 0 or is_smaller
a-repeated-dial-is-refused-for-ever:
    accept=attempt > 0 or not is_smaller => accept=not is_smaller
an-offer-is-refused-for-ever: self._refused = True =>
an-offer-that-may-have-crossed-is-taken:
    may_have_crossed = self._dialed and (self._attempt > 0 or is_smaller) =>
    may_have_crossed = False
claims-open-at-both-ends-are-given-up:
    if self.connection is None or is_smaller: => if True:
another-connection-proves-it:
    return connection is self.connection and self._on(PeerEvent.PROVEN) =>
    return self._on(PeerEvent.PROVEN)
the-end-of-another-is-its-end:
    if connection is not self.connection:\n            return False =>
a-new-connection-has-refused-offers:
    self._refused = False\n\n    def on_proven => pass\n\n    def on_proven
"""),
)

# --- a dial --------------------------------------------------------------------------


def _dial_attempts_are_limited(build: ModuleType) -> None:
    machine = build.DialAttempts()
    events = build.DialEvent
    for number in range(build.ATTEMPTS_MAX):
        assert machine.number == number
        assert not machine.is_exhausted
        assert not machine.is_over
        for event in (events.FREE, events.UNREACHED, events.MOVED):
            machine.on(event)
    assert machine.is_exhausted
    machine.on(events.EXHAUSTED)
    assert machine.is_over


DIAL: Final = Machine(
    name="A dial",
    about="Decides when a peer is dialed again, and when the dial fails.",
    source=dialing,
    states="DialState",
    starts=("READY",),
    begin=lambda build, _: build.DialAttempts(),
    stories="""
the peer answers: READY -FREE-> DIALING -OPENED-> READY -LINKED-> CONNECTED
there is a link before: READY -LINKED-> CONNECTED -FREE-x
the peer has dialed: READY -TAKEN-> AWAITING_PROOF -SETTLED-> READY -LINKED-> CONNECTED
both dial: READY -FREE-> DIALING -DUPLICATE-> AWAITING_WINNER -SETTLED-> READY
the network breaks it: READY -FREE-> DIALING -BROKE-> PAUSED -SETTLED-> READY
the network breaks it again and again:
    READY -FREE-> DIALING -BROKE-> PAUSED -SETTLED-> READY -FREE-> DIALING -BROKE->
    PAUSED -SETTLED-> READY -FREE-> DIALING -BROKE-> PAUSED -SETTLED-> READY -FREE->
    DIALING -BROKE-> ASKING
the peer is not there yet:
    READY -FREE-> DIALING -ABSENT-> PAUSED -SETTLED-> READY -FREE-> DIALING -OPENED->
    READY -LINKED-> CONNECTED
the peer is busy:
    READY -FREE-> DIALING -UNANSWERED-> INQUIRING -BUSY-> READY -FREE-> DIALING
the answer was late: DIALING -UNANSWERED-> INQUIRING -TICKING-> READY -BUSY-x
the peer does not answer and is not known to be there:
    DIALING -UNANSWERED-> INQUIRING -NOT_KNOWN-> ASKING
the peer is somewhere else: DIALING -UNREACHED-> ASKING -MOVED-> READY
the peer is nowhere: DIALING -UNREACHED-> ASKING -NOT_MOVED-> FAILED -MOVED-x
it has been tried often enough: READY -EXHAUSTED-> FAILED
nothing broke that was not dialed: READY -BROKE-x -FREE-> DIALING -BROKE-> PAUSED
""",
    checks=(_dial_attempts_are_limited,),
    tests=(f"{_UNIT}/test_dialing.py",),
    guards=guards(r"""
breaks-are-for-ever:
    if self._breaks >= len(PAUSES_AFTER_BREAK_S): =>
    if self._breaks > len(PAUSES_AFTER_BREAK_S):
absence-is-for-ever: self._absent_s -= self.pause_s =>
absence-is-an-attempt: self.spared += 1 =>
attempts-are-not-counted: self.number += 1 => self.number += 0
every-step-is-an-attempt:
    if before is not DialState.READY and self.state is DialState.READY: =>
    if self.state is not DialState.READY:
a-refused-break-uses-up-a-pause:
    TRANSITIONS.after(before, event)\n        if event =>
    self._breaks += event not in TRANSITIONS[before]
    \n        TRANSITIONS.after(before, event)\n        if event
attempts-exceed-their-limit:
    return self.number - self.spared >= ATTEMPTS_MAX =>
    return self.number - self.spared > ATTEMPTS_MAX
a-busy-peer-is-given-up:
    return self.number - self.spared >= ATTEMPTS_MAX =>
    return self.number >= ATTEMPTS_MAX
a-late-answer-does-not-count:
    self.spared += event is DialEvent.BUSY =>
    self.spared += event in (DialEvent.BUSY, DialEvent.TICKING)
a-failure-is-not-the-end:
    FINAL: Final = frozenset({DialState.CONNECTED, DialState.FAILED}) =>
    FINAL: Final = frozenset({DialState.CONNECTED})
pauses-do-not-grow:
    self.pause_s = PAUSES_AFTER_BREAK_S[self._breaks] =>
    self.pause_s = PAUSES_AFTER_BREAK_S[0]
"""),
)

# --- a link --------------------------------------------------------------------------


def _feed_link(machine: Any, event: Any) -> None:
    if event.name == "GOODBYE":
        machine.on_goodbye()
    else:
        machine.on_lost("a cable")


def _first_reason_counts(build: ModuleType) -> None:
    machine = build.LinkStatus()
    machine.on_goodbye()
    assert not machine.is_lost
    machine.on_lost("a cable")
    machine.on_lost("something else")
    assert machine.is_lost
    assert machine.lost_because == "a cable"
    other = build.LinkStatus()
    other.on_lost("")
    assert other.lost_because


LINK: Final = Machine(
    name="A link",
    about="Whether calls go both ways, one way, or no more. No event leads back: a "
    "later connection makes another link.",
    source=calls,
    states="LinkState",
    starts=("OPEN",),
    begin=lambda build, _: build.LinkStatus(),
    feed=_feed_link,
    stories="""
the peer shuts down: OPEN -GOODBYE-> DRAINING -GOODBYE-> DRAINING -LOST-> LOST
the peer dies: OPEN -LOST-> LOST -LOST-> LOST -GOODBYE-> LOST
""",
    checks=(_first_reason_counts,),
    guards=guards("""
the-last-reason-counts: if not self.is_lost: => if True:
loss-has-no-reason:
    self.lost_because = reason or "the connection was closed" =>
    self.lost_because = reason
a-goodbye-is-a-loss:
    return self.state is LinkState.LOST => return self.state is not LinkState.OPEN
lost-is-never-seen: return self.state is LinkState.LOST => return False
"""),
)

# --- reconnecting and resuming -------------------------------------------------------

RECONNECT: Final = Machine(
    name="Reconnecting",
    about="The reaction of one end of a connection to a broken transport. Events of a "
    "finished attempt may still come, and change nothing.",
    source=reconnect,
    states="ReconnectState",
    starts=("WHOLE",),
    begin=lambda build, _: build.Reconnect(),
    stories="""
the side that dials gets through:
    WHOLE -BROKE-> BROKEN -CLAIM-> CLAIMED -RELEASE-> BROKEN -RESUMED-> WHOLE
the side that was dialed takes another transport: WHOLE -BROKE-> BROKEN -RESUMED-> WHOLE
nobody answers a candidate, and another one asks:
    BROKEN -CLAIM-> CLAIMED -CLAIM-> CLAIMED -RELEASE-> BROKEN -CLAIM-> CLAIMED
it is closed:
    WHOLE -END-> ENDED -BROKE-> ENDED -CLAIM-> ENDED -RESUMED-> ENDED -RELEASE->
    ENDED -END-> ENDED
it is given up: BROKEN -END-> ENDED
it is given up while a candidate asks: CLAIMED -END-> ENDED -RELEASE-> ENDED
only what is broken is resumed: WHOLE -RESUMED-> WHOLE -CLAIM-> WHOLE -RELEASE-> WHOLE
what is asked for is not resumed beside it: CLAIMED -RESUMED-> CLAIMED -BROKE-> CLAIMED
what is broken breaks once: BROKEN -BROKE-> BROKEN -RELEASE-> BROKEN
""",
    tests=(f"{_UNIT}/test_reconnect.py",),
    guards=guards(r"""
the-same-attempt-is-taken-twice:
    if attempt <= self.attempt: => if attempt < self.attempt:
an-attempt-that-was-taken-is-forgotten: self.attempt = attempt => self.attempt = 0
ended-link-is-resumed: if self.state is ReconnectState.ENDED: => if False:
candidates-have-one-number: self.attempt += 1 => self.attempt = 1
a-late-candidate-resumes:
    if not is_candidate or self.state is not ReconnectState.CLAIMED: =>
    if self.state is not ReconnectState.CLAIMED:
another-life-resumes: if not is_same_life: => if False:
attempts-without-end: and under_way < ATTEMPTS_MAX => and under_way <= ATTEMPTS_MAX
a-silent-peer-is-not-excused: if is_excused: => if False:
pauses-go-on-where-they-were:
    self.pause_s = FIRST_PAUSE_S\n        self._since_s = now_s => self._since_s = now_s
two-dials-beside-a-transport: if self.is_probing:\n            return False =>
a-break-from-before-counts: return attempt >= self.attempt => return True
an-old-transport-is-read-beside-a-candidate:
    return self.state is not ReconnectState.CLAIMED => return True
busy-peer-is-lost: if ADVICE[evidence] is Advice.WAIT: => if False:
a-superseded-attempt-ends-it:
    return "" if verdict == SUPERSEDED else verdict => return verdict
"""),
)


def _link_without_transport_is_broken(build: ModuleType) -> None:
    for state, path in paths_to_all(RESUME, build).items():
        is_broken = led(RESUME, build, path).is_broken
        assert is_broken == (state.name in {"BROKEN", "CLOSING_BROKEN"})


RESUME: Final = Machine(
    name="A connection and its transport",
    about="Whether a connection outlives its transport. It may do so from the HELLOs "
    "until a side ends it.",
    source=resume,
    states="ResumeState",
    starts=("NOT_RESUMABLE",),
    begin=lambda build, _: build.ResumeStatus(),
    stories="""
it breaks and goes on:
    NOT_RESUMABLE -ALLOW-> CONNECTED -LOSE-> BROKEN -RESUME-> CONNECTED
another transport takes the place of a silent one:
    CONNECTED -REPLACE-> BROKEN -RESUME-> CONNECTED
its handshake fails: NOT_RESUMABLE -LOSE-> ENDED
it is refused: NOT_RESUMABLE -CLOSE-> ENDING -LOSE-> ENDED
the peer refuses it: NOT_RESUMABLE -PEER_CLOSE-> ENDING -END-> ENDED
it is given up in its handshake: NOT_RESUMABLE -END-> ENDED -ALLOW-> ENDED
this side closes it: CONNECTED -CLOSE-> CLOSING -LOSE-> ENDED
the peer closes it: CONNECTED -PEER_CLOSE-> CLOSING -LOSE-> ENDED
both close it: CLOSING -CLOSE-> CLOSING -PEER_CLOSE-> CLOSING -END-> ENDED
it fails: CONNECTED -END-> ENDED -LOSE-> ENDED -RESUME-> ENDED
the network breaks twice: BROKEN -LOSE-> ENDED
it is closed while it is broken: BROKEN -CLOSE-> ENDING -RESUME-> ENDING
the peer has closed it before it broke: BROKEN -PEER_CLOSE-> ENDED
it is given up while it is broken: BROKEN -END-> ENDED
a transport for what closes, and it goes on to close:
    CLOSING -REPLACE-> CLOSING_BROKEN -RESUME-> CLOSING -LOSE-> ENDED
a transport for what closes does not come: CLOSING_BROKEN -LOSE-> ENDED
what closes is closed while it is broken: CLOSING_BROKEN -CLOSE-> ENDING
the peer closes what closes and is broken: CLOSING_BROKEN -PEER_CLOSE-> ENDED
what closes is given up while it is broken: CLOSING_BROKEN -END-> ENDED
it is resumed only if it is broken: CONNECTED -RESUME-> CONNECTED
what ends is not replaced: ENDING -REPLACE-> ENDING -CLOSE-> ENDING
""",
    checks=(_link_without_transport_is_broken,),
    tests=("tests/unit/core/wire/test_resume.py",),
    guards=guards(r"""
closing-link-is-not-broken:
    _BROKEN: Final = frozenset({BROKEN, CLOSING_BROKEN}) =>
    _BROKEN: Final = frozenset({BROKEN})
an-old-acknowledgement-is-news:
    if received <= self._acknowledged:\n            return =>
half-received-part-is-let-go: if end > received: => if start > received:
read-bytes-go-back: if received < self._acknowledged: => if False:
the-rest-begins-with-a-part: if received > self.start: => if False:
news-are-told-again: self._acknowledged = self.received =>
"""),
)
