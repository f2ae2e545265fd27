"""Prometheus itself scrapes three workers, and answers what the board asks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final

import pytest

from tests.clusters.hanging import HANGS_S
from tests.clusters.prometheus.programs import WORLD
from tests.clusters.prometheus.server import PROGRAMS, Prometheus
from tests.clusters.server_process import POLL_S, missing_programs

ROOT: Final = Path(__file__).resolve().parents[3]
_PROMTOOL: Final = shutil.which("promtool") or "promtool"
# Of what these workers never do: a legal answer is empty.
MAY_BE_EMPTY: Final = ("asyncrpc_client_peer_", "asyncrpc_server_peer_")


def board_queries() -> list[tuple[str, str]]:
    """Return the queries of the board, by the titles of their panels."""
    text = (files("asyncrpc.tools.observability") / "grafana.json").read_text()
    return [
        (panel["title"], target["expr"])
        for panel in json.loads(text)["panels"]
        for target in panel["targets"]
    ]


def filled_in(query: str) -> str:
    """Return a query as Grafana asks it."""
    for variable, value in (
        ("$__rate_interval", "5s"),
        ("$job", ".*"),
        ("$instance", ".*"),
    ):
        query = query.replace(variable, value)
    assert "$" not in query
    return query


@pytest.fixture(scope="module")
def needed() -> None:
    if missing := missing_programs(*PROGRAMS):
        pytest.skip(f"needs {', '.join(missing)}: tests/clusters/install.sh")


@pytest.fixture(scope="module")
def ports(
    needed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[int]]:
    """Run three workers that are busy; the ports of their metrics."""
    del needed
    folder = tmp_path_factory.mktemp("workers")
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.clusters.prometheus.programs"),
                *(str(rank), str(folder)),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        yield [_port(folder / f"port{rank}", started) for rank in range(WORLD)]
        errors = [_ended(process) for process in started]
        assert errors == [""] * WORLD
    finally:
        for process in started:
            process.kill()
            with contextlib.suppress(ValueError):  # its pipes are closed
                process.communicate()


def _port(path: Path, started: list[subprocess.Popen[str]]) -> int:
    end_s = time.monotonic() + HANGS_S
    while not path.exists():
        for process in started:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end_s, "the workers do not start"
        time.sleep(POLL_S)
    return int(path.read_text())


def _ended(worker: subprocess.Popen[str]) -> str:
    """Tell a worker to end; return what it has to complain of."""
    _, errors = worker.communicate("", timeout=HANGS_S)
    return "" if worker.returncode == 0 else errors


@pytest.fixture(scope="module")
def prometheus(
    ports: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    with Prometheus(tmp_path_factory.mktemp("prometheus"), ports) as running:
        running.wait_scraped()
        yield running


def test_prometheus_scrapes_all_workers(prometheus: Prometheus) -> None:
    def all_told() -> bool:
        samples = prometheus.query("asyncrpc_worker_info")
        return {sample["metric"]["worker"] for sample in samples} == {"w0", "w1", "w2"}

    prometheus.wait_until(all_told, "each worker has told its name")
    metadata = prometheus.asked("metadata")
    assert metadata["rpc_client_call_duration_seconds"][0]["type"] == "histogram"


@pytest.mark.parametrize(("title", "query"), board_queries())
def test_queries_of_the_board_have_answers(
    prometheus: Prometheus, title: str, query: str
) -> None:
    words = filled_in(query)
    if any(name in query for name in MAY_BE_EMPTY):
        prometheus.query(words)
        return
    samples = prometheus.wait_until(
        lambda: prometheus.query(words), f"{title}: {words}"
    )
    assert all(len(sample["value"]) == 2 for sample in samples)


@pytest.mark.parametrize("rank", range(WORLD))
def test_promtool_accepts_the_metrics(ports: list[int], rank: int) -> None:
    url = f"http://127.0.0.1:{ports[rank]}/metrics"
    with urllib.request.urlopen(url, timeout=HANGS_S) as answer:
        text = answer.read()
    checked = subprocess.run(
        [_PROMTOOL, "check", "metrics"],
        input=text,
        capture_output=True,
        timeout=HANGS_S,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
