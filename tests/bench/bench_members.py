"""What does one of many processes cost, and what each other that it knows?

    $ python -m tests.bench.bench_members --processes 128
    $ python -m tests.bench.bench_members --processes 32 --torch    # torch's rpc, too

Processes: all join, each calls all others at once, and once more over what is open
then; all pass a barrier and end in order.  A stage begins for all together; shown is
how long the slowest took, and the processor time of each.  They are forked from a
server that has imported torch: of the resident memory (RSS) most is shared; the
proportional share (PSS) adds up over processes, and the private part is what one more
process takes.

Records: what one worker holds for each member of a group, however little it speaks to
it, as it comes over the wire: with texts of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
import tracemalloc
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.links.peer_table import PeerTable
from asyncrpc.core.members import Member
from asyncrpc.core.membership.machine.membership import Membership
from asyncrpc.core.membership.machine.records import Record
from asyncrpc.multiprocessing import launch
from tests.bench import machine
from tests.bench.sides.members_side import LIMIT_S, Life, live, live_in_torch

MIB: Final = 1 << 20
RECORDS: Final = (1_024, 4_096, 16_384, 65_536)
STAGES: Final = ("join", "calls", "calls again", "barrier", "end")


# --- tables --------------------------------------------------------------------------


def show_processes(name: str, lives: Sequence[Life]) -> None:
    """Print what the processes found."""
    print(f"\n{name}, {len(lives)} processes")
    print(f"{'stage':>12} {'slowest, s':>11} {'median, s':>10} {'CPU each, ms':>13}")
    for stage in STAGES:
        walls = [life.wall_s[stage] for life in lives]
        cpus_ms = [1e3 * life.cpu_s[stage] for life in lives]
        print(
            f"{stage:>12} {max(walls):>11.2f} {median(walls):>10.2f} "
            f"{median(cpus_ms):>13.1f}"
        )
    private = [
        life.memory["Private_Dirty"] + life.memory["Private_Clean"] for life in lives
    ]
    kinds = {
        "RSS": [life.memory["Rss"] for life in lives],
        "PSS": [life.memory["Pss"] for life in lives],
        "private": private,
    }
    for kind, values in kinds.items():
        print(
            f"{kind}: median {median(values) / MIB:.1f} MiB, most "
            f"{max(values) / MIB:.1f} MiB, all {sum(values) / MIB:,.0f} MiB"
        )
    for kind, counts in (
        ("descriptors", [life.descriptors for life in lives]),
        ("threads", [life.threads for life in lives]),
    ):
        print(f"{kind}: median {median(counts):.0f}, most {max(counts)}")


def run_processes(size: int, *, beside_torch: bool) -> None:
    multiprocessing.set_forkserver_preload(["tests.bench.sides.members_side"])
    launch(abs, nprocs=1, method="forkserver")  # when it is back, all is imported
    sides: dict[str, Any] = {"asyncrpc": live}
    if beside_torch:
        sides["torch.distributed.rpc"] = live_in_torch
    for name, function in sides.items():
        begun_s = time.perf_counter()
        lives = launch(
            function,
            (size,),
            size,
            method="forkserver",
            threads_per_process=1,
            timeout_s=LIMIT_S,
        )
        show_processes(name, lives)
        took_s = time.perf_counter() - begun_s
        print(f"from the first start to the last end: {took_s:.1f} s")


def members(count: int) -> list[bytes]:
    """Return records as they are published: eight workers of each host."""
    random.seed(count)
    return [_member(rank, random.getrandbits(64)).encode() for rank in range(count)]


def _member(rank: int, incarnation: int) -> Member:
    host, local = divmod(rank, 8)
    address = f"10.{host >> 16}.{host >> 8 & 255}.{host & 255}"
    return Member(
        f"worker{rank}",
        rank,
        Incarnation(incarnation),
        (
            f"tcp://{address}:{40_000 + local}",
            f"uds:///tmp/asyncrpc-1000/{incarnation:016x}/socket",
        ),
        f"8e82636f-2847-43c5-aad7-{host:012x}/net:[4026531833]/mnt:[4026531832]",
    )


class _Myself:
    """The worker that holds the records."""

    name, incarnation = "worker0", Incarnation(1)


def run_records() -> None:
    heads = "members", "bytes each", "of it tables", "all, MiB", "us each"
    print("".join(f"{head:>14}" for head in heads))
    for count in RECORDS:
        packed = members(count)
        begun_s = time.process_time()
        _hold(packed)
        took_s = time.process_time() - begun_s
        tracemalloc.start()
        kept, records_bytes = _hold(packed)
        total = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        tables_bytes = total - records_bytes
        print(
            f"{count:>14,}{total / count:>14.0f}{tables_bytes / count:>14.0f}"
            f"{total / MIB:>14.1f}{1e6 * took_s / count:>14.1f}"
        )
        del kept


def _hold(packed: Sequence[bytes]) -> tuple[object, int]:
    """Return what a worker has of others; and the bytes of the records among it."""
    read = [Member.decode(packed_member) for packed_member in packed]
    records_bytes = tracemalloc.get_traced_memory()[0]
    table = Membership(Record(read[0], 1))
    table.begin((Record(member, 1) for member in read), 0.0)
    peers = PeerTable(_Myself())  # type: ignore[arg-type]
    peers.add(read)
    return (table, peers), records_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_members")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--torch", action="store_true", help="torch's rpc, too")
    options = parser.parse_args()
    print(f"{machine.describe()}; load {machine.load():g}\n")
    run_records()
    run_processes(options.processes, beside_torch=options.torch)
    print(f"load after the run: {machine.load():g}")


if __name__ == "__main__":
    main()
