"""The program that the documentation starts with `asyncrpc run` does start with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAM = re.compile(r"^```python no-run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_S = 240.0


@pytest.mark.slow
def test_program_for_a_launcher_runs_with_asyncrpc_run(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/how-to/start-workers.md").read_text("utf-8")
    (source,) = PROGRAM.findall(page)
    (tmp_path / "hello.py").write_text(source)
    (command,) = re.findall(r"^\$ python -m (asyncrpc run .*)$", page, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "[0] 2\n"
