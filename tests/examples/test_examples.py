"""Examples without tests of their own run, alone and on the CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.commands import REPOSITORY, printed_by

# These are tested where the cluster is, in tests/clusters.
ON_A_CLUSTER = {"train_on_ray.py"}
OTHERS = "".join(
    path.read_text("utf-8")
    for path in Path(__file__).parent.glob("test_*.py")
    if path.name != "test_examples.py"
)
EXAMPLES = [
    path
    for path in sorted((REPOSITORY / "examples").glob("*.py"))
    if not re.search(rf"\b{path.stem}\b", OTHERS) and path.name not in ON_A_CLUSTER
]
EXAMPLE_S = 600.0  # only what hangs reaches it


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
@pytest.mark.slow
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    # Those that take long say themselves how to be quick; tests/ must not.
    quick = ["--quick"] if "--quick" in example.read_text("utf-8") else []
    command = [sys.executable, str(example), *quick]
    printed_by(command, cwd=tmp_path, timeout_s=EXAMPLE_S)
