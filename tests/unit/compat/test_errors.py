"""Errors become what torch would raise, with its text; so do wrong device maps."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrpc.compat.rpc import errors
from asyncrpc.compat.rpc.options import TensorPipeRpcBackendOptions
from asyncrpc.compat.rpc.starting import DeviceWishes, check_device_maps
from asyncrpc.core.serde import describe_exception, rebuild_exception
from asyncrpc.errors import (
    DeadlineExceededError,
    DecodeError,
    EncodeError,
    Outcome,
    WorkerLostError,
)
from tests.unit.core.serde.loopback import TRUSTED, round_trip


class TwoArguments(Exception):  # noqa: N818
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)


class Custom(Exception):  # noqa: N818
    pass


def rank_of(name: str) -> int:
    return int(name.removeprefix("worker"))


def of_callee(function: Callable[[], Any]) -> BaseException:
    """Return what a caller gets of a function that raises on worker1."""
    try:
        function()
    except BaseException as error:  # noqa: BLE001
        tree = describe_exception(error, TRUSTED, worker="worker1", pid=7)
    return rebuild_exception(
        round_trip(tree), TRUSTED.functions, function="f", to="worker1"
    )


def raising(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("raised", "by_future", "by_fetch"),
    [
        (ValueError("one\ntwo"), ValueError, ValueError),
        (TypeError("t"), TypeError, TypeError),
        (KeyError("k"), RuntimeError, KeyError),
        (Custom("c"), RuntimeError, Custom),
        (RuntimeError("r"), RuntimeError, RuntimeError),
    ],
    ids=lambda case: getattr(case, "__name__", None) or type(case).__name__,
)
def test_future_keeps_two_types_and_a_fetch_keeps_all(
    raised: Exception,
    by_future: type[Exception],
    by_fetch: type[Exception],
) -> None:
    error = of_callee(raising(raised))
    waited = errors.of_future(error, rank_of)
    fetched = errors.of_call(error, rank_of)
    assert type(waited) is by_future
    assert type(fetched) is by_fetch
    assert str(waited).startswith(f"{type(raised).__name__}: ")
    for text in (waited.args[0], fetched.args[0]):
        assert "On WorkerInfo(id=1, name=worker1):\n" in text.replace("\\n", "\n")
        assert type(raised).__name__ in text
        assert "Traceback (most recent call last)" in text


def test_newlines_of_a_text_arrive_unchanged() -> None:
    failed = errors.of_future(of_callee(raising(ValueError("one\ntwo"))), rank_of)
    assert "ValueError('one\ntwo')" in str(failed)


def test_exception_with_two_arguments_becomes_a_runtime_error() -> None:
    failed = errors.of_call(of_callee(raising(TwoArguments(1, "foo"))), rank_of)
    assert type(failed) is RuntimeError
    assert re.match(
        r"Failed to create original exception type\. Error msg was .*missing 1 .*"
        r"Original exception on remote side was On WorkerInfo\(id=1, name=worker1\)",
        str(failed),
        re.DOTALL,
    )


def test_function_that_calls_an_operator_is_not_reported_as_operator() -> None:
    def function() -> Any:
        return torch.mm(torch.ones(2, 3), torch.ones(2, 3))

    failed = errors.of_future(of_callee(function), rank_of)
    assert type(failed) is RuntimeError
    assert str(failed).startswith("RuntimeError: On WorkerInfo(id=1, name=worker1):")


@pytest.mark.parametrize("in_seconds", [0.1, 1.0])
def test_timeout_of_a_call_is_told_in_milliseconds(in_seconds: float) -> None:
    late = DeadlineExceededError(
        function="f", to="worker1", outcome=Outcome.UNKNOWN, timeout_s=in_seconds
    )
    for translated in (errors.of_call, errors.of_future):
        failed = translated(late, rank_of)
        assert type(failed) is RuntimeError
        assert str(failed) == (
            f"RPCErr:1:RPC ran for more than set timeout ({in_seconds * 1000:.0f} ms) "
            "and will now be marked with an error"
        )


def test_unpicklable_argument_raises_the_error_of_pickle() -> None:
    cannot = EncodeError("a lock cannot be sent", function="f", to="worker1")
    assert type(errors.of_call(cannot, rank_of)) is RuntimeError
    cannot.__cause__ = TypeError("cannot pickle '_thread.lock' object")
    assert errors.of_call(cannot, rank_of) is cannot.__cause__


def test_reference_to_a_missing_value_cannot_travel() -> None:
    cannot = EncodeError("it cannot be sent", function="f", to="worker1")
    cannot.__cause__ = DeadlineExceededError(
        function="g", to="worker1", outcome=Outcome.UNKNOWN, timeout_s=1.0
    )
    failed = errors.of_call(cannot, rank_of)
    assert type(failed) is RuntimeError
    assert "RRef creation" in str(failed)


def test_function_missing_at_the_callee_is_explained() -> None:
    absent = DecodeError("module 'm' has no 'f'", function="f", to="worker1")
    for error in (absent, of_callee(raising(absent))):
        failed = errors.of_future(error, rank_of)
        assert type(failed) is RuntimeError
        assert "RPC pickler does not serialize" in str(failed)


def test_lost_worker_becomes_a_runtime_error() -> None:
    lost = WorkerLostError("it is gone", function="f", to="worker1")
    failed = errors.of_call(lost, rank_of)
    assert type(failed) is RuntimeError
    assert "it is gone" in str(failed)
    other = OSError("not ours")
    assert errors.of_call(other, rank_of) is other


async def test_cancelled_call_says_that_rpc_has_ended() -> None:
    call: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    call.cancel()
    failed = errors.of_ended(call)
    assert type(failed) is RuntimeError
    assert "shut down" in str(failed)


def test_raised_error_keeps_no_frames_of_the_callee() -> None:
    with pytest.raises(ValueError, match="v") as caught:
        errors.raised(of_callee(raising(ValueError("v"))))
    assert len(caught.traceback) == 2  # this line, and the one that raises
    assert caught.value.__cause__ is None


A = DeviceWishes("a", cuda_devices=2)
B = DeviceWishes("b", cuda_devices=1)


def maps(**by_peer: dict[str, str]) -> DeviceWishes:
    return replace(A, maps=by_peer)


@pytest.mark.parametrize(
    "a",
    [
        A,
        maps(b={"cuda:1": "cuda:0"}),
        maps(b={"cuda": "cpu", "cuda:1": "cuda"}),
        maps(a={"cuda:0": "cuda:1", "cuda:1": "cuda:0"}),
        maps(b={"xla:7": "fake:3"}),  # they are looked for when they are used
        replace(maps(b={"cuda:1": "cuda:0"}), devices=["cuda:1"]),
    ],
)
def test_valid_device_map_is_accepted(a: DeviceWishes) -> None:
    check_device_maps([a, B])
    check_device_maps([B, DeviceWishes.decode(a.encode())])


ABSENT = "devices with invalid indices"
IN_B = "in its device map for b:"
REFUSED = [
    (
        maps(b={"cuda:2": "cuda:0"}),
        f"source {ABSENT} {IN_B} cuda:2, and worker a has 2 CUDA devices",
    ),
    (
        maps(b={"cuda:0": "cuda:1"}),
        f"target {ABSENT} {IN_B} cuda:1, and worker b has 1 CUDA device",
    ),
    (
        maps(b={"cuda:0": "cuda:0", "cuda:1": "cuda:0"}),
        f"duplicated target devices {IN_B} cuda:0, cuda:0",
    ),
    (
        maps(c={"cuda:0": "cuda:0"}),
        "invalid target node names in its device maps: c; the workers are a, b",
    ),
    (
        replace(maps(b={"cuda:0": "cuda:0"}), devices=["cuda:1"]),
        f"unexpected source devices {IN_B} cuda:0; worker a was told to use cuda:1",
    ),
    (replace(A, devices=["cuda:0", "cuda:0"]), "duplicated devices: cuda:0, cuda:0"),
    (
        replace(A, devices=["cuda:2"]),
        f"{ABSENT}: cuda:2, and worker a has 2 CUDA devices",
    ),
]


@pytest.mark.parametrize(("a", "why"), REFUSED)
def test_invalid_device_map_is_refused_on_every_worker(
    a: DeviceWishes, why: str
) -> None:
    for order in ([a, B], [B, a]):
        with pytest.raises(ValueError, match=f"^{re.escape(f'Node a has {why}')}$"):
            check_device_maps(order)


def test_growing_group_checks_the_known_devices_only() -> None:
    check_device_maps([maps(c={"cuda:0": "cuda:9"})], is_static=False)
    with pytest.raises(ValueError, match="source devices with invalid indices"):
        check_device_maps([maps(c={"cuda:9": "cuda:0"})], is_static=False)


def test_device_wishes_are_read_from_options() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1"}})
    options.set_device_map("b", {"cuda:1": torch.device("cuda:0")})
    wishes = DeviceWishes.of_options("a", options)
    assert wishes.maps == {"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}
    assert not wishes.devices
    assert wishes.cuda_devices == torch.cuda.device_count()
