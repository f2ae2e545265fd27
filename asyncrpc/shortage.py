"""Shortage: which resource has run out, what to do about it, and how often to say so.

What a stranger can cause as often as he likes is logged once a second, with the number
of times that it was left out.
"""

from __future__ import annotations

import errno
import resource
from typing import Final

LOGGED_EVERY_S: Final = 1.0
# Of these, a listening socket stays readable although it cannot accept.
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def descriptors_max() -> int:
    """Return how many descriptors this process may have now; it may change."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def shortage_of(error: BaseException | None) -> str:
    """Return which descriptors have run out, and the cure; empty: it is another error.

    Args:
        error: or one of its causes, says what the kernel refused.
    """
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EMFILE:
            return (
                f"this process has no file descriptor left of {descriptors_max()}: "
                "raise its limit, `ulimit -n`"
            )
        if number == errno.ENFILE:
            return (
                "this host has no file descriptor left: raise its limit, "
                "`sysctl fs.file-max`"
            )
        error = error.__cause__
    return ""


class LogLimit:
    """Lets one line a second through, for each kind of line."""

    def __init__(self) -> None:
        """Let the first line of each kind through."""
        self._kinds: dict[str, tuple[float, int]] = {}

    def left_out(self, kind: str, now_s: float) -> str | None:
        """Return what to add to a line; None: leave the line out.

        Args:
            kind: of the line; the program has few of them.
            now_s: the time.
        """
        quiet_until_s, unlogged = self._kinds.get(kind, (now_s, 0))
        if now_s < quiet_until_s:
            self._kinds[kind] = quiet_until_s, unlogged + 1
            return None
        self._kinds[kind] = now_s + LOGGED_EVERY_S, 0
        return f" ({unlogged} more before it)" if unlogged else ""
