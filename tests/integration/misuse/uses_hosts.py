"""How what is around workers is used: processes, serving, devices, the test kit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.integration.misuse.using import Use

USES: Final[Mapping[str, Use]] = {}
