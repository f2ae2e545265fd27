"""Which part of a graph may run, and when a pass has ended, driven directly."""

from __future__ import annotations

import pytest

from asyncrpc.autograd.machine import LocalPass, PassReport, Segment, Wave
from asyncrpc.errors import LocalProtocolError, RemoteProtocolError

Graph = dict[str, str]  # by node, a letter each: what follows


def pass_of(graph: Graph, may_start: str = "") -> LocalPass[str, str]:
    """Return a pass whose starts are nodes; all that a graph has takes part."""
    return LocalPass(
        lambda node: [(child, 0) for child in graph.get(node, "")],
        {*graph, *"".join(graph.values())},
        {one: one for one in may_start},
    )


def report(worker: int, number: int, done: int) -> PassReport:
    return PassReport(worker, number, is_done=bool(done))


def begin(one: LocalPass[str, str], *roots: str) -> None:
    for root in roots:
        one.add_root(root, root)
    one.arrive(roots)


def run(one: LocalPass[str, str]) -> Segment[str, str]:
    segment = one.next_segment()
    assert segment is not None
    return segment


def test_graph_without_other_entries_is_one_segment() -> None:
    one = pass_of({"r": "pq", "p": "q"})
    assert one.next_segment() is None
    begin(one, "r")
    assert not one.is_done
    assert run(one) == Segment(["r"])
    assert one.is_done
    assert one.next_segment() is None


def test_several_roots_enter_at_once() -> None:
    one = pass_of({"r": "p", "s": "p"})
    begin(one, "r", "s")
    assert run(one).starts == ["r", "s"]


def test_nodes_below_a_sent_tensor_wait_for_its_gradient() -> None:
    one = pass_of({"r": "abx", "a": "x", "s": "x", "x": "p"}, may_start="s")
    begin(one, "r")
    first = run(one)
    assert first.starts == ["r"]
    assert set(first.nodes) == {"r", "a", "b"}
    assert set(first.ends) == {"a", "b"}
    assert set(first.cuts) == {"r", "a"}
    assert not first.is_rest
    assert not one.is_done
    assert one.want(["s"]) == ["s"]
    assert one.waits_for == ["s"]
    one.arrive(["s"])
    second = run(one)
    assert second.starts == ["s"]
    assert set(second.nodes) == {"s", "x", "p"}
    assert second.is_rest
    assert second.cuts == []
    assert one.is_done


def test_start_that_takes_no_part_is_ruled_out() -> None:
    one = pass_of({"r": "x"}, may_start="s")
    one._node["s"] = "x"  # noqa: SLF001  (it enters in the middle)
    begin(one, "r")
    first = run(one)
    assert first.nodes == ["r"]
    assert first.cuts == ["r"]
    assert one.unsettled == ["s"]
    one.rule_out()
    assert run(one).nodes == ["x"]
    assert one.is_done


def test_nodes_that_only_peers_reach_are_neither_run_nor_awaited() -> None:
    live = {"r", "p"}
    graph = {"r": "p", "s": "q"}
    one: LocalPass[str, str] = LocalPass(
        lambda node: [(child, 0) for child in graph.get(node, "")], live, {"s": "s"}
    )
    begin(one, "r")
    assert set(run(one).nodes) == {"r", "p"}
    assert one.is_done  # whoever sent `s` may still ask, and then it is not
    live.update("sq")
    one.want(["s"])
    assert not one.is_done
    one.arrive(["s"])
    assert set(run(one).nodes) == {"s", "q"}
    assert one.is_done


def test_starts_at_one_node_are_awaited_separately() -> None:
    one = pass_of({"x": "p"}, may_start="st")
    one._node.update(s="x", t="x")  # noqa: SLF001
    one.want(["s", "t"])
    one.arrive(["s"])
    assert one.next_segment() is None
    one.arrive(["t"])
    assert sorted(run(one).starts) == ["s", "t"]
    assert one.is_done


def test_separate_node_is_a_segment_of_its_own() -> None:
    graph = {"r": "vq", "v": "x", "s": "x"}
    one: LocalPass[str, str] = LocalPass(
        lambda node: [(child, 0) for child in graph.get(node, "")],
        {"r", "v", "q", "x"},
        {"s": "s"},
        lambda node: node == "v",
    )
    begin(one, "r")
    first = run(one)
    assert set(first.nodes) == {"r", "q"}
    assert first.cuts == ["r"]
    second = run(one)
    assert second.nodes == second.ends == second.cuts == ["v"]
    assert one.next_segment() is None
    one.rule_out()
    assert run(one).nodes == ["x"]
    assert one.is_done


def test_separate_node_joins_the_final_segment() -> None:
    one: LocalPass[str, str] = LocalPass(
        lambda node: [("v", 0)] if node == "r" else [],
        {"r", "v"},
        {"s": "r"},
        lambda node: node == "v",
    )
    begin(one, "r")
    assert one.next_segment() is None
    one.rule_out()
    assert set(run(one).nodes) == {"r", "v"}


def test_tensor_is_requested_once() -> None:
    one = pass_of({"s": "p"}, may_start="s")
    assert one.knows("s")
    assert not one.knows("t")
    assert one.want(["s"]) == ["s"]
    assert one.want(["s"]) == []


def test_unexpected_gradient_is_refused() -> None:
    one = pass_of({"s": "p"}, may_start="s")
    with pytest.raises(RemoteProtocolError, match="expects none"):
        one.arrive(["s"])
    one.want(["s"])
    with pytest.raises(RemoteProtocolError, match="expects none"):
        one.arrive(["s", "t"])
    assert one.waits_for == ["s"]


def test_graph_edge_may_lead_nowhere() -> None:
    one: LocalPass[str, str] = LocalPass(
        lambda node: [(None, 0), ("p", 0)] if node == "r" else [],
        {"r", "p"},
        {"s": "p"},
    )
    begin(one, "r")
    assert run(one).nodes == ["r"]
    one.rule_out()
    assert run(one).nodes == ["p"]


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
