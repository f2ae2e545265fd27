"""How a connection outlives its transport: which end dials again, until when.

One object for one connection at one of its ends.  The end that dialed it dials again,
at once and then ever more slowly; the other waits, and asks meanwhile whether the peer
still exists.  So a worker that has died is known to be lost within milliseconds where
its host can be asked, and a network that comes back within
`LivenessOptions.lost_after_s` has only cost time.

An attempt that has proved itself is a *candidate*: it tells the peer how much has been
read, and from then on nothing more may be read over the old transport.  So there is at
most one, which is given up if it gets no answer.  Attempts are numbered by the side
that dials, and the other end accepts only an attempt that is later than the last one
accepted: of two that cross in the network, the older one loses.

A connection is resumed at both ends or at none: the acceptor that has given it up
refuses the attempt, and so the dialer gives it up too.

Sans-IO; times are numbers, in seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.state_table import StateTable

# Between two attempts: doubled from the first to the last.
FIRST_PAUSE_S: Final = 0.01
LAST_PAUSE_S: Final = 2.0
ATTEMPTS_MAX: Final = 4  # at the same time
ANSWER_S: Final = 1.0  # for an answer to HELLO, beside three times what came before it

# The acceptor's verdicts on an attempt.
NO_SUCH: Final = "it has given up this connection"
SUPERSEDED: Final = "a later attempt has come before this one"


class ReconnectState(enum.Enum):
    """What one end has of a connection."""

    WHOLE = "the transport works, as far as this end knows"
    BROKEN = "the connection waits for another transport"
    CLAIMED = "a candidate asks the peer to continue over its transport"
    ENDED = "the connection has ended for good"


class ReconnectEvent(enum.Enum):
    """What happens to a connection."""

    BROKE = "the transport has broken, or was given up for another"
    CLAIM = "a candidate asks the peer to continue"
    RELEASE = "the candidate has ended, got no answer in time, or was answered"
    RESUMED = "another transport has taken the place of the broken one"
    END = "the connection has ended for good"


WHOLE, BROKEN, CLAIMED, ENDED = ReconnectState
_E = ReconnectEvent

TRANSITIONS: Final = StateTable(
    "a connection",
    {
        WHOLE: {_E.BROKE: BROKEN, _E.END: ENDED},
        BROKEN: {_E.CLAIM: CLAIMED, _E.RESUMED: WHOLE, _E.END: ENDED},
        CLAIMED: {_E.RELEASE: BROKEN, _E.END: ENDED},
        ENDED: {},
    },
    late=ReconnectEvent,
)


class Advice(enum.Enum):
    """What evidence of the peer's process means for a side that cannot reach it."""

    GIVE_UP = "neither end will resume the connection"
    WAIT = "its process is there, so the network is at fault"
    KNOCK = "see whether a process listens at its address"


ADVICE: Final[Mapping[Evidence, Advice]] = {
    Evidence.GONE: Advice.GIVE_UP,
    Evidence.STOPPED: Advice.WAIT,
    Evidence.BUSY: Advice.WAIT,
    Evidence.TICKING: Advice.WAIT,
    Evidence.UNREACHABLE: Advice.KNOCK,
    Evidence.UNKNOWN: Advice.KNOCK,
}


class CandidateVerdict(enum.Enum):
    """What the answer to a candidate means."""

    RESUME = "continue over its transport"
    REFUSED = "the peer does not continue over this transport"
    REPLACED = "another life of the peer has answered: the connection is over"
    LATE = "this candidate has been given up meanwhile"


class Reconnect:
    """The state of one connection at one end.

    Attributes:
        state: the present one.
        attempt: at the side that dials, how many candidates there were; at the other,
            the number of the last one that was accepted.
        pause_s: until the next attempt.
        is_probing: whether it is dialed again although it is not known to be broken.
    """

    __slots__ = ("_limit_s", "_since_s", "attempt", "is_probing", "pause_s", "state")

    def __init__(self) -> None:
        self.state = ReconnectState.WHOLE
        self.attempt = 0
        self.pause_s = FIRST_PAUSE_S
        self.is_probing = False
        self._since_s = 0.0
        self._limit_s: float | None = None

    def on(self, event: ReconnectEvent) -> bool:
        """Take an event; return whether it has changed anything."""
        before, self.state = self.state, TRANSITIONS.after(self.state, event)
        return event in TRANSITIONS[before]

    def on_broken(self, now_s: float, limit_s: float | None) -> bool:
        """Record that the transport has broken; return whether to begin attempts.

        Args:
            limit_s: seconds after which to give it up; None if others decide that.
        """
        self.pause_s = FIRST_PAUSE_S
        self._since_s = now_s
        self._limit_s = limit_s
        return self.on(ReconnectEvent.BROKE)

    # --- attempts --------------------------------------------------------------------

    def may_try(self, under_way: int) -> bool:
        """Return whether to begin an attempt beside those that are running.

        An attempt may hang where the next one gets through, and on a slow network one
        takes longer than the pause to the next: so there may be several.
        """
        return self.state is ReconnectState.BROKEN and under_way < ATTEMPTS_MAX

    def on_pause_over(self, now_s: float, *, is_excused: bool) -> str:
        """Time has passed; return why the connection is given up, or nothing."""
        self.pause_s = min(2 * self.pause_s, LAST_PAUSE_S)
        if self._limit_s is None:
            return ""
        if is_excused:
            self._since_s = now_s
        if now_s - self._since_s < self._limit_s:
            return ""
        return f"it could not be resumed in {self._limit_s:g} s"

    # --- the side that dials ---------------------------------------------------------

    def probe(self) -> bool:
        """Nothing comes over its transport: return whether to dial beside it.

        One such dial at a time; `on_probed` ends it.
        """
        if self.is_probing:
            return False
        self.is_probing = True
        return True

    def on_probed(self) -> None:
        """The dial beside its transport has ended, well or not."""
        self.is_probing = False

    def is_broken_since(self, attempt: int) -> bool:
        """Return whether a break that the peer has seen still counts.

        Args:
            attempt: the last one that the peer had accepted when it broke; an earlier
                one than the last here means that it has been resumed since.
        """
        return attempt >= self.attempt

    @property
    def reads_on(self) -> bool:
        """Return whether its old transport may still be read.

        From the first candidate on, what it brings would be read twice.
        """
        return self.state is not ReconnectState.CLAIMED

    def claim(self) -> int:
        """Let a candidate ask; return its number, 0 if another one asks already."""
        if not self.on(ReconnectEvent.CLAIM):
            return 0
        self.attempt += 1
        return self.attempt

    def on_answer(
        self, verdict: str, *, is_same_life: bool, is_candidate: bool
    ) -> CandidateVerdict:
        """Decide on the peer's answer to a candidate.

        Args:
            verdict: of the peer; empty if it goes on.
        """
        if verdict:
            return CandidateVerdict.REFUSED
        if not is_same_life:
            return CandidateVerdict.REPLACED
        if not is_candidate or self.state is not ReconnectState.CLAIMED:
            return CandidateVerdict.LATE
        return CandidateVerdict.RESUME

    # --- the side that was dialed ----------------------------------------------------

    def on_offer(self, attempt: int) -> str:
        """Decide on an attempt of the peer; return the verdict, empty if it is taken.

        An attempt that is taken replaces the present transport, if there is one: the
        peer would not try if that still brought it anything.
        """
        if self.state is ReconnectState.ENDED:
            return NO_SUCH
        if attempt <= self.attempt:
            return SUPERSEDED
        self.attempt = attempt
        return ""


def reason_of_verdict(verdict: str) -> str:
    """Return why a verdict ends a connection; empty if it does not."""
    return "" if verdict == SUPERSEDED else verdict


def reason_of_refusal(evidence: Evidence, refusal: str) -> str:
    """Return why a connection is lost if no process listens at the peer's addresses."""
    if ADVICE[evidence] is Advice.WAIT:
        return ""
    return f"no process listens there any more: {refusal}"


def answer_limit_s(took_s: float) -> float:
    """Return how long a candidate may wait for its answer."""
    return ANSWER_S + 3 * took_s
