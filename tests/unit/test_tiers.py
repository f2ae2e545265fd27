"""Every test is in one tier and one part of it; the table of `make cov`."""

from __future__ import annotations

import pytest

from tests.coverage_table import table, tallies
from tests.tiers import Part, quick_among

pytest_plugins = ["pytester"]

SHARES = {"tests/many/": 0.1, "tests/many/most/": 0.8}
MANY = [f"tests/many/test_a.py::test_it[{case}]" for case in range(1000)]
MOST = [f"tests/many/most/test_a.py::test_it[{case}]" for case in range(1000)]
FUNCTIONS = [f"tests/many/test_a.py::test_{number}" for number in range(1000)]

PLUGINS = ("-p", "tests.tiers", "-p", "no:asyncio")
# What is collected twice: once in a folder with a share, once in one without.
MODULE = """
import pytest

@pytest.mark.parametrize("case", [*range(50), pytest.param(50, marks=pytest.mark.slow)])
def test_cases(case):
    pass

def test_alone():
    pass

@pytest.mark.slow
def test_slow():
    pass
"""


def test_longest_prefix_sets_the_share() -> None:
    assert 60 < len(quick_among(MANY, SHARES)) < 140
    assert 740 < len(quick_among(MOST, SHARES)) < 860


def test_cases_without_a_share_are_all_quick() -> None:
    assert quick_among(MANY, {"tests/man/": 0.1}) == set(MANY)


def test_every_function_has_a_quick_case() -> None:
    assert quick_among(FUNCTIONS, SHARES) == set(FUNCTIONS)
    for item in MANY:
        assert quick_among([item], SHARES) == {item}


def test_quick_case_stays_quick_among_more() -> None:
    some = quick_among(MANY[:500], SHARES)
    assert some == quick_among(MANY, SHARES) & set(MANY[:500])
    assert some == quick_among(reversed(MANY[:500]), SHARES)


def test_each_function_is_in_one_part_of_similar_size() -> None:
    parts = [Part.parse(f"{number}/4") for number in (1, 2, 3, 4)]
    for function in FUNCTIONS:
        assert sum(part.has(function) for part in parts) == 1
    sizes = [sum(map(part.has, FUNCTIONS)) for part in parts]
    assert min(sizes) > 200


def test_cases_of_a_function_are_in_one_part() -> None:
    assert sum(map(Part(1, 3).has, MANY)) in {0, len(MANY)}
    assert all(map(Part().has, MANY))


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "-1/4", "1/4/2", "a/b", "1/0"])
def test_malformed_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a part must be like 2/4"):
        Part.parse(text)


@pytest.fixture
def tree(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers = slow: slow\n")
    for kind in ("unit", "integration"):
        folder = pytester.path / "tests" / kind
        folder.mkdir(parents=True)
        (folder / f"test_{kind}.py").write_text(MODULE)
    return pytester


def collected(tree: pytest.Pytester, *options: str) -> set[str]:
    """Return the node ids of the tests that are chosen."""
    result = tree.runpytest_inprocess(*PLUGINS, "-q", "--collect-only", *options)
    return {line for line in result.outlines if "::" in line}


def test_tiers_are_disjoint_and_cover_all_tests(tree: pytest.Pytester) -> None:
    tests = {
        tier: collected(tree, f"--tier={tier}") for tier in ("quick", "deep", "all")
    }
    assert tests["all"] == collected(tree)
    assert len(tests["all"]) == 2 * 53
    assert tests["quick"] | tests["deep"] == tests["all"]
    assert not tests["quick"] & tests["deep"]


def test_quick_tier_has_a_share_of_unit_cases_and_one_of_others(
    tree: pytest.Pytester,
) -> None:
    quick = collected(tree, "--tier=quick")
    unit = {test for test in quick if test.startswith("tests/unit/")}
    assert len(unit) == 51
    assert not any("slow" in test or "[50]" in test for test in quick)
    assert "tests/integration/test_integration.py::test_alone" in quick
    assert 1 < len(quick - unit) < 25


def test_parts_divide_the_tier(tree: pytest.Pytester) -> None:
    parts = [
        collected(tree, "--tier=deep", f"--part={number}/3") for number in (1, 2, 3)
    ]
    assert set.union(*parts) == collected(tree, "--tier=deep")
    assert sum(map(len, parts)) == len(collected(tree, "--tier=deep"))


def test_malformed_part_is_an_error_of_the_command_line(tree: pytest.Pytester) -> None:
    result = tree.runpytest_inprocess(*PLUGINS, "--part=5/4")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--part*a part must be like 2/4, not '5/4'*"])


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
