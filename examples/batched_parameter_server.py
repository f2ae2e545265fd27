"""Answer all trainers of a parameter server with one update of the model.

    $ python examples/batched_parameter_server.py --trainers 3

Each trainer has a copy of the model and a share of the handwritten digits.  It sends
its gradients to the server, and gets new parameters back.  The server has two ways:

    one by one   every call updates the model, and its answer is a copy of it
    batched      a call waits, without a thread, until all trainers have called;
                 then one update with the mean of their gradients answers them all

Both get as many gradients, of as many digits; the table says what each made of them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import threading
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import asyncrpc
from asyncrpc import RRef
from asyncrpc.multiprocessing import launch

HELD_OUT = 360  # of the 1,797 digits
WARM_STEPS = 3  # before the clock runs: connections, shared memory, torch's own
Digits = tuple[torch.Tensor, torch.Tensor]  # pixels (n, 64) and labels (n,)
Tensors = list[torch.Tensor]  # one for each parameter


class Net(nn.Sequential):
    """Reads digits: `(n, 64)` pixels to `(n, 10)` scores."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        super().__init__(
            *(nn.Linear(64, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 10),
        )


class Server:
    """Keeps the model; made on `ps`, called by the trainers."""

    def __init__(self, trainers: int, width: int, lr: float) -> None:
        self.model = Net(width)
        self.updates = 0
        self._trainers = trainers
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self._one = threading.Lock()
        self._waiting: list[tuple[Tensors, asyncio.Future[Tensors]]] = []

    @asyncrpc.async_execution
    async def update_and_fetch_model(self, gradients: Tensors) -> Tensors:
        """Take a trainer's gradients; answer when there are those of all."""
        answer: asyncio.Future[Tensors] = asyncio.get_running_loop().create_future()
        self._waiting.append((gradients, answer))
        if len(self._waiting) == self._trainers:
            batch, self._waiting = self._waiting, []
            # On the loop itself: whoever could be kept waiting waits for this.
            self._update([sent for sent, _ in batch])
            for _, future in batch:
                if not future.done():  # its caller may have gone
                    # The model itself, uncopied: it changes when all have called
                    # again, and so have got this.
                    future.set_result(self._parameters())
        return await answer

    def update_alone(self, gradients: Tensors) -> Tensors:
        """Update the model with one trainer's gradients, and answer it."""
        with self._one:  # plain functions run in threads
            self._update([gradients])
            return [parameter.clone() for parameter in self._parameters()]

    def parameters(self) -> Tensors:
        """Return a copy of the parameters."""
        with self._one:
            return [parameter.clone() for parameter in self._parameters()]

    def result(self, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[int, float]:
        """Return how many updates there were, and the model's accuracy."""
        right = self.model(pixels).argmax(1) == labels
        return self.updates, right.float().mean().item()

    def _parameters(self) -> Tensors:
        return [parameter.detach() for parameter in self.model.parameters()]

    def _update(self, gradients: list[Tensors]) -> None:
        parts = zip(*gradients, strict=True)
        for parameter, each in zip(self.model.parameters(), parts, strict=True):
            parameter.grad = sum(each[1:], start=each[0]) / len(each)
        self._optimizer.step()
        self.updates += 1


def digits(trainers: int) -> list[Digits]:
    """Return the digits that are held out, then a share for each trainer."""
    dataset = load_digits()
    pixels = torch.tensor(dataset.data, dtype=torch.float32) / 16
    labels = torch.tensor(dataset.target)
    mixed = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    shares = mixed[HELD_OUT:].tensor_split(trainers)
    return [(pixels[part], labels[part]) for part in (mixed[:HELD_OUT], *shares)]


async def train(
    index: int, options: argparse.Namespace, server: RRef[Server], way: str, steps: int
) -> None:
    """Be a trainer: send `steps` gradients; `ps` calls this."""
    pixels, labels = digits(options.trainers)[1 + index]
    model, chance = Net(options.width), torch.Generator().manual_seed(index)
    parameters = list(model.parameters())
    remote = server.rpc_async()
    update = remote.update_and_fetch_model if way == "batched" else remote.update_alone
    newest: Tensors = await remote.parameters()
    for _ in range(steps):
        for parameter, value in zip(parameters, newest, strict=True):
            parameter.data = value
        batch = torch.randint(len(pixels), (options.batch_size,), generator=chance)
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
        newest = await update(list(torch.autograd.grad(loss, parameters)))


@dataclass(frozen=True, slots=True, order=True)
class Round:
    """What a way of answering made of `gradients` gradients."""

    took_s: float
    gradients: int
    updates: int
    accuracy: float


async def measure(options: argparse.Namespace, way: str, steps: int) -> Round:
    """Train a new model in one of the two ways."""
    sizes = (options.trainers, options.width, options.lr)
    server: RRef[Server] = asyncrpc.remote("ps", Server, args=sizes)
    begun = time.perf_counter()
    await asyncio.gather(
        *(
            asyncrpc.rpc_async(
                f"trainer{index}", train, args=(index, options, server, way, steps)
            )
            for index in range(options.trainers)
        )
    )
    took_s = time.perf_counter() - begun
    updates, accuracy = await server.rpc_async().result(*digits(options.trainers)[0])
    return Round(took_s, steps * options.trainers, updates, accuracy)


async def drive(options: argparse.Namespace, console: Console) -> None:
    """Train both ways, in turns, and print them side by side; on `ps`."""
    columns = (
        "server",
        "gradients",
        "updates",
        "time",
        "gradients/s",
        "held-out digits",
    )
    table = Table(*columns)
    results: dict[str, list[Round]] = {"one by one": [], "batched": []}
    shown = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*shown, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("warming up", total=options.rounds)
        await measure(options, "batched", WARM_STEPS)
        for number in range(1, options.rounds + 1):  # in turns: the host changes
            for way, rounds in results.items():
                bars.update(bar, description=f"round {number}, {way}")
                rounds.append(await measure(options, way, options.steps))
            bars.advance(bar)
    for way, rounds in results.items():
        middle = sorted(rounds)[len(rounds) // 2]
        counts = (f"{middle.gradients}", f"{middle.updates}", f"{middle.took_s:.2f} s")
        speed = f"{middle.gradients / middle.took_s:,.0f}"
        table.add_row(way, *counts, speed, f"{middle.accuracy:.1%}")
    size = sum(parameter.numel() for parameter in Net(options.width).parameters())
    console.print(
        f"{options.trainers} trainers, a model of {size:,} parameters; median times"
    )
    console.print(table)


async def work(rank: int, options: argparse.Namespace) -> None:
    """Be one of the workers: what each process runs."""
    name = f"trainer{rank - 1}" if rank else "ps"
    async with asyncrpc.init_rpc(name):
        if name == "ps":
            await drive(options, Console())
        await asyncrpc.shutdown()  # trainers serve until `ps` is here too


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Update a model in batches.")
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of each trainer")
    parser.add_argument("--rounds", type=int, default=3, help="that are timed")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=512, help="of the hidden layers")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    if arguments.trainers < 1 or arguments.rounds < 1:
        parser.error("--trainers and --rounds are at least 1")
    # One process imports this, the last with its first optimizer if nobody else did;
    # the others are forked from it.
    multiprocessing.set_forkserver_preload(
        ["asyncrpc", "rich.progress", "sklearn.datasets", "torch._dynamo"]
    )
    launch(work, args=(arguments,), nprocs=1 + arguments.trainers, method="forkserver")
