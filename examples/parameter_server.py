"""Train one model by several trainers that do not wait for each other.

    $ python examples/parameter_server.py --trainers 4

`ps` owns the model; each trainer has a share of the handwritten digits.  A trainer goes
forward and backward through the model on `ps` in an autograd context of its own, so its
gradients never mix with another's, and then steps:

    trainer0: pixels ->                    -> loss, backward, step
    trainer1: pixels -> the model on `ps`  -> loss, backward, step
    trainer2: pixels ->                    -> loss, backward, step

No barrier, no lock: while one computes a gradient, others change the parameters.  That
is Hogwild, and `allow_stale` says that it is meant.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import asyncrpc
from asyncrpc import autograd
from asyncrpc.multiprocessing import launch
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer

HELD_OUT = 360  # of the 1,797 digits
Digits = tuple[torch.Tensor, torch.Tensor]  # pixels (n, 64) and labels (n,)


class Net(nn.Sequential):
    """Reads digits: `(n, 64)` pixels to `(n, 10)` scores."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@dataclass(frozen=True, slots=True)
class Epoch:
    """How an epoch of a trainer went: its mean loss, and counts from its beginning."""

    loss: float
    steps: int
    images: int


def digits(trainers: int) -> list[Digits]:
    """Return the digits that are held out, then a share for each trainer."""
    dataset = load_digits()
    pixels = torch.tensor(dataset.data, dtype=torch.float32) / 16
    labels = torch.tensor(dataset.target)
    mixed = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    shares = mixed[HELD_OUT:].tensor_split(trainers)
    return [(pixels[part], labels[part]) for part in (mixed[:HELD_OUT], *shares)]


async def train(
    index: int, options: argparse.Namespace, net: RemoteModule
) -> AsyncIterator[Epoch]:
    """Be a trainer, and say how each epoch went; `ps` calls this as a stream."""
    pixels, labels = digits(options.trainers)[1 + index]
    parameters = await net.remote_parameters()
    optimizer = await DistributedOptimizer(torch.optim.SGD, parameters, lr=options.lr)
    order, steps = torch.Generator().manual_seed(index), 0
    for epoch in range(1, options.epochs + 1):
        losses = []
        mixed = torch.randperm(len(pixels), generator=order)
        for batch in torch.split(mixed, options.batch_size):
            async with autograd.context() as ctx:
                scores = await net.forward_async(pixels[batch])
                loss = nn.functional.cross_entropy(scores, labels[batch])
                await autograd.backward(ctx, [loss])
                await optimizer.step(ctx, allow_stale=True)
            losses.append(loss.item())
        steps += len(losses)
        yield Epoch(sum(losses) / len(losses), steps, epoch * len(pixels))


async def drive(options: argparse.Namespace, console: Console) -> None:
    """Make the model, let the trainers train it, and say how it went; on `ps`."""
    worker = asyncrpc.current_worker()
    net = RemoteModule("ps", Net)  # it can be sent to others, like any reference
    table = Table("trainer", "images/s", "steps", "training loss")
    shown = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())

    async def follow(name: str, index: int) -> tuple[Epoch, float]:
        bar = bars.add_task(name, total=options.epochs)
        begun = time.perf_counter()
        stream = worker.peer(name).stream(train, index, options, net)
        async with aclosing(stream) as epochs:
            async for epoch in epochs:
                text = f"{name}, {epoch.steps:4} steps, loss {epoch.loss:.4f}"
                bars.update(bar, advance=1, description=text)
        return epoch, epoch.images / (time.perf_counter() - begun)

    with Progress(*shown, console=console, disable=not console.is_terminal) as bars:
        names = [f"trainer{index}" for index in range(options.trainers)]
        begun = time.perf_counter()
        results = await asyncio.gather(*map(follow, names, range(options.trainers)))
        took_s = time.perf_counter() - begun
    for name, (last, speed) in zip(names, results, strict=True):
        table.add_row(name, f"{speed:,.0f}", f"{last.steps}", f"{last.loss:.4f}")
    console.print(table)
    pixels, labels = digits(options.trainers)[0]
    scores = await net.forward_async(pixels)
    accuracy = (scores.argmax(1) == labels).float().mean().item()
    steps = sum(last.steps for last, _ in results)
    console.print(f"{steps} steps on one model in {took_s:.1f} s")
    console.print(f"{accuracy:.1%} of {HELD_OUT} held-out digits read")


async def work(rank: int, options: argparse.Namespace) -> None:
    """Be one of the workers: what each process runs."""
    name = f"trainer{rank - 1}" if rank else "ps"
    async with asyncrpc.init_rpc(name):
        if name == "ps":
            await drive(options, Console())
        await asyncrpc.shutdown()  # trainers serve until `ps` is here too


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train by a parameter server.")
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--quick", action="store_true", help="two epochs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.epochs = 2
    if arguments.trainers < 1:
        parser.error("--trainers is at least 1")
    # One process imports this, the last with its first optimizer if nobody else did;
    # the others are forked from it.
    multiprocessing.set_forkserver_preload(
        ["asyncrpc", "rich.progress", "sklearn.datasets", "torch._dynamo"]
    )
    launch(work, args=(arguments,), nprocs=1 + arguments.trainers, method="forkserver")
