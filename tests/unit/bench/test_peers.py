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


def test_the_ratio_is_to_the_best_of_the_others() -> None:
    found = figures(10.0, 50.0, 20.0, None, 400.0)
    assert bench_peers.ratio(LATENCY, found) == pytest.approx(2.0)
    assert bench_peers.ratio(RATE, found) == pytest.approx(10 / 400)


def test_without_one_of_two_figures_there_is_no_ratio() -> None:
    assert bench_peers.ratio(LATENCY, figures(None, 1.0, 1.0, 1.0, 1.0)) is None
    assert bench_peers.ratio(LATENCY, figures(1.0, None, None, None, None)) is None


def test_the_columns_of_the_table_line_up_and_what_is_not_there_is_a_dash() -> None:
    found = figures(10.0, 50.0, 20.0, None, 1234.0)
    text = bench_peers.table([(LATENCY, found), (RATE, figures(*[None] * 5))])
    assert text.splitlines() == [
        "workload                   unit  asyncrpc  torch  pyzmq  grpc    ray  ratio",
        "call, p50                  us        10.0   50.0   20.0     -  1,234   2.00",
        "method of a remote object  1/s          -      -      -     -      -      -",
    ]


def test_each_workload_is_measured_by_asyncrpc_and_by_another() -> None:
    for name in bench_peers.WORKLOADS:
        sides = w.WORKLOADS[name].sides
        assert {"asyncrpc", "torch"} < set(sides), name
