"""What is measured: rows, sizes, and the functions that both sides call.

Both sides call the same functions with the same values, in processes with one torch
thread each.  Each is used as its users would: asyncrpc by `await` on its event loop,
torch.distributed.rpc by blocking calls.  The rows of the facade block on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from tests.bench.harness import SIDES, Row
from tests.bench.training import CROSSINGS, NODES, TRAINERS

CALLER, CALLEE = "caller", "callee"
SOCKETS: Final = "sockets"  # no library: what two of them move
ALL: Final = (*SIDES, "pyzmq", "grpc", "ray")  # the others: `make bench-peers`
WITH_OBJECTS: Final = (*SIDES, "ray")  # sides that have objects on the callee
OUTSTANDING: Final = 256
OUTSTANDING_EACH: Final = 64  # of each of several callers
FACADE_OUTSTANDING: Final = 1000
SIZES_MIB: Final = (1, 16, 256)
TCP_SIZES_MIB: Final = (16, 256)
SHARED_MIB: Final = 64
FAN_OUT_MIB: Final = 4
TCP_FAN_OUT_MIB: Final = 64
TCP_KINDS: Final = ("tcp", "tcp_several")
AT_ONCE, AT_ONCE_MIB = 8, 16
KIB_FLOATS: Final = 256  # 1 KiB of float32
FEATURES: Final = 256
BATCH: Final = 64
LEARNING_RATE: Final = 0.01


class Kind(NamedTuple):
    """How the processes of a start are set up."""

    processes: int
    sides: Sequence[str] = SIDES
    environ: Mapping[str, str] = MappingProxyType({})
    ours: str = "asyncrpc"  # whose module in `sides` is run for asyncrpc

    def module_of(self, side: str) -> str:
        """Return the module that the processes of a side run."""
        name = self.ours if side == "asyncrpc" else side
        return f"tests.bench.sides.{name}_side"


# `pair`: two processes, each side with its defaults.  `tcp`: neither shared memory nor
# Unix sockets.  `polling`: the loop polls while it waits.  `several`: callers 0, 2 and
# 3 and one callee; eight callers are eight workers in the processes of these three.
# `tcp_several`: four processes, as `tcp`.  `sockets`: two, without a library.
# `huge`: torch with huge pages, which it does not ask for by itself.  `facade`: both
# under torch's names.  `chain`: a worker that trains, and three that have layers.
# `trainers`: one that has the parameters, and eight that train; the first only counts.
KINDS: Final[Mapping[str, Kind]] = {
    "pair": Kind(2, ALL),
    "tcp": Kind(2, ALL),
    "sockets": Kind(2, (SOCKETS,)),
    "polling": Kind(2, ("asyncrpc",)),
    "several": Kind(4),
    "tcp_several": Kind(4),
    "huge": Kind(2, ("torch",), {"THP_MEM_ALLOC_ENABLE": "1"}),
    "facade": Kind(2, ours="compat"),
    "chain": Kind(4),
    "trainers": Kind(2 + TRAINERS),
}


class Workload(NamedTuple):
    """One thing that is measured, and the lines of the table that it gives."""

    rows: Sequence[Row]
    kind: str = "pair"
    sides: Sequence[str] = SIDES


def _latency(name: str, target: float | None = None, kind: str = "pair") -> Workload:
    return Workload(
        [Row(f"{name}, p50", "us", target=target), Row(f"{name}, p99", "us")], kind
    )


def _row(
    name: str,
    unit: str,
    kind: str = "pair",
    sides: Sequence[str] = SIDES,
    *,
    higher_is_better: bool = True,
    **more: Any,
) -> Workload:
    """Return a workload of one row, as a rule a rate."""
    row = Row(name, unit, higher_is_better=higher_is_better, **more)
    return Workload([row], kind, sides)


def _rate(
    name: str, unit: str, target: float | None = None, kind: str = "pair"
) -> Workload:
    return _row(name, unit, kind, target=target)


def _by(workload: Workload, sides: Sequence[str] = ALL) -> Workload:
    """Return a workload that `make bench-peers` measures, too."""
    return workload._replace(sides=sides)


def _variant(name: str, usual: str, unit: str = "GB/s") -> Workload:
    """Return another way of asyncrpc's to do something, compared with torch's one."""
    return _row(name, unit, sides=OURS, against=("torch", usual))


def _beside_sockets(usual: str) -> Workload:
    """Return what blocking sockets do, compared with the same by asyncrpc."""
    name, ours = f"{usual}, against {SOCKETS}", f"{usual}, TCP only"
    against = (SOCKETS, name)
    return _row(
        name, "GB/s", SOCKETS, (SOCKETS,), target=0.8, against=against, ours=ours
    )


OURS: Final = ("asyncrpc",)
TRIVIAL: Final = "call, async def callee"
LINEAR: Final = "remote Linear, forward to step"
FAN_IN: Final = f"3 callers x {OUTSTANDING_EACH} outstanding"

# Targets are ratios over torch.distributed.rpc in the same run.
WORKLOADS: Final[Mapping[str, Workload]] = {
    "call_async": _by(_latency(TRIVIAL, 2.0)),
    "call_polling": Workload(
        [
            Row(f"call while polling, {at}", "us", target=aim, against=("torch", usual))
            for at, aim, usual in (
                ("p50", 5.0, f"{TRIVIAL}, p50"),
                ("p99", None, f"{TRIVIAL}, p99"),
            )
        ],
        "polling",
        OURS,
    ),
    "call_def": _latency("call, def callee", 4 / 3),
    "tensor_add": _latency("add 1 to 1 KiB tensor", 1 / 0.35),
    "many_async": _by(_rate(f"{OUTSTANDING} outstanding, async def", "calls/s", 4.0)),
    "many_def": _rate(f"{OUTSTANDING} outstanding, def", "calls/s"),
    "callers_3": _rate(FAN_IN, "calls/s", 4.0, "several"),
    "callers_8": _row(
        *(f"8 callers x {OUTSTANDING_EACH}, against 3", "calls/s", "several", OURS),
        target=1.0,
        against=("asyncrpc", FAN_IN),
    ),
    "send_64k": _by(_rate("64 KiB tensor, one way", "GB/s", 2.5)),
    **{
        f"send_{size}": _by(_rate(f"{size} MiB tensor, one way", "GB/s", target))
        for size, target in zip(SIZES_MIB, (2.0, 2.0, 5.0), strict=True)
    },
    "huge_256": _row(
        *("256 MiB one way, torch with huge pages", "GB/s", "huge", ("torch",)),
        ours="256 MiB tensor, one way",
    ),
    "placed_16": _variant(
        "16 MiB from worker.empty, one way", "16 MiB tensor, one way"
    ),
    **{
        f"echo_{size}": _by(_rate(f"{size} MiB tensor, echoed", "GB/s", target))
        for size, target in zip(SIZES_MIB, (None, 2.0, 5.0), strict=True)
    },
    "out_256": _variant("256 MiB echoed into out=", "256 MiB tensor, echoed"),
    **{
        f"tcp_{size}": _by(
            _rate(f"{size} MiB one way, TCP only", "GB/s", target, "tcp")
        )
        for size, target in zip(TCP_SIZES_MIB, (1.5, 1.5), strict=True)
    },
    **{
        f"tcp_echo_{size}": _rate(f"{size} MiB echoed, TCP only", "GB/s", target, "tcp")
        for size, target in zip(TCP_SIZES_MIB, (1.3, 1.3), strict=True)
    },
    **{
        f"sockets_{way}{size}": _beside_sockets(f"{size} MiB {words}")
        for way, words in (("", "one way"), ("echo_", "echoed"))
        for size in TCP_SIZES_MIB
    },
    "tcp_group": _rate(
        f"{TCP_FAN_OUT_MIB} MiB to 3 peers, TCP only", "GB/s", 1.3, "tcp_several"
    ),
    "at_once_16": _by(_rate(f"{AT_ONCE_MIB} MiB one way, {AT_ONCE} at once", "GB/s")),
    "shared": Workload(
        [Row(f"{SHARED_MIB} MiB shared already, over a call", "us more", limit=50.0)],
        sides=("asyncrpc",),
    ),
    "group": _rate(f"{FAN_OUT_MIB} MiB to 3 peers, group", "GB/s", kind="several"),
    "rref": _rate("RRef: create, call, fetch", "1/s", 4.0),
    "rref_method": _by(_rate("RRef: method on a kept one", "1/s", 4.0), WITH_OBJECTS),
    "facade_call": _latency("facade: rpc_sync, def callee", 2.0, "facade"),
    "facade_tensor": _latency("facade: add 1 to 1 KiB tensor", 1.0, "facade"),
    "facade_builtin": _latency("facade: torch.add on 1 KiB", 1 / 1.2, "facade"),
    "facade_many": _rate(
        f"facade: {FACADE_OUTSTANDING:,} rpc_async", "calls/s", 2.0, "facade"
    ),
    "facade_rref": _rate("facade: RRef, call, fetch", "1/s", 2.5, "facade"),
    "facade_train": _rate("facade: remote Linear, a step", "steps/s", 1.1, "facade"),
    "autograd": _rate(LINEAR, "steps/s", 1.6),
    "autograd_apart": _variant("the same, pass and step apart", LINEAR, "steps/s"),
    "train_two": _rate("(a) 2 layers on one worker", "steps/s", 1.5),
    "train_chain": _rate("(b) chain over 3 workers", "steps/s", 1.5, "chain"),
    "train_server": _rate(
        f"(c) {TRAINERS} trainers, 1 server", "steps/s", 2.0, "trainers"
    ),
    "train_crossings": _rate(f"(d) {CROSSINGS} crossings, 1 pass", "passes/s", 1.5),
    "train_nodes": _rate(f"(e) {NODES:,} nodes on one worker", "passes/s", 1.1),
}


def rows_of(names: Sequence[str]) -> list[Row]:
    return [row for name in names for row in WORKLOADS[name].rows]


def of_kind(names: Sequence[str], kind: str, side: str) -> list[str]:
    """Return those of the workloads that a start of this kind measures."""
    return [
        name
        for name in names
        if WORKLOADS[name].kind == kind and side in WORKLOADS[name].sides
    ]


# --- what the callee runs ------------------------------------------------------------


def nothing() -> None:
    """Return at once."""


async def nothing_async() -> None:
    """Return at once; torch.distributed.rpc has no counterpart and gets `nothing`."""


async def take_async(_tensor: torch.Tensor) -> None:
    """Look at nothing: what is measured is how it came here."""


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def shape_of(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count


class Layer(nn.Module):
    """The remote half of the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(BATCH, FEATURES)` to the same shape."""
        result: torch.Tensor = self.linear(rows)
        return result
