"""`asyncrpc why`, `stacks`, `calls` and `status`: look at a group that runs."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

from asyncrpc.cli.table import lines_of
from asyncrpc.errors import UsageError
from asyncrpc.inspection.group import GroupView, view_of
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
from asyncrpc.runtime.options import Options

ADDRESS_VARIABLE: Final = "ASYNCRPC_ADDRESS"
AFTER_S: Final = 10.0
_TROUBLE: Final = 1
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
        type=float,
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
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help=f"of any worker, as tcp://host:port (default: ${ADDRESS_VARIABLE})",
    )
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(act=lambda given: asyncio.run(_look(given, show)))


async def _look(arguments: argparse.Namespace, show: Show) -> int:
    after_s: float = getattr(arguments, "after", AFTER_S)
    if not 0 <= after_s < math.inf:
        raise UsageError(
            f"--after must be finite seconds of at least 0, not {after_s:g}"
        )
    address = arguments.address or os.environ.get(ADDRESS_VARIABLE)
    if not address:
        raise UsageError(
            f"ADDRESS is missing: give that of any worker, or set {ADDRESS_VARIABLE}"
        )
    async with Observer(Options().with_environment()) as observer:
        view = await view_of(
            observer, address, names=arguments.worker, is_thorough=show is _why
        )
    unknown = [one for one in arguments.worker if one not in view.members]
    if unknown:
        known = ", ".join(sorted(view.members))
        raise UsageError(f"there is no worker {unknown[0]!r}; known: {known}")
    return show(view, arguments)


# --- why -----------------------------------------------------------------------------


def _why(view: GroupView, arguments: argparse.Namespace) -> int:
    graph = view.graph
    found = find_hangs(graph, after_s=arguments.after)
    if arguments.json:
        _print_json(
            {
                "hangs": [_hang_record(view, one) for one in found],
                "silent": _silent_records(view),
            }
        )
        return _TROUBLE if found or view.silent else 0
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
    return _TROUBLE


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


def _silent_records(view: GroupView) -> dict[str, Any]:
    return {
        name: {"trouble": one.trouble.name.lower(), "words": one.words}
        for name, one in sorted(view.silent.items())
    }


# --- the others ----------------------------------------------------------------------


def _stacks(view: GroupView, arguments: argparse.Namespace) -> int:
    if arguments.json:
        _print_json(
            {
                "workers": [_plain(one) for one in view.snapshots.values()],
                "silent": _silent_records(view),
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
    _print_silent(view)
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
        _print_json(
            {
                "calls": [
                    {**_plain(call), "from": name, "state": states.get(call.key, "")}
                    for name, call in made
                ],
                "silent": _silent_records(view),
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
    _print_table(rows, "no call is under way")
    _print_silent(view)
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
    states = {one.name: _state_of(view, one.name) for one in shown}
    figures = {one.name: _figures(view.snapshots.get(one.name)) for one in shown}
    if arguments.json:
        _print_json(
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
        _print_table(rows, "no worker is known")
    return 0 if all(one == "runs" for one in states.values()) else _TROUBLE


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


def _state_of(view: GroupView, name: str) -> str:
    no_answer, snapshot = view.silent.get(name), view.snapshots.get(name)
    if no_answer is not None:
        return no_answer.trouble.value
    if snapshot is not None and snapshot.blocked_for_s:
        return f"its event loop is blocked, {duration(snapshot.blocked_for_s)}"
    return "runs"


# --- printing ------------------------------------------------------------------------


def _print_table(rows: Sequence[Sequence[str]], nothing: str) -> None:
    if len(rows) == 1:
        print(nothing)
    else:
        print("\n".join(lines_of(rows)))


def _print_silent(view: GroupView) -> None:
    for name, no_answer in sorted(view.silent.items()):
        words = f": {no_answer.words}" if no_answer.words else ""
        print(
            f"{name} tells nothing: {no_answer.trouble.value}{words}", file=sys.stderr
        )


def _print_json(record: Mapping[str, Any]) -> None:
    print(json.dumps(record, indent=2))


def _plain(value: Any) -> Any:
    """Return a record as JSON has it: named tuples as objects, enums by name."""
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(one) for name, one in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
