"""`spawn` is torch's over `launch`: its signature, and programs as users write them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrpc.errors import ProcessFailedError, UsageError
from asyncrpc.multiprocessing import spawn
from tests.integration.core.multiprocessing import queue_targets as targets

REPOSITORY = Path(__file__).parents[4]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawn_takes_the_arguments_of_torch_in_order(method: Any) -> None:
    shared = torch.zeros(2)
    result: object = spawn(targets.count_up, (shared,), 2, True, False, method)  # noqa: FBT003  as torch's callers do
    assert result is None
    assert shared.tolist() == [1.0, 2.0]


def test_coroutines_run_and_their_results_are_dropped() -> None:
    shared = torch.zeros(1)
    spawn(targets.count_up_async, (shared,), start_method="forkserver")
    assert shared.tolist() == [1.0]


def test_join_with_a_timeout_may_be_repeated() -> None:
    context = spawn(targets.wait_for_one, (shared := torch.zeros(1),), 2, join=False)
    assert len(context.pids) == 2
    assert not context.join(timeout_s=0.01)
    shared[0] = 1.0
    while not context.join(timeout_s=1.0):
        pass
    assert context.join()


def test_failure_is_raised_by_wait_and_join() -> None:
    with pytest.raises(ProcessFailedError, match="no luck at 0"):
        spawn(targets.fail, start_method="forkserver")
    context = spawn(targets.fail, start_method="forkserver", join=False)
    with pytest.raises(ProcessFailedError, match="no luck at 0"):
        context.join()


def test_fork_is_refused() -> None:
    method: Any = "fork"
    with pytest.raises(UsageError, match="use 'spawn' or 'forkserver'"):
        spawn(targets.fail, start_method=method)


UNGUARDED = """
from asyncrpc.multiprocessing import spawn

def work(rank):
    print("worked")

spawn(work, nprocs=1, start_method="{method}")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_unguarded_program_is_told_the_remedy(tmp_path: Path, method: str) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED.format(method=method))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert done.returncode == 1
    assert "put the call under `if __name__ == '__main__':`" in done.stderr
    assert "worked" not in done.stdout
