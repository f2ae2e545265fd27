"""Runs a notebook in a real kernel; an error of a cell ends it.

$ python -m tests.examples.run_notebook NOTEBOOK RESULT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import nbformat
from nbclient import NotebookClient

CELL_S: Final = 240


def main(notebook: Path, result: Path) -> None:
    """Write a notebook with the outputs of its cells."""
    cells = nbformat.read(notebook, as_version=4)
    # Without it each cell has the time when it ran.
    client = NotebookClient(
        cells, timeout=CELL_S, kernel_name="python3", record_timing=False
    )
    client.execute()
    nbformat.write(cells, result)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
