"""The program of the page on migration runs in each way that the page says.

With torch's RPC, with other imports, with `asyncrpc.compat.install()`, and unchanged
under `python -m asyncrpc.compat`: it prints the same.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "how-to" / "migrate-from-torch-rpc.md"
PROGRAM = re.compile(r"^```python no-run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORTS = re.compile(
    r"^```python\n(import asyncrpc\.compat\..*?)^```$", re.MULTILINE | re.DOTALL
)
COROUTINE = re.compile(r"^async def doubled_on\(.*?(?=^```$)", re.MULTILINE | re.DOTALL)
TORCHS = re.compile(r"^(?:import|from) torch\.distributed.*\n", re.MULTILINE)
INSTALLED = "import asyncrpc.compat\n\nasyncrpc.compat.install()\n"
GRADUAL = """
import os

import torch

import asyncrpc
import asyncrpc.compat.rpc as rpc

{function}

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(("trainer", "ps")[rank], rank=rank, world_size=2)
    if rank == 0:
        print(rpc.rpc_sync("ps", doubled_on, ("trainer", torch.ones(2))).tolist())
    rpc.shutdown()
"""
RUN_S = 240.0


def ways() -> dict[str, tuple[str, list[str]]]:
    """Return, by way, the program and what comes before its name."""
    page = PAGE.read_text("utf-8")
    (program,) = PROGRAM.findall(page)
    (imports,) = IMPORTS.findall(page)
    changed = TORCHS.sub("", program).replace(
        "import torch\n", f"import torch\n{imports}"
    )
    return {
        "torch": (program, []),
        "imports": (changed, []),
        "install": (INSTALLED + program, []),
        "unchanged": (program, ["-m", "asyncrpc.compat"]),
    }


@pytest.mark.parametrize("way", list(ways()))
def test_migrated_program_runs(way: str, tmp_path: Path) -> None:
    assert printed(*ways()[way], tmp_path) == "trained: True\n"


def test_functions_can_be_coroutines_before_their_callers_are(tmp_path: Path) -> None:
    (function,) = COROUTINE.findall(PAGE.read_text("utf-8"))
    assert printed(GRADUAL.format(function=function), [], tmp_path) == "[3.0, 3.0]\n"


def printed(program: str, before: list[str], folder: Path) -> str:
    """Run a program in two processes; return what rank 0 prints."""
    (folder / "train.py").write_text(program, "utf-8")
    environ = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TP_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    workers = [
        subprocess.Popen(
            [sys.executable, *before, "train.py"],
            cwd=folder,
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        ended = [worker.communicate(timeout=RUN_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()  # if it ended, this does nothing
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], ended
    (out, _), (out_of_the_other, _) = ended
    assert not out_of_the_other
    return out
