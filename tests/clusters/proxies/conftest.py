"""Workers behind a proxy are forked from the server that has imported everything."""

from tests.integration.serving.conftest import group
from tests.integration.serving.doors.conftest import door
from tests.preloaded import kept_for_life

__all__ = ["door", "group", "kept_for_life"]  # pytest looks for fixtures here
