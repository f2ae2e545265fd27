"""The harness and its table of five libraries: statistics, verdicts, and text."""

from __future__ import annotations

import json

import pytest

from tests.bench import bench_peers
from tests.bench import workloads as w
from tests.bench.harness import (
    Budget,
    Figure,
    Result,
    Row,
    as_json,
    collect,
    failures_of,
    from_json,
    gb_per_second,
    measure,
    measure_async,
    p50_p99_us,
    per_second,
    short,
    table,
)

LATENCY = Row("call, p50", "us", target=2.0)
RATE = Row("calls", "1/s", higher_is_better=True)
EXTRA = Row("shared", "us more", limit=50.0)


def result(row: Row, ours: float | None, theirs: float | None) -> Result:
    figures = {
        side: None if value is None else Figure((value,))
        for side, value in (("asyncrpc", ours), ("torch", theirs))
    }
    return Result(row, figures, figures["torch"])


def test_figure_is_the_median_and_the_range() -> None:
    figure = Figure((5.0, 1.0, 3.0))
    assert (figure.median, figure.least, figure.most) == (3.0, 1.0, 5.0)


def test_percentiles_are_in_microseconds_and_within_the_samples() -> None:
    times_s = [number / 1e6 for number in range(1, 102)]
    assert p50_p99_us(times_s) == pytest.approx([51.0, 100.0])
    assert p50_p99_us([2e-6]) == pytest.approx([2.0, 2.0])
    assert p50_p99_us([1e-6, 3e-6])[1] <= 3.0


def test_rates_count_all_time_and_bandwidth_the_median() -> None:
    assert per_second([1.0, 3.0]) == pytest.approx(0.5)
    assert gb_per_second([1.0, 2.0, 30.0], 4_000_000_000) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123, "0.12"),
        (12.34, "12.3"),
        (123.4, "123"),
        (39_391.2, "39,391"),
        (-12.34, "-12.3"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert short(value) == text


def test_ratio_above_one_means_better_for_latency_and_rate() -> None:
    assert result(LATENCY, 100.0, 250.0).ratio == pytest.approx(2.5)
    assert result(RATE, 100.0, 250.0).ratio == pytest.approx(0.4)
    assert result(RATE, 100.0, None).ratio is None


def test_ratio_spread_is_taken_over_paired_starts() -> None:
    figures = {"asyncrpc": Figure((10.0, 20.0)), "torch": Figure((40.0, 40.0))}
    spread = Result(LATENCY, figures, figures["torch"]).ratios
    assert spread == pytest.approx([4.0, 2.0])


@pytest.mark.parametrize(
    ("row", "ours", "theirs", "verdict"),
    [
        (LATENCY, 100.0, 200.0, "ok"),
        (LATENCY, 100.0, 199.0, "short"),
        (LATENCY, 100.0, None, ""),
        (LATENCY, None, 200.0, "failed"),
        (RATE, 100.0, 200.0, ""),
        (EXTRA, 50.0, None, "ok"),
        (EXTRA, 51.0, None, "short"),
    ],
)
def test_row_verdict_follows_from_its_target(
    row: Row, ours: float | None, theirs: float | None, verdict: str
) -> None:
    assert result(row, ours, theirs).verdict == verdict


def test_starts_are_joined_by_row_despite_a_lost_one() -> None:
    starts = {
        "asyncrpc": [{"call, p50": 1.0}, {}, {"call, p50": 3.0}],
        "torch": [{"call, p50": 4.0, "calls": 7.0}],
    }
    latency, rate = collect([LATENCY, RATE, Row("absent", "s")], starts)
    assert latency.figures["asyncrpc"] == Figure((1.0, 3.0))
    assert rate.figures == {"asyncrpc": None, "torch": Figure((7.0,))}


def test_row_may_be_compared_with_another_row_of_either_side() -> None:
    polling = Row("polling", "us", against=("torch", "call, p50"))
    eight = Row("eight", "1/s", higher_is_better=True, against=("asyncrpc", "calls"))
    starts = {
        "asyncrpc": [{"polling": 20.0, "eight": 90.0, "calls": 60.0}],
        "torch": [{"call, p50": 200.0, "eight": 1.0}],
    }
    ratios = [result.ratio for result in collect([polling, eight], starts)]
    assert ratios == pytest.approx([10.0, 1.5])


def test_failed_row_keeps_its_reason_unless_another_start_measured_it() -> None:
    failures = {"call, p50": "it broke", "calls": "it broke once"}
    results = collect([LATENCY, RATE], {"asyncrpc": [{"calls": 1.0}]}, failures)
    assert [result.verdict for result in results] == ["failed", ""]
    assert failures_of(results) == ["call, p50: it broke"]


def test_table_is_aligned() -> None:
    figures = {"asyncrpc": Figure((200.0, 150.0, 250.0)), "torch": None}
    spread = Result(RATE, figures, None)
    lines = table([result(LATENCY, 100.0, 250.0), spread]).splitlines()
    assert lines == [
        "workload   unit       asyncrpc  torch  ratio   target",
        "call, p50  us              100    250   2.50  >= 2.00  ok",
        "calls      1/s   200 (150-250)      -      -        -",
    ]


def test_row_against_another_side_names_the_side_of_its_figure() -> None:
    row = RATE._replace(name="calls, against sockets", against=("sockets", "bare"))
    starts = {
        "asyncrpc": [{row.name: 3.0}],
        "sockets": [{"bare": 2.0}],
    }
    last = table(collect([row], starts)).splitlines()[-1]
    expected = "calls, against sockets 1/s 3.00 sockets: 2.00 1.50 -"
    assert " ".join(last.split()) == expected


def test_markdown_has_a_rule_and_right_aligned_numbers() -> None:
    lines = table([result(LATENCY, 100.0, 250.0)], markdown=True).splitlines()
    assert lines == [
        "| workload  | unit | asyncrpc | torch | ratio |  target |     |",
        "| --------- | ---- | -------: | ----: | ----: | ------: | --- |",
        "| call, p50 | us   |      100 |   250 |  2.50 | >= 2.00 | ok  |",
    ]


def test_results_survive_json() -> None:
    polling = Row("polling", "us", target=5.0, against=("torch", "call, p50"))
    starts = {"asyncrpc": [{"polling": 20.0}], "torch": [{"call, p50": 200.0}]}
    results = collect([polling, LATENCY, EXTRA], starts, {"shared": "no"})
    written = json.loads(json.dumps(as_json(results)))
    assert from_json(written) == results
    assert (written[0]["ratio"], written[0]["verdict"]) == (10.0, "ok")


def test_measure_warms_up_and_repeats_at_least_three_times() -> None:
    calls = []
    times_s = measure(lambda: calls.append(1), Budget(0.0, at_least=3), warm_ups=2)
    assert (len(times_s), len(calls)) == (3, 5)


async def test_measure_async_warms_up_and_repeats_at_least_three_times() -> None:
    calls = []

    async def action() -> None:
        calls.append(1)

    times_s = await measure_async(action, Budget(0.0, at_least=3), warm_ups=2)
    assert (len(times_s), len(calls)) == (3, 5)


PEERS_LATENCY = Row("call, p50", "us")
PEERS_RATE = Row("RRef: method on a kept one", "1/s", higher_is_better=True)


def figures(*medians: float | None) -> dict[str, Figure | None]:
    return {
        side: None if median is None else Figure((median,))
        for side, median in zip(w.ALL, medians, strict=True)
    }


def test_ratio_is_to_the_best_peer() -> None:
    row = figures(10.0, 50.0, 20.0, None, 400.0)
    assert bench_peers.ratio(PEERS_LATENCY, row) == pytest.approx(2.0)
    assert bench_peers.ratio(PEERS_RATE, row) == pytest.approx(10 / 400)


def test_ratio_needs_both_figures() -> None:
    assert bench_peers.ratio(PEERS_LATENCY, figures(None, 1.0, 1.0, 1.0, 1.0)) is None
    assert (
        bench_peers.ratio(PEERS_LATENCY, figures(1.0, None, None, None, None)) is None
    )


def test_table_columns_line_up_and_show_dashes_for_gaps() -> None:
    latencies = figures(10.0, 50.0, 20.0, None, 1234.0)
    text = bench_peers.table(
        [(PEERS_LATENCY, latencies), (PEERS_RATE, figures(*[None] * 5))]
    )
    assert text.splitlines() == [
        "workload                   unit  asyncrpc  torch  pyzmq  grpc    ray  ratio",
        "call, p50                  us        10.0   50.0   20.0     -  1,234   2.00",
        "method of a remote object  1/s          -      -      -     -      -      -",
    ]


def test_each_workload_runs_on_asyncrpc_torch_and_a_third_side() -> None:
    for name in bench_peers.WORKLOADS:
        sides = w.WORKLOADS[name].sides
        assert {"asyncrpc", "torch"} < set(sides), name
