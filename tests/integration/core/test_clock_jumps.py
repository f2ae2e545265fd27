"""A wall clock that jumps by an hour, either way, changes nothing that counts seconds.

Monotonic time goes on as it does when an administrator or NTP sets a clock.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CLOCK = Path(__file__).with_name("wall_clock.c")
LIMIT_S = 300.0  # only a hang reaches it


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="the clock needs a C compiler")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_time_limits_ignore_clock_jumps(loop: str, tmp_path: Path) -> None:
    """Calls, deadlines, streams, collectives, liveness, resumption, tokens, the log."""
    library = tmp_path / "wall_clock.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(CLOCK), "-ldl"]
    subprocess.run(command, check=True)
    module = "tests.integration.core.jumping_clocks"
    ended = subprocess.run(
        [sys.executable, "-m", module, loop, str(tmp_path)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert not ended.returncode, ended.stderr
