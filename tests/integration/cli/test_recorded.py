"""`asyncrpc top`, `refs`, `timeline` and `dump`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import torch

import asyncrpc
from asyncrpc import Options, Worker, autograd, trace
from asyncrpc.cli.main import main
from asyncrpc.testing import ProcessCluster

SECRET: Final = "a secret of this test"
OPTIONS: Final = Options(secret=SECRET, drain_timeout_s=0.0)


def twice(value: torch.Tensor) -> torch.Tensor:
    return value * 2


async def count(items: int) -> Any:
    for number in range(items):
        yield number


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRPC_SECRET", SECRET)
    monkeypatch.delenv("ASYNCRPC_ADDRESS", raising=False)


@pytest_asyncio.fixture
async def trainer() -> AsyncIterator[Worker]:
    """A member of a group that has done something."""
    cluster = ProcessCluster(
        ["ps"], name="trainer", method="forkserver", options=OPTIONS
    )
    async with cluster as worker:
        await train(worker)
        yield worker


async def train(worker: Worker) -> None:
    """Call, fail, stream, go forward and back."""
    peer = worker.peer("ps")
    leaf = torch.ones(4, requires_grad=True)
    async with autograd.context() as context:
        loss = (await peer.call(twice, leaf)).sum()
        await autograd.backward(context, [loss])
    with pytest.raises(ZeroDivisionError):
        await peer.call(divmod, 1, 0)
    assert [one async for one in peer.stream(count, 3)] == [0, 1, 2]


async def run(
    printed: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run the command in a thread; return its status, and what it printed."""
    printed.readouterr()
    status = await asyncio.to_thread(main, arguments)
    told = printed.readouterr()
    return status, told.out, told.err


async def test_a_timeline_has_both_ends_and_arrows(
    trainer: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    status, _, told = await run(
        capsys, "timeline", trainer.addresses[0], "-o", str(path)
    )
    assert status == 0
    assert "2 workers" in told
    events = json.loads(path.read_text())["traceEvents"]
    names = {one["name"] for one in events if one["ph"] == "X"}
    assert {"twice", "divmod: ZeroDivisionError", "count", "backward pass"} <= names
    started = {one["id"] for one in events if one["ph"] == "s"}
    ended = {one["id"] for one in events if one["ph"] == "f"}
    assert started == ended != set()


async def test_a_timeline_goes_beside_a_profile(
    trainer: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with torch.profiler.profile() as profile:
        await train(trainer)
    source, both = tmp_path / "profile.json", tmp_path / "both.json"
    profile.export_chrome_trace(str(source))
    await run(
        capsys,
        *("timeline", trainer.addresses[0], "-o", str(both)),
        *("--profile", str(source)),
    )
    merged = json.loads(both.read_text())
    spans = [one for one in merged["traceEvents"] if one["ph"] == "X"]
    profiled = [one for one in spans if one.get("cat") == "user_annotation"]
    ours = [one for one in spans if one["name"] == "twice" and one["cat"] == "calls"]
    # The profiler's own range of the same call lies where ours does.
    shown = [one for one in profiled if "twice" in one["name"]]
    assert ours
    assert shown
    assert abs(ours[-1]["ts"] - shown[-1]["ts"]) < 60e6


@pytest.mark.parametrize("content", ["", "[]", "{}"])
async def test_what_is_no_profile_is_refused(
    trainer: Worker,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str,
) -> None:
    source = tmp_path / "profile.json"
    source.write_text(content)
    status, _, told = await run(
        capsys, "timeline", trainer.addresses[0], "--profile", str(source)
    )
    assert status == 2
    assert "--profile" in told


async def test_top_counts_calls_by_worker_and_by_function(
    trainer: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    address = trainer.addresses[0]
    status, table, _ = await run(capsys, "top", address, "--once")
    assert status == 0
    heading, *rows = table.splitlines()
    assert heading.split()[:2] == ["worker", "made/s"]
    assert [one.split()[0] for one in rows] == ["ps", "trainer"]
    assert max(map(len, table.splitlines())) <= 80
    _, table, _ = await run(capsys, "top", address, "--once", "--functions")
    assert "twice" in table
    _, table, _ = await run(capsys, "top", address, "--once", "--training")
    assert "passes/s" in table
    _, told, _ = await run(capsys, "top", address, "--json")
    served = json.loads(told)["workers"]["ps"]
    assert served["functions"]["divmod"]["failed_per_s"] > 0
    assert served["served"]["per_s"] > 0


async def test_refs_names_owner_and_holders(
    trainer: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    rref = trainer.peer("ps").remote(twice, torch.ones(2))
    await rref.to_here()
    address = trainer.addresses[0]
    status, table, _ = await run(capsys, "refs", address)
    assert status == 0
    (row,) = table.splitlines()[1:]
    assert row.split()[:4] == ["ps", "ps", "Tensor", "live"]
    assert "trainer" in row
    _, told, _ = await run(capsys, "refs", address, "--held", "--json")
    listed = json.loads(told)["references"]
    assert {one["seen_by"] for one in listed} == {"ps", "trainer"}
    status, _, told = await run(capsys, "refs", address, "--max", "0")
    assert (status, "--max" in told) == (2, True)
    del rref


async def test_a_dump_has_tasks_and_events(
    trainer: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "dump.json"
    status, _, _ = await run(capsys, "dump", trainer.addresses[0], "-o", str(path))
    assert status == 0
    told = json.loads(path.read_text())["workers"]["ps"]
    assert told["snapshot"]["name"] == "ps"
    assert [one["function"] for one in told["events"]["sent"]] == ["count"]
    _, told_alone, _ = await run(
        capsys, "dump", trainer.addresses[0], "--kind", "links", "--worker", "ps"
    )
    alone = json.loads(told_alone)["workers"]
    assert list(alone) == ["ps"]
    assert not alone["ps"]["events"]["calls"]
    assert alone["ps"]["events"]["links"]


async def test_an_unknown_worker_is_refused(
    trainer: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, told = await run(
        capsys, "top", trainer.addresses[0], "--once", "--worker", "nobody"
    )
    assert status == 2
    assert "there is no worker 'nobody'; known: " in told


async def test_events_of_both_ends_belong_together(trainer: Worker) -> None:
    recent = trainer.subscribe(trace.CallEnded, with_recent=True)
    recent.close()
    call = next(one for one in recent.take() if one.function == "twice")
    assert call.to.name == "ps"
    assert call.outcome == trace.OK
    served = await trainer.peer("ps").call(served_here)
    assert call.call_id in served


async def served_here() -> list[int]:
    with asyncrpc.current_worker().subscribe(
        trace.CallServed, with_recent=True
    ) as events:
        return [one.call_id for one in events.take()]
