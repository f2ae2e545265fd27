"""Cells of a notebook: a real kernel runs each in a task of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.integration.core import notebook

pytest.importorskip("ipykernel", reason="needs the extra [dev]")

ROOT: Final = Path(__file__).parents[3]
START: Final = """
worker = await asyncrpc.init_rpc(
    "w", rank=0, rendezvous=asyncrpc.LocalRendezvous(1)
)
"""


def run(folder: Path, *cells: str) -> list[str]:
    """Return what cells print and raise."""
    done = subprocess.run(
        [sys.executable, "-m", notebook.__name__],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "IPYTHONDIR": str(folder)},
        timeout=2 * notebook.HANGS_S,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    outputs: list[str] = json.loads(done.stdout)
    return outputs


def test_later_cells_use_and_end_the_worker(tmp_path: Path) -> None:
    outputs = run(
        tmp_path,
        "import asyncio, operator, asyncrpc",
        START,
        "asyncrpc.current_worker() is worker",
        "await asyncrpc.rpc_async('w', operator.add, (1, 2))",
        "reference = asyncrpc.remote('w', operator.add, (3, 4))",
        "await reference",
        "await asyncio.to_thread(asyncrpc.rpc_sync, 'w', operator.add, (5, 6))",
        START,
        "await asyncrpc.shutdown()",
        "asyncrpc.current_worker()",
        START,
        "await asyncrpc.shutdown(); worker.is_closed",
    )
    again, ended = outputs.pop(7), outputs.pop(8)
    assert outputs == ["", "", "True", "3", "", "7", "11", "", "", "True"]
    assert again.startswith("AlreadyStartedError: worker 'w' already runs")
    assert ended.startswith("NotStartedError: there is no running worker here")


def test_rerun_cells_and_reloaded_modules_are_called_anew(tmp_path: Path) -> None:
    module = tmp_path / "answers.py"
    write = f"__import__('pathlib').Path({str(module)!r}).write_text"
    call = "await asyncrpc.rpc_async('w', answers.answer)"
    outputs = run(
        tmp_path,
        "import importlib, sys, asyncrpc; sys.dont_write_bytecode = True",
        f"{write}('def answer(): return 1'); import answers",
        START,
        call,
        f"{write}('def answer(): return 2'); importlib.reload(answers); {call}",
        "def cell(): return 3",
        "await worker.peer('w').call(cell)",
        "def cell(): return 4",
        "await worker.peer('w').call(cell)",
        "await asyncrpc.shutdown()",
    )
    assert outputs == ["", "", "", "1", "2", "", "3", "", "4", ""]
