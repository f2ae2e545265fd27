"""PJRT's runtime: real processes by torchrun, and what works on any device."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from asyncrpc import Group, Worker, xla
from asyncrpc.testing import acting_as
from tests.integration.devices.accelerators import TYPE, Hands

HOME = f"{TYPE}:0"
RANKS = Path(__file__).parent / "xla_ranks.py"
Pair = tuple[Worker, Worker]

needs_xla = pytest.mark.skipif(TYPE != "xla", reason="torch_xla is not here")


async def test_replicas_get_the_parameters_of_the_first(pair: Pair) -> None:
    async def run(worker: Worker) -> list[torch.Tensor]:
        hands = Hands(worker)
        async with Group(worker, ["a", "b"], name="master") as group:

            def make() -> nn.Module:
                torch.manual_seed(group.rank)
                return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(HOME)

            module = await hands.do(lambda: xla.with_rng_lock(make))
            await xla.broadcast_master_param(module, group)
            assert {parameter.device.type for parameter in module.parameters()} == {
                TYPE
            }
            state = module.state_dict().values()
            return await hands.do(lambda: [value.cpu() for value in state])

    first, second = await asyncio.gather(*map(run, pair))
    assert len(first) == 7
    assert all(map(torch.equal, first, second))


async def test_rendezvous_may_be_of_all_or_some_replicas(pair: Pair) -> None:
    async def meet(worker: Worker, replicas: Sequence[int]) -> list[bytes]:
        with acting_as(worker):
            return await xla.rendezvous("tag", worker.name.encode(), replicas)

    for replicas, wanted in (((), [b"a", b"b"]), ((1, 0), [b"b", b"a"])):
        payloads = await asyncio.gather(*(meet(replica, replicas) for replica in pair))
        assert payloads == [wanted] * 2
    assert await meet(pair[1], [1]) == [b"b"]


def test_replicas_draw_different_random_numbers() -> None:
    def numbers(replica: int) -> list[float]:
        generator = xla.generator(7, replica=replica)
        return torch.rand(4, generator=generator).tolist()

    assert numbers(0) == numbers(0)
    assert len({tuple(numbers(replica)) for replica in range(100)}) == 100


def _run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_xla
@pytest.mark.parametrize("nprocs", [1, 2])
def test_processes_of_torchrun_train_as_on_the_host(nprocs: int) -> None:
    """The processes meet by `xla://`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    output = _run(*torchrun, f"--nproc_per_node={nprocs}", str(RANKS))
    assert output.count("as on the host") == nprocs
    assert output.count(f"of {nprocs}") == nprocs


@needs_xla
@pytest.mark.parametrize("nprocs", [1, 2])
def test_processes_of_launch_train_as_on_the_host(nprocs: int) -> None:
    output = _run(str(RANKS), str(nprocs))
    assert output.count("as on the host") == nprocs


@needs_xla
@pytest.mark.parametrize("nprocs", [1, 2])
def test_replicas_in_threads_train_as_on_the_host(nprocs: int) -> None:
    """As on TPU v2 and v3: each process has two devices, each device an event loop."""
    output = _run(str(RANKS), str(nprocs), CPU_NUM_DEVICES="2")
    assert output.count(f"of {2 * nprocs}: as on the host") == 2 * nprocs


@needs_xla
def test_a_replica_that_fails_stops_the_others() -> None:
    """Which would wait for it."""
    with pytest.raises(AssertionError, match="this one fails"):
        _run(str(RANKS), "1", "fail", CPU_NUM_DEVICES="2")


@needs_xla
def test_single_process_has_a_world_of_one() -> None:
    """`xla://` without any environment: the runtime says that there is one."""
    assert _run(str(RANKS)).count("of 1") == 1
