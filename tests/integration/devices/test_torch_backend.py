"""torch.distributed over asyncrpc with tensors on devices: as with those of the host.

Each test has processes of its own.  Those of a real device are started afresh: some
runtimes survive no fork.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from asyncrpc import DeviceOptions, Options
from tests.integration.devices import torch_ranks, torch_training
from tests.integration.devices.accelerators import IS_FAKE, TYPE
from tests.integration.parallel.collectives.torch_backend.processes import (
    Outcome,
    run_ranks,
)

# As each device needs it, and where all of them are exclusive.
OPTIONS = [None, Options(devices=DeviceOptions(exclusive=True))] if IS_FAKE else [None]

with_options = pytest.mark.parametrize(
    "options", OPTIONS, ids=["as needed", "turns"][: len(OPTIONS)]
)


def run(function: Callable[..., Any], path: Path, *args: Any) -> list[Outcome]:
    """Run a function at two ranks."""
    method: Literal["forkserver", "spawn"] = "forkserver" if IS_FAKE else "spawn"
    return run_ranks(function, path / "store", *args, size=2, method=method)


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return what both ranks returned."""
    for outcome in outcomes:
        assert not outcome.problem, outcome.problem
        assert outcome.exit_code == 0
    return [outcome.value for outcome in outcomes]


@with_options
def test_collectives_on_devices_match_the_host(
    tmp_path: Path, options: Options | None
) -> None:
    """All of them, on the device, and with tensors both there and on the host."""
    names = list(torch_ranks.CASES)
    results = run(torch_ranks.as_on_the_host, tmp_path, options, names)
    assert values(results) == [names] * 2


def test_object_collectives_and_barriers_work(tmp_path: Path) -> None:
    results = run(torch_ranks.objects_and_barriers, tmp_path)
    assert values(results) == ["done"] * 2


def test_process_group_starts_in_every_way(tmp_path: Path) -> None:
    assert values(run(torch_ranks.every_way_to_start, tmp_path)) == ["done"] * 2


@with_options
def test_work_and_futures_complete(tmp_path: Path, options: Options | None) -> None:
    results = run(torch_ranks.work_and_futures, tmp_path, options)
    assert values(results) == ["done"] * 2


def test_refused_operation_leaves_outputs_unchanged(tmp_path: Path) -> None:
    assert values(run(torch_ranks.wrong_and_unlike, tmp_path)) == ["done"] * 2


def test_collectives_work_under_modes_of_the_program(tmp_path: Path) -> None:
    assert values(run(torch_ranks.in_other_modes, tmp_path)) == ["done"] * 2


def test_sparse_tensors_are_summed(tmp_path: Path) -> None:
    first, second = values(run(torch_ranks.sparse, tmp_path))
    assert first == second
    if first != "summed":
        pytest.skip(f"{TYPE} has no sparse tensors")


@pytest.mark.skipif(TYPE != "xla", reason="functional collectives are torch's own")
def test_functional_collectives_of_torch_xla_are_refused(tmp_path: Path) -> None:
    assert values(run(torch_ranks.refused_functional, tmp_path)) == ["refused"] * 2


@with_options
def test_ddp_is_bitwise_that_of_the_host(
    tmp_path: Path, options: Options | None
) -> None:
    """Bucket views or none, with hooks and without, in two dtypes."""
    results = run(torch_training.digit_for_digit, tmp_path, options)
    assert values(results) == ["equal"] * 2


@with_options
def test_ddp_of_a_common_model_matches_the_host(
    tmp_path: Path, options: Options | None
) -> None:
    results = run(torch_training.as_on_the_host, tmp_path, options)
    assert values(results) == ["equal"] * 2


@pytest.mark.skipif(TYPE == "tpu", reason="TorchTPU has torchrun's variables mean TPUs")
def test_ddp_under_torchrun_is_bitwise_that_of_the_host() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", torch_training.__name__),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("digit for digit") == 2


@pytest.mark.skipif(
    TYPE in torch_training.CANNOT_FIND_UNUSED,
    reason=torch_training.CANNOT_FIND_UNUSED.get(TYPE, ""),
)
def test_ddp_with_unused_parameters_matches_the_host(tmp_path: Path) -> None:
    assert values(run(torch_training.unused, tmp_path)) == ["equal"] * 2


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    first, dead = run(torch_training.lose, tmp_path)
    assert dead.exit_code == -signal.SIGKILL
    assert not first.problem, first.problem
    assert "rank 1 ('rank1')" in first.value
