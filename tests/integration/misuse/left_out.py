"""What is public by its name, and is not for users to call: with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LEFT_OUT: Final[Mapping[str, str]] = {}
