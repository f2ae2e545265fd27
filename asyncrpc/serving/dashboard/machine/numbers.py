"""Numbers for JSON: an unknown value is null, never nan or infinite."""

from __future__ import annotations

import math


def known(value: float) -> float | None:
    """Return a number; None if it is nan or infinite."""
    return value if math.isfinite(value) else None


def known_age(value: float) -> float | None:
    """Return a number of seconds; None if it is not known."""
    return value if math.isfinite(value) and value >= 0 else None


def known_bytes(value: int) -> int | None:
    """Return a number of bytes; None if it is not known."""
    return None if value < 0 else value
