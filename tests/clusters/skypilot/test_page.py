"""The page on SkyPilot: its commands run on two nodes, with the variables set there.

The nodes are network namespaces.  SkyPilot runs `run` by bash in the working directory;
the variables are those of its page "Environment Variables and Secrets".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from asyncrpc.core.environment import resolve
from tests.clusters.network.hosts import ROOT, Network, Program, network, why_not

PAGE: Final = (ROOT / "docs/how-to/run-on-skypilot.md").read_text("utf-8")
PROGRAM: Final = re.compile(r"^```python no-run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TASKS: Final = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESSES: Final = ("10.8.0.1", "10.8.0.2")
SHELL: Final = """
import os, sys
os.chdir(sys.argv[2])
os.execvp("bash", ["bash", "-c", sys.argv[1]])
"""


def tasks() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the task of the page, and as its second block changes it."""
    first, change = (yaml.safe_load(text) for text in TASKS.findall(PAGE))
    return first, first | change


def variables(rank: int, *, gpus: int = 0) -> dict[str, str]:
    """Return what SkyPilot sets on a node."""
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
        "SKYPILOT_NUM_NODES": str(len(ADDRESSES)),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
        "SKYPILOT_TASK_ID": "sky-2026-11-25-22-10-01-123456_squares_1",
    }


def started(
    net: Network, folder: Path, task: dict[str, Any], *, gpus: int = 0
) -> list[Program]:
    """Start a task on both nodes."""
    (source,) = PROGRAM.findall(PAGE)
    (folder / "squares.py").write_text(source)
    path = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"}
    nodes = [
        net.host(f"node{rank}", sky=address) for rank, address in enumerate(ADDRESSES)
    ]
    return [
        node.start(
            SHELL, task["run"], str(folder), **variables(rank, gpus=gpus), **path
        )
        for rank, node in enumerate(nodes)
    ]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_page_starts_a_worker_per_node(tmp_path: Path) -> None:
    task, _ = tasks()
    assert task["num_nodes"] == len(ADDRESSES)
    with network(tmp_path) as net:
        first, second = started(net, tmp_path, task)
        assert "worker1 of 2: 1" in first.ends()
        second.ends()
    assert "\nworker1 of 2: 1\n" in PAGE


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_page_starts_a_worker_per_gpu(tmp_path: Path) -> None:
    """No GPU is needed for it: SkyPilot's count says how many processes."""
    _, task = tasks()
    with network(tmp_path) as net:
        first, second = started(net, tmp_path, task, gpus=2)
        said = first.ends()
        assert all(f"worker{rank} of 4: {rank * rank}" in said for rank in (1, 2, 3))
        second.ends()


def test_rank_is_found_in_the_variables() -> None:
    for rank in range(2):
        resolved = resolve(variables(rank))
        assert (resolved.rank, resolved.world_size) == (rank, 2)
        assert (resolved.host, resolved.launcher) == (ADDRESSES[0], "SkyPilot")
    other = variables(0) | {"SKYPILOT_TASK_ID": "sky-2026-11-25-22-10-02-1_squares_2"}
    assert resolve(other).port != resolve(variables(0)).port
