"""What is lost and what is held back, by message; and the options that say so."""

from functools import partial

import pytest

from asyncrpc.compat import rpc
from tests.conformance import faulty
from tests.conformance.faulty import (
    Faults,
    FaultyTensorPipeRpcBackendOptions,
    MessageType,
    message_type,
)

PYTHON, SCRIPT = MessageType.PYTHON_CALL, MessageType.SCRIPT_CALL


def sends(faults: Faults, kind: MessageType, *messages: bytes) -> list[bool]:
    return [not faults.is_lost(kind, partial(bytes, said)) for said in messages]


# --- the machine ---------------------------------------------------------------------


def test_message_is_lost_the_given_number_of_times() -> None:
    faults = Faults(["PYTHON_CALL"], {}, 2)
    assert sends(faults, PYTHON, b"a", b"a", b"a", b"a") == [False, False, True, True]


def test_messages_are_counted_separately() -> None:
    faults = Faults(["PYTHON_CALL", "SCRIPT_CALL"], {}, 1)
    assert sends(faults, PYTHON, b"a", b"b", b"a") == [False, False, True]
    assert sends(faults, SCRIPT, b"a", b"a") == [False, True]


def test_other_types_are_neither_lost_nor_read() -> None:
    def unread() -> bytes:
        raise AssertionError("outlined")

    assert not Faults(["PYTHON_CALL"], {}, 2).is_lost(SCRIPT, unread)


def test_loss_count_of_zero_loses_nothing() -> None:
    assert sends(Faults(["PYTHON_CALL"], {}, 0), PYTHON, b"a") == [True]


def test_message_type_is_delayed_for_its_time() -> None:
    faults = Faults([], {"SCRIPT_CALL": 1.5}, 0)
    assert (faults.delay_s(SCRIPT), faults.delay_s(PYTHON)) == (1.5, 0.0)


def test_counted_messages_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty, "COUNTED_MAX", 2)
    faults = Faults(["PYTHON_CALL"], {}, 1)
    assert sends(faults, PYTHON, b"a", b"b", b"c", b"c") == [False, False, False, True]
    assert sends(faults, PYTHON, b"a") == [False]  # forgotten, so it counts anew


def test_unknown_message_type_is_refused_with_the_known_ones() -> None:
    assert message_type("RREF_USER_DELETE") is MessageType.RREF_USER_DELETE
    with pytest.raises(RuntimeError, match=r"exists for PYTHON_RET; .*PYTHON_CALL"):
        message_type("PYTHON_RET")


# --- the options ---------------------------------------------------------------------


def options_with(**arguments: object) -> FaultyTensorPipeRpcBackendOptions:
    backend = rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]
    options = rpc.construct_rpc_backend_options(backend, **arguments)  # type: ignore[arg-type]
    assert isinstance(options, FaultyTensorPipeRpcBackendOptions)
    return options


def test_options_keep_their_values() -> None:
    options = options_with(
        init_method="file:///x",
        num_worker_threads=3,
        rpc_timeout=7.0,
        messages_to_fail=["SCRIPT_CALL"],
        messages_to_delay={"PYTHON_CALL": 2},
        num_fail_sends=4,
    )
    assert (options.init_method, options.num_worker_threads) == ("file:///x", 3)
    assert options.rpc_timeout == 7.0
    assert options.messages_to_fail == ["SCRIPT_CALL"]
    assert options.messages_to_delay == {"PYTHON_CALL": 2}
    assert options.num_fail_sends == 4


def test_default_options_simulate_nothing() -> None:
    options = options_with()
    assert (options.messages_to_fail, options.messages_to_delay) == ([], {})
    assert options.num_fail_sends == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"messages_to_fail": ["NO_CALL"]}, "No mapping .* NO_CALL"),
        ({"messages_to_delay": {"NO_CALL": 1}}, "No mapping .* NO_CALL"),
        ({"messages_to_delay": {"PYTHON_CALL": -1}}, "PYTHON_CALL .* -1 s"),
        ({"messages_to_delay": {"PYTHON_CALL": float("nan")}}, "PYTHON_CALL .* nan"),
        ({"num_fail_sends": -1}, "numFailSends should be non-negative"),
    ],
)
def test_impossible_options_are_refused(
    arguments: dict[str, object], error: str
) -> None:
    with pytest.raises(RuntimeError, match=error):
        options_with(**arguments)


@pytest.mark.parametrize(
    "options", [{"messages_to_fail": "PYTHON_CALL"}, {"num_fail_sends": 1.5}]
)
def test_options_of_other_types_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="list of names"):
        options_with(**options)


def test_backends_are_found_by_their_options() -> None:
    types = rpc.backend_registry.BackendType
    assert rpc._backend_of(options_with()) is types["FAULTY_TENSORPIPE"]  # noqa: SLF001
    plain = rpc.TensorPipeRpcBackendOptions()
    assert rpc._backend_of(plain) is types["TENSORPIPE"]  # noqa: SLF001


def test_the_backend_takes_no_other_options() -> None:
    backend = rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]
    with pytest.raises(TypeError, match="FaultyTensorPipeRpcBackendOptions"):
        rpc.backend_registry.init_backend(
            backend,
            store=None,
            name="a",
            rank=0,
            world_size=1,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(),
        )
