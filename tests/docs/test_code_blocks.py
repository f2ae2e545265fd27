"""Every Python block of the documentation runs, as it stands.

The blocks of a page share one namespace and one event loop; each page has a process of
its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of

REPOSITORY = Path(__file__).parents[2]
PAGE_S = 240.0
PAGES = [
    path
    for path in [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    if path.exists() and "```" in path.read_text("utf-8")
]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda p: p.relative_to(REPOSITORY).as_posix()
)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    if not blocks_of(page.read_text("utf-8")):
        return
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_page", str(page)],
        cwd=tmp_path,  # what a page writes is not ours to keep
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PAGE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
