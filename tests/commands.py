"""Commands that tests run to their end, with this repository's packages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

REPOSITORY: Final = Path(__file__).parents[1]


def run_to_end(
    command: Sequence[str],
    *,
    cwd: Path = REPOSITORY,
    environ: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command; it returns when the last holder of its pipes has ended."""
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=False,
    )


def printed_by(command: Sequence[str], **options: Any) -> str:
    """Run a command, which must succeed, and return what it prints."""
    done = run_to_end(command, **options)
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-9000:]
    return done.stdout
