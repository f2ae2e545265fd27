"""`asyncrpc why`, `stacks`, `calls` and `status`: look at a running group."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, Final

from asyncrpc.extend import WaitKind
from asyncrpc.tools.cli.observing import (
    TROUBLE,
    add_observing,
    check_group,
    plain,
    print_json,
    print_silent,
    print_table,
    seconds,
    silent_records,
)
from asyncrpc.tools.cli.table import line_of, wrapped
from asyncrpc.tools.inspection.group import RUNS, GroupView, view_of
from asyncrpc.tools.inspection.machine.graph import Hang, find_hangs
from asyncrpc.tools.inspection.machine.wording import (
    duration,
    place_of,
    sentence,
    tree,
    unnamed_troubles,
    who,
)
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.tools.inspection.records import (
    NO_ACTOR,
    ActorKind,
    CallKey,
    WorkerSnapshot,
)

AFTER_S: Final = 10.0
_LISTED_MAX: Final = 20

Show = Callable[[GroupView, argparse.Namespace], int]


def add_why(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc why`."""
    parser.description = (
        "Say in one sentence why a group is stuck: which task waits for which, over "
        "all of its workers, up to a cycle or to the one at fault.  The exit code is 0 "
        "if nothing waits too long, else 1."
    )
    parser.add_argument(
        "--after",
        type=seconds,
        default=AFTER_S,
        metavar="S",
        help=f"seconds that a wait may take (default: {AFTER_S:g})",
    )
    parser.add_argument("--tree", action="store_true", help="with stacks, as a tree")
    _add_common(parser, _why)


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc stacks`."""
    parser.description = (
        "Show the tasks and threads of a group, with their stacks and what each waits "
        "for.  The exit code is 0 if all workers have answered, else 1."
    )
    parser.add_argument(
        "--internal", action="store_true", help="also asyncrpc's own tasks and threads"
    )
    _add_common(parser, _stacks)


def add_calls(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc calls`."""
    parser.description = (
        "List the calls of a group that are not answered, the oldest first, and the "
        "state of each where it is served.  The exit code is 0 if all workers have "
        "answered, else 1."
    )
    _add_common(parser, _calls)


def add_status(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc status`."""
    parser.description = (
        "List the workers of a group.  The exit code is 0 if all run, else 1."
    )
    _add_common(parser, _status)


def _add_common(parser: argparse.ArgumentParser, show: Show) -> None:
    async def look(
        observer: Observer, address: str, arguments: argparse.Namespace
    ) -> int:
        view = await view_of(
            observer, address, names=arguments.worker, is_thorough=show is _why
        )
        check_group(arguments, view.members)
        return show(view, arguments)

    add_observing(parser, look)


def _status_of(view: GroupView) -> int:
    return TROUBLE if view.silent else 0


def _not_told(view: GroupView) -> dict[str, Any]:
    """Return for JSON the silent workers, and how many tasks and calls are left out."""
    left_out = {
        name: snapshot.left_out
        for name, snapshot in view.snapshots.items()
        if snapshot.left_out
    }
    return {"left_out": left_out, "silent": silent_records(view.silent)}


def _print_left_out(view: GroupView) -> None:
    for name, snapshot in sorted(view.snapshots.items()):
        if snapshot.left_out:
            print(
                f"{name} has {snapshot.left_out} more tasks and calls than are shown",
                file=sys.stderr,
            )


# --- why -----------------------------------------------------------------------------


def _why(view: GroupView, arguments: argparse.Namespace) -> int:
    graph = view.graph
    hangs = find_hangs(graph, after_s=arguments.after)
    if arguments.json:
        print_json(
            {
                "hangs": [_hang_record(view, hang) for hang in hangs],
                **_not_told(view),
            }
        )
        return TROUBLE if hangs or view.silent else 0
    for place, hang in enumerate(hangs[:_LISTED_MAX]):
        if place and arguments.tree:
            print()
        print(wrapped(sentence(graph, hang)))
        if arguments.tree:
            print("\n".join(map(line_of, tree(graph, hang))))
    for line in unnamed_troubles(graph, hangs):
        print(wrapped(line))
    if len(hangs) > _LISTED_MAX:
        print(f"and {len(hangs) - _LISTED_MAX} more; all: --json")
    _print_left_out(view)
    if not hangs and not view.silent:
        print(f"nothing waits longer than {duration(arguments.after)}")
        return 0
    return TROUBLE


def _hang_record(view: GroupView, hang: Hang) -> dict[str, Any]:
    graph = view.graph
    return {
        "sentence": sentence(graph, hang),
        "is_cycle": hang.is_cycle,
        "is_certain": hang.is_certain,
        "for_s": hang.for_s,
        "path": [
            {"worker": node.worker, "who": who(graph, node)} for node in hang.nodes
        ],
        "fault": hang.nodes[-1].worker,
    }


# --- the others ----------------------------------------------------------------------


def _stacks(view: GroupView, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json(
            {
                "workers": [plain(snapshot) for snapshot in view.snapshots.values()],
                **_not_told(view),
            }
        )
        return _status_of(view)
    for name, snapshot in sorted(view.snapshots.items()):
        print(line_of(f"{name}, process {snapshot.pid}"))
        hidden = 0
        for actor in snapshot.actors:
            if actor.is_internal and not arguments.internal:
                hidden += 1
                continue
            print(line_of(f"  {actor.kind.value} {actor.name}"))
            for frame in actor.frames:
                print(line_of(f"      {place_of(frame)}"))
            description = actor.wait.what or actor.wait.kind.value
            verb = "runs" if actor.wait.kind is WaitKind.RUNS else "waits for"
            print(line_of(f"    {verb} {description}"))
        if hidden:
            print(f"  and {hidden} of asyncrpc's own; --internal shows them")
    _print_left_out(view)
    print_silent(view.silent)
    return _status_of(view)


def _calls(view: GroupView, arguments: argparse.Namespace) -> int:
    calls = [
        (name, call)
        for name, snapshot in sorted(view.snapshots.items())
        for call in snapshot.made
    ]
    calls.sort(key=lambda pair: -pair[1].for_s)
    states = _states(view)
    if arguments.json:
        print_json(
            {
                "calls": [
                    {**plain(call), "from": name, "state": states.get(call.key, "")}
                    for name, call in calls
                ],
                **_not_told(view),
            }
        )
        return _status_of(view)
    rows = [("age", "from", "to", "function", "there")]
    rows += [
        (
            duration(call.for_s),
            name,
            call.to,
            call.function,
            states.get(call.key, "not (yet) there"),
        )
        for name, call in calls
    ]
    print_table(rows, "no call is under way")
    _print_left_out(view)
    print_silent(view.silent)
    return _status_of(view)


def _states(view: GroupView) -> dict[CallKey, str]:
    """Return the state of each call that is served."""
    states = {}
    for snapshot in view.snapshots.values():
        for served in snapshot.served:
            if served.actor == NO_ACTOR:
                states[served.key] = "waits for a thread"
                continue
            wait = snapshot.actors[served.actor].wait
            description = wait.what or wait.kind.value
            verb = "runs" if wait.kind is WaitKind.RUNS else "waits for"
            states[served.key] = f"{verb} {description}"
    return states


def _status(view: GroupView, arguments: argparse.Namespace) -> int:
    members = sorted(
        view.members.values(), key=lambda member: (member.rank, member.name)
    )
    wanted = arguments.worker or view.members
    shown = [member for member in members if member.name in wanted]
    states = {member.name: view.state_of(member.name) for member in shown}
    figures = {
        member.name: _figures(view.snapshots.get(member.name)) for member in shown
    }
    if arguments.json:
        print_json(
            {
                "workers": [
                    {
                        "name": member.name,
                        "rank": member.rank,
                        "state": states[member.name],
                        **figures[member.name],
                    }
                    for member in shown
                ],
                **_not_told(view),
            }
        )
    else:
        rows: list[tuple[str, ...]] = [("rank", "name", *_FIGURES, "state")]
        for member in shown:
            shown_figures = [str(it or "") for it in figures[member.name].values()]
            rows.append(
                (str(member.rank), member.name, *shown_figures, states[member.name])
            )
        print_table(rows, "no worker is known")
        _print_left_out(view)
    return 0 if all(state == RUNS for state in states.values()) else TROUBLE


_FIGURES: Final = ("pid", "tasks", "threads", "made", "served")


def _figures(snapshot: WorkerSnapshot | None) -> dict[str, int | None]:
    if snapshot is None:
        return dict.fromkeys(_FIGURES)
    tasks, threads = (
        sum(actor.kind is kind for actor in snapshot.actors) for kind in ActorKind
    )
    outgoing, served = len(snapshot.made), len(snapshot.served)
    values = (snapshot.pid, tasks, threads, outgoing, served)
    return dict(zip(_FIGURES, values, strict=True))
