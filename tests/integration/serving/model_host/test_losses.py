"""The model's process dies, or cannot make its model: web workers know, and go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrpc.errors import (
    CallError,
    OwnerLostError,
    ProcessFailedError,
    RejectedError,
    RemoteError,
    RendezvousTimeoutError,
    UsageError,
)
from tests.integration.serving.model_host.conftest import lines_of, until_all_have_ended
from tests.integration.serving.model_host.web import WebWorker

NewWeb = Callable[[], WebWorker]


def entered(
    new_web: NewWeb, count: int, function: str = "make_model"
) -> list[WebWorker]:
    webs = [new_web() for _ in range(count)]
    for web in webs:
        web.enter(function, linger_s=0.0)
    return webs


def test_killed_model_is_started_again_once(folder: Path, new_web: NewWeb) -> None:
    webs = entered(new_web, 3)
    pid = webs[0].do("call", ("pid",))
    os.kill(pid, signal.SIGKILL)
    for web in webs:
        web.do("lost", 1)
    for web in webs:
        assert web.do("wait_ready") == "model"
    (again,) = {web.do("call", ("pid",)) for web in webs}
    assert again != pid
    assert lines_of(folder / "made") == [str(pid), str(again)]
    state, _, losses, problem = webs[0].do("status")
    assert (state, losses) == ("ready", 1)
    assert f"pid {pid}" in problem


def test_a_call_in_flight_fails_when_the_model_is_killed(
    folder: Path, new_web: NewWeb
) -> None:
    caller, other = entered(new_web, 2)
    pid = other.do("call", ("pid",))
    caller.begin("call", ("wait_forever",))
    while not (folder / "waiting").exists():  # it tells nothing else
        pass
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((CallError, OwnerLostError)):
        caller.result()
    caller.do("wait_ready")


def test_web_worker_waits_for_the_next_model_process(
    folder: Path, new_web: NewWeb
) -> None:
    """A refusal during the shutdown is not a failure of the model."""
    (web,) = entered(new_web, 1)
    pid = web.do("call", ("pid",))
    web.do("call", ("refuse_calls",))
    late = new_web()
    late.begin("enter", ("make_model", {"linger_s": 0.0}))
    while not (folder / "refused").exists():  # it tells nothing else
        pass
    os.kill(pid, signal.SIGKILL)
    late.result()
    assert late.do("call", ("pid",)) != pid
    assert "raised" not in late.do("status")[3]


def test_calls_between_two_model_processes_are_rejected(new_web: NewWeb) -> None:
    """Nothing was sent, so that a retry is safe."""
    (web,) = entered(new_web, 1)
    pid = web.do("call", ("pid",))
    with pytest.raises(
        RejectedError, match=r"cannot be called now: its process .*; before that"
    ) as e:
        web.do("call_when_lost", pid)
    assert f"pid {pid}" in str(e.value)
    web.do("wait_ready")


@pytest.mark.slow
def test_terminated_model_process_is_replaced(folder: Path, new_web: NewWeb) -> None:
    """It does not count as a loss; calls in flight end first."""
    (web,) = entered(new_web, 1)
    web.do("call", ("end",))
    while len(lines_of(folder / "made")) < 2:  # it is asked for nothing
        web.do("wait_ready")
    assert web.do("wait_ready") == "model"
    assert web.do("status")[2] == 0


def test_failed_model_is_explained_to_all_web_workers(
    folder: Path, new_web: NewWeb
) -> None:
    """With the traceback; and without making it anew for each."""
    webs = [new_web() for _ in range(3)]
    for web in webs:
        web.begin("enter", ("make_nothing", {"linger_s": 3600.0}))
    for web in webs:
        with pytest.raises(ValueError, match="no weights here") as e:
            web.result()
        assert isinstance(e.value, RemoteError)
        assert 'raise ValueError("no weights here")' in e.value.remote_traceback
    with pytest.raises(ValueError, match="no weights here"):
        webs[0].enter("make_nothing", linger_s=3600.0)
    assert len(lines_of(folder / "tried")) == 1


@pytest.mark.slow
def test_failed_model_can_be_made_later(folder: Path, new_web: NewWeb) -> None:
    web = new_web()
    with pytest.raises(FileNotFoundError, match="weights"):
        web.enter("make_if_told", linger_s=0.0)
    (folder / "weights").touch()
    until_all_have_ended(folder)
    web.enter("make_if_told", linger_s=0.0)
    assert web.do("status")[0] == "ready"


@pytest.mark.slow
def test_restarts_of_a_crashing_model_are_limited(
    folder: Path, new_web: NewWeb
) -> None:
    web = new_web()
    with pytest.raises(ProcessFailedError, match="its process ended"):
        web.enter("die_before", linger_s=0.0)
    assert len(lines_of(folder / "died")) == 6


@pytest.mark.slow
def test_wait_for_the_model_is_limited(folder: Path, new_web: NewWeb) -> None:
    """The process ends although a thread of it may be making the model for ever."""
    os.mkfifo(folder / "go")
    web = new_web()
    with pytest.raises(RendezvousTimeoutError, match="was not ready within 15 s"):
        web.enter("make_slowly", linger_s=0.0, start_timeout_s=15.0)
    until_all_have_ended(folder)


@pytest.mark.slow
def test_unknown_model_function_is_refused(new_web: NewWeb) -> None:
    web = new_web()
    with pytest.raises(UsageError, match="has no function 'make_other'"):
        web.enter("make_other", linger_s=0.0)
