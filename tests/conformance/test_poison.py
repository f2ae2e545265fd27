"""A facade that falls back on torch's own RPC passes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import run_to_end
from tests.conformance.results import Report, Status

NAMES = ("RpcTest.test_add", "DistAutogradTest.test_backward_simple_self")
# Torch's own modules in the place of the facade's, and so behind the proxies.
PROGRAM = """
import sys
from tests.conformance import __main__, substitution
substitution.MODULES = {name: name for name in substitution.MODULES}
sys.exit(__main__.main())
"""


@pytest.mark.slow
def test_call_that_reaches_torchs_rpc_fails(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    chosen = f"^({'|'.join(NAMES)})$"
    options = ["--filter", chosen, "--retries", "0", "--out", str(out)]
    done = run_to_end([sys.executable, "-c", PROGRAM, *options])
    assert done.returncode == 1, done.stderr
    results = Report.read(out).results
    assert results.keys() == set(NAMES)
    for result in results.values():
        assert result.status is Status.FAIL
        assert result.leaked, result.message
