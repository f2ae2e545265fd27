"""A worker tells observers what the checks find in its process."""

from __future__ import annotations

import pytest

from asyncrpc import LocalRendezvous, NetworkOptions, Options, Worker
from asyncrpc.checkup.machine.findings import CheckState
from asyncrpc.inspection import group_answers
from asyncrpc.inspection.group_answers import WorkerCheckup, checkups_of
from asyncrpc.inspection.observer import Observer

TCP = NetworkOptions(listen=("tcp://127.0.0.1:0",))
OPTIONS = Options(secret="a secret of 32 characters, or so", network=TCP)


async def checkup_of(options: Options) -> WorkerCheckup:
    """Return what a worker with these options tells of itself."""
    alone = LocalRendezvous(1)
    async with (
        Worker("ps", rank=0, world_size=1, rendezvous=alone, options=options) as w,
        Observer(OPTIONS) as observer,
    ):
        found = await checkups_of(observer, w.addresses[0])
    assert found.silent == {}
    return found.answers["ps"]


async def test_it_tells_of_its_own_options_and_loop() -> None:
    options = Options(secret=OPTIONS.secret, network=TCP, threads=7, rpc_timeout_s=5.0)
    found = await checkup_of(options)
    told = {one.check: one for one in found.findings}
    assert "plain functions 7" in told["threads"].found
    assert told["time-outs"].found.startswith("call 5 s")
    assert told["secret"].found == "32 bytes by Options.secret, no TLS"
    assert told["event loop"].state in CheckState
    assert (found.ahead_s, found.error_s) == (0.0, 0.0)  # it is the clock of this host


async def test_the_clock_of_another_host_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As from another host: by round trips, though the clock is that of this one."""
    monkeypatch.setattr(group_answers, "HOST_ID", "another")
    found = await checkup_of(OPTIONS)
    assert found.error_s > 0
    # Both clocks are read within one question; a busy machine may come in between.
    assert abs(found.ahead_s) <= found.error_s + 10.0
