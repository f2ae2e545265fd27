"""Programs whose messages are lost, or late: real processes.

Each test is a scenario that worker0 plays, with messages of its own lost or late; the
others serve it.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import asyncrpc.compat
from asyncrpc.compat import autograd, rpc
from asyncrpc.compat.rpc import _testing, starting
from asyncrpc.compat.rpc import agent as agents
from asyncrpc.multiprocessing import launch

LOST = "Send attempt failed intentionally"
NOT_MADE = "RRef creation via rpc.remote\\(\\) timed out"
TOO_LATE = "RPC ran for more than set timeout"
ONE = torch.ones(1)

noted: list[int] = []


def take_part(rank: int, scenario: Callable[[], None], faults: dict[str, Any]) -> None:
    options = _testing.FaultyTensorPipeRpcBackendOptions(
        init_method="env://", **(faults if rank == 0 else {})
    )
    size = int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"w{rank}", None, rank, size, rpc_backend_options=options)
    try:
        if rank == 0:
            scenario()
    finally:
        rpc.shutdown()


def play(scenario: Callable[[], None], **faults: Any) -> None:
    launch(take_part, (scenario, faults), 2, method="forkserver")


def seconds_of(action: Callable[[], object]) -> float:
    begun_s = time.monotonic()
    action()
    return time.monotonic() - begun_s


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what no event tells of: counters that messages change."""
    limit_s = time.monotonic() + 10.0
    while not is_so():
        assert time.monotonic() < limit_s
        time.sleep(0.02)


def plus_one(x: int) -> int:
    return x + 1


def note(x: int) -> None:
    noted.append(x)


def notes() -> list[int]:
    return noted


def passed_on(rref: Any) -> None:
    del rref


def figures() -> dict[str, str]:
    return rpc._rref_context_get_debug_info()  # noqa: SLF001


# --- lost ----------------------------------------------------------------------------


def calls_are_lost() -> None:
    assert type(agents.current()) is _testing.FaultyTensorPipeAgent
    for to, x in (("w1", 1), ("w1", 2), ("w0", 3)):
        with pytest.raises(RuntimeError, match=f"{LOST} for PYTHON_CALL"):
            rpc.rpc_sync(to, plus_one, (x,))
        assert rpc.rpc_sync(to, plus_one, (x,)) == x + 1
    with pytest.raises(RuntimeError, match=LOST):
        rpc.rpc_async("w1", plus_one, (4,)).wait()
    assert torch.equal(rpc.rpc_sync("w1", torch.add, (ONE, 1)), ONE + 1)


def test_a_lost_call_fails_and_goes_through_when_it_is_repeated() -> None:
    play(calls_are_lost, messages_to_fail=["PYTHON_CALL"], num_fail_sends=1)


def operators_are_lost() -> None:
    with pytest.raises(RuntimeError, match=f"{LOST} for SCRIPT_CALL"):
        rpc.rpc_sync("w1", torch.add, (ONE, 1))
    # As torch counts: the content of tensors is not looked at.
    assert torch.equal(rpc.rpc_sync("w1", torch.add, (ONE * 2, 1)), ONE * 3)
    assert rpc.rpc_sync("w1", plus_one, (1,)) == 2


def test_operators_of_torchs_are_a_type_of_their_own() -> None:
    play(operators_are_lost, messages_to_fail=["SCRIPT_CALL"], num_fail_sends=1)


def values_are_lost() -> None:
    for to in ("w1", "w0"):
        rref = rpc.remote(to, plus_one, (1,))
        with pytest.raises(RuntimeError, match=TOO_LATE):
            rref._get_future().wait()  # noqa: SLF001
        with pytest.raises(RuntimeError, match=NOT_MADE):
            rref.to_here()
        with pytest.raises(RuntimeError, match=NOT_MADE):
            rref._serialize()  # noqa: SLF001
        with pytest.raises(RuntimeError, match=NOT_MADE):
            rpc.rpc_async("w1", passed_on, (rref,))
    assert rpc.rpc_sync("w1", figures)["num_owner_rrefs"] == "0"
    assert torch.equal(rpc.remote("w1", torch.add, (ONE, 1)).to_here(), ONE + 1)


def test_a_value_that_was_lost_cannot_be_used() -> None:
    play(values_are_lost, messages_to_fail=["PYTHON_REMOTE_CALL"], num_fail_sends=1)


def fetches_are_lost() -> None:
    rref = rpc.remote("w1", plus_one, (1,))
    with pytest.raises(RuntimeError, match=f"{LOST} for PYTHON_RREF_FETCH_CALL"):
        rref.to_here()
    assert rref.to_here() == 2
    assert torch.equal(rpc.remote("w1", torch.add, (ONE, 1)).to_here(), ONE + 1)


def test_a_fetch_that_is_lost_can_be_repeated() -> None:
    play(
        fetches_are_lost, messages_to_fail=["PYTHON_RREF_FETCH_CALL"], num_fail_sends=1
    )


# --- late ----------------------------------------------------------------------------


def calls_are_late() -> None:
    for to in ("w1", "w0"):
        assert seconds_of(partial(rpc.rpc_sync, to, plus_one, (1,))) >= 0.4
    with pytest.raises(RuntimeError, match=TOO_LATE):
        rpc.rpc_sync("w1", note, (1,), timeout=0.1)
    rpc.rpc_sync("w1", note, (2,), timeout=0)
    assert rpc.rpc_sync("w1", notes, timeout=60) == [2]


def test_a_late_call_is_in_time_or_is_not_sent() -> None:
    play(calls_are_late, messages_to_delay={"PYTHON_CALL": 0.4})


def calls_never_go() -> None:
    """In an hour, that is: what comes back before has not waited for them."""
    started = rpc.rpc_async("w1", plus_one, (1,), timeout=1.0)
    assert torch.equal(rpc.rpc_sync("w1", torch.add, (ONE, 1)), ONE + 1)
    with pytest.raises(RuntimeError, match=TOO_LATE):
        started.wait()


def test_a_late_call_keeps_neither_its_thread_nor_calls_of_other_kinds() -> None:
    play(calls_never_go, messages_to_delay={"PYTHON_CALL": 3600.0})


def values_are_late() -> None:
    for to in ("w1", "w0"):
        made = partial(rpc.remote, to, plus_one, (1,))
        assert seconds_of(lambda: made().to_here()) >= 0.4  # noqa: B023
        assert made().to_here() == 2
    late = rpc.remote("w1", plus_one, (1,), timeout=0.05)
    with pytest.raises(RuntimeError, match=TOO_LATE):
        late._get_future().wait()  # noqa: SLF001
    with pytest.raises(RuntimeError, match=NOT_MADE):
        late.to_here()
    wait_until(lambda: figures()["num_pending_users"] == "0")
    assert rpc.rpc_sync("w1", figures)["num_owner_rrefs"] == "1"  # all the same
    del late
    gc.collect()  # the errors' frames hold it, and hold each other
    wait_until(lambda: rpc.rpc_sync("w1", figures)["num_owner_rrefs"] == "0")


def test_a_late_value_is_made_and_one_that_is_too_late_too() -> None:
    play(values_are_late, messages_to_delay={"PYTHON_REMOTE_CALL": 0.4})


# --- neither -------------------------------------------------------------------------


def contexts_are_untouched() -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        assert rpc.rpc_sync("w1", plus_one, (1,)) == 2
        y = rpc.rpc_sync("w1", torch.mul, (x, x))
        autograd.backward(context_id, [y.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], 2 * x)
        with pytest.raises(RuntimeError, match=LOST):
            rpc.rpc_sync("w1", torch.mul, (ONE, ONE))


def test_messages_with_gradients_are_of_another_type() -> None:
    fail = ["PYTHON_CALL", "SCRIPT_CALL"]
    play(contexts_are_untouched, messages_to_fail=fail, num_fail_sends=1)


def references_go_round() -> None:
    rref = rpc.remote("w1", plus_one, (1,))
    rpc.rpc_sync("w1", passed_on, (rref,))
    assert rref.to_here() == 2
    del rref
    wait_until(lambda: rpc.rpc_sync("w1", figures)["num_owner_rrefs"] == "0")


def test_messages_of_protocols_are_named_and_change_nothing() -> None:
    names = [
        "RREF_FORK_REQUEST",
        "RREF_CHILD_ACCEPT",
        "RREF_USER_DELETE",
        "CLEANUP_AUTOGRAD_CONTEXT_REQ",
    ]
    late = dict.fromkeys(names, 60.0)
    play(
        references_go_round,
        messages_to_fail=names,
        num_fail_sends=3,
        messages_to_delay=late,
    )


def is_plain(_rank: int) -> None:
    rpc.init_rpc("w0", rank=0, world_size=1)
    try:
        assert type(agents.current()) is agents.Agent
        parts = agents.current().worker.parts
        assert parts.extensions == [starting.add_facade]
    finally:
        rpc.shutdown()


def test_other_backends_have_no_part_in_it() -> None:
    launch(is_plain, nprocs=1, method="forkserver")


def by_torchs_names(_rank: int) -> None:
    asyncrpc.compat.install()
    installed: Any = importlib.import_module("torch.distributed.rpc")
    theirs: Any = importlib.import_module("torch.distributed.rpc._testing")
    assert theirs.FaultyTensorPipeAgent is _testing.FaultyTensorPipeAgent
    backend = installed.backend_registry.BackendType["FAULTY_TENSORPIPE"]
    assert backend is rpc.backend_registry.BackendType["FAULTY_TENSORPIPE"]
    options = installed.backend_registry.construct_rpc_backend_options(
        backend, messages_to_fail=["PYTHON_CALL"], num_fail_sends=1
    )
    installed.init_rpc("w0", backend, 0, 1, rpc_backend_options=options)
    with pytest.raises(RuntimeError, match=LOST):
        installed.rpc_sync("w0", plus_one, (1,))
    installed.shutdown(graceful=False)


def test_torchs_names_for_it_are_the_facades_once_installed() -> None:
    launch(by_torchs_names, nprocs=1, method="forkserver")
