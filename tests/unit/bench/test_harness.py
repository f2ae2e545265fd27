"""The harness: statistics, and a table that can be read."""

from __future__ import annotations

import pytest

from tests.bench.harness import (
    Budget,
    Figure,
    Result,
    Row,
    as_json,
    collect,
    gb_per_second,
    measure,
    measure_async,
    p50_p99_us,
    per_second,
    short,
    table,
)

LATENCY = Row("call, p50", "us")
RATE = Row("calls", "1/s", higher_is_better=True)


def result(row: Row, ours: float, theirs: float | None) -> Result:
    figures = {
        "asyncrpc": Figure(ours, ours, ours),
        "torch": None if theirs is None else Figure(theirs, theirs, theirs),
    }
    return Result(row, figures)


def test_a_figure_is_the_median_and_the_range() -> None:
    assert Figure.of([5.0, 1.0, 3.0]) == Figure(median=3.0, least=1.0, most=5.0)


def test_percentiles_are_in_microseconds_and_never_beyond_what_was_seen() -> None:
    times_s = [number / 1e6 for number in range(1, 102)]
    assert p50_p99_us(times_s) == pytest.approx([51.0, 100.0])
    assert p50_p99_us([2e-6]) == pytest.approx([2.0, 2.0])
    assert p50_p99_us([1e-6, 3e-6])[1] <= 3.0


def test_rates_count_all_time_and_bandwidth_the_median() -> None:
    assert per_second([1.0, 3.0]) == pytest.approx(0.5)
    assert gb_per_second([1.0, 2.0, 30.0], 4_000_000_000) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.123, "0.12"), (12.34, "12.3"), (123.4, "123"), (39_391.2, "39,391")],
)
def test_numbers_have_three_digits_that_count(value: float, text: str) -> None:
    assert short(value) == text


def test_a_ratio_over_one_means_better_whichever_way_is_better() -> None:
    assert result(LATENCY, 100.0, 250.0).ratio == pytest.approx(2.5)
    assert result(RATE, 100.0, 250.0).ratio == pytest.approx(0.4)
    assert result(RATE, 100.0, None).ratio is None


def test_starts_are_joined_by_row_and_a_lost_one_leaves_the_rest() -> None:
    starts = {
        "asyncrpc": [{"call, p50": 1.0}, {}, {"call, p50": 3.0}],
        "torch": [{"call, p50": 4.0, "calls": 7.0}],
    }
    latency, rate = collect([LATENCY, RATE, Row("absent", "s")], starts)
    assert latency.figures["asyncrpc"] == Figure(2.0, 1.0, 3.0)
    assert rate.figures == {"asyncrpc": None, "torch": Figure(7.0, 7.0, 7.0)}


def test_the_table_is_aligned() -> None:
    spread = Result(RATE, {"asyncrpc": Figure(200.0, 150.0, 250.0), "torch": None})
    lines = table([result(LATENCY, 100.0, 250.0), spread]).splitlines()
    assert lines == [
        "workload   unit       asyncrpc  torch  ratio",
        "call, p50  us              100    250   2.50",
        "calls      1/s   200 (150-250)      -      -",
    ]


def test_markdown_has_a_rule_and_right_aligned_numbers() -> None:
    lines = table([result(LATENCY, 100.0, 250.0)], markdown=True).splitlines()
    assert lines == [
        "| workload  | unit | asyncrpc | torch | ratio |",
        "| --------- | ---- | -------: | ----: | ----: |",
        "| call, p50 | us   |      100 |   250 |  2.50 |",
    ]


def test_json_keeps_every_figure() -> None:
    (written,) = as_json([result(LATENCY, 100.0, None)])
    assert written == {
        "name": "call, p50",
        "unit": "us",
        "higher_is_better": False,
        "asyncrpc": {"median": 100.0, "least": 100.0, "most": 100.0},
        "torch": None,
        "ratio": None,
    }


def test_measuring_warms_up_and_repeats_as_often_as_it_must() -> None:
    calls = []
    times_s = measure(lambda: calls.append(1), Budget(0.0, at_least=3), warm_ups=2)
    assert (len(times_s), len(calls)) == (3, 5)


async def test_measuring_what_is_awaited_does_the_same() -> None:
    calls = []

    async def action() -> None:
        calls.append(1)

    times_s = await measure_async(action, Budget(0.0, at_least=3), warm_ups=2)
    assert (len(times_s), len(calls)) == (3, 5)
