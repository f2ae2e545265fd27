"""The table of a state machine: the events of each state, and what follows.

One policy holds for an event that a state does not list.  It is refused with an error
that says who is at fault, and changes nothing; unless the table names it as late: then
it may come at any time, from a timer, a peer or the program, and is passed over.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import TypeVar

from asyncrpc.errors import LocalProtocolError, ProtocolError

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class StateTable(dict[S, Mapping[E, S]]):
    """The transitions of one machine, and what becomes of an event that has none.

    It is a dict, as some are read in every call of a program: from a state to what may
    happen in it.

    Args:
        subject: what is in these states, for the error: "a dial".
        rows: of every state, the events that may happen in it, and the next state.
        late: events that may come in a state that does not list them.  They change
            nothing there.
        error: raised for other events.  The default is a fault of this program;
            `RemoteProtocolError` is one of the peer whose message made the event.

    Attributes:
        subject, late, error: as given.
    """

    __slots__ = ("error", "late", "subject")

    def __init__(
        self,
        subject: str,
        rows: Mapping[S, Mapping[E, S]],
        *,
        late: Iterable[E] = (),
        error: type[ProtocolError] = LocalProtocolError,
    ) -> None:
        super().__init__(rows)
        self.subject = subject
        self.late = frozenset(late)
        self.error = error

    def after(self, state: S, event: E, subject: str = "") -> S:
        """Return the state that follows a state by an event, or raise `error`.

        Args:
            subject: what is in the state, for the error; empty: that of the table.
        """
        following = self[state].get(event)
        if following is not None:
            return following
        if event in self.late:
            return state
        raise self.refusal(state, event, subject)

    def refusal(self, state: S, event: E, subject: str = "") -> ProtocolError:
        """Return the error for an event that cannot happen in a state."""
        return self.error(
            f"{subject or self.subject} cannot take the event {_word(event)} in the "
            f"state {_word(state)}"
        )


def _word(member: enum.Enum) -> str:
    """Return the text of a state or event: its value, if this is one."""
    return repr(member.value) if isinstance(member.value, str) else member.name
