"""`asyncrpc top`, `refs`, `timeline` and `dump`."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import torch

import asyncrpc
from asyncrpc import Options, Worker, autograd, trace
from asyncrpc.testing import ProcessCluster
from asyncrpc.tools.cli.main import main
from tests.unit.tools.inspection.machine.timelines import check

SECRET: Final = "a secret of this test"
OPTIONS: Final = Options(secret=SECRET, drain_timeout_s=0.0)


def twice(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def relay_here(value: int) -> int:
    result: int = asyncrpc.rpc_sync("trainer", abs, args=(value,))
    return result


async def relay(value: int) -> int:
    """Call the caller: once, in a thread, and in a task of its own."""
    peer = asyncrpc.current_worker().peer("trainer")
    once = await peer.call(abs, value)
    more = await asyncio.gather(
        asyncio.to_thread(relay_here, value), peer.call(abs, value)
    )
    return once + sum(more)


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
    assert [number async for number in peer.stream(count, 3)] == [0, 1, 2]


async def run(
    printed: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run the command in a thread; return its status, and what it printed."""
    printed.readouterr()
    status = await asyncio.to_thread(main, arguments)
    output = printed.readouterr()
    return status, output.out, output.err


def tracks_of(events: list[dict[str, Any]], who: str) -> dict[str, list[str]]:
    """Return the spans of each track of a worker, by the title of the track."""
    (pid,) = [
        event["pid"]
        for event in events
        if event["name"] == "process_name" and event["args"]["name"].endswith(who)
    ]
    tracks: dict[str, list[str]] = {}
    for event in events:
        if event["pid"] == pid and event["name"] == "thread_name":
            spans = [
                span["name"]
                for span in events
                if span["ph"] == "X" and span["tid"] == event["tid"]
            ]
            tracks[event["args"]["name"]] = spans
    return tracks


def ends_of_arrows(events: list[dict[str, Any]], phase: str, name: str) -> set[int]:
    ids = [
        event["id"]
        for event in events
        if event["ph"] == phase and event["name"] == name
    ]
    assert len(ids) == len(set(ids))
    return set(ids)


@pytest.mark.parametrize("name", ["timeline.json", "timeline.json.gz"])
async def test_a_timeline_has_both_ends_and_arrows(
    trainer: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    status, _, message = await run(
        capsys, "timeline", trainer.addresses[0], "-o", str(path)
    )
    assert status == 0
    assert "2 workers" in message
    assert "one clock" in message
    assert "apart" not in message
    read = gzip.decompress if name.endswith(".gz") else bytes
    events = json.loads(read(path.read_bytes()))["traceEvents"]
    check(events)
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"twice on ps", "twice", "count on ps", "count"} <= names
    assert {"divmod on ps: ZeroDivisionError", "divmod: ZeroDivisionError"} <= names
    assert ends_of_arrows(events, "s", "call")
    assert ends_of_arrows(events, "f", "call")


async def test_a_task_has_its_track_and_a_function_holds_what_it_calls(
    trainer: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    peer, path = trainer.peer("ps"), tmp_path / "timeline.json"
    has_called, is_drawn = asyncio.Event(), asyncio.Event()

    async def evaluate() -> None:
        for _ in range(3):
            await peer.call(relay, 2)
        has_called.set()
        await is_drawn.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(evaluate(), name="evaluation")
        await has_called.wait()
        await run(capsys, "timeline", trainer.addresses[0], "-o", str(path))
        is_drawn.set()
    events = json.loads(path.read_text())["traceEvents"]
    check(events)
    mine = tracks_of(events, "trainer")
    assert mine[f"evaluation: {evaluate.__name__}"] == ["relay on ps"] * 3
    there = tracks_of(events, "ps")
    below = [
        spans[place + 1]
        for spans in there.values()
        for place, name in enumerate(spans)
        if name == "relay"
    ]
    assert below == ["abs on trainer"] * 3
    # In threads of functions, and in tasks that a function gathers.
    shown = [span for spans in there.values() for span in spans]
    assert shown.count("abs on trainer") == 9


async def test_gradients_have_arrows_to_the_segment_that_takes_them(
    trainer: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    await run(capsys, "timeline", trainer.addresses[0], "-o", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    there = tracks_of(events, "ps")
    assert there["backward passes"] == ["backward pass", "backward"]
    starts = ends_of_arrows(events, "s", "gradient")
    # One pass: from the loss to the function, and back to the leaf.
    assert len(starts) == 2
    assert starts == ends_of_arrows(events, "f", "gradient")


async def test_a_timeline_goes_beside_a_profile(
    trainer: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with torch.profiler.profile() as profile:
        await asyncio.gather(train(trainer), train(trainer))
    source, both = tmp_path / "profile.json", tmp_path / "both.json"
    profile.export_chrome_trace(str(source))
    await run(
        capsys,
        *("timeline", trainer.addresses[0], "-o", str(both)),
        *("--profile", str(source)),
    )
    merged = json.loads(both.read_text())
    spans = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    shown = [span for span in spans if "rpc_async#twice" in span["name"]]
    ours = [span for span in spans if span["name"] == "twice on ps"]
    assert len(shown) == 2
    # The profiler's own range of the same call lies where ours does.
    for its, call_span in zip(by_begin(shown), by_begin(ours)[-2:], strict=True):
        assert abs(its["ts"] - call_span["ts"]) < 60e6
    assert not {task["pid"] for task in shown} & {task["pid"] for task in ours}
    check(spans_of_calls(spans))


def by_begin(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(spans, key=lambda span: (span["ts"], -span["dur"]))


def spans_of_calls(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return by_begin([span for span in spans if span["name"].startswith("rpc_")])


@pytest.mark.parametrize("content", ["", "[]", "{}"])
async def test_invalid_profile_is_refused(
    trainer: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    source = tmp_path / "profile.json"
    source.write_text(content)
    status, _, problem = await run(
        capsys, "timeline", trainer.addresses[0], "--profile", str(source)
    )
    assert status == 2
    assert "--profile" in problem


async def test_top_counts_calls_by_worker_and_by_function(
    trainer: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    address = trainer.addresses[0]
    status, table, _ = await run(capsys, "top", address, "--once")
    assert status == 0
    heading, *rows = table.splitlines()
    assert heading.split()[:2] == ["worker", "made/s"]
    assert [row.split()[0] for row in rows] == ["ps", "trainer"]
    assert max(map(len, table.splitlines())) <= 80
    _, table, _ = await run(capsys, "top", address, "--once", "--functions")
    assert "twice" in table
    _, table, _ = await run(capsys, "top", address, "--once", "--training")
    assert "passes/s" in table
    _, output, _ = await run(capsys, "top", address, "--json")
    served = json.loads(output)["workers"]["ps"]
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
    _, output, _ = await run(capsys, "refs", address, "--held", "--json")
    listed = json.loads(output)["references"]
    assert {entry["seen_by"] for entry in listed} == {"ps", "trainer"}
    status, _, output = await run(capsys, "refs", address, "--max", "0")
    assert (status, "--max" in output) == (2, True)
    del rref


async def test_a_dump_has_tasks_and_events(
    trainer: Worker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "dump.json"
    status, _, _ = await run(capsys, "dump", trainer.addresses[0], "-o", str(path))
    assert status == 0
    dumped = json.loads(path.read_text())["workers"]["ps"]
    assert dumped["snapshot"]["name"] == "ps"
    assert [event["function"] for event in dumped["events"]["sent"]] == ["count"]
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
    status, _, message = await run(
        capsys, "top", trainer.addresses[0], "--once", "--worker", "nobody"
    )
    assert status == 2
    assert "there is no worker 'nobody'; known: " in message


async def test_events_of_both_ends_belong_together(trainer: Worker) -> None:
    recent = trainer.subscribe(trace.CallEnded, with_recent=True)
    recent.close()
    call = next(event for event in recent.take() if event.function == "twice")
    assert call.to.name == "ps"
    assert call.outcome == trace.OK
    served = await trainer.peer("ps").call(served_here)
    assert call.call_id in served


async def served_here() -> list[int]:
    with asyncrpc.current_worker().subscribe(
        trace.CallServed, with_recent=True
    ) as events:
        return [event.call_id for event in events.take()]
