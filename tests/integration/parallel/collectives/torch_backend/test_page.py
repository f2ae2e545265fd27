"""The program of the page about this backend runs, and prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[5] / "docs" / "how-to" / "torch-backend.md"
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "asyncrpc run": ["asyncrpc", "run", "--nproc", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_program_of_the_page_trains(tmp_path: Path, launcher: str) -> None:
    match = re.search(
        r"```python no-run\n(.*?)```.*?```console\n\$.*?\n(.*?)```",
        PAGE.read_text("utf-8"),
        re.DOTALL,
    )
    assert match is not None
    program, output = match.groups()
    script = tmp_path / "train.py"
    script.write_text(program, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], str(script)],
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[2])},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert output in done.stdout.replace("[0] ", "")  # asyncrpc says which rank
