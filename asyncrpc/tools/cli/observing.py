"""The common parts of the commands that look at a running group."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Final

from asyncrpc.core.logs import printable
from asyncrpc.core.members import Member
from asyncrpc.errors import UsageError
from asyncrpc.tools.cli.runs.choosing import others_in
from asyncrpc.tools.cli.runs.finding import ADDRESS_VARIABLE, entrance
from asyncrpc.tools.cli.table import UNCUT, columns_here, lines_of
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.tools.inspection.records import NoAnswer

TROUBLE: Final = 1  # exit code: something is wrong

Look = Callable[[Observer, str, argparse.Namespace], Awaitable[int]]


def add_observing(parser: argparse.ArgumentParser, look: Look) -> None:
    """Describe the options of all these commands.

    Args:
        look: does the work of the command; returns the exit code.
    """
    add_group(parser)
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(act=lambda arguments: asyncio.run(_observe(arguments, look)))


def add_entrance(parser: argparse.ArgumentParser) -> None:
    """Describe the options that select the group; see `entrance`."""
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDRESS",
        help=f"of any worker, as tcp://host:port (default: ${ADDRESS_VARIABLE}, else"
        " your only run or model on this host: see `asyncrpc runs`)",
    )
    parser.add_argument(
        "--run",
        metavar="ID",
        help="the workers of this run of `asyncrpc run`, or of this model of a"
        " ModelHost: its name, the beginning of it, or its process id; see"
        " `asyncrpc runs`",
    )


def add_group(parser: argparse.ArgumentParser) -> None:
    """Describe the options that select the workers."""
    add_entrance(parser)
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one; may be repeated",
    )


async def _observe(arguments: argparse.Namespace, look: Look) -> int:
    # In a thread: it reads files.
    arguments.meant = group_entrance = await asyncio.to_thread(entrance, arguments)
    async with group_entrance.observer() as observer:
        address = await group_entrance.address_for(observer)
        return await look(observer, address, arguments)


def seconds(text: str) -> float:
    """Return the seconds of an argument; a `type` of argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a finite number of seconds, 0 or more, not {text}"
        )
    return value


def check_workers(wanted: Sequence[str], members: Collection[str]) -> None:
    """Raise UsageError unless the group has all of these workers."""
    unknown = [name for name in wanted if name not in members]
    if unknown:
        known = ", ".join(sorted(members))
        raise UsageError(f"there is no worker {unknown[0]!r}; known: {known}")


def check_group(arguments: argparse.Namespace, members: Mapping[str, Member]) -> None:
    """Raise UsageError unless the group has all workers that are selected.

    Prints, once, which workers of the selected run are in another group.
    """
    check_workers(arguments.worker, members)
    meant, arguments.meant = arguments.meant, None
    if meant is not None and meant.run is not None:
        known = {member.incarnation for member in members.values()}
        if words := others_in(meant.run, known):
            print(words, file=sys.stderr)


def print_table(rows: Sequence[Sequence[str]], nothing: str) -> None:
    """Print a table, or a text if it is empty; report if it was cut."""
    if len(rows) == 1:
        print(nothing)
        return
    lines = lines_of(rows)
    print("\n".join(lines))
    if lines != lines_of(rows, width=UNCUT):
        print(f"cut to {columns_here()} columns; --json has all of it", file=sys.stderr)


def print_silent(silent: Mapping[str, NoAnswer]) -> None:
    """Print which workers gave no answer, and why."""
    for name, no_answer in sorted(silent.items()):
        print(f"no answer from {name}: {printable(no_answer.text)}", file=sys.stderr)


def silent_records(silent: Mapping[str, NoAnswer]) -> dict[str, Any]:
    """Return the silent workers for JSON."""
    return {
        name: {"trouble": no_answer.trouble.name.lower(), "words": no_answer.words}
        for name, no_answer in sorted(silent.items())
    }


def print_json(record: Mapping[str, Any]) -> None:
    """Print a record as JSON."""
    print(json.dumps(record, indent=2))


def plain(value: Any) -> Any:
    """Return a record in JSON's types: named tuples as objects, enums by name."""
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(field) for name, field in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
