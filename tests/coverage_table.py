"""What `make cov` has measured, as a table: a row for each folder of asyncrpc.

Reads `.coverage` in the folder that it is started from.  Percentages are of lines and
branches together, as `coverage report` counts.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coverage import Coverage


@dataclass(slots=True)
class Tally:
    """Lines and branches: how many there are, and how many were not reached."""

    lines: int = 0
    lines_missed: int = 0
    branches: int = 0
    branches_missed: int = 0

    def add(self, summary: dict[str, Any]) -> None:
        """Add what was measured of a file."""
        self.lines += summary["num_statements"]
        self.lines_missed += summary["missing_lines"]
        self.branches += summary["num_branches"]
        self.branches_missed += summary["missing_branches"]

    @property
    def percent(self) -> float:
        """How many of the lines and branches were reached, in percent."""
        there = self.lines + self.branches
        missed = self.lines_missed + self.branches_missed
        return 100.0 * (there - missed) / there if there else 100.0


def tallies(measured: dict[str, Any]) -> dict[str, Tally]:
    """Return a tally for each folder, in order, then that of all.

    Args:
        measured: what `coverage json` writes.
    """
    folders: defaultdict[str, Tally] = defaultdict(Tally)
    total = Tally()
    for path, of_file in measured["files"].items():
        folders[str(Path(path).parent)].add(of_file["summary"])
        total.add(of_file["summary"])
    return {**dict(sorted(folders.items())), "all": total}


def table(folders: dict[str, Tally]) -> str:
    """Return the rows with their columns in line."""
    width = max(map(len, folders))
    heading = f"{'folder':{width}}  {'lines':>7}  {'missed':>7}  "
    rows = [f"{heading}{'branches':>8}  {'missed':>7}  covered"]
    rows += [
        f"{name:{width}}  {tally.lines:7,}  {tally.lines_missed:7,}  "
        f"{tally.branches:8,}  {tally.branches_missed:7,}  {tally.percent:6.1f}%"
        for name, tally in folders.items()
    ]
    return "\n".join(rows)


def main() -> None:
    """Print the table."""
    coverage = Coverage()
    coverage.load()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measured.json")
        coverage.json_report(outfile=str(path))
        measured = json.loads(path.read_text("utf-8"))
    print(table(tallies(measured)))  # noqa: T201  (for whoever runs `make cov`)


if __name__ == "__main__":
    main()
