"""The programs of docs/how-to/many-processes.md, each as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[4]
PAGE = REPOSITORY / "docs" / "how-to" / "many-processes.md"
PROGRAMS = re.findall(r"```python no-run\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["launch", "hogwild"])
@pytest.mark.slow
def test_program_of_the_page_passes(tmp_path: Path, program: str) -> None:
    assert "assert " in program
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600.0,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
