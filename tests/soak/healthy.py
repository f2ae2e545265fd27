"""Does work that goes on ever look as if it did not?

Three workers in three processes do everything at once: calls of every kind, streams,
references, backward passes, optimizer steps, collectives and barriers.  Meanwhile
`asyncrpc why` is asked again and again, and each worker watches itself by
`Options.stall_after_s`.  Neither must ever say anything.

    $ python -m tests.soak.healthy --minutes 10

Exits with 1 if anything was said.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import nn

import asyncrpc
from asyncrpc import Group, Options, RRef, Worker
from asyncrpc.autograd import backward, context
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import ProcessCluster
from asyncrpc.tools.inspection.group import view_of
from asyncrpc.tools.inspection.machine.graph import find_hangs
from asyncrpc.tools.inspection.machine.wording import sentence, unnamed_troubles
from asyncrpc.tools.inspection.observer import Observer
from tests.soak.work import KINDS, Use

NAMES: Final = ("a", "b", "c")
AFTER_S: Final = 5.0  # busy machines let a task wait for a second or two
LOOK_EVERY_S: Final = 1.0
AT_ONCE: Final = 8
OPTIONS: Final = Options(secret="a secret of this soak", stall_after_s=AFTER_S)


@dataclass
class Quiet:
    looks: int = 0  # how often `why` was asked
    # How often each kind of work was done.
    rounds: dict[str, int] = field(default_factory=dict)
    # What `why` has said, and what workers have logged.
    said: list[str] = field(default_factory=list)


# --- what runs on every worker -------------------------------------------------------


class Heard(logging.Handler):
    """Keeps what a worker logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


_heard: list[Heard] = []


async def listen() -> None:
    _heard.append(Heard())
    logging.getLogger("asyncrpc").addHandler(_heard[-1])


async def heard() -> list[str]:
    handler = _heard.pop()
    logging.getLogger("asyncrpc").removeHandler(handler)
    return [line for line in handler.lines if "is stuck" in line]


class Layer(nn.Module):
    """A layer that lives on its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


async def parameters(layer: RRef[Layer]) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in (await layer.to_here()).parameters()]


async def forward(layer: RRef[Layer], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = (await layer)(x)
    return result


_stopping: set[str] = set()


async def stop() -> None:
    _stopping.add("")


async def collect() -> int:
    """Meet the others, in collectives and barriers, until all are told to stop."""
    worker, rounds = asyncrpc.current_worker(), 0
    async with Group(worker, list(NAMES), name="soak", timeout_s=None) as group:
        while True:
            # All stop at the same round: when the first of them is to.
            votes = await group.all_reduce(torch.tensor([float(bool(_stopping))]))
            if votes.item():
                _stopping.clear()
                return rounds
            await group.all_gather(torch.ones(100))
            await worker.barrier()
            rounds += 1


# --- what goes on --------------------------------------------------------------------


class Training:
    """Two layers on two workers, which are trained step by step."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def prepare(self) -> None:
        """Take the first step, for which all load what they need."""
        worker = self._worker
        self._layers = [worker.peer(name).remote(Layer) for name in NAMES[1:]]
        references: list[RRef[nn.Parameter]] = []
        for name, layer in zip(NAMES[1:], self._layers, strict=True):
            references += await worker.peer(name).call(parameters, layer)
        self._optimizer = await DistributedOptimizer(
            torch.optim.SGD, references, lr=0.01
        )
        await self._step()

    async def _step(self) -> None:
        async with context() as ctx:
            x = torch.ones(4, 8)
            for name, layer in zip(NAMES[1:], self._layers, strict=True):
                x = await self._worker.peer(name).call(forward, layer, x)
            await backward(ctx, [x.square().mean()])
            await self._optimizer.step(ctx)

    async def run(self, is_over: asyncio.Event) -> int:
        """Train; return how many steps it took."""
        steps = 0
        while not is_over.is_set():
            await self._step()
            steps += 1
        return steps


async def call(worker: Worker, is_over: asyncio.Event, seed: int) -> int:
    """Make calls of every kind."""
    rng, weights, uses = random.Random(seed), [kind.weight for kind in KINDS], 0
    while not is_over.is_set():
        (kind,) = rng.choices(KINDS, weights)
        uses += 1
        await kind.run(Use(worker, rng, uses * AT_ONCE + seed))  # no serial twice
    return uses


async def meet(worker: Worker, is_over: asyncio.Event) -> int:
    """Let all meet in collectives."""
    there = [worker.peer(name).call(collect) for name in NAMES[1:]]
    here = asyncio.create_task(collect())
    meeting = asyncio.gather(here, *there)
    await is_over.wait()
    await stop()
    return int((await meeting)[0])


async def rest() -> None:
    """Wait at rest, as servers do."""
    await asyncio.Event().wait()


# --- who looks -----------------------------------------------------------------------


async def ask_why(worker: Worker, quiet: Quiet, is_over: asyncio.Event) -> int:
    """Ask why nothing goes on, again and again."""
    while not is_over.is_set():
        async with Observer(OPTIONS) as observer:
            view = await view_of(observer, worker.addresses[0])
        graph = view.graph
        hangs = find_hangs(graph, after_s=AFTER_S)
        quiet.said += [sentence(graph, hang) for hang in hangs]
        quiet.said += unnamed_troubles(graph, hangs)
        quiet.looks += 1
        await asyncio.sleep(LOOK_EVERY_S)
    return quiet.looks


async def soak(
    seconds: float,
    *,
    method: Literal["spawn", "forkserver"] = "spawn",
    after_s: float = AFTER_S,
    on_second: Callable[[Quiet], None] = lambda _: None,
) -> Quiet:
    """Do everything for some seconds; return what was said of it."""
    quiet, is_over = Quiet(), asyncio.Event()
    options = replace(OPTIONS, stall_after_s=after_s)
    cluster = ProcessCluster(NAMES[1:], name="a", options=options, method=method)
    async with cluster as worker:
        everybody = [worker.peer(name) for name in NAMES]
        training = Training(worker)
        await training.prepare()
        for peer in everybody:
            await peer.call(listen)
        resting = asyncio.create_task(rest(), name="at rest")
        work: dict[str, Coroutine[Any, Any, int]] = {
            "steps": training.run(is_over),
            "meetings": meet(worker, is_over),
            "looks": ask_why(worker, quiet, is_over),
            **{f"calls {seed}": call(worker, is_over, seed) for seed in range(AT_ONCE)},
        }
        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(coroutine) for name, coroutine in work.items()
            }
            group.create_task(_tell(seconds, quiet, is_over, on_second))
        quiet.rounds = {name: task.result() for name, task in tasks.items()}
        for peer in everybody:
            quiet.said += await peer.call(heard)
        resting.cancel()
        await asyncio.gather(resting, return_exceptions=True)
    return quiet


async def _tell(
    seconds: float,
    quiet: Quiet,
    is_over: asyncio.Event,
    on_second: Callable[[Quiet], None],
) -> None:
    for _ in range(max(1, int(seconds))):
        await asyncio.sleep(1.0)
        on_second(quiet)
    is_over.set()


def main() -> int:
    """Run the soak; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    quiet = asyncrpc.run(soak(60 * options.minutes))
    sys.stdout.write(f"{quiet.looks} looks; {quiet.rounds}\n")
    sys.stdout.writelines(f"{line}\n" for line in quiet.said)
    return 1 if quiet.said else 0


if __name__ == "__main__":
    sys.exit(main())
