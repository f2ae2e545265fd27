"""Examples as programs: run one as a reader would, and read its tables."""

from __future__ import annotations

import subprocess
import sys

from tests.commands import REPOSITORY, run_to_end

PROGRAM_S = 240.0
WIDE = {"COLUMNS": "120", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}


def ran(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `examples/<name>` to its end: then its processes have ended, too."""
    command = [sys.executable, str(REPOSITORY / "examples" / name), *options]
    return run_to_end(command, timeout_s=PROGRAM_S, environ=WIDE)


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
