"""Which findings one worker has not reported yet: each stall is reported once.

A stall is identified by the node at fault, so that a thousand calls that wait for one
lock are reported once.  It is over when it is no longer found; the same fault found
later is a new stall.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from asyncrpc.tools.inspection.machine.graph import AwaitGraph, Hang, Node


class SaidHangs:
    """The stalls that one worker has reported and that are not over."""

    def __init__(self, worker: str) -> None:
        """Begin without any.

        Args:
            worker: its name; only findings with one of its tasks or threads count.
        """
        self._worker = worker
        self._reported: set[Hashable] = set()

    def __len__(self) -> int:
        """Return the number of these stalls."""
        return len(self._reported)

    def news(self, graph: AwaitGraph, hangs: Sequence[Hang]) -> list[Hang]:
        """Return the findings that are new; forget the stalls that are over."""
        by_fault = {
            _fault_of(graph, hang): hang
            for hang in reversed(hangs)  # the gravest of a fault last
            if any(node.worker == self._worker for node in hang.nodes)
        }
        new = [hang for fault, hang in by_fault.items() if fault not in self._reported]
        self._reported = set(by_fault)
        return new[::-1]

    def forget(self) -> None:
        """Forget all stalls: nothing waits any more."""
        self._reported.clear()


def _fault_of(graph: AwaitGraph, hang: Hang) -> Hashable:
    """Return the identity of a stall, which is the same in later snapshots."""
    last = hang.nodes[-1]
    if not hang.is_cycle:
        return _identity(graph, last)
    cycle = hang.nodes[hang.nodes.index(last) :]
    return frozenset(_identity(graph, node) for node in cycle)


def _identity(graph: AwaitGraph, node: Node) -> Hashable:
    """Return a node without its index, which differs between snapshots.

    Its current line does not count either: running code is elsewhere a moment later.
    """
    actor = graph.actor(node)
    if actor is None:
        trouble = graph.troubles.get(node.worker)
        return node.worker, node.what, None if trouble is None else trouble.trouble
    outermost = actor.frames[0].function if actor.frames else ""
    return node.worker, actor.kind, actor.name, outermost
