"""Workers behind a proxy are forked from the server that has imported everything."""

from tests.preloaded import kept_for_life

__all__ = ["kept_for_life"]  # pytest looks for fixtures here
