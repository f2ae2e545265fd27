"""A finding in words: as one sentence, and as a tree with all details."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from asyncrpc.core.loop.waits import WaitKind
from asyncrpc.tools.inspection.machine.graph import (
    NO_THREAD,
    AwaitGraph,
    Edge,
    Hang,
    Node,
)
from asyncrpc.tools.inspection.records import (
    NO_ACTOR,
    ActorKind,
    NoAnswer,
    ObservedActor,
    ServedCall,
    StackFrame,
    Wait,
    WorkerSnapshot,
)

_MINUTE_S: Final = 60
_HOUR_S: Final = 3600
_HOPS_MAX: Final = 20  # of a sentence; even
# Waits for something that a task or thread does, not for something that it holds.
_DONE_BY: Final = {
    WaitKind.THREADS,
    WaitKind.REDUCTION,
    WaitKind.BACKWARD,
    WaitKind.IN_FLIGHT,
}
# What the functions of services do, for people.
_ASKED: Final = {
    "autograd.advance": "the backward pass",
    "autograd.close": "the backward pass",
    **dict.fromkeys(
        ("optim.step", "optim.prepare", "optim.commit", "optim.begin"),
        "an optimizer step",
    ),
}
# What would end a wait, by its kind.
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


def sentence(graph: AwaitGraph, hang: Hang) -> str:
    """Return a finding as one sentence."""
    waited = duration(hang.for_s)
    text = who(graph, hang.nodes[0])
    if hang.path:
        text += f" waits {waited} for " if waited else " waits for "
        text += ", which waits for ".join(_hops(graph, hang))
    elif waited and _is_waiting(graph, hang.nodes[0]):
        end = _end(graph, hang.nodes[0]).removeprefix("waits")
        return f"{text} waits {waited}{end}"
    if hang.is_cycle:
        return f"{text}: a cycle{', which nothing can end' if hang.is_certain else ''}"
    return f"{text}{', which ' if hang.path else ' '}{_end(graph, hang.nodes[-1])}"


def _hops(graph: AwaitGraph, hang: Hang) -> list[str]:
    """Return what each node of a path waits for; of a long path only both ends."""
    ways = list(zip(hang.nodes, hang.path, strict=False))
    more = len(ways) - _HOPS_MAX
    if more <= 0:
        return [hop(graph, *way) for way in ways]
    half = _HOPS_MAX // 2
    first, last = ways[:half], ways[-half:]
    return [
        *(hop(graph, *way) for way in first),
        f"{more} more",
        *(hop(graph, *way) for way in last),
    ]


def _is_waiting(graph: AwaitGraph, node: Node) -> bool:
    wait = graph.wait(node)
    return (
        wait is not None
        and node.worker not in graph.troubles
        and wait.kind not in (WaitKind.RUNS, WaitKind.SLEEP)
    )


def unnamed_troubles(graph: AwaitGraph, hangs: Sequence[Hang]) -> list[str]:
    """Return a sentence for each stuck worker that no finding names."""
    named = {node.worker for hang in hangs for node in hang.nodes}
    return [
        f"{name} is stuck: {_trouble(no_answer)}"
        for name, no_answer in sorted(graph.troubles.items())
        if name not in named
    ]


def _trouble(no_answer: NoAnswer) -> str:
    trouble, words = no_answer
    return trouble.value + (f", {words}" if words else "")


def blocked(snapshot: WorkerSnapshot) -> str:
    """Return where the event loop of a worker is blocked, and for how long."""
    text = f"its event loop is blocked, {duration(snapshot.blocked_for_s)}"
    if snapshot.loop_actor == NO_ACTOR:
        return text
    actor = snapshot.actors[snapshot.loop_actor]
    return f"{text}: {named(actor)} {words_of(actor.wait)}{_where(actor)}"


def who(graph: AwaitGraph, node: Node) -> str:
    """Return a task or thread by name, as in "ps task `evict`"."""
    actor = graph.actor(node)
    if actor is None:
        return f"{node.worker}: {node.what}"
    return f"{node.worker} {named(actor)}"


def named(actor: ObservedActor) -> str:
    """Return a task or thread by its name or function, as in "task `evict`"."""
    name = actor.name
    is_automatic = actor.kind is ActorKind.TASK and name.startswith("Task-")
    return f"{actor.kind.value} `{actor.function if is_automatic else name}`"


def hop(graph: AwaitGraph, here: Node, edge: Edge) -> str:
    """Return what one node waits for, and which node must act."""
    wait, target, actor = graph.wait(here), edge.to, graph.actor(edge.to)
    if edge.through is not None:
        return _through(target, edge.through)
    if here.what == NO_THREAD and actor is not None:
        return f"{NO_THREAD}: {named(actor)}"
    if wait is None or actor is None:
        return target.worker
    if wait.kind is WaitKind.TASKS:
        return named(actor)
    if wait.members:
        more = len(graph.edges[here]) - 1
        absent = (
            f"{target.worker} and {more} more have" if more else f"{target.worker} has"
        )
        return f"{wait.what}, to which {absent} not come: {who(graph, target)}"
    return f"{wait.what}{_tie(wait)}{who(graph, target)}"


def _through(target: Node, call: ServedCall) -> str:
    """Return what the callee of a call is to do."""
    if (asked := _ASKED.get(call.function)) is not None:
        return f"{asked} on {target.worker}"
    if not call.function:
        return f"a value of {target.worker}"
    return f"{target.worker} `{call.function}`"


def _tie(wait: Wait) -> str:
    """Return the words between what is waited for and who must act."""
    if wait.kind is WaitKind.CREDIT:
        return ", "
    if wait.kind in _DONE_BY:
        return ": "
    return " held by " if wait.is_sure else ", known to "


def _end(graph: AwaitGraph, node: Node) -> str:
    """Return why the last node is stuck."""
    actor = graph.actor(node)
    if node.worker in graph.troubles:
        return f"is stuck: {_trouble(graph.troubles[node.worker])}"
    if actor is None:
        return f"waits for {node.what}"
    where = _where(actor)
    return f"{words_of(actor.wait)}{where}"


def words_of(wait: Wait) -> str:
    """Return what a task or thread waits for, as in "waits for Lock `table`"."""
    if wait.kind is WaitKind.RUNS:
        return f"runs `{wait.what}`" if wait.what else "is about to run"
    if wait.kind is WaitKind.SLEEP:
        return f"is in {wait.what}"
    if wait.is_closed and not wait.actors and wait.kind in _ENDED_BY:
        return (
            f"waits for {wait.what}: nothing else refers to it, so nothing can "
            f"{_ENDED_BY[wait.kind]} it"
        )
    if wait.kind is WaitKind.LOCK and not wait.actors:
        return f"waits for {wait.what}, which no task of this worker is known to hold"
    if wait.members:
        return f"waits for {wait.what}"
    return f"waits for {wait.what or wait.kind.value}"


def _where(actor: ObservedActor) -> str:
    if not actor.frames:
        return ""
    return f" ({place_of(actor.frames[-1])})"


def place_of(frame: StackFrame) -> str:
    """Return the place of a frame, as in "train.py:41 in step"."""
    return f"{PurePath(frame.file).name}:{frame.line} in {frame.function}"


def tree(graph: AwaitGraph, hang: Hang) -> list[str]:
    """Return the lines of a finding: each node with its stack, its wait below it."""
    lines = []
    for depth, node in enumerate(hang.nodes):
        indent = "  " * depth
        lead = "" if not depth else "└ "
        wait, actor = graph.wait(node), graph.actor(node)
        through = hang.path[depth - 1].through if depth else None
        title = who(graph, node)
        if through is not None:
            title += f", serving `{through.function}` for {through.caller}"
            if through.for_s >= 0:
                title += f" ({duration(through.for_s)})"
        if depth and node in hang.nodes[:depth]:
            lines.append(f"{indent}{lead}{title}: again")
            break
        lines.append(f"{indent}{lead}{title}")
        if actor is None or wait is None:
            continue
        lines.extend(f"{indent}    {place_of(frame)}" for frame in actor.frames)
        waited = duration(wait.for_s)
        lines.append(
            f"{indent}    {words_of(wait)}" + (f", {waited}" if waited else "")
        )
    return lines
