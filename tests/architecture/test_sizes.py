"""Files and functions stay small enough to be read at once.

The house aims at 400 lines a file and a screen a function.  A file may be longer where
one question is answered in it: to follow a call through many small ones takes more time
than to read on (ADR 43).
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.architecture.sources import (
    PACKAGE,
    TESTS,
    body_lines,
    functions,
    name_of,
    parse,
    python_files,
)

FILE_LINES_MAX = 1000
FUNCTION_LINES_MAX = 60
FUNCTION_LINES_MEDIAN_MAX = 8
FUNCTION_LINES_P90_MAX = 25

FILES = python_files(PACKAGE, TESTS)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_file_is_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES_MAX


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_function_fits_a_screen(path: Path) -> None:
    sizes = {function.name: body_lines(function) for function in functions(parse(path))}
    assert {n: size for n, size in sizes.items() if size > FUNCTION_LINES_MAX} == {}


def test_most_functions_are_a_few_lines() -> None:
    sizes = sorted(
        body_lines(function)
        for path in python_files(PACKAGE)
        for function in functions(parse(path))
    )
    assert statistics.median(sizes) <= FUNCTION_LINES_MEDIAN_MAX
    assert sizes[len(sizes) * 9 // 10] <= FUNCTION_LINES_P90_MAX
