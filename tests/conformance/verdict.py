"""What a run's results mean: which tests fail that must pass.

A test of class a must pass.  One of class b, c or g must pass, or skip itself, or be
listed with a reason.  One that is listed and passes has no business in the list: an
error for class b, and a remark for class c, whose tests pass by luck at times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.conformance.lists import Class, Known
from tests.conformance.results import Result, Status


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tests of a run that need a word."""

    unexpected: tuple[str, ...]  # did not pass, and had to
    excused: tuple[str, ...]  # did not pass, and are listed
    outdated: tuple[str, ...]  # are listed, and passed
    is_good: bool  # whether the run is in order


def judge(
    results: Mapping[str, Result], known: Mapping[str, Known], listed: Mapping[str, str]
) -> Verdict:
    """Compare what was found with what is expected."""
    poor = [
        name for name, result in results.items() if not _is_enough(known[name], result)
    ]
    unexpected = tuple(name for name in poor if name not in listed)
    outdated = tuple(
        name
        for name, result in results.items()
        if name in listed and result.status is Status.PASS
    )
    return Verdict(
        unexpected=unexpected,
        excused=tuple(name for name in poor if name in listed),
        outdated=outdated,
        is_good=not unexpected
        and all(known[name].of_class is Class.C for name in outdated),
    )


def _is_enough(test: Known, result: Result) -> bool:
    if test.of_class is Class.A:
        return result.status is Status.PASS
    return result.is_good
