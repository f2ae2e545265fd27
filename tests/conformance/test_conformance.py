"""What `make test` runs of PyTorch's suites passes with the facade in torch's place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import lists
from tests.conformance.results import Report
from tests.conformance.verdict import judge

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 600  # seconds; a slow machine may need most of them
KNOWN = lists.classified()
LISTED = lists.not_expected(KNOWN)
NAMES = lists.names_in(lists.CI)

# The first test waits for the run of all.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 20)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Run all of them, in an interpreter that imports nothing of ours before."""
    out = tmp_path_factory.mktemp("conformance") / "results.json"
    command = [sys.executable, "-m", "tests.conformance", "--only", str(lists.CI)]
    # Some race by themselves: a trainer may be called before it has a process group.
    options = ["--jobs", "2", "--timeout", "120", "--retries", "3", "--out", str(out)]
    with subprocess.Popen(
        [*command, *options],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            _, said = started.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            started.terminate()  # and it ends its tests, and writes what it has
            _, said = started.communicate()
    assert out.exists(), said
    return Report.read(out)


@pytest.mark.parametrize("name", NAMES)
def test_test_of_pytorch_passes(name: str, report: Report) -> None:
    result = report.results.get(name)
    assert result is not None, f"not run within {LIMIT_S} s"
    assert judge({name: result}, KNOWN, LISTED).is_good, result.message
