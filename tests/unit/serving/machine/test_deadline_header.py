"""The time that a client gives its request."""

from __future__ import annotations

import pytest

from asyncrpc.serving.machine.deadline_header import (
    BadDeadlineError,
    NoTimeLeftError,
    time_allowed_s,
)


@pytest.mark.parametrize(
    ("values", "timeout_s", "allowed_s"),
    [
        ([], None, None),
        ([], 2.0, 2.0),
        (["1500"], None, 1.5),
        (["1500"], 2.0, 1.5),
        (["1500"], 1.0, 1.0),
        ([" 1 "], 1.0, 0.001),
        (["0000000001"], None, 0.001),
        (["9999999999"], None, 9999999.999),
    ],
)
def test_client_may_shorten_its_time_and_not_lengthen_it(
    values: list[str], timeout_s: float | None, allowed_s: float | None
) -> None:
    assert time_allowed_s("T", values, timeout_s) == allowed_s


@pytest.mark.parametrize(("values", "timeout_s"), [(["0"], None), ([], 0.0)])
def test_request_without_time_is_refused(
    values: list[str], timeout_s: float | None
) -> None:
    with pytest.raises(NoTimeLeftError):
        time_allowed_s("T", values, timeout_s)


@pytest.mark.parametrize(
    "value", ["", "-1", "+1", "1.0", "1e3", "1_000", "0x1", "²", "1 s", "9" * 11]
)
def test_malformed_milliseconds_are_named(value: str) -> None:
    with pytest.raises(BadDeadlineError, match="the header T must be whole milli") as e:
        time_allowed_s("T", [value], 1.0)
    assert repr(value) in str(e.value)


def test_long_value_is_not_repeated() -> None:
    with pytest.raises(BadDeadlineError) as caught:
        time_allowed_s("T", ["x" * 10_000], None)
    assert len(str(caught.value)) < 200


def test_repeated_header_is_refused() -> None:
    with pytest.raises(BadDeadlineError, match="was sent 2 times; send it once"):
        time_allowed_s("T", ["1", "1"], None)
