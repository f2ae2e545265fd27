"""PyTorch's tests of c10d and DDP pass on asyncrpc's backend and DDP, but for a few."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import printed_by
from tests.conformance import c10d

LIMIT_S = 900  # seconds; a slow machine may need most of them
# Of each kind some: sums within no_sync, hooks, uneven inputs, averagers.
SOME_OF_DDP = (
    "CPU$|no_sync$|parity_post_localSGD|uneven_input_exception|grad_div|sgd$|undefined"
)


def run(folder: Path, *options: str) -> dict[str, Any]:
    """Run tests that all come out as listed; return the results."""
    out = folder / "results.json"
    command = [sys.executable, "-m", "tests.conformance.c10d", "--out", str(out)]
    printed_by([*command, *options], timeout_s=LIMIT_S)
    results: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return results


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(
    ("options", "listed"),
    [((), c10d.expected()), (("--ddp",), c10d.ddp_expected())],
    ids=["backend", "ddp"],
)
def test_c10d_suite_passes(
    tmp_path: Path, options: tuple[str, ...], listed: dict[str, str]
) -> None:
    results = run(tmp_path, *options)
    # Were nothing in place, or all tests skipped, none of this would be so.
    failed = {n for n, result in results["tests"].items() if result["status"] == "fail"}
    assert failed == listed.keys() & results["tests"].keys()
    assert results["summary"]["pass"] > len(failed)


@pytest.mark.timeout(LIMIT_S + 20)
def test_part_of_the_suite_passes_on_the_module(tmp_path: Path) -> None:
    results = run(tmp_path, "--ddp", "--filter", SOME_OF_DDP)
    assert results["summary"]["pass"] == results["summary"]["total"] > 5
