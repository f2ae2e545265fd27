"""Data parallel work has torch's defaults, whoever holds which mode meanwhile.

The mode is of the task that awaits, or of another one of the same loop.
"""

from __future__ import annotations

import pytest

from asyncrpc import Group, Worker
from asyncrpc.multiprocessing import launch
from tests.integration.parallel.ddp.ranks import groups_of
from tests.numerics.ddp.modes_of_ranks import ALONE, CHECKS, SIZE, Check

CASES = {
    f"{what}-{label}": check
    for what, checks in CHECKS.items()
    for label, check in checks.items()
}


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("check", CASES.values(), ids=CASES)
async def test_ranks_of_a_process_have_the_defaults(check: Check) -> None:
    async with groups_of(SIZE) as groups:
        await check(groups)


@pytest.mark.parametrize("check", ALONE.values(), ids=ALONE)
async def test_loss_computed_in_the_thread_has_the_modes_of_the_caller(
    check: Check,
) -> None:
    async with groups_of(1) as groups:
        await check(groups)


async def one_rank(rank: int, what: str) -> None:
    async with (
        Worker(f"worker{rank}", rendezvous="env://") as worker,
        Group(worker, timeout_s=60.0) as group,
    ):
        for check in CHECKS[what].values():
            await check([group])


@pytest.mark.slow
@pytest.mark.parametrize("what", CHECKS)
def test_ranks_of_two_processes_have_the_defaults(what: str) -> None:
    """The same checks, where each rank has a loop of its own."""
    launch(one_rank, (what,), SIZE, method="forkserver", timeout_s=300)
