"""The program of the page about clusters, run as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md"


def test_program_of_the_page_runs(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    block = re.search(r"```python no-run\n(import os.*?)```", text, re.DOTALL)
    assert block is not None
    script = tmp_path / "program.py"
    script.write_text(block[1])
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert "2.0" in lines
    assert [line for line in lines if line.startswith("w1 ")]
    assert [line for line in lines if line.startswith("[w0] computing in process ")]
