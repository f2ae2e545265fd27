"""The benchmark of the dashboard runs: quickly, so that it does not break unnoticed."""

from __future__ import annotations

import pytest

from tests.bench import bench_dashboard


async def test_benchmark_measures_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    await bench_dashboard.measure(count=3, rounds=1)
    lines = capsys.readouterr().out.splitlines()
    measured = {line.split()[0] for line in lines if " ms" in line}
    assert measured >= {"summary", "calls", "training", "details", "snapshot"}
    assert measured >= set(bench_dashboard.VIEWS)
