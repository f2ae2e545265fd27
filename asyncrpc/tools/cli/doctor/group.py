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
        findings = {name: checkup.findings for name, checkup in self.checkups.items()}
        clocks = {
            name: (checkup.ahead_s, checkup.error_s)
            for name, checkup in self.checkups.items()
        }
        return [*together(findings), *check_walls(clocks)]

    @property
    def is_wrong(self) -> bool:
        """Whether a worker gave no answer, or a check has found a fault."""
        return bool(self.trouble or self.silent) or any(
            finding.state is CheckState.WRONG for finding in self.findings
        )

    def as_record(self) -> dict[str, Any]:
        """Return the checkups for programs."""
        return {
            "name": self.name,
            "trouble": self.trouble,
            "findings": [plain(finding) for finding in self.findings],
            "workers": {
                name: {
                    "checks": [plain(finding) for finding in checkup.findings],
                    "clock": {"ahead_s": checkup.ahead_s, "error_s": checkup.error_s},
                }
                for name, checkup in self.checkups.items()
            },
            "silent": silent_records(self.silent),
        }


def group_meant(
    arguments: argparse.Namespace, here: HereFound, environ: Mapping[str, str]
) -> GroupEntrance | None:
    """Return the group to ask, if any; blocks this thread.

    If a launcher has started this process, the doctor reports on this process, and asks
    a group only if it is named.
    """
    is_named = bool(arguments.address or arguments.run or arguments.worker)
    if arguments.here:
        if is_named:
            raise UsageError("--here excludes ADDRESS, --run and --worker")
        return None
    if is_named:
        return entrance(arguments, environ)
    if not here.diagnosis.problems:
        return None
    if environ.get(ADDRESS_VARIABLE):
        return entrance(arguments, environ)
    runs = [run for run in list_runs(places_here(environ)).runs if run.is_here]
    is_one = len(runs) == 1 and bool(runs[0].notes)
    return entrance_of(runs[0], environ) if is_one else None


async def ask_group(meant: GroupEntrance, arguments: argparse.Namespace) -> GroupFound:
    """Ask the workers of a group."""
    group = GroupFound(meant.run.id if meant.run else meant.address)
    try:
        async with meant.observer() as observer:
            address = await meant.address_for(observer)
            group_answers = await checkups_of(observer, address, names=arguments.worker)
    except (AuthenticationError, ConnectError) as error:
        group.trouble = str(error)
        return group
    check_workers(arguments.worker, group_answers.members)
    ranks = {
        name: (member.rank, name) for name, member in group_answers.members.items()
    }
    for name in sorted(group_answers.answers, key=lambda worker: ranks[worker]):
        group.checkups[name] = group_answers.answers[name]
    wanted = arguments.worker or group_answers.silent
    group.silent = {
        name: no_answer
        for name, no_answer in group_answers.silent.items()
        if name in wanted
    }
    return group
