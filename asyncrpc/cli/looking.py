"""`asyncrpc why`, `stacks`, `calls` and `status`: look at a group that runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

from asyncrpc.cli.observing import (
    TROUBLE,
    add_observing,
    check_workers,
    plain,
    print_json,
    print_silent,
    print_table,
    seconds,
    silent_records,
)
from asyncrpc.inspection.group import RUNS, GroupView, view_of
from asyncrpc.inspection.machine.graph import Hang, find_hangs
from asyncrpc.inspection.machine.wording import (
    duration,
    place_of,
    sentence,
    tree,
    unnamed_troubles,
    who,
)
from asyncrpc.inspection.observer import Observer
from asyncrpc.inspection.records import (
    NO_ACTOR,
    ActorKind,
    CallKey,
    WaitKind,
    WorkerSnapshot,
)

AFTER_S: Final = 10.0
_LISTED_MAX: Final = 20

Show = Callable[[GroupView, argparse.Namespace], int]


def add_why(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc why`."""
    parser.description = (
        "Say in one sentence why a group does not go on: who waits for whom, over all "
        "of its workers, up to a cycle or to who is at fault.  The exit code is 0 if "
        "nothing waits too long, else 1."
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
        "for."
    )
    parser.add_argument(
        "--internal", action="store_true", help="asyncrpc's own tasks and threads too"
    )
    _add_common(parser, _stacks)


def add_calls(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc calls`."""
    parser.description = "List the calls of a group that are not answered."
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
        check_workers(arguments.worker, view.members)
        return show(view, arguments)

    add_observing(parser, look)


# --- why -----------------------------------------------------------------------------


def _why(view: GroupView, arguments: argparse.Namespace) -> int:
    graph = view.graph
    found = find_hangs(graph, after_s=arguments.after)
    if arguments.json:
        print_json(
            {
                "hangs": [_hang_record(view, one) for one in found],
                "silent": silent_records(view.silent),
            }
        )
        return TROUBLE if found or view.silent else 0
    for place, one in enumerate(found[:_LISTED_MAX]):
        if place and arguments.tree:
            print()
        print(sentence(graph, one))
        if arguments.tree:
            print("\n".join(tree(graph, one)))
    for line in unnamed_troubles(graph, found):
        print(line)
    if len(found) > _LISTED_MAX:
        print(f"and {len(found) - _LISTED_MAX} more")
    if not found and not view.silent:
        print(f"nothing waits longer than {duration(arguments.after)}")
        return 0
    return TROUBLE


def _hang_record(view: GroupView, found: Hang) -> dict[str, Any]:
    graph = view.graph
    return {
        "sentence": sentence(graph, found),
        "is_cycle": found.is_cycle,
        "is_certain": found.is_certain,
        "for_s": found.for_s,
        "path": [
            {"worker": node.worker, "who": who(graph, node)} for node in found.nodes
        ],
        "fault": found.nodes[-1].worker,
    }


# --- the others ----------------------------------------------------------------------


def _stacks(view: GroupView, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json(
            {
                "workers": [plain(one) for one in view.snapshots.values()],
                "silent": silent_records(view.silent),
            }
        )
        return 0
    for name, snapshot in sorted(view.snapshots.items()):
        print(f"{name}, process {snapshot.pid}")
        for actor in snapshot.actors:
            if actor.is_internal and not arguments.internal:
                continue
            print(f"  {actor.kind.value} {actor.name}")
            for frame in actor.frames:
                print(f"      {place_of(frame)}")
            what = actor.wait.what or actor.wait.kind.value
            verb = "runs" if actor.wait.kind is WaitKind.RUNS else "waits for"
            print(f"    {verb} {what}")
        if snapshot.left_out:
            print(f"  and {snapshot.left_out} more")
    print_silent(view.silent)
    return 0


def _calls(view: GroupView, arguments: argparse.Namespace) -> int:
    made = [
        (name, call)
        for name, snapshot in sorted(view.snapshots.items())
        for call in snapshot.made
    ]
    made.sort(key=lambda one: -one[1].for_s)
    states = _states(view)
    if arguments.json:
        print_json(
            {
                "calls": [
                    {**plain(call), "from": name, "state": states.get(call.key, "")}
                    for name, call in made
                ],
                "silent": silent_records(view.silent),
            }
        )
        return 0
    rows = [("age", "from", "to", "function", "there")]
    rows += [
        (
            duration(call.for_s),
            name,
            call.to,
            call.function,
            states.get(call.key, "not there (yet)"),
        )
        for name, call in made
    ]
    print_table(rows, "no call is under way")
    print_silent(view.silent)
    return 0


def _states(view: GroupView) -> dict[CallKey, str]:
    """Return what becomes of each call that is served."""
    states = {}
    for snapshot in view.snapshots.values():
        for served in snapshot.served:
            if served.actor == NO_ACTOR:
                states[served.key] = "waits for a thread"
                continue
            wait = snapshot.actors[served.actor].wait
            what = wait.what or wait.kind.value
            verb = "runs" if wait.kind is WaitKind.RUNS else "waits for"
            states[served.key] = f"{verb} {what}"
    return states


def _status(view: GroupView, arguments: argparse.Namespace) -> int:
    members = sorted(view.members.values(), key=lambda one: (one.rank, one.name))
    wanted = arguments.worker or view.members
    shown = [one for one in members if one.name in wanted]
    states = {one.name: view.state_of(one.name) for one in shown}
    figures = {one.name: _figures(view.snapshots.get(one.name)) for one in shown}
    if arguments.json:
        print_json(
            {
                "workers": [
                    {
                        "name": one.name,
                        "rank": one.rank,
                        "state": states[one.name],
                        **figures[one.name],
                    }
                    for one in shown
                ]
            }
        )
    else:
        rows: list[tuple[str, ...]] = [("rank", "name", *_FIGURES, "state")]
        for one in shown:
            shown_figures = [str(it or "") for it in figures[one.name].values()]
            rows.append((str(one.rank), one.name, *shown_figures, states[one.name]))
        print_table(rows, "no worker is known")
    return 0 if all(one == RUNS for one in states.values()) else TROUBLE


_FIGURES: Final = ("pid", "tasks", "threads", "made", "served")


def _figures(snapshot: WorkerSnapshot | None) -> dict[str, int | None]:
    if snapshot is None:
        return dict.fromkeys(_FIGURES)
    tasks, threads = (
        sum(one.kind is kind for one in snapshot.actors) for kind in ActorKind
    )
    made, served = len(snapshot.made), len(snapshot.served)
    values = (snapshot.pid, tasks, threads, made, served)
    return dict(zip(_FIGURES, values, strict=True))
