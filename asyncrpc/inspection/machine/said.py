"""Which findings one worker has not said yet: each stall is said once.

A stall is known by who is at fault, so that a thousand calls that wait for one lock are
said once.  It is over when it is not found any more; the same fault later is another.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from asyncrpc.inspection.machine.graph import AwaitGraph, Hang, Node


class SaidHangs:
    """The stalls that one worker has said, and that are not over."""

    def __init__(self, worker: str) -> None:
        """Begin without any.

        Args:
            worker: its name; only what has one of its tasks or threads in it counts.
        """
        self._worker = worker
        self._said: set[Hashable] = set()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._said)

    def news(self, graph: AwaitGraph, found: Sequence[Hang]) -> list[Hang]:
        """Return what is to be said of all that is found now; forget what is over."""
        by_fault = {
            _fault_of(graph, one): one
            for one in reversed(found)  # the gravest of a fault last
            if any(node.worker == self._worker for node in one.nodes)
        }
        new = [one for fault, one in by_fault.items() if fault not in self._said]
        self._said = set(by_fault)
        return new[::-1]

    def forget(self) -> None:
        """Nothing waits any more: all is over."""
        self._said.clear()


def _fault_of(graph: AwaitGraph, found: Hang) -> Hashable:
    """Return what tells a stall from another, in later snapshots as well."""
    last = found.nodes[-1]
    if not found.is_cycle:
        return _identity(graph, last)
    cycle = found.nodes[found.nodes.index(last) :]
    return frozenset(_identity(graph, one) for one in cycle)


def _identity(graph: AwaitGraph, node: Node) -> Hashable:
    """Return a node without its place, which is another in each snapshot.

    Where it is in its code does not count: what runs is elsewhere a moment later.
    """
    actor = graph.actor(node)
    if actor is None:
        trouble = graph.troubles.get(node.worker)
        return node.worker, node.what, None if trouble is None else trouble.trouble
    outermost = actor.frames[0].function if actor.frames else ""
    return node.worker, actor.kind, actor.name, outermost
