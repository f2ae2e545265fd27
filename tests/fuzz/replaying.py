"""Where the corpus is, and what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).parent / "corpus"
TARGETS: Final = (
    *("frames", "handshake", "hello", "http", "lanes", "messages", "sidecar", "values"),
)
