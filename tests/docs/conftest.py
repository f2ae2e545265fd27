"""Pages run in processes that have imported everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import kept_for_life

__all__ = ["kept_for_life"]  # pytest looks for fixtures here
MAKE_API = Path(__file__).parents[2] / "docs" / "make_api.py"


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page for each public module."""
    folder = tmp_path_factory.mktemp("docs") / "api"
    subprocess.run([sys.executable, str(MAKE_API), str(folder)], check=True)
    return folder
