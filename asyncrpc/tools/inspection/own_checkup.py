"""What a worker finds when it checks its own process and host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.loop.clock import wall_ns
from asyncrpc.core.membership.machine.records import (
    Record,
)
from asyncrpc.core.parts import Parts
from asyncrpc.tools.checkup.machine.checks import check_all
from asyncrpc.tools.checkup.reading import Circumstances, gather
from asyncrpc.tools.inspection.messages import CheckupSeen
from asyncrpc.trace import FlightRecorder


def circumstances_of(worker: Parts, records: Iterable[Record]) -> Circumstances:
    """Return what is known of a worker; called on its loop."""
    hosts = [record.member.host_id for record in records if record.is_alive]
    return Circumstances(
        worker.options,
        loop=type(worker.loop),
        is_debug=worker.loop.get_debug(),
        workers=max(1, len(hosts)),
        workers_here=max(1, hosts.count(HOST_ID)),
        is_one_host=set(hosts) <= {HOST_ID},
    )


def own_checkup(
    circumstances: Circumstances,
    recorder: FlightRecorder,
    environ: Mapping[str, str] = os.environ,
) -> CheckupSeen:
    """Return what the checks find; blocks this thread for some milliseconds."""
    findings = check_all(gather(circumstances, environ))
    return CheckupSeen(findings, recorder.now_s(), wall_ns())
