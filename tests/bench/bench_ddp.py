"""What does a training step of several ranks cost, beside torch's own over gloo?

Two processes with one thread each train a multilayer perceptron of ten million
parameters.  A row is a way to reduce its gradients; both sides take turns in the same
processes, a few steps at a time, and each begins a step when all ranks are there.
`alone` reduces nothing.  `in step` neither, but each step ends when all ranks have
ended it, as one must that reduces something: what is over it is communication.

    $ python -m tests.bench.bench_ddp
    $ python -m tests.bench.bench_ddp --ranks 4 --rounds 9 --only none,fp16

Hidden is the share of communication that passed while autograd ran.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from asyncrpc import Group, Worker, ddp
from asyncrpc.core.loop.clock import now_s
from asyncrpc.multiprocessing import launch
from tests.bench import pages

WIDTHS: Final = (784, 2048, 2048, 2048, 10)
BATCH: Final = 32
STEPS: Final = 6  # of a side in a round; the first warms up
ROUNDS: Final = 5
RANK_OF_MATRICES: Final = 2  # PowerSGD's
SIDES: Final = ("alone", "in step", "asyncrpc", "torch")


class Way(NamedTuple):
    # Of asyncrpc, with what makes its state; None: no hook.
    hook: tuple[Any, Callable[[], Any]] | None
    theirs: tuple[Any, Callable[[], Any]] | None  # the same of torch
    options: dict[str, Any]  # of both modules
    # Of torch's alone.
    their_options: dict[str, Any] = {}  # noqa: RUF012  (nobody changes it)


def power_ours() -> ddp.PowerSGDState:
    return ddp.PowerSGDState(None, RANK_OF_MATRICES, start_powerSGD_iter=2)


def power_theirs() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, RANK_OF_MATRICES, start_powerSGD_iter=2)


def nothing() -> None:
    return None


def bf16_theirs(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, which are text here
    """torch's own, which its module refuses by name where there is no GPU."""
    return default_hooks.bf16_compress_hook(state, bucket)


WAYS: Final = {
    "none": Way(None, None, {}),
    "bucket views": Way(None, None, {"gradient_as_bucket_view": True}),
    "own memory": Way(None, None, {"gradient_as_bucket_view": False}),
    "fp16": Way(
        (ddp.fp16_compress_hook, nothing),
        (default_hooks.fp16_compress_hook, nothing),
        {},
    ),
    "bf16": Way((ddp.bf16_compress_hook, nothing), (bf16_theirs, nothing), {}),
    "PowerSGD": Way(
        (ddp.powerSGD_hook, power_ours),
        (powerSGD_hook.powerSGD_hook, power_theirs),
        {},
        # Of several buckets at once torch's hook may reduce P of one and Q of another
        # together, as ranks see them ready in other orders: gloo ends the process.
        {"bucket_cap_mb": 1000},
    ),
}


def make() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the module, inputs and labels."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    module = nn.Sequential(*layers[:-1])
    return module, torch.randn(BATCH, WIDTHS[0]), torch.randint(10, (BATCH,))


class Trainer:
    """A model on its way, in blocking steps or awaited ones."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        _, self._inputs, self._labels = make()
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self) -> torch.Tensor:
        self._optimizer.zero_grad()
        return nn.functional.cross_entropy(self.model(self._inputs), self._labels)

    def run(self, *, in_step: bool = False) -> float:
        """Make some steps; return the median of their milliseconds."""
        times_ms = []
        for _ in range(STEPS):
            dist.barrier()
            begun_s = now_s()
            torch.autograd.backward(self.loss())
            if in_step:
                dist.barrier()
            self._optimizer.step()
            times_ms.append((now_s() - begun_s) * 1e3)
        return statistics.median(times_ms[1:])

    async def run_async(self, group: Group) -> float:
        """Make some steps with asyncrpc's module; likewise."""
        assert isinstance(self.model, ddp.DistributedDataParallel)
        times_ms = []
        for _ in range(STEPS):
            await group.barrier()
            begun_s = now_s()
            await self.model.backward(self.loss())
            self._optimizer.step()
            times_ms.append((now_s() - begun_s) * 1e3)
        return statistics.median(times_ms[1:])


async def compare_way(way: Way, group: Group, rounds: int) -> dict[str, Any]:
    """Return the times of a row, by side: milliseconds of each round."""
    model = await ddp.DistributedDataParallel(make()[0], group, **way.options)
    # In a thread, as all that blocks: our loop has to answer the other ranks meanwhile.
    theirs = await asyncio.to_thread(
        nn.parallel.DistributedDataParallel,
        make()[0],
        **way.options,
        **way.their_options,
    )
    if way.hook is not None and way.theirs is not None:
        model.register_comm_hook(way.hook[1](), way.hook[0])
        theirs.register_comm_hook(way.theirs[1](), way.theirs[0])
    alone, ours, other = Trainer(make()[0]), Trainer(model), Trainer(theirs)
    row: dict[str, list[float]] = {side: [] for side in SIDES}
    before = model.statistics()
    for _ in range(rounds):
        row["alone"].append(await asyncio.to_thread(alone.run))
        row["in step"].append(await asyncio.to_thread(alone.run, in_step=True))
        row["asyncrpc"].append(await ours.run_async(group))
        row["torch"].append(await asyncio.to_thread(other.run))
    after = model.statistics()
    model.close()
    sent_s = after.communication_s - before.communication_s
    waited_s = after.waited_s - before.waited_s
    return {**row, "hidden": max(0.0, 1 - waited_s / sent_s)}


async def compare(rank: int, names: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return what every row has given."""
    dist.init_process_group("gloo")
    try:
        async with (
            Worker(f"w{rank}", rendezvous="env://") as worker,
            Group(worker) as all_,
        ):
            return {name: await compare_way(WAYS[name], all_, rounds) for name in names}
    finally:
        dist.destroy_process_group()


def cell(times_ms: Sequence[float]) -> str:
    least, most = min(times_ms), max(times_ms)
    return f"{statistics.median(times_ms):.0f} ({least:.0f}-{most:.0f})"


def table(rows: dict[str, Any]) -> str:
    """Return what is printed."""
    columns = "".join(f"{name + ', ms':>22}" for name in SIDES)
    lines = [f"{'hook':<16}{columns}{'ratio':>8}{'hidden':>9}"]
    for name, row in rows.items():
        ours, theirs = row["asyncrpc"], row["torch"]
        ratio = statistics.median(theirs) / statistics.median(ours)
        cells = "".join(f"{cell(row[side]):>22}" for side in SIDES)
        lines.append(f"{name:<16}{cells}{ratio:>8.2f}{row['hidden']:>9.0%}")
    about = "medians (least-most) over rounds; ratio over 1: asyncrpc does better"
    return "\n".join([*lines, "", about])


def main() -> None:
    parser = pages.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default=",".join(WAYS), metavar="NAMES")
    options = parser.parse_args()
    names = [name for name in WAYS if name in options.only.split(",")]
    parameters = sum(parameter.numel() for parameter in make()[0].parameters())
    about = f"{parameters / 1e6:.2f} million parameters, {options.ranks} ranks"
    args = (names, options.rounds)
    rows = launch(compare, args, options.ranks, threads_per_process=1)[0]
    text = f"{about}\n\n{table(rows)}"
    pages.show("ddp", text, options)


if __name__ == "__main__":
    main()
