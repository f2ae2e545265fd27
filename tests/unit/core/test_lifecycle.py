"""A worker's life: what may be done with it when, and the picture of it in the docs.

$ python -m tests.unit.core.test_lifecycle    # prints the picture
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrpc import UsageError
from asyncrpc.core.lifecycle import TRANSITIONS, Event, Lifecycle, WorkerState
from asyncrpc.core.loop.loops import LoopGuard
from asyncrpc.errors import NotStartedError

DOC = Path(__file__).parents[3] / "docs" / "explanation" / "architecture.md"
PATHS = {
    WorkerState.NEW: (),
    WorkerState.STARTING: (Event.START,),
    WorkerState.RUNNING: (Event.START, Event.STARTED),
    WorkerState.DRAINING: (Event.START, Event.STARTED, Event.SHUT_DOWN),
    WorkerState.CLOSED: (Event.START, Event.STARTED, Event.SHUT_DOWN, Event.DRAINED),
    WorkerState.FORKED: (Event.START, Event.FORK),
}


def lifecycle_in(state: WorkerState) -> Lifecycle:
    lifecycle = Lifecycle("a")
    for event in PATHS[state]:
        lifecycle.advance(event)
    assert lifecycle.state is state
    return lifecycle


def diagram() -> str:
    """Draw `TRANSITIONS` as mermaid text, without forks."""
    lines = ["stateDiagram-v2", "    [*] --> NEW"]
    for state, row in TRANSITIONS.items():
        lines += [
            f"    {state.name} --> {after.name}: {event.value}"
            for event, after in row.items()
            if event is not Event.FORK
        ]
    return "\n".join([*lines, "    CLOSED --> [*]"])


def test_picture_shows_the_transition_table() -> None:
    text = DOC.read_text(encoding="utf-8")
    drawn = text.split("```mermaid\nstateDiagram-v2", 1)[1].split("\n```", 1)[0]
    assert f"stateDiagram-v2{drawn}" == diagram()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (WorkerState.NEW, "has not been started; use `async with`"),
        (WorkerState.CLOSED, "does not run: it has been shut down"),
        (WorkerState.FORKED, "a forked child has no worker"),
    ],
)
def test_misuse_error_names_the_state(state: WorkerState, text: str) -> None:
    lifecycle = lifecycle_in(state)
    with pytest.raises(NotStartedError, match=text):
        lifecycle.check_running()
    with pytest.raises(NotStartedError, match=text):
        LoopGuard(lifecycle).check_on_loop("Worker.find")


@pytest.mark.parametrize(
    "state", [WorkerState.STARTING, WorkerState.RUNNING, WorkerState.DRAINING]
)
def test_functions_may_use_the_worker_until_it_has_drained(state: WorkerState) -> None:
    lifecycle = lifecycle_in(state)
    lifecycle.check_running()
    assert lifecycle.is_draining is (state is WorkerState.DRAINING)


async def test_worker_belongs_to_its_loop_only() -> None:
    guard = LoopGuard(lifecycle_in(WorkerState.RUNNING))
    guard.loop = asyncio.get_running_loop()
    guard.check_on_loop("Worker.find")
    with pytest.raises(UsageError, match=r"Worker\.find .* in a thread without one"):
        await asyncio.to_thread(guard.check_on_loop, "Worker.find")


async def test_worker_belongs_to_its_loop_after_its_end() -> None:
    guard = LoopGuard(lifecycle_in(WorkerState.CLOSED))
    guard.loop = asyncio.get_running_loop()
    guard.check_loop("Worker.shutdown")
    with pytest.raises(NotStartedError, match="has been shut down"):
        guard.check_on_loop("Worker.find")
    guard.lifecycle.advance(Event.FORK)
    with pytest.raises(NotStartedError, match="a forked child has no worker"):
        guard.check_loop("Worker.shutdown")


if __name__ == "__main__":
    print(diagram())  # noqa: T201  # to be pasted
