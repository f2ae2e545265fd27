"""The await graph of a group: who waits for whom, over all workers.

Its nodes are the tasks and threads of all snapshots, and what is not in any: a worker
that cannot be reached, a member that has not come, a lock without a known holder.  An
edge leads from a waiting node to one that must act.  Calls join the workers: both ends
know a call by the same key.

Some waits need *all* nodes that they lead to (the tasks of a group), others *any* (a
task that sets an event).  So some nodes can never make progress: see `stuck`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.tools.inspection.machine.slices import (
    Slices,
    finished,
    let_go,
    parts_of,
    weighed_parts,
)
from asyncrpc.tools.inspection.records import (
    NO_ACTOR,
    UNKNOWN_S,
    ActorKind,
    CallKey,
    NoAnswer,
    ObservedActor,
    ServedCall,
    Wait,
    WorkerSnapshot,
)

NODES_MAX: Final = 100  # of one slice of work: half a millisecond
_PER_NODE: Final = 10  # members, or edges, that take as long as a node
# Waits that end by themselves, or by something outside of the group.
_ENDS_ALONE: Final = frozenset({WaitKind.RUNS, WaitKind.SLEEP, WaitKind.SOCKET})
# A look at all workers takes less.  Waits at several workers that have each lasted
# longer have overlapped.
SKEW_S: Final = 2.0
_LOOP: Final = "its event loop"
NO_THREAD: Final = "a thread of its pool"
_OF_MEMBERS: Final = frozenset({WaitKind.ROUND, WaitKind.COLLECTIVE})
# A wait for an event, an item or a socket may be idle for as long as the program runs.
# The waits of `_NEVER_AT_REST` are for something that should happen.
_AT_REST: Final = frozenset({WaitKind.EVENT, WaitKind.ITEM, WaitKind.SOCKET})
_NEVER_AT_REST: Final = _OF_MEMBERS | {
    *(WaitKind.LOCK, WaitKind.SEMAPHORE, WaitKind.CONDITION, WaitKind.BACKWARD),
    *(WaitKind.REDUCTION, WaitKind.TURN, WaitKind.INBOUND, WaitKind.IN_FLIGHT),
    WaitKind.DEVICE,
}
_NEEDS_ALL: Final = _OF_MEMBERS | {
    WaitKind.TASKS,
    WaitKind.BACKWARD,
    WaitKind.IN_FLIGHT,
}


class Node(NamedTuple):
    """A task or thread of a snapshot, or something that is in no snapshot.

    Attributes:
        actor: its index in the snapshot; `NO_ACTOR` if it is in no snapshot.
        what: its name for people, if it is in no snapshot.
    """

    worker: str
    actor: int = NO_ACTOR
    what: str = ""


class Edge(NamedTuple):
    """A wait that leads from one node to another.

    Attributes:
        to: the node that must act.
        through: the call in between, as its callee serves it.
        is_sure: whether it is certain that `to` must act.
    """

    to: Node
    through: ServedCall | None = None
    is_sure: bool = True


@dataclass
class AwaitGraph:
    """The tasks and threads of a group, and which waits for which.

    Attributes:
        snapshots: by name of the worker.
        troubles: of workers that are stuck or did not answer, by name.
        edges: by the waiting node.
    """

    snapshots: Mapping[str, WorkerSnapshot]
    troubles: Mapping[str, NoAnswer]
    edges: dict[Node, tuple[Edge, ...]] = field(default_factory=dict)

    def actor(self, node: Node) -> ObservedActor | None:
        """Return the task or thread of a node; None if the node is neither."""
        if node.actor == NO_ACTOR:
            return None
        return self.snapshots[node.worker].actors[node.actor]

    def wait(self, node: Node) -> Wait | None:
        """Return what a node waits for; None if it is not a task or thread."""
        actor = self.actor(node)
        return None if actor is None else actor.wait

    def nodes(self) -> Iterable[Node]:
        """Yield the tasks and threads of all workers."""
        for name, snapshot in self.snapshots.items():
            for place in range(len(snapshot.actors)):
                yield Node(name, place)


def graph_of(
    snapshots: Sequence[WorkerSnapshot],
    troubles: Mapping[str, NoAnswer] | None = None,
) -> AwaitGraph:
    """Join the snapshots of a group."""
    return finished(graph_in_slices(snapshots, troubles))


def graph_in_slices(
    snapshots: Sequence[WorkerSnapshot],
    troubles: Mapping[str, NoAnswer] | None = None,
) -> Slices[AwaitGraph]:
    """Join the snapshots of a group, in slices; otherwise like `graph_of`."""
    by_name = {snapshot.name: snapshot for snapshot in snapshots}
    return _GraphJoiner(AwaitGraph(by_name, dict(troubles or {}))).join()


class _GraphJoiner:
    """Makes the edges of a graph."""

    def __init__(self, graph: AwaitGraph) -> None:
        self._graph = graph
        self._names = {
            snapshot.incarnation: snapshot.name for snapshot in graph.snapshots.values()
        }
        self._served: dict[CallKey, tuple[str, ServedCall]] = {}
        self._to: dict[CallKey, str] = {}  # names of callees that told nothing
        self._coming: dict[tuple[str, str], Node] = {}  # by worker and what it waits in
        self._doing: dict[str, list[Node]] = {}  # by label
        # In a collective of a thousand ranks all that have come wait for the same ones.
        self._to_members: dict[tuple[str, tuple[str, ...]], Edge] = {}

    def _note(self, name: str, snapshot: WorkerSnapshot) -> None:
        """Note what other workers may wait for at this one."""
        for served in snapshot.served:
            self._served[served.key] = (name, served)
        for call in snapshot.made:
            self._to[call.key] = call.to
        for place, actor in enumerate(snapshot.actors):
            if actor.wait.kind in _OF_MEMBERS:
                self._coming[name, actor.wait.what] = Node(name, place)
            for label in actor.does:
                self._doing.setdefault(label, []).append(Node(name, place))

    def join(self) -> Slices[AwaitGraph]:
        graph = self._graph
        for name, snapshot in graph.snapshots.items():
            self._note(name, snapshot)
            yield len(snapshot.actors)
        for part, weight in weighed_parts(graph.nodes(), self._weight_of, NODES_MAX):
            for node in part:
                wait = graph.wait(node)
                assert wait is not None
                graph.edges[node] = tuple(self._edges(node, wait))
            yield weight
        for name, snapshot in graph.snapshots.items():
            graph.edges[Node(name, what=NO_THREAD)] = tuple(_busy(snapshot))
            yield len(snapshot.actors)
        return graph

    def _weight_of(self, node: Node) -> int:
        wait = self._graph.wait(node)
        return 1 if wait is None else 1 + len(wait.members) // _PER_NODE

    def _edges(self, node: Node, wait: Wait) -> Iterable[Edge]:
        if node.worker in self._graph.troubles:
            yield Edge(Node(node.worker, what=_LOOP))
            return
        if (blocked := self._loop_that_blocks(node)) is not None:
            yield Edge(blocked)
            return
        yield from self._calls(wait)
        if wait.kind is WaitKind.TURN:
            yield from map(Edge, self._doers(wait))
        for place in wait.actors:
            yield Edge(Node(node.worker, place), is_sure=wait.is_sure)
        for name in wait.members:
            if name != node.worker and (name, wait.what) not in self._coming:
                key = name, wait.needs
                if key not in self._to_members:
                    self._to_members[key] = self._to_member(name, wait)
                yield self._to_members[key]

    def _calls(self, wait: Wait) -> Iterable[Edge]:
        """Make the edges of a wait for calls."""
        if wait.kind is WaitKind.CREDIT:
            yield from self._to_consumer(wait)
        elif wait.kind is WaitKind.INBOUND and wait.call is not None:
            yield from self._to_holders(wait.call)
        elif wait.call is not None:
            yield from self._to_callee(wait.call)
        for key in wait.calls:
            yield from self._to_callee(key)

    def _doers(self, wait: Wait, name: str = "") -> list[Node]:
        """Return the nodes that do what a wait needs: on one worker, or on any."""
        nodes = [node for label in wait.needs for node in self._doing.get(label, ())]
        return [node for node in nodes if name in ("", node.worker)]

    def _loop_that_blocks(self, node: Node) -> Node | None:
        """Return the thread of a blocked loop, which all tasks of the worker need."""
        snapshot = self._graph.snapshots[node.worker]
        if not snapshot.blocked_for_s or snapshot.loop_actor == NO_ACTOR:
            return None
        is_task = snapshot.actors[node.actor].kind is ActorKind.TASK
        return Node(node.worker, snapshot.loop_actor) if is_task else None

    def _to_member(self, name: str, wait: Wait) -> Edge:
        """Return the edge to what a member that has not come does instead.

        The edge is sure if it is known which task will come, or if one of the member's
        tasks waits for members itself.  Otherwise another of its tasks may come.
        """
        if name in self._graph.troubles or name not in self._graph.snapshots:
            return Edge(Node(name, what=_LOOP))
        for node in self._doers(wait, name):
            return Edge(node)
        actors = self._graph.snapshots[name].actors
        for place, actor in enumerate(actors):
            if actor.wait.kind in _OF_MEMBERS:
                return Edge(Node(name, place))
        for place, actor in enumerate(actors):
            if actor.kind is ActorKind.TASK and not actor.is_internal:
                return Edge(Node(name, place), is_sure=False)
        return Edge(Node(name, what="a task that comes"), is_sure=False)

    def _to_callee(self, key: CallKey) -> Iterable[Edge]:
        entry = self._served.get(key)
        if entry is not None:
            name, served = entry
            if name in self._graph.troubles:
                yield Edge(Node(name, what=_LOOP), served)
            elif served.actor == NO_ACTOR:
                yield Edge(self._unserved(name, served), served)
            else:
                yield Edge(Node(name, served.actor), served)
            return
        name = self._names.get(key.callee) or self._to.get(key, "")
        snapshot = self._graph.snapshots.get(name)
        if snapshot is not None and snapshot.blocked_for_s:  # the call is still unread
            yield Edge(Node(name, snapshot.loop_actor))
        elif name in self._graph.troubles or (
            name and name not in self._graph.snapshots
        ):
            yield Edge(Node(name, what=_LOOP))

    def _unserved(self, name: str, call: ServedCall) -> Node:
        """Return the node that a call waits for before a task or thread runs it."""
        snapshot = self._graph.snapshots[name]
        for other in snapshot.served if call.needs else ():
            if other.makes == call.needs:
                return _server(name, other)
        if snapshot.blocked_for_s and snapshot.loop_actor != NO_ACTOR:
            return Node(name, snapshot.loop_actor)
        return Node(name, what=NO_THREAD)

    def _to_holders(self, key: CallKey) -> Iterable[Edge]:
        """Find the calls that use up a callee's room for large requests."""
        name = self._names.get(key.callee, "")
        snapshot = self._graph.snapshots.get(name)
        if snapshot is None or name in self._graph.troubles or snapshot.blocked_for_s:
            yield from self._to_callee(key)
            return
        for served in snapshot.served:
            if served.holds_bytes:
                yield Edge(_server(name, served))

    def _to_consumer(self, wait: Wait) -> Iterable[Edge]:
        """Find the consumer of a stream: a task that waits for its items."""
        if wait.call is None:
            return
        name = self._names.get(wait.call.caller, "")
        snapshot = self._graph.snapshots.get(name)
        if snapshot is None or name in self._graph.troubles:
            if name:
                yield Edge(Node(name, what=_LOOP))
            return
        for place, actor in enumerate(snapshot.actors):
            if actor.wait.kind is WaitKind.STREAM and actor.wait.call == wait.call:
                yield Edge(Node(name, place))
                return
        yield Edge(Node(name, what="the consumer of the stream"))


def _server(name: str, call: ServedCall) -> Node:
    """Return the node that serves a call."""
    return Node(name, call.actor, "" if call.actor != NO_ACTOR else NO_THREAD)


def _busy(snapshot: WorkerSnapshot) -> Iterable[Edge]:
    """Find the threads of a worker's pool that run functions."""
    prefix = f"asyncrpc-{snapshot.name}-"
    busy = [
        Node(snapshot.name, place)
        for place, actor in enumerate(snapshot.actors)
        if actor.kind is ActorKind.THREAD
        and not actor.is_internal
        and actor.name.startswith(prefix)
    ]
    return (Edge(node, is_sure=len(busy) == 1) for node in busy)


def stuck(graph: AwaitGraph) -> set[Node]:
    """Return the tasks and threads that can never make progress.

    A node that runs, sleeps or waits for something outside can.  A node that waits for
    others can if all of them can, or any, depending on the wait.
    """
    return finished(_stuck_in_slices(graph))


def _nodes_by_edges(graph: AwaitGraph) -> Iterable[tuple[list[Node], int]]:
    """Yield the tasks and threads in slices, weighed by their edges."""

    def weight_of(node: Node) -> int:
        return 1 + len(graph.edges[node]) // _PER_NODE

    return weighed_parts(graph.nodes(), weight_of, NODES_MAX)


def _needed(
    graph: AwaitGraph,
) -> Slices[tuple[dict[Node, list[Node]], dict[Node, int]]]:
    """Return the waiters of each node, and how many nodes each one needs."""
    waiting: dict[Node, list[Node]] = {}
    missing: dict[Node, int] = {}
    for part, weight in _nodes_by_edges(graph):
        for node in part:
            missing[node] = _needs(graph, node)
            for target in _able(graph, node):
                waiting.setdefault(target, []).append(node)
        yield weight
    return waiting, missing


def _stuck_in_slices(graph: AwaitGraph) -> Slices[set[Node]]:
    waiting, missing = yield from _needed(graph)
    free, going = deque[Node](), set[Node]()
    for some in parts_of(missing.items(), NODES_MAX):
        begin = [node for node, count in some if not count]
        free.extend(begin)
        going.update(begin)
        yield len(some)
    passed = 0
    while free:
        waiters = waiting.get(free.popleft(), ())
        passed += 1 + len(waiters) // _PER_NODE
        if passed >= NODES_MAX:
            yield passed
            passed = 0
        for node in waiters:
            if node in going:
                continue
            missing[node] -= 1
            if missing[node] <= 0:
                going.add(node)
                free.append(node)
    dead: set[Node] = set()
    for part in parts_of(graph.nodes(), NODES_MAX):
        dead.update(node for node in part if node not in going)
        yield len(part)
    yield from let_go(waiting, NODES_MAX)
    yield from let_go(missing)
    yield from let_go(going)
    return dead


def _able(graph: AwaitGraph, node: Node) -> list[Node]:
    """Return the tasks and threads that can end the wait of a node.

    A member that has not come may still come by another task than the one shown.
    """
    wait = graph.wait(node)
    is_any = wait is not None and wait.kind not in _NEEDS_ALL
    return [
        edge.to
        for edge in graph.edges[node]
        if edge.to.actor != NO_ACTOR and (is_any or edge.is_sure)
    ]


def _needs(graph: AwaitGraph, node: Node) -> int:
    """Return how many of `_able` must make progress first; 0: it may without them."""
    wait, able = graph.wait(node), _able(graph, node)
    if wait is None or node.worker in graph.troubles or wait.kind in _ENDS_ALONE:
        return 0
    if wait.kind in _NEEDS_ALL:
        return len(able)  # nodes in no snapshot may act at any time
    is_known = wait.is_closed or (able and wait.is_sure)
    return 1 if is_known and len(able) == len(graph.edges[node]) else 0


class Hang(NamedTuple):
    """A path from a waiting node to the node at fault.

    Attributes:
        path: the waits; each edge leads from one node to the next.
        nodes: one more than `path`; the first waits, the last is at fault.
        is_cycle: whether the last node is also an earlier one.
        is_certain: whether the first node can never make progress; see `stuck`.
        for_s: seconds that the first node has waited; `UNKNOWN_S`.
    """

    nodes: tuple[Node, ...]
    path: tuple[Edge, ...]
    is_cycle: bool
    is_certain: bool
    for_s: float


def find_hangs(graph: AwaitGraph, *, after_s: float) -> list[Hang]:
    """Return the waits that take too long and why, the gravest first.

    Of the paths that end at the same node only the longest is kept.  A wait for a node
    that makes progress is not reported, however long it takes: see `_goes_on`.
    """
    return finished(hangs_in_slices(graph, after_s=after_s))


def hangs_in_slices(graph: AwaitGraph, *, after_s: float) -> Slices[list[Hang]]:
    """Return the waits that take too long, in slices; otherwise like `find_hangs`."""
    dead = yield from _stuck_in_slices(graph)
    awaited: set[Node] = set()
    for part, weight in weighed_parts(graph.edges.values(), len, 10 * NODES_MAX):
        awaited.update(edge.to for edges in part for edge in edges)
        yield weight // _PER_NODE
    by_fault: dict[Node, Hang] = {}
    passed = 0
    for node in graph.nodes():
        hang = _hang_from(graph, node, dead, after_s)
        # A path may lead through all nodes of the graph.
        passed += 1 + len(graph.edges[node]) // _PER_NODE
        if hang is not None:
            passed += len(hang.path)
            fault = min(_cycle_of(hang)) if hang.is_cycle else hang.nodes[-1]
            other = by_fault.get(fault)
            if other is None or _reach(hang, awaited) > _reach(other, awaited):
                by_fault[fault] = hang
        if passed >= NODES_MAX:
            yield passed
            passed = 0
    yield from let_go(awaited)
    yield from let_go(dead)
    different = {hang.nodes: hang for hang in by_fault.values()}
    return sorted(different.values(), key=_weight, reverse=True)


def _hang_from(
    graph: AwaitGraph, node: Node, dead: set[Node], after_s: float
) -> Hang | None:
    """Return the path from a node that waits too long; None if it does not."""
    actor = graph.actor(node)
    assert actor is not None
    is_late = actor.wait.for_s >= after_s and _matters(graph, node)
    if actor.is_internal or not (node in dead or is_late):
        return None
    hang = _follow(graph, node, dead)
    limit_s = min(after_s, SKEW_S) if node in dead else after_s
    if _goes_on(graph, hang, limit_s):
        return None
    if not hang.path and actor.wait.kind not in _NEVER_AT_REST:
        return None
    if node not in dead and _is_at_rest(graph, hang):
        return None
    return hang


def _is_at_rest(graph: AwaitGraph, hang: Hang) -> bool:
    """Return whether tasks wait for an idle one, such as a server's."""
    waits = [graph.wait(node) for node in hang.nodes]
    kinds = [None if wait is None else wait.kind for wait in waits]
    *before, last = kinds
    return last in _AT_REST and all(kind is WaitKind.TASKS for kind in before)


def _goes_on(graph: AwaitGraph, hang: Hang, after_s: float) -> bool:
    """Return whether the last node of a path has made progress recently.

    A task has if it began its current wait within `after_s`, or is about to run: the
    main task of a program waits for the others as long as the program runs.  A cycle
    makes progress if any of its nodes does: workers are not looked at in the same
    moment, so those that go from round to round look as if each waited for the other.
    """
    if hang.is_cycle:
        waits = map(graph.wait, _cycle_of(hang))
        return any(wait is not None and 0 <= wait.for_s < after_s for wait in waits)
    last = hang.nodes[-1]
    actor, snapshot = graph.actor(last), graph.snapshots.get(last.worker)
    if snapshot is None or last.worker in graph.troubles:
        return False
    if snapshot.blocked_for_s and last.actor == snapshot.loop_actor:
        return snapshot.blocked_for_s < after_s
    if actor is not None and actor.wait.kind is not WaitKind.RUNS:
        return 0 <= actor.wait.for_s < after_s
    if actor is not None and actor.kind is ActorKind.TASK:
        return not snapshot.blocked_for_s and after_s > 0
    # Only the wait for a thread tells how long the thread has run.
    wait = graph.wait(hang.nodes[-2]) if hang.path else None
    return wait is not None and 0 <= wait.for_s < after_s


def _reach(hang: Hang, awaited: set[Node]) -> tuple[bool, int, float]:
    """Return a key that prefers paths from unawaited nodes, then longer paths."""
    return hang.nodes[0] not in awaited, len(hang.path), hang.for_s


def _matters(graph: AwaitGraph, node: Node) -> bool:
    """Return whether a wait is for known nodes, and not just for work to arrive."""
    wait = graph.wait(node)
    assert wait is not None
    return (
        wait.call is not None
        or wait.kind in _NEEDS_ALL
        or bool(wait.is_sure and wait.actors)
        or bool(wait.needs)
    )


def _cycle_of(hang: Hang) -> Sequence[Node]:
    return hang.nodes[hang.nodes.index(hang.nodes[-1]) :]


def _weight(hang: Hang) -> tuple[bool, float, int]:
    return (hang.is_certain, hang.for_s, len(hang.path))


def _follow(graph: AwaitGraph, start: Node, dead: set[Node]) -> Hang:
    """Return the path from a node to its end, or to where it closes a cycle."""
    nodes, path, known = [start], list[Edge](), {start}
    first = graph.wait(start)
    for_s = UNKNOWN_S if first is None else first.for_s
    is_cycle = False
    while True:
        edge = _next(graph, nodes[-1], dead, known)
        if edge is None:
            break
        path.append(edge)
        is_cycle = edge.to in known
        nodes.append(edge.to)
        known.add(edge.to)
        if is_cycle:
            break
    return Hang(tuple(nodes), tuple(path), is_cycle, start in dead, for_s)


def _next(
    graph: AwaitGraph, node: Node, dead: set[Node], passed: set[Node]
) -> Edge | None:
    """Return the edge to follow: to a stuck node if there is one, else to a waiter."""
    edges = graph.edges.get(node, ())
    if not edges:
        return None
    if node in dead and not any(edge.to in dead for edge in edges):
        return None
    if len(edges) == 1:
        return edges[0]

    def rank(edge: Edge) -> tuple[bool, bool, bool, bool, float]:
        wait = graph.wait(edge.to)
        age = UNKNOWN_S if wait is None else wait.for_s
        is_of_members = wait is not None and wait.kind in _OF_MEMBERS
        is_new = edge.to not in passed
        return edge.to in dead, edge.is_sure, is_new, is_of_members, age

    best = max(edges, key=rank)
    wait = graph.wait(node)
    is_of_members = wait is not None and wait.kind in _OF_MEMBERS
    is_clear = best.is_sure or best.to in dead or is_of_members
    return best if is_clear else None
