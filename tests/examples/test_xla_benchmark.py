"""The figures of the table, and torch_xla's own gaps by the same arithmetic."""

from __future__ import annotations

import pytest

from examples.xla_benchmark import COLUMNS, Rates, gap


def test_rates_are_summarized_as_in_the_table() -> None:
    rates = Rates.of([float(rate) for rate in range(1, 12)])
    assert COLUMNS == ("mean", "median", "90 %", "std", "CV")
    assert rates[:3] == (6.0, 6.0, 10.0)
    assert rates.std == pytest.approx(10**0.5)
    assert rates.cv == pytest.approx(10**0.5 / 6)


@pytest.mark.parametrize(
    ("compared", "native", "ddp", "reported"),
    [
        (
            "mean",
            Rates(418.54, 419.22, 430.40, 9.76, 0.02),
            Rates(395.97, 395.54, 407.13, 7.60, 0.02),
            0.0539,
        ),
        (
            "90 %",
            Rates(17864.19, 20108.96, 24351.74, 5866.83, 0.33),
            Rates(10701.39, 11770.00, 14313.78, 3102.92, 0.29),
            0.4122,
        ),
    ],
    ids=["ResNet50", "MNIST"],
)
def test_gap_matches_the_figures_of_torch_xla(
    compared: str, native: Rates, ddp: Rates, reported: float
) -> None:
    assert gap(native, ddp, compared) == pytest.approx(reported, abs=5e-5)
    assert gap(native, native, compared) == 0
