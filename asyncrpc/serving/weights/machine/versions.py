"""Which version of its weights a replica serves, and the state of new ones.

    IDLE -BEGUN-> STAGING -PART-> STAGING -LAST_PART-> STAGED -COMMITTED-> IDLE

New weights arrive in parts, apart from those that are served.  When all parts are
there, they replace the served ones in one step; before that, nothing changes what is
served.  The previous versions are kept, so that a rollback is one step.

Invariants:
    - what is served is one version, whole;
    - a part counts only for the transfer that it belongs to;
    - no number is served twice in a row for different weights.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import Outcome, RejectedError, UsageError


class TransferState(enum.Enum):
    """The state of new weights."""

    IDLE = "no new weights are under way"
    STAGING = "parts of new weights arrive"
    STAGED = "the new weights are complete"


class TransferEvent(enum.Enum):
    """What a publisher does, or what happens to it."""

    BEGUN = "a publisher announces new weights"
    PART = "a part has arrived, and others are missing"
    LAST_PART = "the last part has arrived"
    COMMITTED = "the publisher commits the new weights"
    ABANDONED = "the publisher gives them up, or is gone"
    ROLLED_BACK = "the previous version is served again"


_S, _E = TransferState, TransferEvent

TRANSITIONS: Final = StateTable(
    "a transfer of weights",
    {
        _S.IDLE: {_E.BEGUN: _S.STAGING, _E.ROLLED_BACK: _S.IDLE},
        _S.STAGING: {
            _E.PART: _S.STAGING,
            _E.LAST_PART: _S.STAGED,
            _E.ABANDONED: _S.IDLE,
            _E.ROLLED_BACK: _S.IDLE,
        },
        _S.STAGED: {
            _E.COMMITTED: _S.IDLE,
            _E.ABANDONED: _S.IDLE,
            _E.ROLLED_BACK: _S.IDLE,
        },
    },
    late=TransferEvent,
)


class TransferId(NamedTuple):
    """One transfer: which publisher it is from, and a counter there."""

    publisher: int
    serial: int


class VersionHistory:
    """The versions of one replica.

    Attributes:
        kept: earlier versions that can be served again, the latest last.
        transfer: which new weights are under way; None: no transfer is.
        missing: names of the tensors that have not arrived.
    """

    __slots__ = (
        "_kept_max",
        "kept",
        "missing",
        "served",
        "staged",
        "state",
        "transfer",
    )

    def __init__(self, served: int, kept_max: int) -> None:
        self.state = TransferState.IDLE
        self.served = served
        self.kept: list[int] = []
        self._kept_max = kept_max
        self.transfer: TransferId | None = None
        self.staged = served
        self.missing: set[str] = set()

    def advance(self, event: TransferEvent) -> None:
        """Go to the next state."""
        self.state = TRANSITIONS.after(self.state, event)
        if self.state is TransferState.IDLE:
            self.transfer = None
            self.missing.clear()

    def begin(self, transfer: TransferId, version: int, names: Iterable[str]) -> None:
        """Begin a transfer; an earlier one of the same publisher is given up."""
        if version == self.served or version in self.kept:
            raise UsageError(
                f"version {version} is here already; give new weights a new number"
            )
        if self.transfer is not None:
            if self.transfer.publisher != transfer.publisher:
                raise RejectedError(
                    f"version {self.staged} of another publisher is under way; try"
                    " again when it is served or given up",
                    outcome=Outcome.NOT_EXECUTED,
                )
            self.advance(TransferEvent.ABANDONED)
        self.advance(TransferEvent.BEGUN)
        self.transfer, self.staged = transfer, version
        self.missing = set(names)

    def take(self, transfer: TransferId, names: Collection[str]) -> bool:
        """Take a part; return whether it was the last one."""
        self._check(transfer, TransferState.STAGING)
        unwanted = sorted(set(names) - self.missing)
        if unwanted:
            raise UsageError(f"tensor {unwanted[0]!r} was not expected")
        self.missing -= set(names)
        is_last = not self.missing
        self.advance(TransferEvent.LAST_PART if is_last else TransferEvent.PART)
        return is_last

    def commit(self, transfer: TransferId) -> int:
        """Serve the new weights from now on; return the dropped version, or -1."""
        self._check(transfer, TransferState.STAGED)
        self.kept.append(self.served)
        self.served = self.staged
        self.advance(TransferEvent.COMMITTED)
        return self.kept.pop(0) if len(self.kept) > self._kept_max else -1

    def abandon(self, transfer: TransferId) -> bool:
        """Give up a transfer; return whether it was under way."""
        if self.transfer != transfer:
            return False
        self.advance(TransferEvent.ABANDONED)
        return True

    def on_lost(self, publisher: int) -> bool:
        """Give up the transfer of a lost publisher; return whether there was one."""
        if self.transfer is None or self.transfer.publisher != publisher:
            return False
        self.advance(TransferEvent.ABANDONED)
        return True

    def roll_back(self, from_version: int) -> bool:
        """Serve the previous version again if `from_version` is served.

        A transfer under way is dropped.  A second call does nothing.
        """
        if self.served != from_version:
            return False
        if not self.kept:
            raise RejectedError(
                f"version {from_version} is served, and no earlier one is kept",
                outcome=Outcome.NOT_EXECUTED,
            )
        self.advance(TransferEvent.ROLLED_BACK)
        self.served = self.kept.pop()
        return True

    def _check(self, transfer: TransferId, state: TransferState) -> None:
        if self.transfer != transfer or self.state is not state:
            raise RejectedError(
                f"{transfer} is not {state.name} here: {self.state.value}",
                outcome=Outcome.NOT_EXECUTED,
            )
