"""Hangs in words and as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.serving.dashboard.machine.hangs import (
    FRAMES_MAX,
    NODES_MAX,
    SENTENCES_MAX,
    findings_of,
)
from asyncrpc.tools.inspection.machine import graph
from asyncrpc.tools.inspection.machine.slices import SLICE_MAX
from asyncrpc.tools.inspection.records import (
    NO_ACTOR,
    NoAnswer,
    Trouble,
    Wait,
    WorkerSnapshot,
)
from tests.unit.serving.dashboard.machine.seen import (
    EVENT,
    actor,
    call_to,
    frames,
    lock,
    served_by,
    snapshot,
    thread,
)
from tests.unit.serving.dashboard.machine.told import (
    NO_NUMBERS,
    ODD_NAMES,
    as_sent,
    done,
)

AFTER_S = 10.0


def findings(
    snapshots: Sequence[WorkerSnapshot] = (), **silent: NoAnswer
) -> dict[str, Any]:
    return done(findings_of(snapshots, silent, after_s=AFTER_S))[0]


def pair_in_a_cycle(name: str = "a", **fields: Any) -> WorkerSnapshot:
    """Return a worker two of whose tasks wait for each other."""
    return snapshot(name, [actor("one", lock(1)), actor("two", lock(0))], **fields)


def chain(name: str, length: int) -> WorkerSnapshot:
    """Return a worker whose tasks wait for the next, and the last for an event."""
    waits = [lock(place + 1) for place in range(length - 1)]
    tasks = [actor(f"t{place}", wait) for place, wait in enumerate(waits)]
    never = Wait(WaitKind.EVENT, "Event `go`", 20.0, is_closed=True)
    return snapshot(name, [*tasks, actor("last", never)])


# --- what there is to say ------------------------------------------------------------


@pytest.mark.parametrize(
    "snapshots",
    [[], [snapshot("a")], [snapshot("a", [actor("t"), thread("x")]), snapshot("b")]],
)
def test_group_without_waits_has_no_findings(snapshots: list[WorkerSnapshot]) -> None:
    assert findings(snapshots) == {
        "sentences": [],
        "sentences_left_out": 0,
        "after_s": AFTER_S,
        "is_certain": False,
        "nodes": [],
        "edges": [],
        "cycle": [],
        "at_fault": None,
        "left_out": 0,
    }


def test_cycle_has_a_sentence_and_a_drawing() -> None:
    report = findings([pair_in_a_cycle()])
    (sentence,) = report["sentences"]
    assert sentence.endswith("a cycle, which nothing can end")
    assert report["is_certain"]
    ids = {node["label"]: node["id"] for node in report["nodes"]}
    assert sorted(ids) == ["task `one`", "task `two`"]
    assert sorted(report["cycle"]) == sorted(ids.values())
    assert report["at_fault"] in ids.values()
    assert [(edge["from"], edge["to"]) for edge in report["edges"]] in (
        [("n0", "n1"), ("n1", "n0")],
        [("n1", "n0"), ("n0", "n1")],
    )
    assert all(edge["is_sure"] for edge in report["edges"])
    assert report["edges"][0]["label"].startswith("Lock `table` held by a task `")


def test_path_leads_over_workers_to_the_fault() -> None:
    snapshots = [
        snapshot("a", [actor("train", call_to(1))], incarnation=1),
        snapshot(
            "b",
            [actor("f", lock(1)), actor("holds", EVENT._replace(for_s=20.0))],
            incarnation=2,
            served=(served_by(0, 1),),
        ),
    ]
    report = findings(snapshots)
    nodes = {node["id"]: node for node in report["nodes"]}
    assert [node["worker"] for node in nodes.values()] == ["a", "b", "b"]
    assert nodes[report["at_fault"]]["label"] == "task `holds`"
    assert report["cycle"] == []
    assert report["nodes"][0] == {
        "id": "n0",
        "kind": "task",
        "worker": "a",
        "label": "task `train`",
        "age_s": 20.0,
        "detail": ["waits for `f`", "train.py:2 in f2", "train.py:1 in f1"],
        "trouble": None,
    }
    assert report["edges"][0]["label"] == "b `f`"


def test_cycle_is_marked_apart_from_the_path_into_it() -> None:
    tasks = [actor("enters", lock(1)), actor("one", lock(2)), actor("two", lock(1))]
    report = findings([snapshot("a", tasks)])
    labels = {node["id"]: node["label"] for node in report["nodes"]}
    assert len(labels) == 3
    assert sorted(labels[node_id] for node_id in report["cycle"]) == [
        "task `one`",
        "task `two`",
    ]


@pytest.mark.parametrize("trouble", list(Trouble))
def test_worker_in_trouble_is_a_node_of_its_own(trouble: Trouble) -> None:
    snapshots = [
        snapshot(
            "a",
            [
                actor(
                    "train",
                    Wait(WaitKind.COLLECTIVE, "all_reduce", 20.0, members=("a", "b")),
                )
            ],
        )
    ]
    no_answer = NoAnswer(trouble, "since noon")
    report = findings(snapshots, b=no_answer)
    (_, node) = report["nodes"]
    assert node == {
        "id": "n1",
        "kind": "worker",
        "worker": "b",
        "label": "its event loop",
        "age_s": None,
        "detail": [no_answer.text],
        "trouble": no_answer.text,
    }
    assert report["at_fault"] == "n1"
    assert len(report["sentences"]) == 1


def test_trouble_without_waiters_is_reported() -> None:
    report = findings([snapshot("a")], b=NoAnswer(Trouble.GONE, ""))
    assert report["sentences"] == ["b is stuck: its process is gone"]
    assert report["nodes"] == []
    assert not report["is_certain"]


def test_busy_pool_is_neither_a_task_nor_a_trouble() -> None:
    """It is in no snapshot: it has a name, and nothing else is known of it."""
    snapshots = [
        snapshot("a", [actor("train", call_to(1))], incarnation=1),
        snapshot("b", [], incarnation=2, served=(served_by(NO_ACTOR, 1),)),
    ]
    report = findings(snapshots)
    assert report["nodes"][-1] == {
        "id": "n1",
        "kind": "worker",
        "worker": "b",
        "label": graph.NO_THREAD,
        "age_s": None,
        "detail": [],
        "trouble": None,
    }


@pytest.mark.parametrize("for_s", [-1.0, *NO_NUMBERS])
def test_nonfinite_age_is_null(for_s: float) -> None:
    """A cycle is reported however long it has waited."""
    tasks = [actor("one", lock(1, for_s=for_s)), actor("two", lock(0, for_s=for_s))]
    report = findings([snapshot("a", tasks)])
    assert [node["age_s"] for node in report["nodes"]] == [None, None]
    as_sent(report)


def test_short_wait_is_not_reported() -> None:
    calls = [actor("train", call_to(1, for_s=AFTER_S - 0.1))]
    snapshots = [
        snapshot("a", calls, incarnation=1),
        snapshot("b", [actor("f", EVENT)], incarnation=2, served=(served_by(0, 1),)),
    ]
    assert findings(snapshots)["sentences"] == []
    late = [actor("train", call_to(1, for_s=AFTER_S))]
    snapshots[0] = snapshot("a", late, incarnation=1)
    snapshots[1] = snapshots[1]._replace(actors=(actor("f", lock(for_s=AFTER_S)),))
    assert len(findings(snapshots)["sentences"]) == 1


# --- limits --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, FRAMES_MAX, FRAMES_MAX + 1, 500])
def test_shown_frames_are_limited_to_the_innermost_first(count: int) -> None:
    tasks = [actor("one", lock(1), frames=frames(count)), actor("two", lock(0))]
    report = findings([snapshot("a", tasks)])
    node = next(node for node in report["nodes"] if node["label"] == "task `one`")
    lines = [f"train.py:{line} in f{line}" for line in range(count, 0, -1)]
    assert node["detail"][1:] == lines[:FRAMES_MAX]


@pytest.mark.parametrize("count", [SENTENCES_MAX, SENTENCES_MAX + 1, 300])
def test_sentences_are_limited_and_the_rest_counted(count: int) -> None:
    report = findings([pair_in_a_cycle(f"w{number}") for number in range(count)])
    assert len(report["sentences"]) == SENTENCES_MAX
    assert report["sentences_left_out"] == count - SENTENCES_MAX
    drawn = min(count, NODES_MAX // 2)
    assert len(report["nodes"]) == 2 * drawn
    assert len(report["edges"]) == 2 * drawn
    assert report["left_out"] == 2 * (count - drawn)
    assert len({node["id"] for node in report["nodes"]}) == 2 * drawn


@pytest.mark.parametrize("hangs", [0, 1, SENTENCES_MAX - 1, SENTENCES_MAX])
def test_troubles_follow_the_findings_within_the_same_limit(hangs: int) -> None:
    snapshots = [pair_in_a_cycle(f"w{number}") for number in range(hangs)]
    silent = {
        f"x{number:02}": NoAnswer(Trouble.SILENT, "") for number in range(SENTENCES_MAX)
    }
    report = findings(snapshots, **silent)
    assert len(report["sentences"]) == SENTENCES_MAX
    assert report["sentences_left_out"] == hangs
    words = report["sentences"][hangs:]
    assert words == [
        f"{name} is stuck: it does not answer"
        for name in sorted(silent)[: SENTENCES_MAX - hangs]
    ]


def test_path_longer_than_a_drawing_is_left_out() -> None:
    report = findings([chain("a", NODES_MAX + 1)])
    assert len(report["sentences"]) == 1
    assert report["nodes"] == report["edges"] == []
    assert report["left_out"] == NODES_MAX + 1
    assert report["at_fault"] is None
    assert report["cycle"] == []


def test_finding_that_fits_is_drawn_after_one_that_does_not() -> None:
    report = findings([chain("a", NODES_MAX), chain("b", 3)])
    assert len(report["nodes"]) == NODES_MAX
    assert report["left_out"] == 3
    longer = findings([chain("a", NODES_MAX + 1), chain("b", 3)])
    assert {node["worker"] for node in longer["nodes"]} == {"b"}
    assert longer["at_fault"] is None  # that of the first is not drawn


def test_node_on_two_paths_is_drawn_once() -> None:
    tasks = [
        actor("x", lock(2)),
        actor("y", lock(2, for_s=30.0)),
        actor("holds", Wait(WaitKind.EVENT, "Event `go`", 20.0, is_closed=True)),
    ]
    report = findings([snapshot("a", tasks)])
    labels = [node["label"] for node in report["nodes"]]
    assert len(labels) == len(set(labels))


@pytest.mark.parametrize("size", [1, 150, 1000])
def test_findings_are_made_a_slice_at_a_time(size: int) -> None:
    snapshots = [pair_in_a_cycle(f"w{number}") for number in range(size)]
    report, steps = done(findings_of(snapshots, {}, after_s=AFTER_S))
    assert len(report["sentences"]) == min(size, SENTENCES_MAX)
    assert max(steps) <= SLICE_MAX


def test_collective_of_many_ranks_comes_in_slices() -> None:
    """Half of the ranks wait for the other half: ten thousand edges."""
    names = tuple(f"w{number}" for number in range(200))
    waits = Wait(WaitKind.COLLECTIVE, "all_reduce 1", 20.0, members=names)
    other = EVENT._replace(for_s=20.0)
    snapshots = [
        snapshot(
            name, [actor("train", waits if place % 2 else other)], incarnation=place
        )
        for place, name in enumerate(names)
    ]
    report, steps = done(findings_of(snapshots, {}, after_s=AFTER_S))
    assert "and 99 more have not come" in report["sentences"][0]
    assert max(steps) <= SLICE_MAX
    assert len(steps) > 100 * 100 // (10 * graph.NODES_MAX)


# --- names ---------------------------------------------------------------------------


def test_odd_names_stay_text() -> None:
    snapshots = [
        snapshot(
            name,
            [
                actor(name, lock(1)._replace(what=name), function=name),
                actor(name, lock(0)._replace(what=name), frames=()),
            ],
            incarnation=place,
        )
        for place, name in enumerate(ODD_NAMES)
    ]
    silent = {f"silent {name}": NoAnswer(Trouble.SILENT, name) for name in ODD_NAMES}
    report = done(findings_of(snapshots, silent, after_s=AFTER_S))[0]
    assert as_sent(report) == report
    assert {node["worker"] for node in report["nodes"]} == set(ODD_NAMES)
    assert len(report["sentences"]) + report["sentences_left_out"] == 2 * len(ODD_NAMES)


def test_limit_of_a_wait_is_echoed() -> None:
    for after_s in (0.0, 0.5, 1e9):
        report, _ = done(findings_of([], {}, after_s=after_s))
        assert report["after_s"] == after_s
