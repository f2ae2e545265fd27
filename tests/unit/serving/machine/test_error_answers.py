"""Which error gets which answer; the time that a client gives its request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrpc.errors import (
    CallKindError,
    DeadlineExceededError,
    NotStartedError,
    Outcome,
    OverloadedError,
    OwnerLostError,
    RejectedError,
    RemoteError,
    UsageError,
    WorkerLostError,
    rebuild,
)
from asyncrpc.serving.contract import (
    BadDeadlineError,
    NoTimeLeftError,
    time_allowed_s,
)
from asyncrpc.serving.machine.error_answers import (
    INTERNAL,
    REASON_BYTES_MAX,
    ErrorAnswer,
    answer_to,
    bad_request,
    is_overloaded_status,
)

LATE = DeadlineExceededError(
    function="f", to="b", outcome=Outcome.UNKNOWN, timeout_s=2.0
)
LOST = OwnerLostError(worker="b", incarnation=1, reason="it ended")


class FromFarError(RemoteError, OverloadedError):
    """An error of a worker further on, which is of a class made at run time."""


class RemoteTimeoutError(RemoteError, TimeoutError):
    """A timeout that a called function raised."""


def from_far(**sent: Any) -> BaseException:
    known = {"function": "f", "to": "b", "outcome": Outcome.NOT_EXECUTED}
    return rebuild(FromFarError, ("full",), {**known, **sent})


def answer_for(error: BaseException, **state: Any) -> Any:
    return answer_to(error, **{"is_over": False, "is_closed": False, **state})


@pytest.mark.parametrize(
    ("error", "status", "name", "code", "retry"),
    [
        (LATE, 504, "DeadlineExceededError", 4504, None),
        (RejectedError("no"), 503, "RejectedError", 1013, "1"),
        (CallKindError("use `call`"), 500, "CallKindError", 1011, None),
        (WorkerLostError("gone"), 503, "WorkerLostError", 1013, "1"),
        (LOST, 503, "OwnerLostError", 1013, "1"),
        (OverloadedError("full", retry_after_s=2.1), 503, "OverloadedError", 1013, "3"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_known_errors_have_an_answer(
    error: Exception, status: int, name: str, code: int, retry: str | None
) -> None:
    answer = answer_for(error)
    assert (answer.status, answer.error, answer.close_code) == (status, name, code)
    assert answer.headers.get("Retry-After") == retry
    assert json.loads(answer.body) == {"error": name, "message": str(error)}


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        UsageError("x"),
        RemoteError("x"),
        NotStartedError("none"),
        TimeoutError("of the program"),
        RemoteTimeoutError("of the function"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_the_program_have_no_answer(error: Exception) -> None:
    assert answer_for(error) is None


def test_timeout_after_the_deadline_of_the_request_is_a_504() -> None:
    """Only one that comes after the deadline, and from no function."""
    assert answer_for(TimeoutError(), is_over=True) == ErrorAnswer(
        504, "DeadlineExceededError", "the request took longer than it may", 4504
    )
    assert answer_for(RemoteTimeoutError("its own"), is_over=True) is None


def test_application_whose_worker_has_ended_answers_503() -> None:
    answer = answer_for(NotStartedError("it has ended"), is_closed=True)
    assert (answer.status, answer.error) == (503, "NotStartedError")


@pytest.mark.parametrize(
    ("estimate", "sent"),
    [
        (0, "0"),
        (0.2, "1"),
        (7, "7"),
        (1e9, "3600"),
        (-3, "0"),
        (float("inf"), "3600"),
        (float("nan"), "9"),
        ("soon", "9"),
        (True, "9"),
        (None, "9"),
    ],
)
def test_retry_estimate_is_clamped_or_replaced(estimate: Any, sent: str) -> None:
    """It may come from another worker, where anything can be an attribute."""
    answer = answer_for(from_far(retry_after_s=estimate), retry_after_s=8.5)
    assert (answer.error, answer.headers["Retry-After"]) == ("OverloadedError", sent)


def test_overload_may_have_a_status_of_its_own() -> None:
    full = answer_for(OverloadedError("full", retry_after_s=2.1), overloaded_status=429)
    assert (full.status, full.close_code) == (429, 1013)
    assert full.headers["Retry-After"] == "3"
    assert answer_for(RejectedError("no"), overloaded_status=429).status == 503


@pytest.mark.parametrize("status", [503, 429])
def test_overload_status_is_accepted(status: int) -> None:
    assert is_overloaded_status(status)


@pytest.mark.parametrize("status", [None, True, 0, 200, 500, 504, 503.0, "503"])
def test_other_values_are_not_an_overload_status(status: object) -> None:
    assert not is_overloaded_status(status)


def test_missing_estimate_gives_the_default() -> None:
    answer = answer_for(from_far(), retry_after_s=0.5)
    assert answer.headers["Retry-After"] == "1"


def test_reason_fits_into_a_close_frame() -> None:
    answer = answer_for(RejectedError("ä" * 200), retry_after_s=2)
    size = len(answer.reason.encode())
    assert REASON_BYTES_MAX - 1 <= size <= REASON_BYTES_MAX  # no half character
    assert answer.reason.startswith("RejectedError: retry after 2 s: ää")
    assert bad_request("no").reason == "BadRequest: no"
    assert INTERNAL.reason.startswith("InternalError: the server failed")


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
