"""A `Cluster` in bundles of a real Ray cluster; `grounds` has what is played."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from tests.clusters.ray.conftest import Session
from tests.clusters.ray.grounds import GROUNDS


@pytest.mark.parametrize("name", GROUNDS)
def test_cluster_passes_the_scenario(session: Session, name: str) -> None:
    session.play(name)
    session.play("no_placement_group_is_left")
