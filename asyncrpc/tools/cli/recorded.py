"""`asyncrpc dump`: what a group does and remembers, written to a file."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrpc.errors import UsageError
from asyncrpc.tools.cli.observing import (
    TROUBLE,
    add_observing,
    check_group,
    plain,
    print_silent,
    silent_records,
)
from asyncrpc.tools.inspection.events import KIND_NAMES
from asyncrpc.tools.inspection.group import view_of
from asyncrpc.tools.inspection.group_answers import events_of
from asyncrpc.tools.inspection.machine.spans import WorkerEvents
from asyncrpc.tools.inspection.observer import Observer


def add_dump(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc dump`."""
    parser.description = (
        "Write the state of a group into a file: the tasks, threads and calls of "
        "each worker, and its last events.  The file is always JSON.  The exit code is "
        "0 if all have answered, else 1."
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to (default: the standard output)",
    )
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        choices=KIND_NAMES,
        help="only these events; may be repeated",
    )
    add_observing(parser, _dump)


async def _dump(observer: Observer, address: str, arguments: argparse.Namespace) -> int:
    view = await view_of(observer, address, names=arguments.worker, is_thorough=False)
    check_group(arguments, view.members)
    group_answers = await events_of(
        observer, address, names=arguments.worker, kinds=arguments.kind
    )
    silent = {**group_answers.silent, **view.silent}
    record = {
        "workers": {
            name: {
                "snapshot": plain(view.snapshots.get(name)),
                "events": _events_record(group_answers.answers.get(name)),
            }
            for name in sorted({*view.snapshots, *group_answers.answers})
        },
        "silent": silent_records(silent),
    }
    await asyncio.to_thread(_write, arguments.output, record)
    print_silent(silent)
    return TROUBLE if silent else 0


def _events_record(events: WorkerEvents | None) -> Any:
    if events is None:
        return None
    clock = {"offset_s": events.offset_s, "error_s": events.error_s}
    return {"clock": clock, **plain(events.recent)}


def _write(path: str | None, record: Mapping[str, Any]) -> None:
    if path is None:
        print(json.dumps(record))
        return
    try:
        Path(path).write_text(json.dumps(record))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
