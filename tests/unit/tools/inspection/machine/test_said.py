"""A stall is said once, and again only if it has been over."""

from __future__ import annotations

from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.tools.inspection.machine.graph import Hang, find_hangs, graph_of
from asyncrpc.tools.inspection.machine.said import SaidHangs
from asyncrpc.tools.inspection.records import (
    Actor,
    ActorKind,
    NoAnswer,
    StackFrame,
    Trouble,
    Wait,
    WorkerSnapshot,
)


def actor(name: str, wait: Wait, *, line: int = 1) -> Actor:
    frames = (StackFrame(name, "train.py", line),)
    return Actor(ActorKind.TASK, name, name, frames, wait, is_internal=False)


def tasks(*places: int, for_s: float = 9.0) -> Wait:
    return Wait(WaitKind.TASKS, "a task", for_s, places)


def snapshot_of(*actors: Actor, name: str = "a") -> WorkerSnapshot:
    return WorkerSnapshot(name, 0, 1, 2, "host", 0.0, -1, actors, (), ())


STANDS = Wait(WaitKind.CONDITION, "Condition `go`", 9.0)
SLOW = snapshot_of(actor("train", tasks(1)), actor("step", STANDS))
CYCLE = snapshot_of(actor("left", tasks(1)), actor("right", tasks(0)))


def news(
    history: SaidHangs, snapshot: WorkerSnapshot, **silent: NoAnswer
) -> list[tuple[Hang, ...]]:
    graph = graph_of([snapshot], silent)
    hangs = find_hangs(graph, after_s=3.0)
    return [(hang,) for hang in history.news(graph, hangs)]


def test_repeated_hang_is_not_news() -> None:
    history = SaidHangs("a")
    assert len(news(history, SLOW)) == 1
    assert news(history, SLOW) == []
    assert len(history) == 1


def test_moved_line_is_not_news() -> None:
    history = SaidHangs("a")
    assert news(history, SLOW)
    later = snapshot_of(actor("train", tasks(1)), actor("step", STANDS, line=70))
    assert news(history, later) == []


def test_cycle_is_the_same_from_any_entry() -> None:
    history = SaidHangs("a")
    assert len(news(history, CYCLE)) == 1
    turned = snapshot_of(actor("right", tasks(1)), actor("left", tasks(0)))
    assert news(history, turned) == []


def test_another_fault_is_news() -> None:
    history = SaidHangs("a")
    assert news(history, SLOW)
    both = snapshot_of(*SLOW.actors, actor("other", tasks(3)), actor("reader", STANDS))
    assert len(news(history, both)) == 1
    assert len(history) == 2


def test_hang_that_was_over_is_news_again() -> None:
    history = SaidHangs("a")
    assert news(history, SLOW)
    assert news(history, snapshot_of(actor("step", STANDS))) == []
    assert len(history) == 0
    assert len(news(history, SLOW)) == 1
    history.forget()
    assert len(news(history, SLOW)) == 1


def test_hangs_of_other_workers_are_not_news() -> None:
    assert news(SaidHangs("b"), SLOW) == []


def test_changed_trouble_of_a_silent_worker_is_news() -> None:
    history = SaidHangs("a")
    wait = Wait(WaitKind.ROUND, "barrier 1", 9.0, members=("a", "b"))
    waiting = snapshot_of(actor("train", wait))
    assert news(history, waiting, b=NoAnswer(Trouble.SILENT, ""))
    assert news(history, waiting, b=NoAnswer(Trouble.SILENT, "in other words")) == []
    assert news(history, waiting, b=NoAnswer(Trouble.STOPPED, ""))
