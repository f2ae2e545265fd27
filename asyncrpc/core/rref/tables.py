"""The two machines of one worker, and what carries out their effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from asyncrpc.core.ids import RRefId
from asyncrpc.core.rref import machine as m
from asyncrpc.core.rref.messages import Gone, Probe, Register, Registered, Settled
from asyncrpc.core.rref.notices import Notices
from asyncrpc.core.rref.shared import SharedById
from asyncrpc.core.rref.values import Values
from asyncrpc.core.services.schema import Notice

# What a reference takes at its owner besides its value, as measured.
REFERENCE_BYTES: Final = 1 << 10

_NOTICES: Final[dict[type, Callable[[RRefId], Notice]]] = {
    m.SendRegister: Register,
    m.SendRegistered: Registered,
    m.SendGone: Gone,
    m.SendProbe: Probe,
    m.SendSettled: Settled,
}


class Tables:
    """Which worker holds which value: the owner's table, the user's, and their effects.

    Attributes:
        user: of the values of others that are held here.
    """

    def __init__(
        self,
        owner: m.OwnerTable,
        user: m.UserTable,
        values: Values,
        shared: SharedById,
        notices: Notices,
    ) -> None:
        """Join the machines to what carries out their effects.

        Args:
            values: of this worker; effects free them.
        """
        self.owner = owner
        self.user = user
        self._values = values
        self._shared = shared
        self._notices = notices
        self._actions: dict[type, Callable[[Any], None]] = {
            m.SendRelease: self._send_release,
            m.SendLoanReturned: self._return_loan,
            m.Freed: self._free,
            m.NotWanted: self._free,
            m.ValueGone: self._fail_value,
            m.HandlesLost: self._lose_handles,
            m.HandlesApart: self._set_apart,
            m.FindOwner: self._find,
            **dict.fromkeys(_NOTICES, self._send),
        }

    def carry_out(self, effects: Iterable[m.Effect]) -> None:
        """Do what a machine has decided, in its order."""
        for effect in effects:
            self._actions[type(effect)](effect)

    def _send_release(self, effect: m.SendRelease) -> None:
        self._notices.release(effect.to, effect.rref_id, effect.forks)

    def _return_loan(self, effect: m.SendLoanReturned) -> None:
        self._notices.return_loan(effect.to, effect.token)

    def _send(self, effect: Any) -> None:
        notice = _NOTICES[type(effect)]
        self._notices.send(effect.to, notice(effect.rref_id))

    def _free(self, effect: m.Freed | m.NotWanted) -> None:
        self._values.free(effect.rref_id, "the value was freed before it was made")

    def _fail_value(self, effect: m.ValueGone) -> None:
        self._values.free(
            effect.rref_id,
            "the value will never be made: this worker refused to make it, or its "
            "creator was lost before the call that was to make it arrived",
        )

    def _set_apart(self, effect: m.HandlesApart) -> None:
        self._shared.set_apart(effect.rref_id)

    def _find(self, effect: m.FindOwner) -> None:
        self._notices.connect(effect.owner)

    def _lose_handles(self, effect: m.HandlesLost) -> None:
        self._shared.lose(effect.rref_id, effect.cause)
