"""Strangers get nothing: no connection, no memory, no function; the worker lives on."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

import asyncrpc
from asyncrpc import LocalRendezvous, Options, Policy, RejectedError, UsageError, Worker
from asyncrpc.testing import Cluster
from tests.integration.core import remote
from tests.integration.core.groups import LIMIT_S, alone, processes, started, until

QUICK = Options(
    drain_timeout_s=0.5,
    network=asyncrpc.NetworkOptions(connect_timeout_s=1.0, handshake_timeout_s=1.0),
)
TCP = replace(QUICK, network=replace(QUICK.network, listen=("tcp://127.0.0.1:0",)))


async def test_listening_to_strangers_without_a_secret_is_refused() -> None:
    options = replace(TCP, secret=None)
    worker = alone("a", options)
    with pytest.raises(UsageError, match="ASYNCRPC_SECRET"):
        await worker.__aenter__()


@pytest.mark.parametrize("listen", [None, ("tcp://0.0.0.0:0",), ("tcp://[::]:0",)])
async def test_weak_secret_is_refused_beyond_the_host(
    listen: tuple[str, ...] | None,
) -> None:
    network = replace(TCP.network, listen=listen)
    options = replace(TCP, secret="letters", network=network)
    worker = alone("a", options)
    with pytest.raises(UsageError, match=r"a secret of 7 characters.*at least 16"):
        await worker.__aenter__()


@pytest.mark.parametrize(
    "network",
    [
        TCP.network,
        replace(TCP.network, listen=("tcp://[::1]:0",)),
        replace(TCP.network, listen=None, interface="lo"),
    ],
    ids=["127.0.0.1", "::1", "lo"],
)
async def test_weak_secret_is_warned_of_on_one_host(
    network: asyncrpc.NetworkOptions, caplog: pytest.LogCaptureFixture
) -> None:
    options = replace(TCP, secret="letters", network=network)
    async with alone("a", options):
        assert "'a': its secret has 7 characters" in caplog.text
        assert "letters" not in caplog.text
    caplog.clear()
    options = replace(options, secret="0123456789abcdef")
    async with alone("a", options):
        assert not caplog.text


async def test_strict_policy_refuses_unexposed_functions() -> None:
    options = Options(policy=Policy.STRICT, allow=(f"{remote.__name__}:add",))
    async with Cluster(2, options=options) as (a, _):
        assert await a.peer("b").call(remote.add, 1) == 2
        for function in (remote.echo, exec, remote.add_async):
            with pytest.raises((RejectedError, asyncrpc.RemoteError), match="expose"):
                await a.peer("b").call(function, "1")
        with pytest.raises(asyncrpc.errors.EncodeError, match=r"pickle|strict|STRICT"):
            await a.peer("b").call(remote.add, remote.Counter())
        assert await a.peer("b").call(remote.add, 1) == 2


async def test_a_trusting_caller_cannot_make_a_strict_callee_unpickle() -> None:
    meeting = LocalRendezvous(2)
    strict = Options(policy=Policy.STRICT, allow=(f"{remote.__name__}:*",))
    a = Worker("a", rank=0, rendezvous=meeting, options=QUICK)
    b = Worker("b", rank=1, rendezvous=meeting, options=strict)
    async with started(a, b):
        assert await a.peer("b").call(remote.add, 1) == 2
        for value in (Exception.with_traceback, remote.Counter()):
            with pytest.raises(asyncrpc.CallError, match=r"STRICT|strict|pickle"):
                await a.peer("b").call(remote.echo, value)
        assert await a.peer("b").call(remote.add, 1) == 2


async def test_a_flooded_callee_rejects_and_recovers() -> None:
    limits = asyncrpc.LimitOptions(inbound_calls_max=4)
    async with Cluster(2, options=Options(limits=limits)) as (a, _):
        calls = [a.parts.start_call("b", remote.slow_one) for _ in range(10)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results.count(1) == 4
        rejected = [result for result in results if isinstance(result, RejectedError)]
        assert len(rejected) == 6
        assert rejected[0].outcome is asyncrpc.Outcome.NOT_EXECUTED
        assert await a.peer("b").call(remote.add, 1) == 2


async def test_peer_may_use_half_of_the_call_limit() -> None:
    options = Options(
        limits=asyncrpc.LimitOptions(inbound_calls_max=1000), drain_timeout_s=0.0
    )
    async with processes("b", "c", options=options) as a:
        calls = [a.parts.start_call("b", asyncio.sleep, (3600.0,)) for _ in range(600)]
        await until(lambda: sum(call.done() for call in calls) == 100)
        for call in calls[500:]:
            with pytest.raises(RejectedError, match="one peer's share"):
                await call
        with pytest.raises(RejectedError, match="one peer's share"):
            await a.peer("b").call(remote.add, 1)
        assert await a.peer("c").call(remote.forward, ["b"], remote.add, 1) == 2
        for call in calls[:500]:
            call.cancel()
        served = 0
        async with asyncio.timeout(LIMIT_S):
            while not served:  # some of them may not have ended there yet
                with contextlib.suppress(RejectedError):
                    served = await a.peer("b").call(remote.add, 1)
        assert served == 2
