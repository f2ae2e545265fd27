"""What may be logged of peers: how often, how long, and in which characters.

A peer, or a stranger, can cause a line as often as it likes, and writes a part of it.
So every line of this package passes a filter of its logger, and none needs a limit of
its own.  The logger is the process's, so the filter is as well (ADR 44).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.loop.clock import now_s

LOGGED_EVERY_S: Final = 1.0
LINES_AT_ONCE: Final = 100  # of one kind, about one peer
FORGOTTEN_AFTER_S: Final = 60.0  # without such a line; then as many may come at once
PEERS_MAX: Final = 64  # that are told apart in the lines of one kind
LINE_CHARACTERS_MAX: Final = 4096
TRACEBACK_CHARACTERS_MAX: Final = 16384
_OTHERS: Final = object()  # the peers beyond `PEERS_MAX`
_FORMATTER: Final = logging.Formatter()


@dataclass(slots=True)
class _Lines:
    """The lines of one kind: how many went through, and how many since did not."""

    through: int = 0
    next_s: float = 0.0  # when one may go through, once so many have
    left_out: int = 0
    last_s: float = 0.0


class LogLimit:
    """Lets the first lines of each kind through, then one a second."""

    def __init__(self, at_once: int = 1) -> None:
        self._kinds: dict[Hashable, _Lines] = {}
        self._at_once = at_once

    def left_out(self, kind: Hashable, now_s: float) -> str | None:
        """Return what to add to a line; None: leave the line out.

        Args:
            kind: of the line; of more than `PEERS_MAX` some are counted as one.
        """
        if kind not in self._kinds and len(self._kinds) >= PEERS_MAX:
            self._forget(now_s)
            if len(self._kinds) >= PEERS_MAX:
                kind = _OTHERS
        lines = self._kinds.setdefault(kind, _Lines())
        if now_s - lines.last_s > FORGOTTEN_AFTER_S:
            lines.through = 0
        lines.last_s = now_s
        lines.through += 1
        if lines.through > self._at_once and now_s < lines.next_s:
            lines.left_out += 1
            return None
        lines.next_s = now_s + LOGGED_EVERY_S
        more, lines.left_out = lines.left_out, 0
        return f" ({more} more before it)" if more else ""

    def _forget(self, now_s: float) -> None:
        # Lines come from several threads: a copy cannot change under the loop.
        for kind, lines in list(self._kinds.items()):
            if now_s - lines.last_s > FORGOTTEN_AFTER_S:
                self._kinds.pop(kind, None)


class PeerLineFilter(logging.Filter):
    """Bounds the lines that peers cause: their number, length and characters.

    Lines are of a kind if the same statement logs them.  Whom a line is about is in its
    first two arguments, if they are strings: each has a limit of its own.
    """

    def __init__(self, now_s: Callable[[], float] = now_s) -> None:
        super().__init__()
        self._limits: dict[Hashable, LogLimit] = {}
        self._now_s = now_s

    def forget(self) -> None:
        """Let as many lines through as at the beginning."""
        self._limits.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line is logged; shorten and escape what it says."""
        statement = record.pathname, record.lineno
        limit = self._limits.setdefault(statement, LogLimit(LINES_AT_ONCE))
        args = record.args[:2] if isinstance(record.args, tuple) else ()
        about = tuple(arg for arg in args if isinstance(arg, str))
        more = limit.left_out(about, self._now_s())
        if more is None:
            return False
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  (a user's `__str__`: the handler says so)
            return True
        clean = _clean(text, LINE_CHARACTERS_MAX) + more
        if clean != text:
            record.msg, record.args = clean, ()
        if record.exc_info and not record.exc_text:
            traceback = _FORMATTER.formatException(record.exc_info)
            record.exc_text = _clean(traceback, TRACEBACK_CHARACTERS_MAX)
        return True


def _clean(text: str, characters_max: int) -> str:
    """Return a text that looks like one line of the log, or one with indented ones."""
    if len(text) > characters_max:
        half = characters_max // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}... ({left_out} characters) ...{text[-half:]}"
    if text.isprintable():
        return text
    return "\n  ".join(map(printable, text.split("\n")))


def printable(text: str) -> str:
    """Return a text of a peer without what would command the terminal."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in text
    )


logging.getLogger("asyncrpc").addFilter(PeerLineFilter())
