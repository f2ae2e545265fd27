"""A gang on a real Ray cluster of several nodes; `scenarios` has what is played."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from tests.clusters.ray.conftest import Play
from tests.clusters.ray.scenarios import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_gang(play: Play, name: str) -> None:
    play(name)
