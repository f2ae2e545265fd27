"""torchrun's own restarts: a lost agent that comes back, and a worker that fails.

torch 2.13 has an agent share the store of its first round with its workers, and an
agent that comes later waits for ever for the address of it.  With
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 each round has a store of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.ports import free_port

ROOT: Final = Path(__file__).resolve().parents[3]
WORKING: Final = Path(__file__).parent / "working.py"
LIMIT_S: Final = 800.0  # of each wait; only a hang reaches it
ALL: Final = ["0", "1", "2", "3"]

# torchrun imports torch anew for each agent and each life of a worker: seconds, each.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

Note = dict[str, Any]


class Fleet:
    """Agents of torchrun on this host, and what their workers have noted."""

    def __init__(self, folder: Path) -> None:
        self.notes_file = folder / "notes.jsonl"
        self.stop_file = folder / "stop"
        self.notes_file.touch()
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(
        self, *options: str, has_own_stores: bool = True
    ) -> subprocess.Popen[bytes]:
        """Start an agent, with two workers.

        Args:
            options: of torchrun; a word without dashes is for the workers.
            has_own_stores: whether each round has a store of its own.
        """
        extra = [option for option in options if not option.startswith("--")]
        agent = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nproc-per-node", "2"),
                *(option for option in options if option.startswith("--")),
                *(str(WORKING), str(self.notes_file), str(self.stop_file), *extra),
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(has_own_stores)),
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.agents.append(agent)
        return agent

    def notes(self) -> list[Note]:
        lines = self.notes_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def await_notes(self, are_enough: Callable[[list[Note]], bool]) -> list[Note]:
        """Wait until the notes are enough; return them."""
        end_s = time.monotonic() + LIMIT_S
        while not are_enough(notes := self.notes()):
            assert time.monotonic() < end_s, f"the notes are not enough: {notes}"
            time.sleep(0.05)
        return notes

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent and its workers, as a node that loses its power."""
        for pid in [*children(agent.pid), agent.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    created = Fleet(tmp_path)
    try:
        yield created
    finally:
        for agent in created.agents:
            if agent.poll() is None:
                created.kill(agent)


def met(notes: list[Note], *, after: int = 0) -> dict[str, Note]:
    return {note["met"]: note for note in notes[after:] if "met" in note}


def names_with_answers(
    notes: list[Note], answers: list[str], *, after: int = 0
) -> set[str]:
    """Return the names of those who noted these answers."""
    return {note["name"] for note in notes[after:] if note.get("answers") == answers}


def agent_options(port: int, host: str, *, is_host: bool) -> list[str]:
    # Agents are ordered by their addresses: the one that stays has rank 0.
    return [
        "--nnodes=1:2",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=elastic",
        f"--rdzv-conf=keep_alive_interval=1,is_host={is_host}".lower(),
        f"--local-addr={host}",
    ]


def test_workers_of_a_lost_agent_come_back_as_new_incarnations(fleet: Fleet) -> None:
    """Meanwhile those of the other agent call each other as before."""
    names = {f"worker{rank}" for rank in ALL}
    port = free_port()
    fleet.start(*agent_options(port, "127.0.0.1", is_host=True))
    lost = fleet.start(*agent_options(port, "127.0.0.2", is_host=False))
    notes = fleet.await_notes(lambda notes: names_with_answers(notes, ALL) == names)
    first = met(notes)

    fleet.kill(lost)
    survivors = {"worker0", "worker1"}
    gone = ["0", "1", "lost", "lost"]
    notes = fleet.await_notes(
        lambda notes: names_with_answers(notes, gone) == survivors
    )

    so_far = len(notes)
    fleet.start(*agent_options(port, "127.0.0.2", is_host=False))
    notes = fleet.await_notes(
        lambda notes: names_with_answers(notes, ALL, after=so_far) == names
    )
    second = met(notes, after=so_far)
    assert set(first) == set(second) == names
    for name in names:
        assert first[name]["incarnation"] != second[name]["incarnation"]
        assert first[name]["restart"] == second[name]["restart"] == "0"

    fleet.stop_file.touch()
    assert [agent.wait(LIMIT_S) for agent in fleet.agents if agent is not lost] == [
        0,
        0,
    ]


@pytest.mark.parametrize("has_own_stores", [True, False])
def test_failed_worker_restarts_all_workers(
    fleet: Fleet, *, has_own_stores: bool
) -> None:
    """The second life meets apart from the first, also at the store of the first."""
    options = ("--standalone", "--max-restarts=1", "fails")
    agent = fleet.start(*options, has_own_stores=has_own_stores)
    names = {"worker0", "worker1"}

    def have_both_lives(notes: list[Note]) -> bool:
        again = [note for note in notes if note["restart"] == "1"]
        return names_with_answers(again, ["0", "1"]) == names

    notes = fleet.await_notes(have_both_lives)
    lives = [(note["met"], note["restart"]) for note in notes if "met" in note]
    assert sorted(lives) == [(name, life) for name in sorted(names) for life in "01"]
    assert len({note["incarnation"] for note in notes if "met" in note}) == 4
    fleet.stop_file.touch()
    assert agent.wait(LIMIT_S) == 0
