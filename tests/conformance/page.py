"""The part of docs/reference/compatibility.md that a run writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.bench.pages import replaced
from tests.conformance import tables
from tests.conformance.lists import Class, Known
from tests.conformance.results import Report
from tests.conformance.verdict import judge

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
PART: Final = "suites"


def section(
    report: Report, known: Mapping[str, Known], listed: Mapping[str, str]
) -> str:
    """Return the text that stands for one run."""
    about = report.about
    versions = f"torch {about['torch']}, Python {about['python']}"
    took = f"{about['seconds']:.0f} s on {about['cpus']} cores"
    lines = [
        f"{about['date']}: {versions}, {took}.",
        "",
        tables.markdown(report.results, known),
    ]
    verdict = judge(report.results, known, listed)
    poor = [(name, listed[name]) for name in verdict.excused]
    poor += [(name, "to be done") for name in verdict.unexpected]
    if poor:
        lines += ["", "| does not pass | class | why |", "| --- | --- | --- |"]
        lines += [
            f"| `{name}` | {_class_of(known[name])} | {why} |" for name, why in poor
        ]
    return "\n".join(lines)


def renew(
    report: Report,
    known: Mapping[str, Known],
    listed: Mapping[str, str],
    page: Path = PAGE,
) -> None:
    """Write that part of the page."""
    if report.about["implementation"] != "asyncrpc":
        raise ValueError(f"a run of {report.about['implementation']}, not of asyncrpc")
    if left := _of_hosts(known) - report.results.keys():
        raise ValueError(f"{len(left)} tests were not run, {min(left)} is one")
    text = section(report, known, listed)
    page.write_text(replaced(page.read_text("utf-8"), PART, text), "utf-8")


def _of_hosts(known: Mapping[str, Known]) -> set[str]:
    """Return the tests that need no GPU: the page is about these."""
    return {name for name, test in known.items() if test.of_class is not Class.G}


def _class_of(test: Known) -> str:
    return f"{test.of_class} ({test.kind})" if test.kind else str(test.of_class)
