"""All scenarios, by name."""

from __future__ import annotations

from typing import Final

from tests.clusters.ray.misuse import MISUSES
from tests.clusters.ray.scenarios import SCENARIOS, Scenario

PLAYED: Final[dict[str, Scenario]] = {**SCENARIOS, **MISUSES}
