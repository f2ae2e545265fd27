"""A cluster over the cells of a notebook, in a real kernel."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("ipykernel", reason="needs the extra [dev]")

from tests.integration.core.notebook import run

GONE_S: Final = 60.0  # only what hangs reaches it
START: Final = "cluster = await asyncrpc.Cluster(2)"
# Of a module, so that a worker's later calls see what the first one has done.
HANGING: Final = """
import asyncio
ended = asyncio.Event()
async def hang():
    print("hanging", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()
"""


def wait_gone(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], GONE_S)[0], f"{pid} still runs"
    finally:
        os.close(process)


def test_later_cells_use_and_close_the_cluster(tmp_path: Path) -> None:
    outputs = run(
        tmp_path,
        "import os, asyncrpc",
        START,
        "cluster",
        "len({await peer.call(os.getpid) for peer in cluster.peers})",
        "await asyncrpc.remote('w1', divmod, (17, 5))",
        "asyncrpc.current_worker() is cluster.worker",
        "await cluster.close(); await cluster.close(); cluster",
        "cluster['w0']",
    )
    assert outputs[2:7] == [
        "<Cluster 'cluster': 2 workers, 2 running>",
        *("2", "(3, 2)", "True"),
        "<Cluster 'cluster': ended>",
    ]
    assert outputs[7] == "NotStartedError: the cluster 'cluster' has ended"


def test_cell_shows_what_it_waits_for_and_takes_it_away(tmp_path: Path) -> None:
    _, shown = run(tmp_path, "import asyncrpc", START)
    first, *_, last = shown.split("\n")
    assert first.startswith("<em>cluster: 0 of 2 workers run, waiting for w0, w1 (")
    assert not last


def test_cell_run_again_replaces_its_cluster(tmp_path: Path) -> None:
    outputs = run(
        tmp_path,
        "import os, asyncrpc",
        START,
        "pids = [await peer.call(os.getpid) for peer in cluster.peers]",
        "former = cluster",
        START,
        "former, cluster, os.path.exists(f'/proc/{pids[0]}')",
        "other = await asyncrpc.Cluster(1, name='other')",
        "(cluster, asyncrpc.current_worker('other') is other.worker)",
    )
    runs = "<Cluster 'cluster': 2 workers, 2 running>"
    assert outputs[5] == f"(<Cluster 'cluster': ended>, {runs}, False)"
    assert outputs[7] == f"({runs}, True)"


def test_interrupted_cell_cancels_its_calls_on_the_workers(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    outputs = run(
        tmp_path,
        "import asyncrpc, hanging",
        START,
        ["await cluster['w0'].call(hanging.hang)", "hanging"],
        "async def ended(): await hanging.ended.wait(); return 'ended'",
        "await cluster['w0'].call(ended)",
    )
    assert "CancelledError" in outputs[2]
    assert outputs[4] == "'ended'"


def test_interrupted_computation_leaves_the_cluster_usable(tmp_path: Path) -> None:
    outputs = run(
        tmp_path,
        "import asyncrpc",
        START,
        ["print('computing', flush=True)\nwhile True: pass", "computing"],
        "await cluster['w0'].call(divmod, 17, 5)",
    )
    assert "KeyboardInterrupt" in outputs[2]
    assert outputs[3] == "(3, 2)"


def test_interrupted_start_leaves_no_worker(tmp_path: Path) -> None:
    outputs = run(
        tmp_path,
        "import asyncio, os, signal, asyncrpc",
        "interrupt = os.kill, os.getpid(), signal.SIGINT",
        f"asyncio.get_running_loop().call_soon(*interrupt); {START}",
        START,
        "cluster",
        "asyncrpc.current_worker() is cluster.worker",
    )
    assert "CancelledError" in outputs[2]
    assert outputs[4:] == ["<Cluster 'cluster': 2 workers, 2 running>", "True"]


def test_killed_kernel_leaves_no_process(tmp_path: Path) -> None:
    outputs = run(
        tmp_path,
        "import os, asyncrpc",
        START,
        "[pid for peer in cluster.peers for pid in"
        " await peer.call(lambda: (os.getpid(), os.getppid()))]",
    )
    pids = set(json.loads(outputs[2]))
    assert len(pids) == 3  # two workers, and what has forked them
    for pid in pids:
        wait_gone(pid)
