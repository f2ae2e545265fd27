"""Train while workers are killed and others come: the result is that of a calm run.

    $ python examples/elastic_training.py            # kill -9, and start others
    $ python examples/elastic_training.py --kills 0  # leave them alone

Processes learn to read handwritten digits together, one batch at a time, of which each
takes a part.  Now and then one is killed by SIGKILL, and a while later a new one is
started.  Those that are left repeat the step that was broken off.  Each batch is the
same whoever is there, so the network is the same, too, but for the order of sums.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import asyncrpc
from asyncrpc.ddp import DistributedDataParallel, broadcast_state
from asyncrpc.errors import CollectiveError

TRAINING, BATCH = 1440, 96  # of the 1,797 digits
PRELOADED = ["sklearn.datasets", "asyncrpc.ddp", "torch._dynamo"]  # in each process
PAUSE_S = 0.01  # after each step: as if the network were larger

# --- in a worker's process -----------------------------------------------------------


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels and labels, mixed alike in every process."""
    dataset, chance = load_digits(), torch.Generator().manual_seed(0)
    order = torch.randperm(len(dataset.target), generator=chance)
    pixels = torch.tensor(dataset.data, dtype=torch.float32) / 16
    return pixels[order], torch.tensor(dataset.target)[order]


class Trainer:
    """One worker's part in the training.

    Attributes:
        step: how many steps are done; -1: it has no network yet.
    """

    def __init__(self, group: asyncrpc.ElasticGroup) -> None:
        self.step = -1
        self._group = group
        self._pixels, self._labels = digits()
        torch.manual_seed(1)
        self._net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self._model = DistributedDataParallel(self._net, group.current)
        self._optimizer = torch.optim.SGD(self._net.parameters(), 0.05, momentum=0.9)

    async def catch_up(self) -> None:
        """Take over what the others have, if this worker is new, or a step behind."""
        group = self._group
        if group.source is not None:
            mine = self._net.state_dict(), self._optimizer.state_dict(), self.step
            state = await broadcast_state(group.current, mine, group.source)
            self._net.load_state_dict(state[0])
            self._optimizer.load_state_dict(state[1])
            self.step = max(state[2], 0)
        await self._model.regroup(group.current)

    async def do_step(self) -> None:
        """Learn from one batch, of which this worker takes its part."""
        ranks = self._group.current
        chance = torch.Generator().manual_seed(self.step)
        batch = torch.randint(TRAINING, (BATCH,), generator=chance)
        mine = batch.tensor_split(ranks.size)[ranks.rank]
        scores = self._model(self._pixels[mine])
        loss = nn.functional.cross_entropy(scores, self._labels[mine], reduction="sum")
        self._optimizer.zero_grad()
        # So the mean over the ranks is that over the batch, however it is divided.
        await self._model.backward(loss * ranks.size / BATCH)
        self._optimizer.step()
        self.step += 1

    async def train(self, steps: int, first: asyncrpc.Peer) -> float:
        """Take part to the end; return the accuracy on other digits."""
        is_ready, group = False, self._group
        while self.step < steps:
            try:
                if group.has_changed:
                    is_ready = False
                    await group.reconfigure(step=self.step, quorum="any")
                if not is_ready:
                    await self.catch_up()
                    await first.call(tell, self.step, group.current.members)
                    is_ready = True
                await self.do_step()
            except CollectiveError:
                is_ready = False
                await group.reconfigure(step=self.step, quorum="any")
            else:
                await first.call(tell, self.step, ())
                await asyncio.sleep(PAUSE_S)
        guesses = self._net(self._pixels[TRAINING:]).argmax(1)
        return float((guesses == self._labels[TRAINING:]).float().mean())


async def work(name: str, contact: str, options: argparse.Namespace) -> None:
    where = asyncrpc.JoinRendezvous([contact])
    async with asyncrpc.Worker(name, rendezvous=where) as worker:
        least = options.workers if int(name[1:]) < options.workers else 1
        group = await asyncrpc.join_group(worker, "digits", min_size=least)
        first = worker.peer("first")
        accuracy = await Trainer(group).train(options.steps, first)
        await first.call(tell_accuracy, accuracy)


def run_worker(name: str, contact: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    asyncrpc.run(work(name, contact, options))


# --- in the first process ------------------------------------------------------------


class Log:
    """What the workers have told."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.step = 0
        self.members: tuple[str, ...] = ()
        self.accuracies: list[float] = []
        self.news = asyncio.Event()

    def say(self, text: str) -> None:
        print(f"{time.perf_counter() - self.begun:6.2f} s  {text}", flush=True)

    async def until_step(self, step: int) -> None:
        await self._until(lambda: self.step >= step)

    async def until_here(self, name: str) -> None:
        await self._until(lambda: name in self.members)

    async def until_end(self) -> None:
        await self._until(lambda: False)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so() and not self.accuracies:
            self.news.clear()
            await self.news.wait()


log = Log()


@asyncrpc.on_loop
def tell(step: int, members: tuple[str, ...]) -> None:
    log.step = max(log.step, step)
    if members and members != log.members:
        log.members = members
        log.say(f"step {step:3} by {', '.join(members)}")
    log.news.set()


@asyncrpc.on_loop
def tell_accuracy(accuracy: float) -> None:
    log.accuracies.append(accuracy)
    log.news.set()


class Fleet:
    """The processes of the workers, by name."""

    def __init__(self, contact: str, options: argparse.Namespace) -> None:
        self.running: dict[str, ForkServerProcess] = {}
        self._given = contact, options
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def start(self, name: str) -> None:
        process = self._context.Process(target=run_worker, args=(name, *self._given))
        process.start()
        self.running[name] = process

    async def disturb(self, options: argparse.Namespace) -> None:
        """Kill the oldest worker, then start a new one; again and again."""
        every = options.steps // (2 * options.kills + 2)
        for number in range(options.kills):
            await log.until_step(every * (2 * number + 1))
            name = next(iter(self.running))
            log.say(f"kill -9 {name}")
            os.kill(self.running.pop(name).pid or 0, signal.SIGKILL)
            await log.until_step(every * (2 * number + 2))
            name = f"w{options.workers + number}"
            log.say(f"start {name}")
            self.start(name)
            await log.until_here(name)

    async def wait(self) -> None:
        await log.until_end()
        for name, process in self.running.items():
            if name not in log.members:
                process.kill()  # it came when the others had done all
            await asyncio.to_thread(process.join)


async def report(changes: asyncrpc.MemberChanges) -> None:
    async for change in changes:
        log.say(f"{change.member.name}: {change.kind}")


async def lead(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        contact = f"uds://{Path(folder) / 'first'}"
        network = asyncrpc.NetworkOptions(listen=(contact,))
        async with asyncrpc.Worker(
            "first",
            rendezvous={"first": contact},
            options=asyncrpc.Options(network=network),
        ) as worker:
            reporting = asyncio.create_task(report(worker.members_changed()))
            fleet = Fleet(contact, options)
            for number in range(options.workers):
                fleet.start(f"w{number}")
            await fleet.disturb(options)
            await fleet.wait()
        await reporting
    accuracies = {f"{accuracy:.1%}" for accuracy in log.accuracies}
    print(f"accuracy at {len(log.accuracies)} workers: {', '.join(accuracies)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train while workers come and go.")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    asyncrpc.run(lead(parser.parse_args()))


if __name__ == "__main__":
    main()
