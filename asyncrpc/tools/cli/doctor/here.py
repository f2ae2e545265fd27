"""The doctor's checks of this process and its host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from asyncrpc import NetworkOptions, Options
from asyncrpc.core.environment import LaunchPlacement, resolve
from asyncrpc.core.host.this_host import LAUNCHER_PID
from asyncrpc.core.options import INTERFACE_VARIABLE
from asyncrpc.errors import UsageError
from asyncrpc.tools.checkup.machine.checks import check_all
from asyncrpc.tools.checkup.machine.findings import CheckFinding, CheckState
from asyncrpc.tools.checkup.reading import Circumstances, gather
from asyncrpc.tools.cli.doctor.placement import (
    Diagnosis,
    diagnose,
    host_facts,
    is_one_host,
)


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
