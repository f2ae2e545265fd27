"""`asyncrpc runs`: list the runs and models that are under way."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import Any, Final

from asyncrpc.core.host.run_places import places_here
from asyncrpc.core.loop.clock import NS_PER_S, wall_ns
from asyncrpc.tools.cli.runs.choosing import nothing_runs, table_of
from asyncrpc.tools.cli.runs.listing import LiveRun, RunListing, list_runs

NOTHING: Final = 1  # exit code: no run is under way


def now_s() -> float:
    """Return the seconds since 1970."""
    return wall_ns() / NS_PER_S


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc runs`."""
    parser.description = (
        "List your runs of `asyncrpc run` that are under way, and your models of "
        "ModelHosts: the name for --run of the other commands, how many of the "
        "processes have a listening worker, and the command; for a model, how many of "
        "it and its web workers listen.  The exit code is 0 if there is a run or "
        "model, else 1."
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(act=_runs)


def _runs(arguments: argparse.Namespace) -> int:
    listing = list_runs(places_here(os.environ))
    if arguments.json:
        print(json.dumps(_record(listing), indent=2))
    elif listing.runs:
        print(table_of(listing.runs, now_s()))
        for problem in listing.problems:
            print(f"skipped: {problem}")
    else:
        print(nothing_runs(listing))
    return 0 if listing.runs else NOTHING


def _record(listing: RunListing) -> dict[str, Any]:
    return {
        "runs": [_run_record(run) for run in listing.runs],
        "looked_at": list(map(str, listing.looked_at)),
        "problems": listing.problems,
    }


def _run_record(run: LiveRun) -> dict[str, Any]:
    record = asdict(run.record)
    del record["host_id"]
    return {
        "run": run.id,
        "is_here": run.is_here,
        "directory": str(run.path),
        **record,
        "workers": [note._asdict() for note in run.notes],
    }
