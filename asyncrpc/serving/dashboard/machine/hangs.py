"""Why a group is stuck, in the words of `asyncrpc why`, and as a drawing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from asyncrpc.serving.dashboard.machine.answers import known_age
from asyncrpc.tools.inspection.machine.graph import (
    AwaitGraph,
    Edge,
    Hang,
    Node,
    graph_in_slices,
    hangs_in_slices,
)
from asyncrpc.tools.inspection.machine.slices import Slices, let_go, weighed_parts
from asyncrpc.tools.inspection.machine.wording import (
    hop,
    named,
    place_of,
    sentence,
    unnamed_troubles,
    words_of,
)
from asyncrpc.tools.inspection.records import NoAnswer, WorkerSnapshot

SENTENCES_MAX: Final = 20
NODES_MAX: Final = 200
FRAMES_MAX: Final = 12  # of one node
NODES_OF_SLICE: Final = 50  # described in words: half a millisecond


def findings_of(
    snapshots: Sequence[WorkerSnapshot],
    silent: Mapping[str, NoAnswer],
    *,
    after_s: float,
) -> Slices[dict[str, Any]]:
    """Return the waits that take too long and why, in slices."""
    graph = yield from graph_in_slices(snapshots, silent)
    hangs = yield from hangs_in_slices(graph, after_s=after_s)
    shown = hangs[:SENTENCES_MAX]
    sentences = []
    for hang in shown:
        sentences.append(sentence(graph, hang))
        yield len(hang.nodes)
    troubles = unnamed_troubles(graph, hangs)
    sentences += troubles[: SENTENCES_MAX - len(sentences)]
    drawing = yield from _Drawing(graph).of(hangs)
    yield from let_go(graph.edges)
    return {
        "sentences": sentences,
        "sentences_left_out": len(hangs) + len(troubles) - len(sentences),
        "after_s": after_s,
        "is_certain": bool(shown) and shown[0].is_certain,
        **drawing,
    }


def _length_of(hang: Hang) -> int:
    return len(hang.nodes)


class _Drawing:
    """The nodes and edges on the paths of hangs, the gravest first, within a limit."""

    def __init__(self, graph: AwaitGraph) -> None:
        self._graph = graph
        self._ids: dict[Node, str] = {}
        self._left_out: set[Node] = set()
        self._nodes: list[dict[str, Any]] = []
        self._edges: dict[tuple[str, str], dict[str, Any]] = {}

    def of(self, hangs: Sequence[Hang]) -> Slices[dict[str, Any]]:
        for some, weight in weighed_parts(hangs, _length_of, NODES_OF_SLICE):
            for hang in some:
                self._draw(hang)
            yield weight
        first = hangs[0] if hangs and hangs[0].nodes[0] in self._ids else None
        return {
            "nodes": self._nodes,
            "edges": list(self._edges.values()),
            "cycle": [] if first is None else self._cycle(first),
            "at_fault": None if first is None else self._ids[first.nodes[-1]],
            "left_out": len(self._left_out - self._ids.keys()),
        }

    def _draw(self, hang: Hang) -> None:
        """Add a path, completely or not at all."""
        new = {node for node in hang.nodes if node not in self._ids}
        if len(self._ids) + len(new) > NODES_MAX:
            self._left_out |= new
            return
        for node in hang.nodes:
            self._add(node)
        for node, edge in zip(hang.nodes, hang.path, strict=False):
            self._tie(node, edge)

    def _cycle(self, hang: Hang) -> list[str]:
        if not hang.is_cycle:
            return []
        begin = hang.nodes.index(hang.nodes[-1])
        return [self._ids[node] for node in hang.nodes[begin:-1]]

    def _tie(self, node: Node, edge: Edge) -> None:
        ends = self._ids[node], self._ids[edge.to]
        self._edges[ends] = {
            "from": ends[0],
            "to": ends[1],
            "label": hop(self._graph, node, edge),
            "is_sure": edge.is_sure,
        }

    def _add(self, node: Node) -> None:
        if node in self._ids:
            return
        self._ids[node] = f"n{len(self._ids)}"
        actor, wait = self._graph.actor(node), self._graph.wait(node)
        trouble = self._graph.troubles.get(node.worker)
        shown: dict[str, Any] = {
            "id": self._ids[node],
            "kind": "worker" if actor is None else actor.kind.value,
            "worker": node.worker,
            "label": node.what if actor is None else named(actor),
            "age_s": None,
            "detail": [],
            "trouble": None if trouble is None else trouble.text,
        }
        if actor is not None and wait is not None:
            shown["age_s"] = known_age(wait.for_s)
            frames = actor.frames[-FRAMES_MAX:]
            shown["detail"] = [words_of(wait), *map(place_of, reversed(frames))]
        elif trouble is not None:
            shown["detail"] = [trouble.text]
        self._nodes.append(shown)
