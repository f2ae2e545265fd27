"""`launch`: results, the environment, and every way to fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrpc.core.transport.interfaces import host_addresses
from asyncrpc.errors import DeadlineExceededError, ProcessFailedError, UsageError
from asyncrpc.multiprocessing import launch
from tests.integration.core.multiprocessing import targets

# Here the fork server has torch loaded: a launch takes a tenth of a spawn's time.
quick = partial(launch, method="forkserver")


def failure_of(
    fn: Callable[..., Any], *args: object, nprocs: int = 1, method: Any = "forkserver"
) -> ProcessFailedError:
    with pytest.raises(ProcessFailedError) as caught:
        launch(fn, args, nprocs, method=method)
    assert multiprocessing.active_children() == []
    return caught.value


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_results_come_back_by_rank(method: Any) -> None:
    assert launch(targets.square, (3,), nprocs=3, method=method) == [0, 1, 8]


def test_imports_of_the_fork_server_stay_shared() -> None:
    """To look for circles would write to every page of it: a copy in each process."""
    assert min(quick(targets.frozen_count, nprocs=2)) > 10_000


def test_a_coroutine_function_runs_on_a_loop() -> None:
    assert quick(targets.square_async, nprocs=2) == [0, 1]


def test_processes_share_a_secret_and_know_their_rank() -> None:
    environments = quick(targets.environment, nprocs=2)
    assert len({environment["ASYNCRPC_SECRET"] for environment in environments}) == 1
    assert [environment["RANK"] for environment in environments] == ["0", "1"]
    assert "ASYNCRPC_SECRET" not in os.environ
    secret = "given to all of them"
    assert quick(targets.environment, secret=secret)[0]["ASYNCRPC_SECRET"] == secret


def test_launch_without_a_store_sets_no_rendezvous() -> None:
    (environment,) = quick(targets.environment, host_store=False)
    assert environment.get("MASTER_PORT") == os.environ.get("MASTER_PORT")


def test_torch_finds_its_rendezvous_in_the_environment() -> None:
    """`init_process_group` with its defaults: env://, served by the parent."""
    assert quick(targets.meet, nprocs=2) == [1, 1]


def test_threads_are_an_equal_share_or_as_requested() -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert quick(targets.thread_count, nprocs=2) == [share, share]
    assert quick(targets.thread_count, threads_per_process=3) == [3]


def test_arguments_are_shared_and_results_are_copies() -> None:
    shared = torch.zeros(2)  # `launch` moves it to shared memory
    returned = quick(targets.add_to, (shared,), nprocs=2)
    assert shared.tolist() == [1.0, 2.0]
    assert [tensor[rank].item() for rank, tensor in enumerate(returned)] == [1.0, 2.0]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_first_exception_comes_with_its_traceback_and_cause(method: str) -> None:
    error = failure_of(targets.fail_at, 1, nprocs=2, method=method)
    assert (error.rank, error.exit_code) == (1, 1)
    assert "rank 1 of 2 raised ValueError: no luck at 1" in str(error)
    assert "in fail_at" in error.remote_traceback
    assert isinstance(error.__cause__, ValueError)


def test_unpicklable_exception_becomes_text() -> None:
    error = failure_of(targets.raise_unpicklable)
    assert "kept as text" in str(error)
    assert "raise_unpicklable" in error.remote_traceback
    assert error.__cause__ is None


def test_unpicklable_result_is_explained() -> None:
    error = failure_of(targets.return_unpicklable)
    assert "a function, cannot be pickled" in str(error)


@pytest.mark.parametrize(
    ("method", "signum"), [("spawn", signal.SIGKILL), ("forkserver", signal.SIGSEGV)]
)
def test_a_death_by_signal_is_named(method: str, signum: signal.Signals) -> None:
    error = failure_of(targets.die_of, signum, nprocs=2, method=method)
    assert (error.rank, error.exit_code) == (1, -signum)
    assert f"rank 1 of 2 was killed by {signum.name}" in str(error)


def test_dead_process_is_blamed_not_its_observer() -> None:
    error = failure_of(targets.follow_the_dead, nprocs=2)
    assert (error.rank, error.exit_code) == (0, -signal.SIGKILL)


def test_sys_exit_is_a_failure_unless_it_is_zero() -> None:
    assert failure_of(targets.exit_with, 3).exit_code == 3
    assert quick(targets.exit_with, (0,)) == [None]


@pytest.mark.parametrize("code", [0, 5])
def test_an_exit_that_skips_the_return_is_a_failure(code: int) -> None:
    error = failure_of(targets.exit_hard, code)
    assert error.exit_code == code
    assert f"0 of 1 exited with code {code} before its function had ret" in str(error)


def test_stopped_processes_run_their_finally_blocks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meeting")
    assert failure_of(targets.clean_up, str(tmp_path), nprocs=2).rank == 1
    assert (tmp_path / "cleaned").exists()


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """After how long, the supervisor's own tests check."""
    os.mkfifo(tmp_path / "meeting")
    assert failure_of(targets.ignore_sigterm, str(tmp_path), nprocs=2).rank == 1


def test_timeout_names_the_ranks_still_running() -> None:
    with pytest.raises(DeadlineExceededError, match="wait_forever on 'ranks 0, 1'"):
        quick(targets.wait_forever, nprocs=2, timeout_s=1.0)
    assert multiprocessing.active_children() == []


def test_launch_works_in_a_thread_and_outlives_it() -> None:
    """The kernel ties a child to the thread that made it: only the main one will do."""
    handles = []
    thread = threading.Thread(
        target=lambda: handles.append(
            launch(targets.square, (2,), 2, method="forkserver", join=False)
        )
    )
    thread.start()
    thread.join()
    assert handles[0].wait() == [0, 1]


def test_fork_is_refused_with_reasons() -> None:
    wrong: dict[Any, str] = {
        "fork": r"OpenMP.*CUDA.*use 'spawn'",
        "thread": "method must be 'spawn' or 'forkserver', not 'thread'",
    }
    for method, words in wrong.items():
        with pytest.raises(UsageError, match=words):
            launch(targets.square, (2,), method=method)


def test_invalid_arguments_are_refused_before_any_start() -> None:
    with pytest.raises(UsageError, match=r"nprocs must be an integer of .* not 0"):
        launch(targets.square, (2,), nprocs=0)
    with pytest.raises(UsageError, match="top level of a module"):
        launch(lambda _rank: None)
    assert multiprocessing.active_children() == []


async def test_launch_refuses_to_block_a_running_loop() -> None:
    with pytest.raises(UsageError, match=r"join=False.*wait_async"):
        launch(targets.square, (2,))


def is_local(address: str) -> bool:
    return address.startswith(("uds://", "tcp://127."))


def test_workers_with_the_launchers_own_secret_listen_on_this_host_alone() -> None:
    results = launch(targets.addresses, (None,), nprocs=2, method="forkserver")
    assert all(is_local(address) for each in results for address in each)


@pytest.mark.parametrize(
    ("secret", "own"),
    [("sesame, for all of you", None), (None, "sesame, for all of you")],
)
def test_workers_with_a_secret_of_the_program_listen_everywhere(
    secret: str | None, own: str | None
) -> None:
    results = launch(
        targets.addresses, (own,), nprocs=2, method="forkserver", secret=secret
    )
    has_network = any(not host_address.is_loopback for host_address in host_addresses())
    for addresses in results:
        assert any(not is_local(address) for address in addresses) is has_network
