"""`asyncrpc refs`: which workers own the referenced values, and which hold them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from asyncrpc.errors import UsageError
from asyncrpc.tools.cli.observing import (
    TROUBLE,
    add_observing,
    check_group,
    plain,
    print_json,
    print_silent,
    print_table,
    silent_records,
)
from asyncrpc.tools.inspection.group_answers import references_of
from asyncrpc.tools.inspection.machine.wording import duration
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.tools.inspection.reference_records import ReferenceSeen
from asyncrpc.trace import RECENT_MAX


def add_refs(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc refs`."""
    parser.description = (
        "List the remote references of a group: which worker owns the value, which "
        "hold it, and for how long.  The exit code is 0 if all workers have answered, "
        "else 1."
    )
    parser.add_argument(
        "--max",
        type=int,
        default=50,
        metavar="N",
        help="the oldest N of each worker (default: 50)",
    )
    parser.add_argument(
        "--held", action="store_true", help="also as seen by the workers that hold them"
    )
    add_observing(parser, _refs)


async def _refs(observer: Observer, address: str, arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.max <= RECENT_MAX:
        raise UsageError(f"--max must be from 1 to {RECENT_MAX}, not {arguments.max}")
    group_answers = await references_of(
        observer, address, names=arguments.worker, oldest_max=arguments.max
    )
    check_group(arguments, group_answers.members)
    listed = [
        (name, reference)
        for name, seen in sorted(group_answers.answers.items())
        for reference in seen.references
        if reference.is_owner or arguments.held
    ]
    left_out = {
        name: seen.left_out for name, seen in sorted(group_answers.answers.items())
    }
    if arguments.json:
        print_json(
            {
                "references": [
                    {**plain(reference), "seen_by": name} for name, reference in listed
                ],
                "left_out": left_out,
                "silent": silent_records(group_answers.silent),
            }
        )
    else:
        print_table(list(_reference_rows(listed)), "no value is referred to")
        for name, count in left_out.items():
            if count:
                print(f"{name} has {count} more; --max shows more of them")
        print_silent(group_answers.silent)
    return TROUBLE if group_answers.silent else 0


def _reference_rows(
    listed: Sequence[tuple[str, ReferenceSeen]],
) -> Iterator[tuple[str, ...]]:
    yield ("seen by", "owner", "value", "state", "age", "held by", "handles")
    for name, reference in sorted(listed, key=lambda item: -item[1].age_s):
        value = reference.type_name or f"#{reference.rref_id.serial:016x}"
        held_by = ", ".join(reference.holders) or "-"
        yield (
            *(name, reference.owner, value, reference.state, duration(reference.age_s)),
            *(held_by, str(reference.handles)),
        )
