"""The parts of docs/explanation/performance.md and scale.md that runs write.

Each stands between two markers that name what made it; the rest is written by people.
"""

from __future__ import annotations

import argparse
import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.bench import harness, machine

PAGE: Final = Path(__file__).parents[2] / "docs" / "explanation" / "performance.md"
SCALE: Final = PAGE.with_name("scale.md")
SERVING: Final = PAGE.with_name("serving-performance.md")
PICTURE: Final = PAGE.with_suffix(".png")


def section(written: Mapping[str, Any]) -> str:
    """Return the text that stands for one run.

    Args:
        written: what `--json` wrote.
    """
    results = harness.from_json(written["rows"])
    missed = [result.row.name for result in results if result.verdict == "short"]
    failed = harness.failures_of(results)
    aimed = [result for result in results if result.verdict]
    reached = sum(result.verdict == "ok" for result in aimed)
    lines = [
        f"{written['date']}, starts of each side: {written['starts']}, seconds per",
        f"workload and start: {written['seconds']:g}.  Load before the run:",
        f"{written['load']:g}.  {written['machine']}.",
        "",
        harness.table(results, markdown=True),
        "",
        f"{reached} of {len(aimed)} targets are reached.",
    ]
    if missed:
        lines.append(f"Short of theirs: {'; '.join(missed)}.")
    if failed:
        lines.append(f"Not measured: {'; '.join(failed)}.")
    return "\n".join(lines)


def replaced(page: str, name: str, text: str) -> str:
    """Return a page with `text` between the markers of a part."""
    opening, closing = (f"<!-- measured: {name}: {end} -->" for end in ("begin", "end"))
    before, begin, rest = page.partition(opening)
    _, end, after = rest.partition(closing)
    if not begin or not end or opening in rest or closing in after:
        raise ValueError(f"the page needs {opening!r} and {closing!r}, once each")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def renew(name: str, text: str, page: Path = PAGE) -> None:
    page.write_text(replaced(page.read_text("utf-8"), name, text), "utf-8")


def as_block(table: str) -> str:
    """Return a table that a script printed as a part of the page, with the machine."""
    return f"{about()}\n\n```text\n{table}\n```"


def parser(description: str | None, starts: int = 0) -> argparse.ArgumentParser:
    """Return a parser with what most scripts take: `--starts`, `--update-docs`."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=kind)
    if starts:
        parser.add_argument("--starts", type=int, default=starts, help="of each side")
    parser.add_argument("--update-docs", action="store_true")
    return parser


def show(part: str, text: str, options: argparse.Namespace, page: Path = PAGE) -> None:
    """Print a table; with `--update-docs` write it into its page, too."""
    print(text)
    if options.update_docs:
        renew(part, as_block(text), page)


def about() -> str:
    """Return when this is, and on which machine, in a line."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return f"{today}. {machine.describe()}, load {machine.load():g} after the run."
