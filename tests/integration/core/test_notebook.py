"""Cells of a notebook: a real kernel runs each in a task of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("ipykernel", reason="needs the extra [dev]")

from tests.integration.core.notebook import run

START: Final = """
worker = await asyncrpc.init_rpc(
    "w", rank=0, rendezvous=asyncrpc.LocalRendezvous(1)
)
"""


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
