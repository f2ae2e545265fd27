"""What `make bench-peers` compares works: each side checks its answers as it begins."""

from __future__ import annotations

import pytest

from tests.bench import bench_peers
from tests.bench import workloads as w
from tests.bench.comparing import Comparison


def test_libraries_to_compare_are_installed() -> None:
    assert not bench_peers.missing()


@pytest.mark.parametrize("side", w.ALL)
def test_sides_measure_all_their_workloads(side: str) -> None:
    comparison = Comparison(bench_peers.WORKLOADS, seconds=0.01, sides=[side])
    comparison.run(1)
    assert comparison.failures == {side: {}}
    measured = [
        name
        for name in bench_peers.WORKLOADS
        for row in w.WORKLOADS[name].rows
        if comparison.figure(side, row) is not None
    ]
    expected = [
        name
        for name in bench_peers.WORKLOADS
        for _ in w.WORKLOADS[name].rows
        if side in w.WORKLOADS[name].sides
    ]
    assert measured == expected
