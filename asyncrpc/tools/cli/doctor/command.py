"""`asyncrpc doctor`: what it checks here and at a group's workers, and its output."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from asyncrpc import NetworkOptions, Options
from asyncrpc.core.environment import LaunchPlacement, resolve
from asyncrpc.core.host.run_places import places_here
from asyncrpc.core.host.this_host import LAUNCHER_PID
from asyncrpc.core.options import INTERFACE_VARIABLE
from asyncrpc.errors import AuthenticationError, ConnectError, UsageError
from asyncrpc.tools.checkup.machine.checks import check_all
from asyncrpc.tools.checkup.machine.findings import CheckFinding, CheckState
from asyncrpc.tools.checkup.machine.together import GroupFinding, check_walls, together
from asyncrpc.tools.checkup.reading import Circumstances, gather
from asyncrpc.tools.cli.doctor.placement import (
    Diagnosis,
    as_record,
    as_text,
    diagnose,
    host_facts,
    is_one_host,
    paragraph,
)
from asyncrpc.tools.cli.observing import (
    add_group,
    check_workers,
    plain,
    print_json,
    silent_records,
)
from asyncrpc.tools.cli.runs.finding import (
    ADDRESS_VARIABLE,
    GroupEntrance,
    entrance,
    entrance_of,
)
from asyncrpc.tools.cli.runs.listing import list_runs
from asyncrpc.tools.cli.table import lines_of
from asyncrpc.tools.inspection.group_answers import WorkerCheckup, checkups_of
from asyncrpc.tools.inspection.records import NoAnswer


class HereFound(NamedTuple):
    """The checks of this process and its host.

    Attributes:
        diagnosis: of the values that `env://` finds.
    """

    diagnosis: Diagnosis
    findings: list[CheckFinding]

    @property
    def is_wrong(self) -> bool:
        """Whether a check has found a fault."""
        return any(finding.state is CheckState.WRONG for finding in self.findings)


def look_here(environ: Mapping[str, str]) -> HereFound:
    """Check this process and its host; blocks this thread for some milliseconds."""
    try:
        options: Options | UsageError = Options().with_environment(environ)
    except UsageError as error:
        options = error
    diagnosis = diagnose(environ, host_facts(options), launcher_pid=LAUNCHER_PID)
    try:
        placement = resolve(environ, launcher_pid=LAUNCHER_PID)
    except UsageError:
        placement = LaunchPlacement()
    circumstances = _circumstances(options, placement, environ)
    return HereFound(diagnosis, check_all(gather(circumstances, environ)))


def _circumstances(
    options: Options | UsageError,
    placement: LaunchPlacement,
    environ: Mapping[str, str],
) -> Circumstances:
    if isinstance(options, UsageError):  # without the invalid options
        interface = environ.get(INTERFACE_VARIABLE) or None
        options = Options(network=NetworkOptions(interface=interface))
    return Circumstances(
        options,
        workers=placement.world_size or 1,
        workers_here=placement.local_world_size or 1,
        is_one_host=is_one_host(placement) if placement.world_size else None,
    )


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


_NOT_READY: Final = 1
_NAMES_MAX: Final = 3  # of workers in a table; all are in the JSON


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Describe the command line of `asyncrpc doctor`."""
    parser.description = (
        "Check this process and its host: versions, event loop, threads, memory and "
        "its limits, open files, /dev/shm, huge pages, clocks, interfaces, and the "
        "permissions of secret files.  Show which launcher started this process, and "
        "its rank and the like, each with the variable that it comes from: run it "
        "under the launcher, as in `srun asyncrpc doctor`.  With ADDRESS, --run or "
        "--worker, the workers of a group check themselves as well; so do those of "
        "your only run if no launcher has started this process.  The exit code is 0 if "
        "nothing is wrong, and a worker could start by env:// here or the group runs "
        "already, else 1."
    )
    add_group(parser)
    parser.add_argument(
        "--here", action="store_true", help="only this process and its host"
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.set_defaults(act=lambda arguments: asyncio.run(_doctor(arguments)))


async def _doctor(arguments: argparse.Namespace) -> int:
    here = await asyncio.to_thread(look_here, os.environ)
    meant = await asyncio.to_thread(group_meant, arguments, here, os.environ)
    group = None if meant is None else await ask_group(meant, arguments)
    if arguments.json:
        print_json(_record(here, group))
    else:
        print("\n".join(_lines(here, group)))
    is_ready = not here.diagnosis.problems or is_elsewhere(here, group)
    is_wrong = here.is_wrong or (group is not None and group.is_wrong)
    return 0 if is_ready and not is_wrong else _NOT_READY


def is_elsewhere(here: HereFound, group: GroupFound | None) -> bool:
    """Return whether a group runs of which this process is not to be a worker."""
    return group is not None and not here.diagnosis.values


def _record(here: HereFound, group: GroupFound | None) -> dict[str, Any]:
    return {
        **as_record(here.diagnosis),
        "checks": [plain(finding) for finding in here.findings],
        "group": None if group is None else group.as_record(),
    }


def _lines(here: HereFound, group: GroupFound | None) -> list[str]:
    lines = ["this process was not started by a launcher; checks of this host:"]
    if not is_elsewhere(here, group):
        lines = as_text(here.diagnosis).splitlines()
    rows = [
        (finding.check, finding.state.value, finding.found) for finding in here.findings
    ]
    lines += ["", *lines_of([("check", "state", "found"), *rows], wraps=True)]
    lines += _advice(here.findings)
    if group is not None:
        lines += ["", *_group_lines(group)]
    return lines


def _group_lines(group: GroupFound) -> list[str]:
    if group.trouble:
        return paragraph(f"problem: {group.trouble}")
    count = len(group.checkups)
    everybody = tuple(group.checkups)
    lines = [f"{count} workers of {group.name} report of themselves:", ""]
    rows = [
        (finding.check, finding.state.value, _who(finding, everybody), finding.found)
        for finding in group.findings
    ]
    if rows:
        heading = ("check", "state", "workers", "found")
        lines += lines_of([heading, *rows], wraps=True)
    lines += _advice(group.findings)
    for name, no_answer in sorted(group.silent.items()):
        lines += ["", *paragraph(f"problem: no answer from {name}: {no_answer.text}")]
    return lines


def _who(finding: GroupFinding, everybody: Sequence[str]) -> str:
    if len(finding.workers) == len(everybody):
        return "all"
    more = len(finding.workers) - _NAMES_MAX
    named = ", ".join(finding.workers[:_NAMES_MAX])
    return f"{named} and {more} more" if more > 0 else named


def _advice(findings: Sequence[CheckFinding] | Sequence[GroupFinding]) -> list[str]:
    lines: list[str] = []
    for finding in findings:
        if finding.state is not CheckState.OK:
            title = f"{finding.state.value}: {finding.check}"
            text = f"{title}: {finding.found}: {finding.advice}"
            lines += ["", *paragraph(text)]
    return lines
