"""Which part of a graph may run, when a pass has ended, and what is kept of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrpc.core.autograd.functions import CrossingId
from asyncrpc.core.autograd.machine import LocalPass, PassReport, Segment, Wave
from asyncrpc.core.autograd.messages import PassId, PassIds
from asyncrpc.core.autograd.work import SegmentEvents
from asyncrpc.core.ids import ContextId, Incarnation, MessageId
from asyncrpc.core.trace.events import MESSAGES_MAX
from asyncrpc.errors import LocalProtocolError, RemoteProtocolError
from asyncrpc.trace import FlightRecorder

Graph = dict[str, str]  # by node, a letter each: what follows


def pass_of(graph: Graph, may_start: str = "") -> LocalPass[str, str]:
    """Return a pass whose starts are nodes; all that a graph has takes part."""
    return LocalPass(
        lambda node: [(child, 0) for child in graph.get(node, "")],
        {*graph, *"".join(graph.values())},
        {start: start for start in may_start},
    )


def report(worker: int, number: int, done: int) -> PassReport:
    return PassReport(worker, number, is_done=bool(done))


def begin(local_pass: LocalPass[str, str], *roots: str) -> None:
    for root in roots:
        local_pass.add_root(root, root)
    local_pass.arrive(roots)


def run(local_pass: LocalPass[str, str]) -> Segment[str, str]:
    segment = local_pass.next_segment()
    assert segment is not None
    return segment


def test_graph_without_other_entries_is_one_segment() -> None:
    local_pass = pass_of({"r": "pq", "p": "q"})
    assert local_pass.next_segment() is None
    begin(local_pass, "r")
    assert not local_pass.is_done
    assert run(local_pass) == Segment(["r"])
    assert local_pass.is_done
    assert local_pass.next_segment() is None


def test_several_roots_enter_at_once() -> None:
    local_pass = pass_of({"r": "p", "s": "p"})
    begin(local_pass, "r", "s")
    assert run(local_pass).starts == ["r", "s"]


def test_nodes_below_a_sent_tensor_wait_for_its_gradient() -> None:
    local_pass = pass_of({"r": "abx", "a": "x", "s": "x", "x": "p"}, may_start="s")
    begin(local_pass, "r")
    first = run(local_pass)
    assert first.starts == ["r"]
    assert set(first.nodes) == {"r", "a", "b"}
    assert set(first.ends) == {"a", "b"}
    assert set(first.cuts) == {"r", "a"}
    assert not first.is_rest
    assert not local_pass.is_done
    assert local_pass.want(["s"]) == ["s"]
    assert local_pass.waits_for == ["s"]
    local_pass.arrive(["s"])
    second = run(local_pass)
    assert second.starts == ["s"]
    assert set(second.nodes) == {"s", "x", "p"}
    assert second.is_rest
    assert second.cuts == []
    assert local_pass.is_done


def test_start_that_takes_no_part_is_ruled_out() -> None:
    local_pass = pass_of({"r": "x"}, may_start="s")
    local_pass._node["s"] = "x"  # noqa: SLF001  (it enters in the middle)
    begin(local_pass, "r")
    first = run(local_pass)
    assert (first.nodes, first.cuts) == (["r"], ["r"])
    assert local_pass.unsettled == ["s"]
    local_pass.rule_out()
    assert run(local_pass).nodes == ["x"]
    assert local_pass.is_done


def test_nodes_that_only_peers_reach_are_neither_run_nor_awaited() -> None:
    live = {"r", "p"}
    graph = {"r": "p", "s": "q"}
    local_pass: LocalPass[str, str] = LocalPass(
        lambda node: [(child, 0) for child in graph.get(node, "")], live, {"s": "s"}
    )
    begin(local_pass, "r")
    assert set(run(local_pass).nodes) == {"r", "p"}
    assert local_pass.is_done  # whoever sent `s` may still ask, and then it is not
    live.update("sq")
    local_pass.want(["s"])
    assert not local_pass.is_done
    local_pass.arrive(["s"])
    assert set(run(local_pass).nodes) == {"s", "q"}
    assert local_pass.is_done


def test_starts_at_one_node_are_awaited_separately() -> None:
    local_pass = pass_of({"x": "p"}, may_start="st")
    local_pass._node.update(s="x", t="x")  # noqa: SLF001
    local_pass.want(["s", "t"])
    local_pass.arrive(["s"])
    assert local_pass.next_segment() is None
    local_pass.arrive(["t"])
    assert sorted(run(local_pass).starts) == ["s", "t"]
    assert local_pass.is_done


def test_separate_node_is_a_segment_of_its_own() -> None:
    graph = {"r": "vq", "v": "x", "s": "x"}
    local_pass: LocalPass[str, str] = LocalPass(
        lambda node: [(child, 0) for child in graph.get(node, "")],
        {"r", "v", "q", "x"},
        {"s": "s"},
        lambda node: node == "v",
    )
    begin(local_pass, "r")
    first = run(local_pass)
    assert set(first.nodes) == {"r", "q"}
    assert first.cuts == ["r"]
    second = run(local_pass)
    assert second.nodes == second.ends == second.cuts == ["v"]
    assert local_pass.next_segment() is None
    local_pass.rule_out()
    assert run(local_pass).nodes == ["x"]
    assert local_pass.is_done


def test_separate_node_joins_the_final_segment() -> None:
    local_pass: LocalPass[str, str] = LocalPass(
        lambda node: [("v", 0)] if node == "r" else [],
        {"r", "v"},
        {"s": "r"},
        lambda node: node == "v",
    )
    begin(local_pass, "r")
    assert local_pass.next_segment() is None
    local_pass.rule_out()
    assert set(run(local_pass).nodes) == {"r", "v"}


def test_tensor_is_requested_once() -> None:
    local_pass = pass_of({"s": "p"}, may_start="s")
    assert local_pass.knows("s")
    assert not local_pass.knows("t")
    assert local_pass.want(["s"]) == ["s"]
    assert local_pass.want(["s"]) == []


def test_unexpected_gradient_is_refused() -> None:
    local_pass = pass_of({"s": "p"}, may_start="s")
    with pytest.raises(RemoteProtocolError, match="expects none"):
        local_pass.arrive(["s"])
    local_pass.want(["s"])
    with pytest.raises(RemoteProtocolError, match="expects none"):
        local_pass.arrive(["s", "t"])
    assert local_pass.waits_for == ["s"]


def test_graph_edge_may_lead_nowhere() -> None:
    local_pass: LocalPass[str, str] = LocalPass(
        lambda node: [(None, 0), ("p", 0)] if node == "r" else [],
        {"r", "p"},
        {"s": "p"},
    )
    begin(local_pass, "r")
    assert run(local_pass).nodes == ["r"]
    local_pass.rule_out()
    assert run(local_pass).nodes == ["p"]


# --- waves ---------------------------------------------------------------------------


def test_engaged_wave_answers_a_second_engagement_at_once() -> None:
    wave = Wave()
    assert wave.engage()
    assert not wave.engage()
    assert wave.disengage(1, is_done=True) == [report(1, 1, 1)]
    assert wave.engage()


def test_answer_waits_until_all_parts_have_ended() -> None:
    wave = Wave()
    wave.engage()
    wave.outstanding += 1
    assert not wave.is_idle
    with pytest.raises(LocalProtocolError):
        wave.disengage(1, is_done=True)
    wave.outstanding -= 1
    wave.is_running = True
    assert not wave.is_idle
    wave.is_running = False
    assert wave.is_idle


def test_last_report_of_each_worker_counts() -> None:
    wave = Wave()
    wave.receive([report(2, 2, 1), report(3, 1, 0)])
    wave.receive([report(2, 1, 0)])  # it had said so before
    assert wave.unfinished == [3]
    wave.receive([report(3, 2, 1)])
    assert wave.unfinished == []
    assert wave.disengage(1, is_done=False) == [
        report(2, 2, 1),
        report(3, 2, 1),
        report(1, 1, 0),
    ]
    assert wave.unfinished == [1]


ME, OTHER = Incarnation(1), Incarnation(2)
ONE: Any = SimpleNamespace(
    ids=PassIds(ContextId(ME, 7), PassId(ME, 9)),
    root="trainer",
)


def crossings(sender: int, *serials: int) -> list[CrossingId]:
    return [
        CrossingId(MessageId(Incarnation(sender), serial), position)
        for position, serial in enumerate(serials)
    ]


def noted(entered: list[CrossingId], left: list[CrossingId]) -> Any:
    recorder = FlightRecorder()
    SegmentEvents(recorder).note(ONE, 3, 1.0, entered, left)
    (event,) = recorder.segments.recent
    return event


@pytest.mark.parametrize(
    ("entered", "messages"),
    [
        ([], ()),
        (crossings(ME, 5), (MessageId(ME, 5),)),
        (crossings(ME, 5, 5, 6, 5), (MessageId(ME, 5), MessageId(ME, 6))),
        (crossings(0, 5), ()),  # a root of the pass
        (crossings(0, 5) + crossings(ME, 5), (MessageId(ME, 5),)),
    ],
)
def test_segment_event_lists_each_message_once(
    entered: list[CrossingId], messages: tuple[MessageId, ...]
) -> None:
    event = noted(entered, crossings(OTHER, 4))
    assert event.fed_by == messages
    assert event.feeds == (MessageId(OTHER, 4),)
    assert event.left_out == 0
    assert all(type(message) is MessageId for message in (*event.fed_by, *event.feeds))


@pytest.mark.parametrize(("more", "less"), [(3, 1), (0, 5), (2, 2 - MESSAGES_MAX)])
def test_segment_event_limits_its_messages_and_counts_the_rest(
    more: int, less: int
) -> None:
    entered = crossings(ME, *range(1, MESSAGES_MAX + more + 1))
    left = crossings(OTHER, *range(1, MESSAGES_MAX + less + 1))
    event = noted(entered, left)
    assert event.fed_by == tuple(
        crossing.message for crossing in entered[:MESSAGES_MAX]
    )
    assert event.feeds == tuple(crossing.message for crossing in left[:MESSAGES_MAX])
    assert event.left_out == more + max(less, 0)
