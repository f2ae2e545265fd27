"""The notebook runs in a kernel, and prints what its file has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import REPOSITORY, printed_by

pytest.importorskip("nbclient", reason="needs the extra [dev]")

NOTEBOOK = REPOSITORY / "examples" / "notebook.ipynb"
NOTEBOOK_S = 600.0  # only what hangs reaches it
BYTES_MAX = 32 << 10


def outputs_of(path: Path) -> list[str]:
    """Return the text that each cell of a notebook has printed or shown."""
    cells: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["cells"]
    return [
        "".join(
            "".join(output.get("text", ()) or output["data"]["text/plain"])
            for output in cell.get("outputs", ())
        )
        for cell in cells
    ]


@pytest.mark.slow
def test_notebook_runs_and_shows_its_outputs(tmp_path: Path) -> None:
    result = tmp_path / "notebook.ipynb"
    module = "tests.examples.run_notebook"
    command = [sys.executable, "-m", module, str(NOTEBOOK), str(result)]
    printed_by(command, cwd=REPOSITORY, timeout_s=NOTEBOOK_S)
    assert outputs_of(result) == outputs_of(NOTEBOOK)


def test_notebook_is_small_and_of_no_host() -> None:
    text = NOTEBOOK.read_text("utf-8")
    assert len(text) <= BYTES_MAX
    assert not any(folder in text for folder in ("/home/", "/var/", "/usr/", "/root/"))
    cells = json.loads(text)["cells"]
    assert any("text/html" in str(cell.get("outputs")) for cell in cells)
