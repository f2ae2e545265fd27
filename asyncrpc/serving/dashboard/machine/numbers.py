"""Numbers as JSON has them: what is not known is null, and never nan."""

from __future__ import annotations

import math


def known(value: float) -> float | None:
    """Return a number; None if it is not known."""
    return None if math.isnan(value) else value


def known_bytes(value: int) -> int | None:
    """Return a number of bytes; None if it is not known."""
    return None if value < 0 else value
