"""The table of five libraries: what is compared, and how it reads."""

from __future__ import annotations

import pytest

from tests.bench import bench_peers
from tests.bench import workloads as w
from tests.bench.harness import Figure, Row

LATENCY = Row("call, p50", "us")
RATE = Row("RRef: method on a kept one", "1/s", higher_is_better=True)


def figures(*medians: float | None) -> dict[str, Figure | None]:
    return {
        side: None if median is None else Figure((median,))
        for side, median in zip(w.ALL, medians, strict=True)
    }


def test_ratio_is_to_the_best_peer() -> None:
    row = figures(10.0, 50.0, 20.0, None, 400.0)
    assert bench_peers.ratio(LATENCY, row) == pytest.approx(2.0)
    assert bench_peers.ratio(RATE, row) == pytest.approx(10 / 400)


def test_ratio_needs_both_figures() -> None:
    assert bench_peers.ratio(LATENCY, figures(None, 1.0, 1.0, 1.0, 1.0)) is None
    assert bench_peers.ratio(LATENCY, figures(1.0, None, None, None, None)) is None


def test_table_columns_line_up_and_show_dashes_for_gaps() -> None:
    latencies = figures(10.0, 50.0, 20.0, None, 1234.0)
    text = bench_peers.table([(LATENCY, latencies), (RATE, figures(*[None] * 5))])
    assert text.splitlines() == [
        "workload                   unit  asyncrpc  torch  pyzmq  grpc    ray  ratio",
        "call, p50                  us        10.0   50.0   20.0     -  1,234   2.00",
        "method of a remote object  1/s          -      -      -     -      -      -",
    ]


def test_each_workload_runs_on_asyncrpc_torch_and_a_third_side() -> None:
    for name in bench_peers.WORKLOADS:
        sides = w.WORKLOADS[name].sides
        assert {"asyncrpc", "torch"} < set(sides), name
