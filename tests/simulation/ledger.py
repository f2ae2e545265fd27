"""What was called, what ran, and what the callers were told: do the three agree?

Every call has a number of its own.  The callee enters it when its function begins, on
whatever worker; the caller enters how the call ended for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asyncrpc import CallError, Outcome


@dataclass(slots=True)
class Ledger:
    """The calls of one run.

    Attributes:
        made: who made each call, and what it was.
        ran: on which worker each call ran, as often as it did.
        claims: how each call ended, for who made it.
        reasons: the errors among them.
        errors: how often each class of them came.
        excused: calls of which nobody was told how they ended.
    """

    made: dict[int, str] = field(default_factory=dict)
    ran: dict[int, list[str]] = field(default_factory=dict)
    claims: dict[int, Outcome] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    excused: set[int] = field(default_factory=set)

    def new(self, what: str) -> int:
        """Enter a call that is about to be made; return its number."""
        number = len(self.made)
        self.made[number] = what
        return number

    def begin(self, number: int, where: str) -> None:
        """Enter that a function runs."""
        self.ran.setdefault(number, []).append(where)

    def claim(self, number: int, error: BaseException | None) -> None:
        """Enter how a call ended for its caller."""
        outcome = Outcome.EXECUTED
        if error is not None:
            self.errors[type(error).__name__] += 1
            self.reasons[number] = repr(error)  # no traceback: it holds handles
            is_call = isinstance(error, CallError)
            outcome = error.outcome if is_call else Outcome.UNKNOWN  # type: ignore[attr-defined]
        self.claims[number] = outcome

    def excuse(self, number: int) -> None:
        """Enter that the caller died, or gave up: nobody is told how it ended."""
        self.excused.add(number)

    def problems(self) -> list[str]:
        """Return every disagreement, in words."""
        wrongs = []
        for number, what in self.made.items():
            ran = self.ran.get(number, [])
            outcome = self.claims.get(number)
            why = self.reasons.get(number, "")
            if len(ran) > 1:
                wrongs.append(f"call {number} ({what}) ran twice: on {ran}")
            if outcome is None and number not in self.excused:
                wrongs.append(f"call {number} ({what}) was never answered")
            if outcome is Outcome.EXECUTED and not ran:
                wrongs.append(
                    f"call {number} ({what}) did not run, but is EXECUTED: {why}"
                )
            if outcome is Outcome.NOT_EXECUTED and ran:
                wrongs.append(f"call {number} ({what}) ran, but is NOT_EXECUTED: {why}")
        return wrongs
