"""`asyncrpc refs`: which workers own the referenced values, and which hold them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from asyncrpc.core.trace.ring import RECENT_MAX
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


async def _refs(observer: Observer, address: str, given: argparse.Namespace) -> int:
    if not 1 <= given.max <= RECENT_MAX:
        raise UsageError(f"--max must be from 1 to {RECENT_MAX}, not {given.max}")
    found = await references_of(
        observer, address, names=given.worker, oldest_max=given.max
    )
    check_group(given, found.members)
    listed = [
        (name, one)
        for name, seen in sorted(found.answers.items())
        for one in seen.references
        if one.is_owner or given.held
    ]
    left_out = {name: seen.left_out for name, seen in sorted(found.answers.items())}
    if given.json:
        print_json(
            {
                "references": [{**plain(one), "seen_by": name} for name, one in listed],
                "left_out": left_out,
                "silent": silent_records(found.silent),
            }
        )
    else:
        print_table(list(_reference_rows(listed)), "no value is referred to")
        for name, count in left_out.items():
            if count:
                print(f"{name} has {count} more; --max shows more of them")
        print_silent(found.silent)
    return TROUBLE if found.silent else 0


def _reference_rows(
    listed: Sequence[tuple[str, ReferenceSeen]],
) -> Iterator[tuple[str, ...]]:
    yield ("seen by", "owner", "value", "state", "age", "held by", "handles")
    for name, one in sorted(listed, key=lambda item: -item[1].age_s):
        value = one.type_name or f"#{one.rref_id.serial:016x}"
        held_by = ", ".join(one.holders) or "-"
        yield (
            *(name, one.owner, value, one.state, duration(one.age_s)),
            *(held_by, str(one.handles)),
        )
