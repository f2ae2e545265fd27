"""The table of `make cov`."""

from __future__ import annotations

from tests.coverage_table import table, tallies


def of_file(*counts: int) -> dict[str, dict[str, int]]:
    names = ("num_statements", "missing_lines", "num_branches", "missing_branches")
    return {"summary": dict(zip(names, counts, strict=True))}


MEASURED = {
    "files": {
        "asyncrpc/core/wire/reader.py": of_file(80, 8, 20, 2),
        "asyncrpc/core/loop/clock.py": of_file(20, 0, 0, 0),
        "asyncrpc/core/wire/frames.py": of_file(1000, 0, 100, 0),
        "asyncrpc/nothing/__init__.py": of_file(0, 0, 0, 0),
    }
}


def test_each_folder_has_a_row_with_aligned_columns() -> None:
    assert table(tallies(MEASURED)).splitlines() == [
        "folder                lines   missed  branches   missed  covered",
        "asyncrpc/core/loop       20        0         0        0   100.0%",
        "asyncrpc/core/wire    1,080        8       120        2    99.2%",
        "asyncrpc/nothing          0        0         0        0   100.0%",
        "all                   1,100        8       120        2    99.2%",
    ]
