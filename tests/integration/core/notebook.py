"""Runs cells in a real kernel, as a notebook does.

    $ python -m tests.integration.core.notebook < CELLS

The input is a JSON list of cells; the output, one of what they print and raise.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from jupyter_client.manager import start_new_kernel

HANGS_S: Final = 300.0  # a cell may import torch on a busy machine


def main(cells: list[str]) -> list[str]:
    """Return the output of each cell: its texts, and its error."""
    manager, client = start_new_kernel(startup_timeout=HANGS_S, kernel_name="python3")
    outputs: list[str] = []
    try:
        for cell in cells:
            parts: list[str] = []
            client.execute_interactive(
                cell,
                timeout=HANGS_S,
                output_hook=lambda message, to=parts: keep(message, to),
            )
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
        case "error":
            parts.append(f"{content['ename']}: {content['evalue']}")


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
