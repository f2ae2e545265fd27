"""Observers look at the ranks of a job of torch.distributed as at any workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrpc.tools.cli.main import main
from tests.forked import forked
from tests.integration.parallel.collectives.torch_backend.processes import (
    run_ranks,
    start,
)

ANALYSE = """
from torch.distributed.flight_recorder.fr_trace import main
main([{!r}])
"""


def miss(rank: int, size: int, url: str, folder: str) -> list[int]:
    """Rank 2 is late in a collective, and rank 0 looks at all meanwhile."""
    start(rank, size, url)
    group: Any = dist.group.WORLD
    store = group.get_group_store()
    dist.all_reduce(torch.ones(4))
    statuses = []
    if rank == 2:
        store.wait(["looked"])
    work: Any = dist.all_reduce(torch.ones(8), async_op=True)
    if rank == 1:
        store.set("begun", "")
    if rank == 0:
        store.wait(["begun"])
        address = group.addresses[0]
        statuses.append(main(["torch-dump", address, "--to", folder]))
        statuses.append(main(["why", address, "--after", "0.1"]))
        statuses.append(main(["status", address]))
        store.set("looked", "")
    work.wait()
    dist.destroy_process_group()
    return statuses


def test_torchfrtrace_names_a_rank_that_is_late(tmp_path: Path) -> None:
    folder = str(tmp_path / "dumps")
    first, *others = run_ranks(miss, tmp_path / "store", folder)
    assert not any(one.problem for one in (first, *others))
    assert first.value == [0, 1, 0]
    with forked(ANALYSE.format(folder)) as program:
        said = program.output.read()
    assert "missing ranks: {2}" in said
    assert "collective: gloo:all_reduce" in said
    assert "input sizes: [[8]]" in said
