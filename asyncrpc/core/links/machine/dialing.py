"""How often a peer is dialed, and when dialing is given up.

One object for one dial: all attempts for the tasks that wait for a connection.
`machine.pool` decides which of two connections survives, if both sides dial; this
module decides what the dialing side does then:

- A peer whose own dial has been taken is waited for, to show that it uses it.
- A dial that the peer refused as `DUPLICATE` is followed by a wait for the peer's own.
- A connection that broke in its handshake says nothing of the peer: the network broke
  it.  So the next attempt is made after a pause; as often as there are pauses.
- A peer that lets itself be connected to and does not answer in time may be busy, or
  its host.  If its process is known to be busy, it is dialed again, however often: it
  cannot be lost by that.  If its event loop is known to run, it is dialed again, too.
- A peer that nobody has met and at whose address nobody listens may just be starting:
  it imports torch.  It is dialed again after pauses, for as long as a dial may take.
- After any other failure another attempt can help only if the peer is somewhere else,
  or its own connection has arrived meanwhile.

Sans-IO: the service makes one step for each state, and reports its outcome.
"""

from __future__ import annotations

import enum
from typing import Final

from asyncrpc.core.state_table import StateTable

# How often a dial is repeated before it counts as failed.
ATTEMPTS_MAX: Final = 5
# After a connection broke in its handshake, which says nothing of the peer.
PAUSES_AFTER_BREAK_S: Final = (0.02, 0.1, 0.5)
# While a peer is not there yet; as long as this together, unless the service says else.
PAUSE_FOR_ABSENT_S: Final = 0.1
ABSENT_S_MAX: Final = 10.0


class DialState(enum.Enum):
    """What to do now."""

    READY = "look whether to dial, to wait or to end"
    DIALING = "dial"
    AWAITING_PROOF = "wait for the first message over the peer's connection"
    AWAITING_WINNER = "wait for the connection that the peer has dialed"
    PAUSED = "wait for `pause_s`"
    INQUIRING = "ask what became of the process that does not answer"
    ASKING = "ask whether the peer is somewhere else"
    CONNECTED = "end: a link is open"
    FAILED = "end: the peer cannot be reached"


class DialEvent(enum.Enum):
    """The outcome of a step."""

    LINKED = "a link is open"
    FREE = "no other dial is under way"
    TAKEN = "this worker took a dial of the peer"
    EXHAUSTED = "all attempts have been made"
    OPENED = "the connection is open"
    DUPLICATE = "the peer refused the connection, because its own dial survives"
    BROKE = "the connection broke in its handshake"
    UNANSWERED = "the peer did not answer in time"
    BUSY = "its process can run, and does not turn to its event loop"
    TICKING = "its event loop runs: the answer was late"
    NOT_KNOWN = "its process has ended or is stopped, or nothing is known of it"
    ABSENT = "nobody listens yet where a peer that was never met is to be"
    UNREACHED = "no address led to the peer, or the peer refused the connection"
    SETTLED = "the wait is over: its event has come, or its time has passed"
    MOVED = "another attempt may succeed"
    NOT_MOVED = "another attempt would fail as well"


_S, _E = DialState, DialEvent

TRANSITIONS: Final = StateTable(
    "a dial",
    {
        _S.READY: {
            _E.LINKED: _S.CONNECTED,
            _E.FREE: _S.DIALING,
            _E.TAKEN: _S.AWAITING_PROOF,
            _E.EXHAUSTED: _S.FAILED,
        },
        _S.DIALING: {
            _E.OPENED: _S.READY,
            _E.DUPLICATE: _S.AWAITING_WINNER,
            _E.BROKE: _S.PAUSED,
            _E.ABSENT: _S.PAUSED,
            _E.UNANSWERED: _S.INQUIRING,
            _E.UNREACHED: _S.ASKING,
        },
        _S.AWAITING_PROOF: {_E.SETTLED: _S.READY},
        _S.AWAITING_WINNER: {_E.SETTLED: _S.READY},
        _S.PAUSED: {_E.SETTLED: _S.READY},
        _S.INQUIRING: {
            _E.BUSY: _S.READY,
            _E.TICKING: _S.READY,
            _E.NOT_KNOWN: _S.ASKING,
        },
        _S.ASKING: {_E.MOVED: _S.READY, _E.NOT_MOVED: _S.FAILED},
        _S.CONNECTED: {},
        _S.FAILED: {},
    },
)
FINAL: Final = frozenset({DialState.CONNECTED, DialState.FAILED})


class DialAttempts:
    """The attempts of one dial.

    Attributes:
        number: of the present attempt, from 0.
        pause_s: how long to wait if the state is PAUSED.
        spared: attempts that do not count: the peer was busy, or not there yet.
    """

    __slots__ = ("_absent_s", "_breaks", "number", "pause_s", "spared", "state")

    def __init__(self, absent_s_max: float = ABSENT_S_MAX) -> None:
        self.state = DialState.READY
        self.number = 0
        self.pause_s = 0.0
        self.spared = 0
        self._breaks = 0
        self._absent_s = absent_s_max  # that are left

    @property
    def is_over(self) -> bool:
        """Return whether the dial has ended."""
        return self.state in FINAL

    @property
    def is_exhausted(self) -> bool:
        """Return whether no attempt is left."""
        return self.number - self.spared >= ATTEMPTS_MAX

    def on(self, event: DialEvent) -> None:
        """Change to the next state."""
        before = self.state
        TRANSITIONS.after(before, event)
        if event is DialEvent.BROKE:
            event = self._after_break()
        elif event is DialEvent.ABSENT:
            event = self._after_absence()
        self.state = TRANSITIONS.after(before, event)
        if before is not DialState.READY and self.state is DialState.READY:
            self.number += 1
            self.spared += event is DialEvent.BUSY

    def _after_break(self) -> DialEvent:
        """Return what a break is taken for: after the last pause, for a failure."""
        if self._breaks >= len(PAUSES_AFTER_BREAK_S):
            return DialEvent.UNREACHED
        self.pause_s = PAUSES_AFTER_BREAK_S[self._breaks]
        self._breaks += 1
        return DialEvent.BROKE

    def _after_absence(self) -> DialEvent:
        """Return what it is taken for: when no time is left, for a failure."""
        if self._absent_s <= 0:
            return DialEvent.UNREACHED
        self.pause_s = PAUSE_FOR_ABSENT_S
        self._absent_s -= self.pause_s
        self.spared += 1
        return DialEvent.ABSENT
