"""Pages run in processes that have imported everything."""

from __future__ import annotations

from tests.preloaded import kept_for_life

__all__ = ["kept_for_life"]  # pytest looks for fixtures here
