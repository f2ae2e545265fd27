"""Programs with torch's names start under mpirun, too, by the same resolver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters.mpi.launchers import LAUNCHERS, ended, python, started

RPC = """
import os
from asyncrpc.compat import rpc

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=2)
largest = rpc.rpc_sync(f"trainer{1 - rank}", max, args=(rank, 5))
os.write(1, f"trainer{rank} hears {largest}\\n".encode())
rpc.shutdown()
"""
BACKEND = """
import os
import torch
import torch.distributed as dist
import asyncrpc.torch_backend

dist.init_process_group("asyncrpc", init_method="asyncrpc://")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
os.write(1, f"rank {dist.get_rank()} has {total.item():g}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("source", "lines"),
    [
        (RPC, ["trainer0 hears 5", "trainer1 hears 5"]),
        (BACKEND, ["rank 0 has 3", "rank 1 has 3"]),
    ],
    ids=["compat", "backend"],
)
def test_programs_with_torchs_names_start_under_mpirun(
    launcher: str, source: str, lines: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    code, said, errors = ended(started(launcher, "-n", "2", *python(str(script))))
    assert code == 0, errors
    assert sorted(said.splitlines()) == lines
