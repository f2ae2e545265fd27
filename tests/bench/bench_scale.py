"""What does one worker cost with many peers, many callers and many calls?

    $ python -m tests.bench.bench_scale

Memory per peer: 64 workers in four processes connect to one, make small calls and send
a few tensors; then all are idle.  Over Unix sockets 1 MiB goes through a slab of at
least 16 MiB, which its sender gives back half a minute later: that figure is what is
warm.
Rate: callers in processes of their own keep 64 calls outstanding each; beside the rate
stands the callee's processor time per call, which bounds it (with two cores the callers
compete with the callee for them).
Outstanding: one caller starts 10,000 calls at once, which all wait on the callee.
Fan-out: one set of arguments to four peers, by `PeerGroup.call` and by four calls.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Literal

import torch

import asyncrpc
from asyncrpc import Worker
from asyncrpc.testing import ProcessCluster
from tests.integration.core import fan_in

KIB: Final = 1 << 10
MIB: Final = 1 << 20
PEERS: Final = 64
TRANSPORTS: Final[tuple[Literal["uds", "tcp"], ...]] = ("uds", "tcp")
OUTSTANDING_EACH: Final = 64
CALLERS: Final = (1, 3, 8)
CALLS: Final = 10_000
ROUNDS: Final = 5
SECONDS: Final = 0.6
REPEATS: Final = 20
WARM_UPS: Final = 10


def show(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def heading(*cells: str) -> None:
    show(*cells)
    show("---", *("---:" for _ in cells[1:]))


async def memory_per_peer(transport: Literal["uds", "tcp"], nbytes: int) -> None:
    hosts = ["w", "x", "y", "z"]
    async with ProcessCluster(["b", *hosts], transport=transport) as worker:
        callee, group = worker.peer("b"), worker.group(hosts)
        addresses = worker.parts.directory.find("b").member.addresses
        await fan_in.call_some(callee, nbytes)
        before = await callee.call(fan_in.settled_memory)
        each = PEERS // len(hosts)
        await group.call(fan_in.gather_crowd, each, "b", addresses, nbytes)
        after = await callee.call(fan_in.settled_memory)
        await group.call(fan_in.dismiss_crowd)
        gone = await callee.call(fan_in.settled_memory)
    show(
        f"{transport}, {nbytes >> 10} KiB sent",
        f"{(after.rss - before.rss) / PEERS / KIB:.0f}",
        f"{(after.pss - before.pss) / PEERS / KIB:.0f}",
        f"{(gone.rss - before.rss) / PEERS / KIB:.0f}",
        f"{before.rss / MIB:.0f}",
    )


async def load(
    worker: Worker, callers: int, function: Callable[[], Any]
) -> tuple[float, float]:
    """Return calls per second, and microseconds of the callee's processor per call."""
    callee = worker.peer("b")
    group = worker.group([f"c{number}" for number in range(callers)])
    begun_s = await callee.call(time.process_time)
    rate = sum(
        await group.call(fan_in.call_for, "b", function, OUTSTANDING_EACH, SECONDS)
    )
    cost_s = await callee.call(time.process_time) - begun_s
    return rate, cost_s / (rate * SECONDS) * 1e6


async def rates() -> None:
    names = [f"c{number}" for number in range(max(CALLERS))]
    async with ProcessCluster(["b", *names]) as worker:
        for function in (fan_in.nothing, fan_in.nothing_in_thread):
            await load(worker, len(names), function)  # connects
            found: dict[int, list[tuple[float, float]]] = {n: [] for n in CALLERS}
            for _ in range(ROUNDS):
                for callers in CALLERS:
                    found[callers].append(await load(worker, callers, function))
            for callers, rounds in found.items():
                per_second = sorted(rate for rate, _ in rounds)
                cost_us = sorted(cost for _, cost in rounds)
                show(
                    f"{function.__name__}, {callers}",
                    f"{statistics.median(per_second):,.0f}",
                    f"{per_second[0]:,.0f} to {per_second[-1]:,.0f}",
                    f"{statistics.median(cost_us):.1f}",
                    f"{cost_us[0]:.1f}",
                )


async def outstanding() -> None:
    async with ProcessCluster(["b"]) as worker:
        callee = worker.peer("b")
        await fan_in.call_some(callee)
        for attempt in range(3):
            await callee.call(fan_in.close_gate)
            before, here = (
                await callee.call(fan_in.settled_memory),
                fan_in.memory_of(),
            )
            begun_s = time.perf_counter()
            calls = [
                worker.parts.start_call("b", fan_in.pass_gate, (number,))
                for number in range(CALLS)
            ]
            assert await callee.call(fan_in.calls_in_hand) == CALLS
            in_hand_s = time.perf_counter() - begun_s
            during, then = (
                await callee.call(fan_in.settled_memory),
                fan_in.memory_of(),
            )
            begun_s = time.perf_counter()
            await callee.call(fan_in.open_gate)
            lost = CALLS - sum(
                answer == number
                for number, answer in enumerate(await asyncio.gather(*calls))
            )
            answered_s = time.perf_counter() - begun_s
            show(
                attempt + 1,
                f"{CALLS / (in_hand_s + answered_s):,.0f}",
                f"{in_hand_s * 1e3:.0f}",
                f"{answered_s * 1e3:.0f}",
                f"{(during.rss - before.rss) / CALLS / KIB:.2f}",
                f"{(then.rss - here.rss) / CALLS / KIB:.2f}",
                f"{during.peak / MIB:.0f}",
                lost,
            )


def arguments() -> Iterator[tuple[str, Any]]:
    floats = 16 * MIB // 4
    yield "16 MiB tensor", torch.ones(floats)
    yield "16 MiB, every 8th element", torch.ones(floats * 8)[::8]
    yield "400 tensors of 256 bytes", {str(n): torch.ones(64) for n in range(400)}
    yield "list of 20,000 numbers", list(range(20_000))
    yield "1 KiB tensor", torch.ones(KIB // 4)


async def fan_out() -> None:
    names = ["b", "c", "d", "e"]
    async with ProcessCluster(names) as worker:
        group, peers = worker.group(names), [worker.peer(name) for name in names]
        for what, value in arguments():

            async def together(value: Any = value) -> None:
                await group.call(fan_in.take, value)

            async def apart(value: Any = value) -> None:
                await asyncio.gather(*(peer.call(fan_in.take, value) for peer in peers))

            for _ in range(WARM_UPS):  # until enough slabs have been made
                await together()
                await apart()
            ours, theirs = [], []
            for _ in range(REPEATS):
                ours.append(await _seconds(together))
                theirs.append(await _seconds(apart))
            one, other = statistics.median(ours), statistics.median(theirs)
            show(what, f"{one * 1e3:.2f}", f"{other * 1e3:.2f}", f"{other / one:.2f}")


async def _seconds(action: Callable[[], Awaitable[None]]) -> float:
    begun_s = time.perf_counter()
    await action()
    return time.perf_counter() - begun_s


async def main() -> None:
    torch.set_num_threads(1)
    heading(
        "memory of one callee, 64 idle peers",
        "KiB each (RSS)",
        "KiB each (PSS)",
        "when they have gone",
        "MiB before",
    )
    for transport in TRANSPORTS:
        for nbytes in (32 * KIB, MIB):
            await memory_per_peer(transport, nbytes)
    print()
    heading(
        f"callers, {OUTSTANDING_EACH} outstanding each",
        "calls/s",
        "least to most",
        "callee CPU us/call",
        "least",
    )
    await rates()
    print()
    heading(
        f"{CALLS:,} outstanding, attempt",
        "calls/s",
        "ms until in hand",
        "ms to answer",
        "callee KiB/call",
        "caller KiB/call",
        "callee peak MiB",
        "lost",
    )
    await outstanding()
    print()
    heading("to 4 peers", "group ms", "4 calls ms", "times as fast")
    await fan_out()


if __name__ == "__main__":
    asyncrpc.run(main())
