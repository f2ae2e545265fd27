"""A finding in words: one sentence, and a tree for who wants to see all of it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from asyncrpc.inspection.machine.graph import AwaitGraph, Edge, Hang, Node
from asyncrpc.inspection.records import (
    Actor,
    ActorKind,
    StackFrame,
    Wait,
    WaitKind,
)

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_LISTED_MAX: Final = 4
# What nobody can end any more, by kind.
_ENDED_BY: Final = {
    WaitKind.LOCK: "release",
    WaitKind.SEMAPHORE: "release",
    WaitKind.CONDITION: "notify",
    WaitKind.EVENT: "set",
    WaitKind.ITEM: "put an item into",
    WaitKind.ROOM: "take an item from",
    WaitKind.WORK: "call task_done of",
    WaitKind.BARRIER: "come to",
}


def duration(seconds: float) -> str:
    """Return a duration for people, as in "41 s"; empty if it is not known."""
    if seconds < 0:
        return ""
    if seconds < 10:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    if seconds < 10 * _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 10 * _HOUR_S:
        return f"{seconds / _MINUTE_S:.0f} min"
    return f"{seconds / _HOUR_S:.0f} h"


def sentence(graph: AwaitGraph, found: Hang) -> str:
    """Return a finding as one sentence."""
    waited = duration(found.for_s)
    text = who(graph, found.nodes[0])
    if found.path:
        text += f" waits {waited} for " if waited else " waits for "
        hops = [
            _hop(graph, node, edge)
            for node, edge in zip(found.nodes, found.path, strict=False)
        ]
        text += ", which waits for ".join(hops)
    if found.is_cycle:
        return f"{text}: a cycle{', which nothing can end' if found.is_certain else ''}"
    return f"{text}{', which ' if found.path else ' '}{_end(graph, found.nodes[-1])}"


def who(graph: AwaitGraph, node: Node) -> str:
    """Return a task or thread by name, as in "ps task `evict`"."""
    actor = graph.actor(node)
    if actor is None:
        return f"{node.worker}: {node.what}"
    return f"{node.worker} {_actor(actor)}"


def _actor(actor: Actor) -> str:
    given = actor.name
    is_automatic = actor.kind is ActorKind.TASK and given.startswith("Task-")
    return f"{actor.kind.value} `{actor.function if is_automatic else given}`"


def _hop(graph: AwaitGraph, here: Node, edge: Edge) -> str:
    """Return what one node waits for, and who has to act."""
    wait, target, actor = graph.wait(here), edge.to, graph.actor(edge.to)
    if edge.through is not None:
        name = edge.through.function
        return f"{target.worker} `{name}`" if name else f"a value of {target.worker}"
    if wait is None or actor is None:
        return target.worker
    if wait.kind is WaitKind.TASKS:
        return _actor(actor)
    if wait.members:
        more = len(graph.edges[here]) - 1
        absent = (
            f"{target.worker} and {more} more have" if more else f"{target.worker} has"
        )
        return f"{wait.what}, to which {absent} not come: {who(graph, target)}"
    return f"{wait.what}{_tie(wait)}{who(graph, target)}"


def _tie(wait: Wait) -> str:
    """Return what ties something that is waited for to who has to act."""
    if wait.kind is WaitKind.CREDIT:
        return ", "
    if wait.kind is WaitKind.THREADS:
        return ": "
    return " held by " if wait.is_sure else ", known to "


def _end(graph: AwaitGraph, node: Node) -> str:
    """Return why the last node does not go on."""
    actor = graph.actor(node)
    if node.worker in graph.troubles:
        trouble, words = graph.troubles[node.worker]
        return f"does not go on: {trouble.value}" + (f", {words}" if words else "")
    if actor is None:
        return f"waits for {node.what}"
    where = _where(actor)
    return f"{_waits(actor.wait)}{where}"


def _waits(wait: Wait) -> str:
    if wait.kind is WaitKind.RUNS:
        return f"runs `{wait.what}`" if wait.what else "is about to run"
    if wait.kind is WaitKind.SLEEP:
        return f"is in {wait.what}"
    if wait.is_closed and not wait.actors and wait.kind in _ENDED_BY:
        return (
            f"waits for {wait.what}: nothing else refers to it, so nobody can "
            f"{_ENDED_BY[wait.kind]} it"
        )
    if wait.kind is WaitKind.LOCK and not wait.actors:
        return f"waits for {wait.what}, which no task of this worker is known to hold"
    if wait.members:
        return f"waits for {wait.what}"
    return f"waits for {wait.what or wait.kind.value}"


def _where(actor: Actor) -> str:
    if not actor.frames:
        return ""
    return f" ({place_of(actor.frames[-1])})"


def place_of(frame: StackFrame) -> str:
    """Return the place of a frame, as in "train.py:41 in step"."""
    return f"{PurePath(frame.file).name}:{frame.line} in {frame.function}"


def tree(graph: AwaitGraph, found: Hang) -> list[str]:
    """Return a finding line by line: each node with its stack, each wait below it."""
    lines = []
    for depth, node in enumerate(found.nodes):
        indent = "  " * depth
        lead = "" if not depth else "└ "
        wait, actor = graph.wait(node), graph.actor(node)
        through = found.path[depth - 1].through if depth else None
        title = who(graph, node)
        if through is not None:
            title += f", serving `{through.function}` for {through.caller}"
            if through.for_s >= 0:
                title += f" ({duration(through.for_s)})"
        if depth and node in found.nodes[:depth]:
            lines.append(f"{indent}{lead}{title}: again")
            break
        lines.append(f"{indent}{lead}{title}")
        if actor is None or wait is None:
            continue
        lines.extend(f"{indent}    {place_of(one)}" for one in actor.frames)
        waited = duration(wait.for_s)
        lines.append(f"{indent}    {_waits(wait)}" + (f", {waited}" if waited else ""))
    return lines
