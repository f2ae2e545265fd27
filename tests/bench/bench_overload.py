"""What becomes of requests that are more than a server can do?

    $ python -m tests.bench.bench_overload --quick
    $ python -m tests.bench.bench_overload --update-docs   # the page: five minutes

A model that computes eight requests in 80 ms stands behind a `serving.Batcher`, in a
process of its own; this process offers it 0.5 to 20 times what it can do, in an open
loop: requests come when they come.  Latencies count from when a request was due.  They
come over HTTP (aiohttp) or as calls; too much is refused in one of three ways:

- *oldest*: by the age of the queue, at most the time of a batch; the oldest gives way;
- *newest*: by the same age; what comes is refused at once;
- *none*: by nothing but the length of the queue, 1,024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from matplotlib.figure import Figure

import asyncrpc
from asyncrpc import Worker
from asyncrpc.errors import OverloadedError
from tests.bench import pages
from tests.bench.open_loop import (
    Ask,
    HttpClient,
    LoadResult,
    offer,
    one_at_a_time,
    quantile,
)
from tests.bench.overload_server import CAPACITY_PER_S, POLICIES, predict
from tests.bench.processes import process, say
from tests.ports import free_port

LOADS: Final = (0.5, 1.0, 2.0, 5.0, 20.0)
DOORS: Final = ("http", "call")
ALONE: Final = 100  # requests, one after the other
PAGE: Final = pages.PAGE.with_name("overload.md")
PICTURE: Final = PAGE.with_suffix(".png")
HEADS: Final = (
    *("too much is refused", "door", "offered", "answered/s", "of the peak"),
    *("p50, ms", "p99, ms", "p99 : alone", "refused/s"),
    *("p99 of refusals, ms", "given up/s", "generator late, ms"),
)
RULES: Final = ("---", "---", *["---:"] * (len(HEADS) - 2))
COLORS: Final = {"oldest": "#2a7f62", "newest": "#3c6fb4", "none": "#d1495b"}


class OverloadRow(NamedTuple):
    policy: str  # how too much is refused
    door: str  # by which requests come
    load: float  # as a multiple of the capacity
    goodput: float  # answers a second
    of_peak: float  # that, as a share of the most of this policy and door
    p50_ms: float  # median latency of what was answered
    p99_ms: float  # 99th percentile of it
    ratio: float  # of that to the 99th percentile of requests that are alone
    refused: float  # refusals a second
    refused_p99_ms: float  # 99th percentile of their latency
    given_up: float  # callers a second that waited for 5 s in vain
    late_ms: float  # by how much the generator was late, at most


def rows_of(
    policy: str, door: str, alone: LoadResult, results: dict[float, LoadResult]
) -> list[OverloadRow]:
    peak = max(result.goodput for result in results.values())
    alone_ms = 1e3 * quantile(alone.answered_s, 0.99)
    rows = []
    for load, result in results.items():
        p99_ms = 1e3 * quantile(result.answered_s, 0.99)
        rows.append(
            OverloadRow(
                *(policy, door, load, result.goodput, result.goodput / peak),
                *(1e3 * quantile(result.answered_s, 0.5), p99_ms, p99_ms / alone_ms),
                len(result.refused_s) / result.seconds,
                *(
                    1e3 * quantile(result.refused_s, 0.99),
                    result.given_up / result.seconds,
                ),
                1e3 * result.late_s,
            )
        )
    return rows


async def measure(
    policy: str, doors: Sequence[str], seconds: float, ports: tuple[int, int]
) -> tuple[list[OverloadRow], dict[str, LoadResult]]:
    """Flood a server that runs; return the rows, and what one alone takes, by door."""
    http_port, meeting_port = ports
    worker = Worker(
        "load", rank=1, world_size=2, rendezvous=f"tcp://127.0.0.1:{meeting_port}"
    )
    client = HttpClient(http_port)

    async def by_http() -> bool:
        try:
            return await client.ask("/") == 200
        except OSError:  # a reset connection is no answer
            return False

    async def by_call() -> bool:
        try:
            await peer.call(predict, 1)
        except OverloadedError:
            return False
        return True

    asks: dict[str, Ask] = {"http": by_http, "call": by_call}
    rows: list[OverloadRow] = []
    alone = {}
    async with worker:
        await worker.barrier()
        peer = worker.peer("server")
        for door in doors:
            ask = asks[door]
            alone[door] = await one_at_a_time(ask, ALONE)
            results = {}
            for load in LOADS:
                say(f"  {policy}, {door}: {load:g} times the capacity")
                seed = int(10 * load)
                results[load] = await offer(ask, load * CAPACITY_PER_S, seconds, seed)
            rows += rows_of(policy, door, alone[door], results)
        client.close()
        await worker.barrier()
    return rows, alone


def measure_all(
    policies: Sequence[str], doors: Sequence[str], seconds: float
) -> tuple[list[OverloadRow], dict[str, LoadResult]]:
    """Return the rows of all, each policy with a server of its own."""
    rows: list[OverloadRow] = []
    alone: dict[str, LoadResult] = {}
    for policy in policies:
        http_port, meeting_port = free_port(), free_port()
        arguments = ["--policy", policy]
        arguments += ["--http", str(http_port), "--meeting", str(meeting_port)]
        with process("tests.bench.overload_server", arguments, {}) as server:
            ports = (http_port, meeting_port)
            policy_rows, alone = asyncrpc.run(measure(policy, doors, seconds, ports))
            rows += policy_rows
            server.wait(30)
    return rows, alone


def cell(value: float, form: str) -> str:
    """Return a number as the table has it; nothing if it is none."""
    return "" if math.isnan(value) else format(value, form)


def table(rows: Sequence[OverloadRow], alone: dict[str, LoadResult]) -> str:
    """Return the rows, as the page has them."""
    lines = [f"| {' | '.join(HEADS)} |", f"| {' | '.join(RULES)} |"]
    for row in rows:
        cells = (
            *(row.policy, row.door, f"{row.load:g}x", f"{row.goodput:.1f}"),
            *(f"{row.of_peak:.0%}", cell(row.p50_ms, ",.0f"), cell(row.p99_ms, ",.0f")),
            *(cell(row.ratio, ".2f"), f"{row.refused:,.0f}"),
            "" if not row.refused else f"{row.refused_p99_ms:,.0f}",
            f"{row.given_up:,.0f}" if row.given_up else "",
            f"{row.late_ms:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    latencies = ", ".join(
        f"{1e3 * quantile(result.answered_s, 0.5):.1f} ms in the median and "
        f"{1e3 * quantile(result.answered_s, 0.99):.1f} ms at p99 by {door}"
        for door, result in alone.items()
    )
    lines += ["", f"A request that is alone takes {latencies}."]
    return "\n".join(lines)


def draw(rows: Sequence[OverloadRow], path: Path) -> None:
    """Write the picture: answers a second, and latency, over the load."""
    figure = Figure(figsize=(10, 4))
    left, right = figure.subplots(1, 2)
    for policy in dict.fromkeys(row.policy for row in rows):
        for door, line in zip(DOORS, ("-", "--"), strict=True):
            own = [row for row in rows if (row.policy, row.door) == (policy, door)]
            if not own:
                continue
            style: dict[str, Any] = {
                "color": COLORS[policy],
                "linestyle": line,
                "marker": "o",
                "markersize": 3,
                "label": f"{policy}, {door}",
            }
            loads = [row.load for row in own]
            left.plot(loads, [row.goodput for row in own], **style)
            right.plot(loads, [row.p99_ms for row in own], **style)
    left.set_title("answers a second", loc="left", fontsize=10)
    right.set_title("p99 of what is answered, ms", loc="left", fontsize=10)
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(LOADS, [f"{load:g}x" for load in LOADS])
        axes.minorticks_off()
        axes.set_xlabel("offered, as a multiple of what the model can do", fontsize=9)
        axes.grid(color="#dddddd")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = pages.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--doors", nargs="+", default=list(DOORS))
    parser.add_argument("--quick", action="store_true", help="3 s of each load")
    options = parser.parse_args()
    seconds = 3.0 if options.quick else options.seconds
    rows, alone = measure_all(options.policies, options.doors, seconds)
    text = table(rows, alone)
    print(text)
    if options.update_docs:
        pages.renew("overload", f"{pages.about()}\n\n{text}", PAGE)
        draw(rows, PICTURE)


if __name__ == "__main__":
    main()
