"""Numbers as JSON has them."""

from __future__ import annotations

import math
import sys

import pytest

from asyncrpc.serving.dashboard.machine.numbers import known, known_age, known_bytes
from tests.unit.serving.dashboard.machine.told import NO_NUMBERS

FINITE = (0.0, -0.0, 1e-300, -1.5, 7, sys.float_info.max, 1 << 63)


@pytest.mark.parametrize("value", FINITE)
def test_a_number_is_itself(value: float) -> None:
    assert known(value) == value


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_number_is_not_known(value: float) -> None:
    assert known(value) is None
    assert known_age(value) is None


def test_an_age_below_zero_is_not_known() -> None:
    assert known_age(-1.0) is None
    assert known_age(-1e-9) is None
    assert known_age(0.0) == 0.0
    assert known_age(math.pi) == math.pi


def test_bytes_below_zero_are_not_known() -> None:
    assert known_bytes(-1) is None
    assert known_bytes(0) == 0
    assert known_bytes(1 << 62) == 1 << 62
