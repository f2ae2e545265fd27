"""PyTorch's tests of c10d and DDP pass on asyncrpc's backend, but for a few."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import c10d

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 900  # seconds; a slow machine may need most of them


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_the_suite_passes_on_the_backend(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance.c10d", "--out", str(out)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(out.read_text("utf-8"))
    # Were the backend not in place, or all tests skipped, none of this would be so.
    assert {n for n, one in results["tests"].items() if one["status"] == "fail"} == set(
        c10d.expected()
    )
    assert results["summary"]["pass"] > len(c10d.expected())
