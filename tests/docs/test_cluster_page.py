"""The programs of the pages about clusters and actors, run as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

PAGES: Final = Path(__file__).parents[2] / "docs" / "how-to"


def printed_by(page: str, tmp_path: Path) -> list[str]:
    """Run the first program of a page; return the lines that it prints."""
    text = (PAGES / page).read_text(encoding="utf-8")
    block = re.search(r"```python no-run\n(import .*?)```", text, re.DOTALL)
    assert block is not None
    script = tmp_path / "program.py"
    script.write_text(block[1])
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_program_about_clusters_runs(tmp_path: Path) -> None:
    lines = printed_by("cluster.md", tmp_path)
    assert "2.0" in lines
    assert [line for line in lines if line.startswith("w1 ")]
    assert [line for line in lines if line.startswith("[w0] computing in process ")]


def test_program_about_actors_runs(tmp_path: Path) -> None:
    lines = printed_by("actors.md", tmp_path)
    assert lines[:3] == ["[3, 3]", "5", "[15, 23]"]
    assert sorted(lines[3:5]) == ["w0 15", "w1 23"]
    assert lines[5:] == [f"{n}" for n in reversed(range(15))]
