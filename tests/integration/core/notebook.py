"""Runs cells in a real kernel, as a notebook does.

    $ python -m tests.integration.core.notebook < CELLS

The input is a JSON list of cells; the output, one of what they print, show and raise.
A cell that is a list of two texts is interrupted once it has printed the second.  In
the end the kernel is killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from jupyter_client.manager import start_new_kernel

HANGS_S: Final = 300.0  # a cell may import torch on a busy machine
ROOT: Final = Path(__file__).parents[3]


def run(folder: Path, *cells: str | list[str]) -> list[str]:
    """Return what cells print and raise, in a kernel of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.core.notebook"],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "IPYTHONDIR": str(folder)},
        timeout=2 * HANGS_S,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    outputs: list[str] = json.loads(done.stdout)
    return outputs


def main(cells: list[str | list[str]]) -> list[str]:
    """Return the output of each cell: its texts, and its error."""
    manager, client = start_new_kernel(startup_timeout=HANGS_S, kernel_name="python3")
    outputs: list[str] = []
    try:
        for cell in cells:
            source, until = (cell, "") if isinstance(cell, str) else cell
            parts: list[str] = []

            def hook(
                message: dict[str, Any], to: list[str] = parts, until: str = until
            ) -> None:
                has_said = until in "".join(to)
                keep(message, to)
                if not has_said and until in "".join(to):
                    manager.interrupt_kernel()

            client.execute_interactive(source, timeout=HANGS_S, output_hook=hook)
            outputs.append("".join(parts))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return outputs


def keep(message: dict[str, Any], parts: list[str]) -> None:
    content = message["content"]
    match message["msg_type"]:
        case "stream":
            parts.append(content["text"])
        case "execute_result":
            parts.append(content["data"]["text/plain"])
        case "display_data" | "update_display_data":
            parts.append(f"{content['data']['text/html']}\n")
        case "error":
            parts.append(f"{content['ename']}: {content['evalue']}")


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
