"""A worker tells observers what the checks find in its process."""

from __future__ import annotations

import math

import pytest

from asyncrpc import LocalRendezvous, NetworkOptions, Options, Worker
from asyncrpc.tools.checkup.machine.findings import CheckState
from asyncrpc.tools.inspection import group_answers
from asyncrpc.tools.inspection.group_answers import (
    WorkerCheckup,
    checkups_of,
    wall_ahead_s,
)
from asyncrpc.tools.inspection.messages import CheckupSeen
from asyncrpc.tools.inspection.observer import Observer

TCP = NetworkOptions(listen=("tcp://127.0.0.1:0",))
OPTIONS = Options(secret="a secret of 32 characters, or so", network=TCP)


async def checkup_of(options: Options) -> WorkerCheckup:
    """Return what a worker with these options tells of itself."""
    alone = LocalRendezvous(1)
    async with (
        Worker("ps", rank=0, world_size=1, rendezvous=alone, options=options) as w,
        Observer(OPTIONS) as observer,
    ):
        checkups = await checkups_of(observer, w.addresses[0])
    assert checkups.silent == {}
    return checkups.answers["ps"]


async def test_checkup_shows_options_and_event_loop() -> None:
    options = Options(secret=OPTIONS.secret, network=TCP, threads=7, rpc_timeout_s=5.0)
    checkup = await checkup_of(options)
    findings = {finding.check: finding for finding in checkup.findings}
    assert "plain functions 7" in findings["threads"].found
    assert findings["time-outs"].found.startswith("call 5 s")
    assert findings["secret"].found == "32 bytes by Options.secret, no TLS"
    assert findings["event loop"].state in CheckState
    # It is the clock of this host.
    assert (checkup.ahead_s, checkup.error_s) == (0.0, 0.0)


async def test_the_clock_of_another_host_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from another host: by round trips, though the clock is that of this one."""
    monkeypatch.setattr(group_answers, "HOST_ID", "another")
    checkup = await checkup_of(OPTIONS)
    assert checkup.error_s > 0
    assert math.isfinite(checkup.ahead_s)


@pytest.mark.parametrize(
    ("wall_s", "clock_s", "offset_s", "ahead_s"),
    [
        (1000.0, 50.0, 0.0, 0.0),  # as if it were our host
        (1000.0, 50.0, 7.0, 0.0),  # its host was started 7 s later
        (1003.0, 50.0, 7.0, 3.0),
        (996.5, 50.0, -20.0, -3.5),
        (990.0, 40.0, 0.0, 0.0),  # it was asked 10 s ago
    ],
)
def test_wall_clocks_are_compared_at_one_moment(
    wall_s: float, clock_s: float, offset_s: float, ahead_s: float
) -> None:
    theirs = CheckupSeen([], clock_s - offset_s, round(wall_s * 1e9))
    ahead = wall_ahead_s(theirs, offset_s, wall_s=1000.0, clock_s=50.0)
    assert ahead == pytest.approx(ahead_s)
