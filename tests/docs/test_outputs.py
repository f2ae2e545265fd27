"""What a page says its blocks print is what they print.

A page with fences of `output` is run once more, and all that it prints is compared with
all that they hold.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OUTPUT = re.compile(r"^```output\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE_S = 240.0
PAGES = [
    path
    for path in [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    if OUTPUT.search(path.read_text("utf-8"))
]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda p: p.relative_to(REPOSITORY).as_posix()
)
def test_a_page_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_page", str(page)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PAGE_S,
        check=True,
    )
    assert done.stdout == "".join(OUTPUT.findall(page.read_text("utf-8")))
