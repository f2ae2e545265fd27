"""What does a peer cost: while it is idle, and while others call?

    $ make bench ONLY=at_rest
    $ python -m tests.bench.bench_at_rest --seconds 60 --rounds 7 --update-docs
    $ python -m tests.bench.bench_at_rest --only rest --apart    # a process each

At rest: a worker in a process of its own has so many peers, each with a connection of
its own.  They have called it once; or many times, with tensors of the size shown.  Then
all are idle: what remains are signs of life.  Memory is that which no other process
has, for each peer that came, with the garbage collected before and after; slabs, which
are shared, are not in it.

Calls: the peers are in one process, the callee in another.  *one calls* has all calls
of one peer, while the others are connected; *all call* shares 256 outstanding calls
among all, so that fewer of them go into one write as there are more peers; *one each*
has one call of each outstanding, so that none shares a write.  *bare echo* is the
second on uvloop alone, with 90 bytes a call: what the kernel and the loop take for
writes that are not shared.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, cast

import torch

import asyncrpc
from asyncrpc.core.loop.loops import loop_factory
from asyncrpc.testing import ProcessCluster, acting_as
from tests.bench import pages
from tests.bench.processes import say
from tests.bench.sides import at_rest_side as side
from tests.bench.sides.at_rest_side import CALLEE, Held, Rate, Usage
from tests.integration.core import fan_in

KIB: Final = 1 << 10
MEETING_S: Final = 600.0  # many processes begin at once, on few cores
OUTSTANDING: Final = 256
ECHOED: Final = b"x" * 90  # about what a small call has on the wire
# Peers, and bytes of tensors that each sends before it rests.
RESTS: Final = (
    *((1, 0), (16, 0), (64, 0), (64, KIB), (64, 32 * KIB), (64, KIB * KIB), (256, KIB)),
)
PEERS: Final = (1, 4, 16, 64, 256)
Transport = Literal["uds", "tcp"]


# --- at rest -------------------------------------------------------------------------


async def rest(
    transport: Transport, peers: int, nbytes: int, seconds: float, *, apart: bool
) -> tuple[Held, Held, Usage, Usage]:
    """Let a worker rest among its peers; return what it had before, and then."""
    names = [f"p{number}" for number in range(peers - 1)] if apart else []
    cluster = ProcessCluster(
        [CALLEE, *names],
        transport=transport,
        options=asyncrpc.Options(rendezvous_timeout_s=MEETING_S),
        method="forkserver",
    )
    async with cluster as worker:
        callee = worker.peer(CALLEE)
        await fan_in.call_some(callee, nbytes or KIB)
        await asyncio.sleep(side.SETTLED_S)
        before = await callee.call(side.held)
        if apart:
            await worker.group(names).call(side.call_here, nbytes)
        else:
            addresses = worker.parts.directory.find(CALLEE).member.addresses
            with acting_as(worker):
                await side.gather_crowd(peers - 1, addresses, nbytes)
        await asyncio.sleep(side.SETTLED_S)
        after = await callee.call(side.held)
        used = await callee.call(side.rest, seconds)
        await side.dismiss_crowd()
    return before, after, *used


def rests(options: argparse.Namespace) -> Iterator[str]:
    """Measure; return the lines of the table."""
    yield (
        f"{'':>9} {'tensors':>8} {'peers':>6} {'CPU, %':>7} {'wake-ups/s':>11} "
        f"{'reads/s':>8} {'KiB each':>9} {'descriptors':>12}"
    )
    for transport in options.transports:
        for peers, nbytes in RESTS:
            say(f"{transport}, {peers} peers, tensors of {nbytes >> 10} KiB")
            result = asyncrpc.run(
                rest(transport, peers, nbytes, options.seconds, apart=options.apart)
            )
            before, after, begun, ended = result
            took_s = ended.wall_s - begun.wall_s
            new = after.links - before.links
            each = (after.private_kib - before.private_kib) / new if new else 0.0
            yield (
                f"{transport:>9} {f'{nbytes >> 10} KiB' if nbytes else '-':>8} "
                f"{after.links:>6} {100 * (ended.cpu_s - begun.cpu_s) / took_s:>7.2f} "
                f"{(ended.wake_ups - begun.wake_ups) / took_s:>11.1f} "
                f"{(ended.reads - begun.reads) / took_s:>8.1f} "
                f"{f'{each:.1f}' if new else '-':>9} {after.descriptors:>12}"
            )


# --- calls ---------------------------------------------------------------------------


async def rates(rounds: int, seconds: float) -> dict[tuple[str, int], list[Rate]]:
    """Measure each way with each number of peers, in turn."""
    results: dict[tuple[str, int], list[Rate]] = defaultdict(list)
    async with ProcessCluster([CALLEE, "c"], method="forkserver") as worker:
        callers = worker.peer("c")
        addresses = worker.parts.directory.find(CALLEE).member.addresses
        for round_ in range(rounds):
            say(f"round {round_ + 1} of {rounds}")
            for peers in PEERS:
                # In the first round the others are not connected yet.
                await callers.call(side.gather_crowd, peers, addresses, 0)
                ways = {"one calls": (1, OUTSTANDING), "all call": (peers, OUTSTANDING)}
                if peers >= 16:  # fewer leave both processes waiting
                    ways["one each"] = (peers, peers)
                for way, (active, outstanding) in ways.items():
                    rate = await callers.call(
                        side.keep_calling, active, outstanding, seconds
                    )
                    results[way, peers].append(rate)
        await callers.call(side.dismiss_crowd)
    return results


def calls(options: argparse.Namespace) -> Iterator[str]:
    """Measure; return the lines of the table."""
    result = asyncrpc.run(rates(options.rounds, options.call_seconds))
    for _ in range(options.rounds):
        for peers, rate in bare_rates(options.call_seconds).items():
            result["bare echo", peers].append(rate)
    yield (
        f"{'':>10} {'peers':>6} {'calls/s':>9} {'least - most':>19} "
        f"{'callee, us':>11} {'callers, us':>12} {'callee of 1':>12}"
    )
    for way in ("one calls", "all call", "one each", "bare echo"):
        first_us = 0.0
        for peers in PEERS:
            value = result.get((way, peers))
            if not value:
                continue
            every = sorted(rate.per_second for rate in value)
            callee_us = median(rate.callee_us for rate in value)
            first_us = first_us or callee_us
            yield (
                f"{way:>10} {peers:>6} {median(every):>9,.0f} "
                f"{f'{every[0]:,.0f} - {every[-1]:,.0f}':>19} {callee_us:>11.2f} "
                f"{median(rate.caller_us for rate in value):>12.2f} "
                f"{callee_us / first_us:>12.2f}"
            )


# --- the same without asyncrpc -------------------------------------------------------


class Bare(asyncio.BufferedProtocol):
    """One end of an echo."""

    def __init__(self, *, counts: bool) -> None:
        self.count = 0
        self._counts = counts
        self._memory = memoryview(bytearray(64 * KIB))
        self._rest = 0  # bytes of the beginning of a message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def get_buffer(self, _sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        if not self._counts:
            self.transport.writelines([bytes(self._memory[:nbytes])])
            return
        whole, self._rest = divmod(nbytes + self._rest, len(ECHOED))
        self.count += whole
        if whole:
            self.transport.writelines([ECHOED * whole])


def _serve(path: str, is_up: Any) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_server(
            lambda: Bare(counts=False), path, backlog=max(PEERS)
        )
        is_up.set()
        await asyncio.Event().wait()  # until it is killed

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())


async def _call_bare(path: str, pid: int, peers: int, seconds: float) -> Rate:
    loop = asyncio.get_running_loop()
    ends = [
        (await loop.create_unix_connection(lambda: Bare(counts=True), path))[1]
        for _ in range(peers)
    ]
    for end in ends:
        end.transport.writelines([ECHOED * (OUTSTANDING // peers)])
    await asyncio.sleep(seconds / 10)
    begun = time.perf_counter(), _cpu_s(pid), time.process_time()
    before = sum(end.count for end in ends)
    await asyncio.sleep(seconds)
    count = sum(end.count for end in ends) - before
    took_s = time.perf_counter() - begun[0]
    there_s, here_s = _cpu_s(pid) - begun[1], time.process_time() - begun[2]
    for end in ends:
        end.transport.abort()
    return Rate(count / took_s, 1e6 * there_s / count, 1e6 * here_s / count)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bare_rates(seconds: float) -> dict[int, Rate]:
    """Echo with each number of connections."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path, is_up = f"{folder}/socket", context.Event()
        server = context.Process(target=_serve, args=(path, is_up), daemon=True)
        server.start()
        try:
            is_up.wait(60)
            assert server.pid is not None
            return {
                peers: asyncrpc.run(_call_bare(path, server.pid, peers, seconds))
                for peers in PEERS
            }
        finally:
            server.kill()
            server.join()


# --- the script ----------------------------------------------------------------------

PARTS: Final[dict[str, Callable[[argparse.Namespace], Iterator[str]]]] = {
    "rest": rests,
    "calls": calls,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_at_rest")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--transports", nargs="+", default=["uds", "tcp"])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each rest")
    parser.add_argument("--apart", action="store_true", help="a process for each peer")
    parser.add_argument("--rounds", type=int, default=3, help="of calls")
    parser.add_argument("--call-seconds", type=float, default=1.0, help="of each way")
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, part in PARTS.items():
        if options.only not in {None, name}:
            continue
        lines = []
        for line in part(options):
            print(line, flush=True)
            lines.append(line)
        print()
        if options.update_docs:
            text = pages.as_block("\n".join(lines))
            pages.renew(f"at rest, {name}", text, pages.SCALE)


if __name__ == "__main__":
    main()
