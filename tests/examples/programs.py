"""Examples as programs: run one as a reader would, and read its tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROGRAM_S = 240.0
WIDE = {"COLUMNS": "120", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}


def ran(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `examples/<name>` to its end.

    It returns when the last holder of its pipes has ended: so its processes have, too.
    """
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / name), *options],
        env={**os.environ, **WIDE, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=PROGRAM_S,
        check=False,
    )


def run(name: str, *options: str) -> str:
    """Run `examples/<name>`, which must succeed, and return what it prints."""
    done = ran(name, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def rows(printed: str) -> list[list[str]]:
    """Return the cells of every row of every table, without the headings."""
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
