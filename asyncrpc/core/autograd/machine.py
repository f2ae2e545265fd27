"""Decides which part of a local graph may run, and when a whole pass has ended.

A *start* is a tensor that this worker sent (or a root of the loss): there a backward
pass enters the local graph, once its gradient has arrived.

`LocalPass` hands out the graph in segments, so that each node runs once, as in one
process.  Every tensor that was sent in the context may turn out to be a start; so a
node is *ready* when each start that reaches it has its gradient, and each other tensor
that was sent and reaches it is known to take no part.  As a rule all starts are there
at once, nothing else was sent, and the whole graph is one segment: nothing is counted
then.

`Wave` decides when the pass has ended everywhere.  A worker that is asked, and is not
at work for the pass already, answers when it has no more to do and all workers that it
asked have answered; a worker that is at work answers soon.  So the worker that began
gets the last answer when nothing is under way any more.  Gradients for the worker that
an answer is owed to go with that answer (`owes`), if nothing else is under way.

Sans-IO, and without torch: starts and nodes are keys.

Source: Kahn's order (1962); Dijkstra and Scholten, "Termination detection for diffusing
computations" (1980).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from asyncrpc.errors import LocalProtocolError, RemoteProtocolError

S = TypeVar("S", bound=Hashable)
N = TypeVar("N", bound=Hashable)

Following: TypeAlias = Callable[[N], Iterable[tuple[N | None, int]]]


class PassReport(NamedTuple):
    """The last report of a worker about its part in a pass.

    Attributes:
        is_done: whether it has done all the work that it knows of.
        is_sure: whether the step that is to follow cannot raise on it; None: it was not
            asked to vote, or has nothing to vote on.
    """

    worker: int
    number: int
    is_done: bool
    is_sure: bool | None = None


@dataclass(frozen=True, slots=True)
class Segment(Generic[S, N]):
    """A part of the graph to run now.

    Attributes:
        starts: the tensors whose gradients enter here.
        nodes: the nodes to run; empty if it is the whole graph.
        ends: nodes of it that no other node of it follows.
        cuts: nodes of it that are followed by nodes that run later.
        is_rest: whether no segment follows.
        is_whole: whether it is the only segment.
    """

    starts: list[S]
    nodes: list[N] = field(default_factory=list)
    ends: list[N] = field(default_factory=list)
    cuts: list[N] = field(default_factory=list)
    is_rest: bool = True
    is_whole: bool = True


class LocalPass(Generic[S, N]):
    """One backward pass through the graph of one worker."""

    def __init__(
        self,
        following: Following[N],
        live: set[N],
        may_start: Mapping[S, N],
        is_apart: Callable[[N], bool] = lambda _node: False,
    ) -> None:
        """Begin.

        Args:
            live: the nodes that participating starts can reach; the caller adds to it
                when it calls `want`.
        """
        self._following = following
        self._is_apart = is_apart
        self._apart: list[N] = []  # wait for nothing, and must run by themselves
        self._live = live
        self._node: dict[S, N] = dict(may_start)
        self._open: set[S] = set(may_start)  # not known whether it takes part
        self._waiting: dict[S, None] = {}  # takes part, no gradient yet
        self._here: list[S] = []  # gradient here, not handed out
        self._missing: dict[N, int] | None = None  # by node: how many it waits for
        self._fresh: list[N] = []  # wait for nothing, and are not handed out
        self._handed: set[N] = set()
        self._live_handed = 0
        self._is_over = False  # the whole graph was handed out as one

    @property
    def is_done(self) -> bool:
        """Return whether all nodes known to take part were handed out."""
        if self._waiting or self._here:
            return False
        return self._missing is None or self._live_handed == len(self._live)

    @property
    def waits_for(self) -> list[S]:
        """Starts whose gradients have not come."""
        return list(self._waiting)

    @property
    def unsettled(self) -> list[S]:
        """Return the tensors that may or may not take part."""
        return list(self._open)

    def knows(self, start: S) -> bool:
        """Return whether a tensor was sent, or is a root."""
        return start in self._node

    def add_root(self, start: S, node: N) -> None:
        """Add a root, which takes part."""
        self._node[start] = node
        self._waiting[start] = None

    def want(self, starts: Iterable[S]) -> list[S]:
        """Record that tensors take part; return those that were not known to do so."""
        new = [start for start in starts if start in self._open]
        self._open.difference_update(new)
        self._waiting.update(dict.fromkeys(new))
        return new

    def arrive(self, starts: Iterable[S]) -> None:
        """Take gradients that have arrived."""
        arrived = list(starts)
        unknown = [start for start in arrived if start not in self._waiting]
        if unknown:
            raise RemoteProtocolError(
                f"a gradient came for {unknown[0]}, which expects none"
            )
        for start in arrived:
            del self._waiting[start]
            self._settle(start)
        self._here += arrived

    def rule_out(self) -> None:
        """Record that no further tensors take part."""
        for start in self._open:
            self._settle(start)
        self._open.clear()

    def next_segment(self) -> Segment[S, N] | None:
        """Hand out the nodes that may run now; None if there are none."""
        if self._missing is None:
            if not self._here:
                return None
            if not self._open and not self._waiting:
                self._is_over = True
                starts, self._here = self._here, []
                return Segment(starts)
            self._count()
        is_rest = not self._open and not self._waiting
        nodes = self._release(is_rest=is_rest)
        if not nodes and self._apart:
            return self._single_node_segment()
        starts = self._starts_here()
        if not nodes and not starts:
            return None
        ends, cuts = self._borders(nodes)
        return Segment(starts, nodes, ends, cuts, is_rest=is_rest, is_whole=False)

    def _starts_here(self) -> list[S]:
        """Take out the starts whose nodes were handed out."""
        starts = [start for start in self._here if self._node[start] in self._handed]
        self._here = [start for start in self._here if start not in starts]
        return starts

    def _single_node_segment(self) -> Segment[S, N]:
        """Hand out a node that must run by itself."""
        node = self._apart.pop()
        self._hand_out(node)
        self._live_handed += 1
        starts = self._starts_here()
        return Segment(starts, [node], [node], [node], is_rest=False, is_whole=False)

    def _settle(self, start: S) -> None:
        """Let a start's node wait for one thing less."""
        if self._is_over:
            raise LocalProtocolError(f"{start} was settled after the graph had run")
        if self._missing is not None:
            self._let_go(self._node[start])

    def _let_go(self, node: N) -> None:
        assert self._missing is not None
        self._missing[node] -= 1
        if not self._missing[node]:
            self._fresh.append(node)

    def _count(self) -> None:
        """Count what each node waits for: nodes before it, and starts at it."""
        starts = (*self._here, *self._open, *self._waiting)
        todo = [self._node[start] for start in starts]
        missing = self._missing = dict.fromkeys(todo, 0)
        seen: set[N] = set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            for child, _ in self._following(node):
                if child is not None:
                    missing[child] = missing.get(child, 0) + 1
                    todo.append(child)
        for start in (*self._open, *self._waiting):
            missing[self._node[start]] += 1
        here = dict.fromkeys(self._node[start] for start in self._here)
        self._fresh = [node for node in here if not missing[node]]

    def _release(self, *, is_rest: bool) -> list[N]:
        """Hand out all nodes that wait for nothing; return those that take part."""
        if is_rest:
            self._fresh += self._apart
            self._apart = []
        nodes, todo, self._fresh = [], self._fresh, []
        while todo:
            node = todo.pop()
            is_live = node in self._live
            if is_live and not is_rest and self._is_apart(node):
                self._apart.append(node)
                continue
            if is_live:
                nodes.append(node)
            self._hand_out(node)
            todo += self._fresh
            self._fresh = []
        self._live_handed += len(nodes)
        return nodes

    def _hand_out(self, node: N) -> None:
        self._handed.add(node)
        for child, _ in self._following(node):
            if child is not None:
                self._let_go(child)

    def _borders(self, nodes: list[N]) -> tuple[list[N], list[N]]:
        """Return the nodes that none of them follows, and those that others follow."""
        here = set(nodes)
        ends, cuts = [], []
        for node in nodes:
            after = [
                follower
                for follower, _ in self._following(node)
                if follower is not None
            ]
            if not any(follower in here for follower in after):
                ends.append(node)
            if any(follower not in here for follower in after):
                cuts.append(node)
        return ends, cuts


class Wave:
    """The work of a pass on one worker, and that worker's knowledge of the others.

    Attributes:
        is_running: whether a segment runs here.
        outstanding: messages sent that have not been answered.
        is_engaged: whether a worker waits to hear that all this has ended.
        owes: that worker; None if it is this one, which began the pass.
        reports: by worker, its last report.
    """

    __slots__ = (
        "_number",
        "is_engaged",
        "is_running",
        "outstanding",
        "owes",
        "reports",
    )

    def __init__(self) -> None:
        self.is_running = False
        self.outstanding = 0
        self.is_engaged = False
        self.owes: int | None = None
        self.reports: dict[int, PassReport] = {}
        self._number = 0

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is running here."""
        return not self.is_running and not self.outstanding

    def engage(self, by: int | None = None) -> bool:
        """Take a message; return whether its answer must wait until all has ended."""
        if self.is_engaged:
            return False
        self.is_engaged, self.owes = True, by
        return True

    def disengage(
        self, me: int, *, is_done: bool, is_sure: bool | None = None
    ) -> list[PassReport]:
        """End here: return the answer, the last reports of all known workers."""
        if not self.is_idle:
            raise LocalProtocolError("work is still under way for the pass")
        self.is_engaged, self.owes = False, None
        self._number += 1
        self.reports[me] = PassReport(me, self._number, is_done, is_sure)
        return list(self.reports.values())

    def receive(self, answer: Iterable[PassReport]) -> None:
        """Take the reports in an answer; the last one of each worker counts."""
        for report in answer:
            known = self.reports.get(report.worker)
            if report.number > (0 if known is None else known.number):
                self.reports[report.worker] = report

    @property
    def unfinished(self) -> list[int]:
        """Return the workers that have work left, and wait for messages to do it."""
        return [report.worker for report in self.reports.values() if not report.is_done]
