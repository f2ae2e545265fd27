"""When a wait counts as hanging: on a busy machine what takes seconds takes minutes."""

from typing import Final

HANGS_S: Final = 900.0
