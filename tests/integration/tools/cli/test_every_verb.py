"""What all verbs have in common that look at a group."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
import uvloop

from asyncrpc import LocalRendezvous, NetworkOptions, Options, Worker
from asyncrpc.tools.cli.main import main, make_parser

SECRET: Final = "a secret of this test"
OPTIONS: Final = Options(
    secret=SECRET,
    drain_timeout_s=0.0,
    network=NetworkOptions(listen=("tcp://127.0.0.1:0",)),
)
NAMES: Final = ("trainer-" + "with-a-long-name-" * 8, "ps-" + "b" * 120)
# Those that run until Ctrl-C have tests of their own.
SERVE: Final = frozenset({"dashboard"})
# Their JSON has no name of a worker if all is well: files, or nothing to tell.
NAMELESS: Final = frozenset({"timeline", "torch-dump", "why"})
# What each verb needs besides, in a folder of the test; and whether it shows a table.
VERBS: Final[dict[str, tuple[tuple[str, ...], bool]]] = {
    "status": ((), True),
    "top": (("--once",), True),
    "calls": ((), True),
    "refs": ((), True),
    "doctor": ((), True),
    "torch-dump": (("--to", "{}/dumps"), True),
    "why": ((), False),  # sentences
    "stacks": (("--internal",), False),  # paths and lines, to be copied whole
    "timeline": (("-o", "{}/timeline.json"), False),
    "dump": ((), False),
}


def observing() -> dict[str, argparse.ArgumentParser]:
    """Return the verbs that take the address of a worker."""
    (commands,) = (
        action
        for action in make_parser()._actions  # noqa: SLF001  (argparse has no other way)
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    )
    return {
        name: parser
        for name, parser in commands.choices.items()
        if any(action.dest == "address" for action in parser._actions)  # noqa: SLF001
    }


def test_table_of_verbs_is_complete() -> None:
    assert set(observing()) - SERVE == set(VERBS)


@pytest.mark.parametrize("verb", sorted(observing()))
def test_verb_has_common_options_and_explains_exit_codes(verb: str) -> None:
    parser = observing()[verb]
    actions = parser._actions  # noqa: SLF001
    options = {name for action in actions for name in action.option_strings}
    assert {"--run"} <= options
    assert verb in SERVE or {"--json", "--worker"} <= options
    assert verb in SERVE or "exit code is 0 if" in str(parser.description)


async def of_a_function_that_has_a_long_name_and_does_not_end_before_it_is_told_to(
    _: str,
) -> None:
    await asyncio.Event().wait()


async def serves(worker: Worker) -> bool:
    """Return whether a worker serves a call by now."""
    await asyncio.sleep(0)
    return any(link.served for link in worker.parts.directory.links)


@pytest_asyncio.fixture
async def address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[str]:
    """The address of a member of a group with long names and a call under way."""
    monkeypatch.setenv("ASYNCRPC_SECRET", SECRET)
    monkeypatch.setenv("ASYNCRPC_RUN_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("COLUMNS", "80")
    meeting = LocalRendezvous(2)
    workers = [
        Worker(name, rank=rank, world_size=2, rendezvous=meeting, options=OPTIONS)
        for rank, name in enumerate(NAMES)
    ]
    async with AsyncExitStack() as stack:
        await asyncio.gather(*map(stack.enter_async_context, workers))
        peer = workers[0].peer(1)
        function = (
            of_a_function_that_has_a_long_name_and_does_not_end_before_it_is_told_to
        )
        call = asyncio.ensure_future(peer.call(function, "x"))
        reference = await peer.remote(str, "a value that is referred to")
        while not await serves(workers[1]):
            pass
        yield workers[0].addresses[0]
        del reference
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def run_verb(
    printed: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Return the status of a command, its output, and its errors."""
    printed.readouterr()
    status = await asyncio.to_thread(main, arguments)
    output = printed.readouterr()
    return status, output.out, output.err


async def test_verb_fits_80_columns_and_filters_json_by_worker(
    address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for verb, (more, is_table) in VERBS.items():
        needed = [argument.format(tmp_path / verb) for argument in more]
        (tmp_path / verb).mkdir()
        status, output, errors = await run_verb(capsys, verb, address, *needed)
        assert status in {0, 1}, (verb, errors)
        lines = output.splitlines()
        if is_table:
            assert max(map(len, lines)) <= 80, (verb, output)
        if "…" in output:
            assert errors.startswith("cut to 80 columns; --json has all of it"), verb

        needed = [argument.format(tmp_path / verb / "json") for argument in more]
        (tmp_path / verb / "json").mkdir()
        only = (verb, address, *needed, "--json", "--worker", NAMES[0])
        status, output, errors = await run_verb(capsys, *only)
        assert status in {0, 1}, (verb, errors)
        assert isinstance(json.loads(output), dict)
        assert verb in NAMELESS or NAMES[0] in output, (verb, output)

        needed = [argument.format(tmp_path / verb / "none") for argument in more]
        (tmp_path / verb / "none").mkdir()
        answer = await run_verb(capsys, verb, address, *needed, "--worker", "nobody")
        assert answer[0] == 2
        assert f"asyncrpc {verb}: there is no worker 'nobody'; known: " in answer[2]


@pytest.mark.parametrize("more", ["--functions", "--training"])
async def test_tables_of_top_fit_80_columns(
    address: str, capsys: pytest.CaptureFixture[str], more: str
) -> None:
    _, output, _ = await run_verb(capsys, "top", address, "--once", more)
    assert max(map(len, output.splitlines())) <= 80


COLUMNS: Final = 80
# Until when it is read: to the end, or a screen of what goes on.
IN_TERMINAL: Final = {
    ("stacks", "--internal"): b"",
    ("why", "--after", "0", "--tree"): b"",
    ("top",): b"made/s",
}


def read_terminal(address: str, arguments: tuple[str, ...], until: bytes) -> list[str]:
    """Run a command in a terminal of 80 columns; return the lines that it writes."""
    ours, theirs = os.openpty()
    try:
        try:
            fcntl.ioctl(
                theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, COLUMNS, 0, 0)
            )
            environment = {
                name: it for name, it in os.environ.items() if name != "COLUMNS"
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "asyncrpc", *arguments, address],
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                env=environment,
            )
        finally:
            os.close(theirs)
        written = b""
        with process:
            while not until or until not in written or not written.endswith(b"\n"):
                try:
                    written += os.read(ours, 1 << 16)
                except OSError:  # the command has ended
                    break
            process.kill()
    finally:
        os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*[A-Z]", "", written.decode()).splitlines()


class TestTerminal:
    """The commands have loops of their own: one here is enough."""

    loops = {"uvloop": uvloop.new_event_loop}  # noqa: RUF012

    async def test_output_fits_the_width_of_the_terminal(self, address: str) -> None:
        for arguments, until in IN_TERMINAL.items():
            lines = await asyncio.to_thread(read_terminal, address, arguments, until)
            assert lines, arguments
            assert max(map(len, lines)) <= COLUMNS, (arguments, lines)
            if arguments[0] != "why":
                assert any(line.endswith("…") or "…" in line for line in lines), lines


async def test_unreachable_worker_has_its_own_exit_status(
    address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for verb, (more, _) in VERBS.items():
        needed = [argument.format(tmp_path) for argument in more]
        nowhere = "tcp://127.0.0.1:1"
        status, output, errors = await run_verb(capsys, verb, nowhere, *needed)
        if verb == "doctor":  # which tells of this host all the same
            assert status == 1
            assert "problem: no worker answers at" in output
        else:
            assert status == 2
            assert f"asyncrpc {verb}: no worker answers at {nowhere}" in errors
