"""Rates from the last events; work in slices; a stall is reported once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.core.trace.events import CallEnded, CallServed
from asyncrpc.tools.inspection.events import KIND_NAMES, RecentEvents
from asyncrpc.tools.inspection.machine.graph import Hang, find_hangs, graph_of
from asyncrpc.tools.inspection.machine.rates import by_function, percentile, rates_of
from asyncrpc.tools.inspection.machine.reported_stalls import SaidHangs
from asyncrpc.tools.inspection.machine.slices import (
    SLICE_MAX,
    Slices,
    finished,
    let_go,
    parts_of,
    weighed_parts,
)
from asyncrpc.tools.inspection.records import (
    ActorKind,
    NoAnswer,
    ObservedActor,
    StackFrame,
    Trouble,
    Wait,
    WorkerSnapshot,
)
from asyncrpc.trace import RECENT_MAX

PEER = WorkerId("b", Incarnation(2))


def recent(**events: list[Any]) -> RecentEvents:
    return RecentEvents(
        100.0, 0, [], **{name: events.get(name, []) for name in KIND_NAMES}
    )


def call(at_s: float, took_s: float = 0.01, outcome: str = "ok") -> CallEnded:
    return CallEnded(at_s, at_s - took_s, PEER, "add", 1, outcome, 300, 200, "")


def test_rates_count_calls_ended_in_the_window() -> None:
    calls = [call(90.0), call(96.0, 0.02), call(97.0, 0.04, "ValueError")]
    rates = rates_of(recent(calls=calls), window_s=5.0).made
    assert (rates.per_s, rates.failed_per_s, rates.bytes_per_s) == (0.4, 0.2, 200.0)
    assert rates.p50_s == pytest.approx(0.02)
    assert rates.p99_s == pytest.approx(0.04)


def test_full_ring_shortens_the_window() -> None:
    calls = [call(99.0 + place / RECENT_MAX) for place in range(RECENT_MAX)]
    assert rates_of(recent(calls=calls), window_s=5.0).made.per_s == RECENT_MAX


@pytest.mark.parametrize("place", [0, RECENT_MAX - 1])
def test_inspection_calls_do_not_count_as_work(place: int) -> None:
    calls = [call(99.0 + at / RECENT_MAX) for at in range(RECENT_MAX)]
    calls[place] = calls[place]._replace(function="inspection.summary")
    assert rates_of(recent(calls=calls), window_s=5.0).made.per_s == RECENT_MAX - 1
    served = [CallServed(99.0, 98.0, 98.9, PEER, "inspection.calls", 1, "ok")]
    assert by_function(recent(served=served), window_s=5.0) == {}


def test_empty_record_has_no_percentiles() -> None:
    rates = rates_of(recent(), window_s=5.0)
    assert rates.made.per_s == rates.steps_per_s == 0.0
    assert math.isnan(rates.served.p50_s)


def test_function_times_include_the_wait_of_the_request() -> None:
    served = [
        CallServed(99.0, 98.0, 98.9, PEER, "slow", 1, "ok"),
        CallServed(99.5, 99.4, 99.4, PEER, "fast", 2, "ok"),
    ]
    rates = by_function(recent(served=served), window_s=5.0)
    assert rates["slow"].p50_s == 1.0
    assert rates["fast"].per_s == 0.2


def test_percentiles_are_values_that_occur() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 0.5) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([3.0], 0.99) == 3.0


def test_finished_slices_return_the_result() -> None:
    def work() -> Slices[str]:
        yield 1
        yield 2
        return "done"

    assert finished(work()) == "done"


@pytest.mark.parametrize("count", [0, 1, 2, 3, SLICE_MAX, SLICE_MAX + 1, 2000])
@pytest.mark.parametrize("at_most", [1, 2, 3, SLICE_MAX])
def test_slices_have_all_items_in_order(count: int, at_most: int) -> None:
    parts = list(parts_of(range(count), at_most))
    assert [item for part in parts for item in part] == list(range(count))
    assert all(len(part) == at_most for part in parts[:-1])
    assert all(parts)


@pytest.mark.parametrize("at_most", [1, 5, 10, 100])
def test_weighed_slices_stay_within_their_limit(at_most: int) -> None:
    weights = [0, 1, 9, 3, 3, 3, 1, 200, 0, 0, 5, 5, 11]
    parts = list(weighed_parts(range(len(weights)), weights.__getitem__, at_most))
    assert [item for part, _ in parts for item in part] == list(range(len(weights)))
    for part, weight in parts:
        assert weight == sum(max(1, weights[item]) for item in part)
        assert weight <= at_most or len(part) == 1
    for (_, weight), (after, _) in pairwise(parts):
        assert weight + max(1, weights[after[0]]) > at_most  # none is too small


def test_empty_list_has_no_weighed_slice() -> None:
    assert list(weighed_parts([], lambda _: 1)) == []


class Thing:
    """Something that is freed."""


@pytest.mark.parametrize("kind", [list, set, dict])
@pytest.mark.parametrize("count", [0, 1, 7, 20, 21])
def test_items_are_freed_a_slice_at_a_time(kind: type, count: int) -> None:
    at_most = 7

    def references() -> Iterator[weakref.ref[Thing]]:
        for _ in range(count):
            thing = Thing()
            if kind is list:
                a_list.append(thing)
            elif kind is set:
                a_set.add(thing)
            else:
                a_dict[thing] = thing
            yield weakref.ref(thing)

    a_list, a_set, a_dict = list[Thing](), set[Thing](), dict[Thing, Thing]()
    left = list(references())
    things = a_list if kind is list else a_set if kind is set else a_dict
    alive = count
    for step in let_go(things, at_most):
        assert step == min(at_most, alive)
        alive -= step
        assert sum(reference() is not None for reference in left) == alive
    assert alive == 0
    assert not things


def actor(name: str, wait: Wait, *, line: int = 1) -> ObservedActor:
    frames = (StackFrame(name, "train.py", line),)
    return ObservedActor(ActorKind.TASK, name, name, frames, wait, is_internal=False)


def tasks(*places: int, for_s: float = 9.0) -> Wait:
    return Wait(WaitKind.TASKS, "a task", for_s, places)


def snapshot_of(*actors: ObservedActor, name: str = "a") -> WorkerSnapshot:
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
