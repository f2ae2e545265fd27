"""Every Python block of the documentation runs, and prints what its page says.

The blocks of a page share one namespace and one event loop; each page has a process of
its own.  Where a page has fences of `output`, they hold all that it prints.
"""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of
from tests.docs.run_page import run_apart

REPOSITORY = Path(__file__).parents[2]
OUTPUT = re.compile(r"^```output\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE_S = 240.0
PAGES = [
    path
    for path in [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    if path.exists() and blocks_of(path.read_text("utf-8"))
]


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda p: p.relative_to(REPOSITORY).as_posix()
)
def test_page_runs_and_prints_its_output(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"  # what a page writes is not ours to keep
    folder.mkdir()
    printed, errors = tmp_path / "stdout", tmp_path / "stderr"
    # Forked from one that has imported torch: a process of its own takes seconds to.
    process = multiprocessing.get_context("forkserver").Process(
        target=run_apart, args=(page, folder, printed, errors)
    )
    process.start()
    process.join(PAGE_S)
    ended = process.exitcode
    if ended is None:
        process.kill()
        process.join()
    process.close()
    assert ended == 0, printed.read_text("utf-8") + errors.read_text("utf-8")
    if outputs := OUTPUT.findall(page.read_text("utf-8")):
        assert printed.read_text("utf-8") == "".join(outputs)
