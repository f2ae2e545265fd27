"""The states of one replica, as one of its routers sees it.

    state       what it takes
    JOINING     nothing yet: it has not reported that it is ready
    WARMING     a share of the calls that grows with time
    READY       calls
    EJECTED     nothing for a while: it failed too often
    DRAINING    nothing more: its running calls end
    LOST        nothing: it has left, or is gone

A replica that is started again is a new one: so no transition leads back from DRAINING
or LOST, and late news of an earlier incarnation cannot revive it.

Source: outlier ejection and slow start are Envoy's,
https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/outlier and
https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/load_balancing/slow_start
"""

from __future__ import annotations

import enum
from typing import Final

from asyncrpc.core.state_table import StateTable


class ReplicaState(enum.Enum):
    """What a replica takes."""

    JOINING = "it has not said, by serving.Replica, that it is ready"
    WARMING = "it takes a growing share of the calls"
    READY = "it takes calls"
    EJECTED = "it failed too often: it takes no calls for a while"
    DRAINING = "it takes no further calls; what runs there ends"
    LOST = "it has left, or is gone"


class ReplicaEvent(enum.Enum):
    """What has happened to a replica, or what it has reported."""

    SAID_READY = "it reports that it takes calls"
    WARMED = "its slow start is over"
    FAILED = "it failed too often"
    RETURNED = "the time of its ejection is over"
    SAID_DRAINING = "it reports that it takes no further calls"
    GONE = "it has left the group, or is lost"


_S, _E = ReplicaState, ReplicaEvent

TRANSITIONS: Final = StateTable(
    "a replica",
    {
        _S.JOINING: {
            _E.SAID_READY: _S.WARMING,
            _E.SAID_DRAINING: _S.DRAINING,
            _E.GONE: _S.LOST,
        },
        _S.WARMING: {
            _E.WARMED: _S.READY,
            _E.FAILED: _S.EJECTED,
            _E.SAID_DRAINING: _S.DRAINING,
            _E.GONE: _S.LOST,
        },
        _S.READY: {
            _E.FAILED: _S.EJECTED,
            _E.SAID_DRAINING: _S.DRAINING,
            _E.GONE: _S.LOST,
        },
        _S.EJECTED: {
            _E.RETURNED: _S.WARMING,
            _E.SAID_DRAINING: _S.DRAINING,
            _E.GONE: _S.LOST,
        },
        _S.DRAINING: {_E.GONE: _S.LOST},
        _S.LOST: {},
    },
    late=ReplicaEvent,
)

TAKES_CALLS: Final = frozenset({ReplicaState.WARMING, ReplicaState.READY})


class ReplicaLife:
    """The state of one replica."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = ReplicaState.JOINING

    def advance(self, event: ReplicaEvent) -> bool:
        """Go to the next state; return whether the event can happen now."""
        before, self.state = self.state, TRANSITIONS.after(self.state, event)
        return event in TRANSITIONS[before]

    @property
    def takes_calls(self) -> bool:
        """Return whether calls may go to the replica."""
        return self.state in TAKES_CALLS
