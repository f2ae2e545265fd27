"""How fast is all_reduce between processes of one host, beside gloo?

Every rank is a process with one thread, an event loop and a group of each kind.  A row
is a tensor; the kinds take turns, some calls at a time one right after the other:

    gloo      torch.distributed.all_reduce
    asyncrpc  Group.all_reduce of an ordinary tensor: through windows
    in place  the same of a tensor of Group.empty: copies nothing

    $ python -m tests.bench.bench_collectives
    $ python -m tests.bench.bench_collectives --ranks 2,3 --rounds 21 --only "64 KiB"

GB/s are bytes of the tensor by time.  And which of two schedules is faster where ranks
are on several hosts, here over TCP on loopback?  That is what RING_BYTES_MIN of
asyncrpc.parallel.collectives.message_path is chosen by:

    $ python -m tests.bench.bench_collectives --path messages
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from asyncrpc import Group, LimitOptions, NetworkOptions, Options, Worker
from asyncrpc.core.loop.clock import now_s
from asyncrpc.multiprocessing import launch
from asyncrpc.parallel.collectives import message_path
from tests.bench import pages

KIB: Final = 1 << 10
MIB: Final = 1 << 20
ROUNDS: Final = 11
ROUND_S: Final = 0.1  # about so long is one kind's turn
CALLS_MAX: Final = 200

Call = Callable[[], Awaitable[object]]
Times = dict[str, list[float]]  # by kind: seconds of a call, of each round


class Row(NamedTuple):
    nbytes: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """What the table says."""
        size = f"{self.nbytes // MIB} MiB"
        if self.nbytes < MIB:
            size = f"{self.nbytes // KIB} KiB"
        return f"{size} {str(self.dtype).removeprefix('torch.')}"


ROWS: Final = (
    *(Row(nbytes, torch.float32) for nbytes in (64 * KIB, MIB, 16 * MIB, 64 * MIB)),
    Row(16 * MIB, torch.float16),
    Row(16 * MIB, torch.bfloat16),
)
SIZES: Final = tuple(KIB << shift for shift in range(0, 17, 2))  # of `--path messages`
FOR_MESSAGES: Final = tuple(Row(nbytes, torch.float32) for nbytes in SIZES)


async def per_call_s(call: Call, calls: int, group: Group) -> float:
    """Return how long one of so many calls takes, all ranks together."""
    await group.barrier()
    await call()
    begun_s = now_s()
    for _ in range(calls):
        await call()
    return (now_s() - begun_s) / calls


async def take_turns(kinds: Mapping[str, Call], group: Group, *, rounds: int) -> Times:
    times: Times = {kind: [] for kind in kinds}
    counts = {}
    for kind, call in kinds.items():
        await per_call_s(call, 2, group)
        # All ranks have to make as many.
        took = torch.tensor(await per_call_s(call, 2, group))
        await group.all_reduce(took, "max")
        counts[kind] = max(2, min(CALLS_MAX, int(ROUND_S / took.item())))
    for turn in range(rounds):
        order = list(kinds) if turn % 2 else list(kinds)[::-1]
        for kind in order:
            times[kind].append(await per_call_s(kinds[kind], counts[kind], group))
    return times


async def beside_gloo(rank: int, rows: Sequence[Row], rounds: int) -> dict[str, Times]:
    dist.init_process_group("gloo")
    results = {}
    async with Worker(f"w{rank}", rendezvous="env://") as worker:
        for row in rows:
            async with Group(worker) as group:
                numel = row.nbytes // row.dtype.itemsize
                plain = torch.zeros(numel, dtype=row.dtype)
                theirs = torch.zeros(numel, dtype=row.dtype)
                seen = (await group.empty(numel, dtype=row.dtype)).zero_()
                kinds = {
                    "gloo": lambda tensor=theirs: gloo(tensor),
                    "asyncrpc": lambda tensor=plain: group.all_reduce(tensor),
                    "in place": lambda tensor=seen: group.all_reduce(tensor),
                }
                results[row.name] = await take_turns(kinds, group, rounds=rounds)
                await group.barrier()  # before the first one leaves
    dist.destroy_process_group()
    return results


async def gloo(tensor: torch.Tensor) -> None:
    """Reduce with gloo, which blocks; nothing else is to be done meanwhile."""
    dist.all_reduce(tensor)


async def ring_beside_tree(
    rank: int, rows: Sequence[Row], rounds: int
) -> dict[str, Times]:
    """Return the times of every row by either schedule."""
    options = Options(
        limits=LimitOptions(shared_memory_bytes=0),
        network=NetworkOptions(listen=("tcp://127.0.0.1:0",)),
        secret="known to all of a benchmark",  # which TCP needs
    )
    results = {}
    async with (
        Worker(f"w{rank}", rendezvous="env://", options=options) as worker,
        Group(worker) as group,
    ):
        for row in rows:
            tensor = torch.zeros(row.nbytes // row.dtype.itemsize, dtype=row.dtype)

            async def by(threshold: float, tensor: torch.Tensor = tensor) -> None:
                message_path.RING_BYTES_MIN = threshold  # type: ignore[misc,assignment]  # is measured
                await group.all_reduce(tensor)

            kinds = {"tree": lambda by=by: by(math.inf), "ring": lambda by=by: by(0)}
            results[row.name] = await take_turns(kinds, group, rounds=rounds)
        await group.barrier()
    return results


def cells(times: Times, nbytes: int, base: str) -> str:
    """Return a line of the table."""
    medians = {kind: statistics.median(rounds_s) for kind, rounds_s in times.items()}
    text = ""
    for kind, median_s in medians.items():
        text += f"{median_s * 1e3:>14.3f}{nbytes / median_s / 1e9:>7.2f}"
        if kind != base:
            ratios = [a / b for a, b in zip(times[base], times[kind], strict=True)]
            text += f"{statistics.median(ratios):>7.2f}"
    return text


def table(results: dict[str, Times], rows: Sequence[Row], ranks: int) -> str:
    """Return what is printed of so many ranks."""
    kinds = list(next(iter(results.values())))
    heads = "".join(
        f"{kind + ', ms':>14}{'GB/s':>7}" + (f"{'ratio':>7}" if at else "")
        for at, kind in enumerate(kinds)
    )
    lines = (
        f"{row.name:<18}{cells(results[row.name], row.nbytes, kinds[0])}"
        for row in rows
    )
    return "\n".join([f"{f'{ranks} ranks':<18}{heads}", *lines])


def main() -> None:
    """Measure what is asked for."""
    parser = pages.parser(__doc__)
    parser.add_argument("--ranks", default="", help="such as 2,4")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="rows with this in their names")
    parser.add_argument("--path", choices=["shared", "messages"], default="shared")
    options = parser.parse_args()
    measure: Any = beside_gloo
    rows, ranks = ROWS, options.ranks or "2,4"
    if options.path == "messages":
        measure, rows, ranks = ring_beside_tree, FOR_MESSAGES, options.ranks or "2,3,4"
    chosen = [row for row in rows if options.only in row.name]
    tables = []
    for count in map(int, ranks.split(",")):
        args = (chosen, options.rounds)
        results = launch(measure, args, count, threads_per_process=1)[0]
        tables.append(table(results, chosen, count))
    about = "medians over rounds; ratio: times as fast as the first kind"
    text = "\n\n".join([*tables, about])
    pages.show(f"collectives, {options.path}", text, options)


if __name__ == "__main__":
    main()
