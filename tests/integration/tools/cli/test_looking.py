"""`asyncrpc why`, `stacks`, `calls` and `status`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
import pytest_asyncio

from asyncrpc import Options, Worker
from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.testing import ProcessCluster
from asyncrpc.tools.cli.main import main
from asyncrpc.tools.inspection.group import view_of
from asyncrpc.tools.inspection.observer import Observer
from tests.integration.tools.inspection import hanging

SECRET: Final = "a secret of this test"
OPTIONS: Final = Options(secret=SECRET, drain_timeout_s=0.0)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRPC_SECRET", SECRET)
    monkeypatch.delenv("ASYNCRPC_ADDRESS", raising=False)


@pytest_asyncio.fixture
async def trainer() -> AsyncIterator[Worker]:
    """A group that hangs, as of its member here."""
    cluster = ProcessCluster(
        ["ps"], name="trainer", method="forkserver", options=OPTIONS
    )
    async with cluster as worker:
        task = asyncio.ensure_future(worker.peer("ps").call(hanging.evict))
        while not await waits_for_table(worker):
            pass
        yield worker
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def waits_for_table(worker: Worker) -> bool:
    """Return whether the hang is whole."""
    async with Observer(OPTIONS) as observer:
        view = await view_of(observer, worker.addresses[0])
    actors = view.snapshots["ps"].actors
    return any(actor.wait.kind is WaitKind.LOCK for actor in actors)


class Command:
    """Runs the command in a thread, which has a loop of its own then."""

    def __init__(self, printed: pytest.CaptureFixture[str]) -> None:
        self._printed = printed

    async def __call__(self, *arguments: str) -> tuple[int, str]:
        """Return the status, and what was printed."""
        self._printed.readouterr()
        status = await asyncio.to_thread(main, arguments)
        printed = self._printed.readouterr()
        return status, printed.out or printed.err

    async def json(self, *arguments: str) -> Any:
        _, printed = await self(*arguments, "--json")
        return json.loads(printed)


@pytest.fixture
def asyncrpc(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


async def test_why_prints_the_cycle_as_a_subprocess(trainer: Worker) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncrpc", "why", "--after", "0"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "ASYNCRPC_ADDRESS": trainer.addresses[0]},
    )
    output, _ = await process.communicate()
    assert process.returncode == 1
    assert b"which waits for ps `apply`, which waits for Lock `table` held" in output


async def test_why_shows_a_certain_cycle(trainer: Worker, asyncrpc: Command) -> None:
    address = trainer.addresses[0]
    status, printed = await asyncrpc("why", address, "--after", "0", "--tree")
    assert status == 1
    assert "└ ps task `apply`, serving `apply` for trainer" in printed
    hang, *_ = (await asyncrpc.json("why", address, "--after", "0"))["hangs"]
    assert hang["is_cycle"]
    assert hang["is_certain"]


async def test_calls_stacks_and_status_show_the_workers(
    trainer: Worker, asyncrpc: Command
) -> None:
    address = trainer.addresses[0]
    status, printed = await asyncrpc("calls", address)
    lines = printed.splitlines()
    assert status == 0
    assert lines[0].split() == ["age", "from", "to", "function", "there"]
    assert max(map(len, lines)) <= 80
    assert any(line.endswith("waits for Lock `table`") for line in lines)
    calls = (await asyncrpc.json("calls", address))["calls"]
    assert len(calls) == len(lines) - 1

    status, printed = await asyncrpc("stacks", address, "--worker", "ps")
    assert status == 0
    assert "waits for Lock `table`" in printed
    assert "in evict" in printed
    workers = (await asyncrpc.json("stacks", address, "--internal"))["workers"]
    assert {worker["name"] for worker in workers} == {"trainer", "ps"}

    status, printed = await asyncrpc("status", address)
    assert status == 0
    names = [line.split()[1] for line in printed.splitlines()]
    assert names == ["name", "trainer", "ps"]
    workers = (await asyncrpc.json("status", address))["workers"]
    assert [worker["state"] for worker in workers] == ["runs", "runs"]


@pytest.mark.parametrize("after", ["-1", "nan", "inf", "-inf", "soon"])
def test_invalid_after_is_refused(
    capsys: pytest.CaptureFixture[str], after: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["why", "tcp://127.0.0.1:1", f"--after={after}"])
    assert ended.value.code == 2
    refusal = f"--after: must be a finite number of seconds, 0 or more, not {after}\n"
    assert capsys.readouterr().err.endswith(refusal)


async def test_wrong_arguments_are_explained(
    trainer: Worker, asyncrpc: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = trainer.addresses[0]
    monkeypatch.setenv("ASYNCRPC_RUN_DIR", "/nowhere")
    status, printed = await asyncrpc("why")
    assert status == 2
    assert "no run of yours is under way on this host (looked in /nowhere)" in printed
    assert "give the ADDRESS of any worker" in printed
    assert await asyncrpc("stacks", address, "--worker", "x") == (
        2,
        "asyncrpc stacks: there is no worker 'x'; known: ps, trainer\n",
    )
    status, printed = await asyncrpc("status", "tcp://127.0.0.1:1")
    assert status == 2
    assert "no worker answers at tcp://127.0.0.1:1" in printed
    monkeypatch.setenv("ASYNCRPC_SECRET", "another")
    status, printed = await asyncrpc("why", address)
    assert status == 2
    assert "different secrets" in printed
