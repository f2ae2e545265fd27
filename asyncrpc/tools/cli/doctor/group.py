"""The checkups of the workers of a group, requested by the doctor."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrpc.errors import AuthenticationError, ConnectError, UsageError
from asyncrpc.tools.checkup.machine.findings import CheckState
from asyncrpc.tools.checkup.machine.together import GroupFinding, check_walls, together
from asyncrpc.tools.cli.doctor.here import HereFound
from asyncrpc.tools.cli.observing import check_workers, plain, silent_records
from asyncrpc.tools.cli.runs.command import places_here
from asyncrpc.tools.cli.runs.finding import (
    ADDRESS_VARIABLE,
    GroupEntrance,
    entrance,
    entrance_of,
)
from asyncrpc.tools.cli.runs.listing import list_runs
from asyncrpc.tools.inspection.group_answers import WorkerCheckup, checkups_of
from asyncrpc.tools.inspection.records import NoAnswer


@dataclass(slots=True)
class GroupFound:
    """The checkups of a group.

    Attributes:
        name: of the run, or an address.
        checkups: by worker.
        silent: why the others gave no answer, by name.
        trouble: why no worker could be asked; empty: no trouble.
    """

    name: str
    checkups: dict[str, WorkerCheckup] = field(default_factory=dict)
    silent: dict[str, NoAnswer] = field(default_factory=dict)
    trouble: str = ""

    @property
    def findings(self) -> list[GroupFinding]:
        """Return the findings of the workers, as one table."""
        found = {name: one.findings for name, one in self.checkups.items()}
        clocks = {
            name: (one.ahead_s, one.error_s) for name, one in self.checkups.items()
        }
        return [*together(found), *check_walls(clocks)]

    @property
    def is_wrong(self) -> bool:
        """Whether a worker gave no answer, or a check has found a fault."""
        return bool(self.trouble or self.silent) or any(
            one.state is CheckState.WRONG for one in self.findings
        )

    def as_record(self) -> dict[str, Any]:
        """Return the checkups for programs."""
        return {
            "name": self.name,
            "trouble": self.trouble,
            "findings": [plain(one) for one in self.findings],
            "workers": {
                name: {
                    "checks": [plain(one) for one in found.findings],
                    "clock": {"ahead_s": found.ahead_s, "error_s": found.error_s},
                }
                for name, found in self.checkups.items()
            },
            "silent": silent_records(self.silent),
        }


def group_meant(
    given: argparse.Namespace, here: HereFound, environ: Mapping[str, str]
) -> GroupEntrance | None:
    """Return the group to ask, if any; blocks this thread.

    If a launcher has started this process, the doctor reports on this process, and asks
    a group only if it is named.

    Raises:
        UsageError: more than one group matches, or the named group does not exist.
    """
    is_named = bool(given.address or given.run or given.worker)
    if given.here:
        if is_named:
            raise UsageError("--here excludes ADDRESS, --run and --worker")
        return None
    if is_named:
        return entrance(given, environ)
    if not here.diagnosis.problems:
        return None
    if environ.get(ADDRESS_VARIABLE):
        return entrance(given, environ)
    runs = [one for one in list_runs(places_here(environ)).runs if one.is_here]
    is_one = len(runs) == 1 and bool(runs[0].notes)
    return entrance_of(runs[0], environ) if is_one else None


async def ask_group(meant: GroupEntrance, given: argparse.Namespace) -> GroupFound:
    """Ask the workers of a group.

    Raises:
        UsageError: the group has no worker of a given name.

    Cancellation:
        All connections are closed.
    """
    found = GroupFound(meant.run.id if meant.run else meant.address)
    try:
        async with meant.observer() as observer:
            address = await meant.address_for(observer)
            told = await checkups_of(observer, address, names=given.worker)
    except (AuthenticationError, ConnectError) as error:
        found.trouble = str(error)
        return found
    check_workers(given.worker, told.members)
    ranks = {name: (one.rank, name) for name, one in told.members.items()}
    for name in sorted(told.answers, key=lambda one: ranks[one]):
        found.checkups[name] = told.answers[name]
    wanted = given.worker or told.silent
    found.silent = {name: one for name, one in told.silent.items() if name in wanted}
    return found
