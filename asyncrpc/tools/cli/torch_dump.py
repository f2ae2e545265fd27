"""`asyncrpc torch-dump`: write the collectives of a group for torch's own tools.

The files are pickles, as torch's recorder writes them.  They are made here from plain
data that came as msgpack: nothing that a worker sends is unpickled.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrpc.errors import UsageError
from asyncrpc.tools.cli.observing import (
    TROUBLE,
    add_observing,
    check_workers,
    print_json,
    print_table,
)
from asyncrpc.tools.inspection.collective_records import CollectiveHistory
from asyncrpc.tools.inspection.group import GroupView, view_of
from asyncrpc.tools.inspection.observer import Observer
from asyncrpc.tools.inspection.torch_format import (
    began_before,
    global_ranks,
    torch_dumps,
)

PREFIX: Final = "asyncrpc_rank_"
# Between two looks: time for running ranks to begin what another rank began before.
SETTLE_S: Final = 1.0
_PREFIX: Final = re.compile(r"[\w-]*([^\W\d]|-)", re.ASCII)  # what torchfrtrace infers


def add_torch_dump(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc torch-dump`."""
    parser.description = (
        "Write the collectives of a group in the format of torch's flight recorder, a "
        "file for each rank: `torchfrtrace DIR` names the ranks that are missing from "
        "a collective, or take part in another one.  The exit code is 0 if all ranks "
        "have a file, else 1."
    )
    parser.add_argument(
        "--to",
        required=True,
        type=Path,
        metavar="DIR",
        help="where the files go; it is made if it does not exist",
    )
    parser.add_argument(
        "--prefix",
        default=PREFIX,
        help=f"of the file names; the rank follows (default: {PREFIX})",
    )
    add_observing(parser, _write)


async def _write(
    observer: Observer, address: str, arguments: argparse.Namespace
) -> int:
    folder: Path = arguments.to
    await asyncio.to_thread(_check, folder, arguments.prefix)
    view, histories = await _collect(observer, address, arguments.worker)
    ranks = global_ranks(view.ranks, histories)
    dumps = torch_dumps(histories, ranks)
    paths = {rank: folder / f"{arguments.prefix}{rank}" for rank in dumps}
    content = {paths[rank]: dump for rank, dump in dumps.items()}
    await asyncio.to_thread(_write_files, folder, content)
    missing = _missing(view, ranks, dumps, arguments.worker)
    if arguments.json:
        files = {str(rank): str(path) for rank, path in paths.items()}
        print_json({"files": files, "missing": missing})
    else:
        _tell(view, paths, dumps, missing)
    return TROUBLE if missing else 0


def _write_files(folder: Path, dumps: Mapping[Path, dict[str, Any]]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, dump in dumps.items():
            path.write_bytes(pickle.dumps(dump))
    except OSError as error:
        raise UsageError(f"{str(folder)!r} cannot be written to: {error}") from error


async def _collect(
    observer: Observer, address: str, names: Sequence[str]
) -> tuple[GroupView, list[CollectiveHistory]]:
    """Look at a group twice; return it, and what was begun by the first look."""
    earlier = await _look(observer, address, names)
    check_workers(names, earlier.members)
    await asyncio.sleep(SETTLE_S)
    view = await _look(observer, address, names)
    histories = list(view.collectives.values())
    return view, began_before(histories, earlier.collectives.values())


async def _look(observer: Observer, address: str, names: Sequence[str]) -> GroupView:
    return await view_of(
        observer, address, names=names, is_thorough=False, with_collectives=True
    )


def _check(folder: Path, prefix: str) -> None:
    """Refuse a directory whose files the tools would mistake for files of this dump."""
    if not _PREFIX.fullmatch(prefix):
        raise UsageError(
            "--prefix must be letters, digits, '_' or '-', and not end in a digit, "
            f"not {prefix!r}"
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--to must be a directory, not the file {str(folder)!r}")
    old = sorted(path.name for path in folder.glob(f"{prefix}*"))
    if old:
        raise UsageError(
            f"{str(folder)!r} has {old[0]!r} of an earlier dump, which torchfrtrace "
            "would also read: choose another --to or --prefix"
        )


def _missing(
    view: GroupView,
    ranks: Mapping[str, int],
    dumps: Mapping[int, Any],
    wanted: Sequence[str],
) -> dict[str, str]:
    """Return why workers have no file, by name."""
    taking_part = {
        name
        for collectives in view.collectives.values()
        for group in collectives.groups
        for name in group.members
    }
    reasons = {}
    for name in sorted(
        {*view.silent, *taking_part}, key=lambda worker: ranks.get(worker, -1)
    ):
        if ranks.get(name) in dumps or (wanted and name not in wanted):
            continue
        silent = view.silent.get(name)
        if silent is None:
            reasons[name] = "it is no longer a member"
        else:
            reasons[name] = silent.text
    return reasons


def _tell(
    view: GroupView,
    paths: Mapping[int, Path],
    dumps: Mapping[int, dict[str, Any]],
    missing: Mapping[str, str],
) -> None:
    rows = [("rank", "name", "collectives", "under way", "file")]
    for rank, dump in dumps.items():
        entries = dump["entries"]
        under_way = sum(not entry["retired"] for entry in entries)
        counts = str(len(entries)), str(under_way)
        rows.append((str(rank), dump["host_name"], *counts, paths[rank].name))
    print_table(rows, "no rank has a file")
    for name, snapshot in sorted(view.snapshots.items()):
        if snapshot.blocked_for_s:
            print(
                f"{name} is blocked: only its last collectives are included",
                file=sys.stderr,
            )
    for name, why in missing.items():
        print(f"{name} has no file: {why}", file=sys.stderr)
