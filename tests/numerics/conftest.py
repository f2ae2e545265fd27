"""Processes for ranks start from one that has imported what they need."""

from __future__ import annotations

from tests.preloaded import kept_for_life

__all__ = ["kept_for_life"]  # pytest looks for fixtures here
