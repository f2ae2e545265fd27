"""The tests of docs/how-to/test-your-program.md, run by pytest as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "test-your-program.md"
FILE: Final = re.compile(r"```python no-run\n# (test_\w+\.py)\n(.*?)```", re.DOTALL)
SETTINGS: Final = re.compile(r"```ini\n(.*?)```", re.DOTALL)


def test_tests_of_the_page_pass(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    settings = SETTINGS.search(page)
    assert settings is not None
    (tmp_path / "pytest.ini").write_text(settings[1])
    files = FILE.findall(page)
    for name, text in files:
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", str(tmp_path)]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert f"{page.count('async def test_')} passed" in ended.stdout
