"""Train a model that is split over processes, and watch it.

    $ python examples/train_split_model.py

Four processes on this host.  `stage0` and `stage1` own one half each of a network that
reads handwritten digits.  `trainer0` and `trainer1` share both, and have half of the
digits each.  A step goes forward through the stages, backward through the stages, and
ends in an optimizer that steps on them; all of it is awaited:

    images -> stage0 -> stage1 -> loss        (the stages are remote, the loss is here)

With `--fail-at 50` a trainer raises at its 50th step, and everything ends with it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

import asyncrpc
from asyncrpc import RRef, autograd
from asyncrpc.errors import ProcessFailedError
from asyncrpc.multiprocessing import launch
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer

NAMES = ("stage0", "stage1", "trainer0", "trainer1")  # by rank
EACH, HELD_OUT = 718, 361  # of the 1,797 digits


class Front(nn.Sequential):
    """The first half of the network, for `(n, 64)` pixels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())


class Back(nn.Sequential):
    """The second half, which gives `(n, 10)` scores."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def digits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pixels and labels: for each trainer, and those held out."""
    dataset = load_digits()
    pixels = torch.tensor(dataset.data, dtype=torch.float32) / 16
    mixed = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    parts = torch.split(mixed, [EACH, EACH, HELD_OUT])
    return [(pixels[part], torch.tensor(dataset.target)[part]) for part in parts]


async def parameters_of(module: RRef[nn.Module]) -> list[RRef[nn.Parameter]]:
    """Return references to the parameters of a module; called on its owner."""
    return [RRef(parameter) for parameter in (await module.to_here()).parameters()]


async def train(index: int, options: Any, shared: Any, show: Any = None) -> float:
    """Train the shared stages on this trainer's digits; return the last loss."""
    stage0, stage1, barrier = shared
    pixels, labels = digits()[index]
    parameters = await stage0.remote_parameters()
    parameters += await asyncrpc.rpc_async("stage1", parameters_of, args=(stage1,))
    optimizer = await DistributedOptimizer(torch.optim.Adam, parameters, lr=0.002)
    order, steps, losses = torch.Generator().manual_seed(index), 0, [0.0]
    for _ in range(options.epochs):
        losses.clear()
        mixed = torch.randperm(EACH, generator=order)
        for batch in torch.split(mixed, options.batch_size):
            steps += 1
            if index == 1 and steps == options.fail_at:
                raise RuntimeError(f"told to fail at step {steps}")
            async with autograd.context() as ctx:
                hidden = await stage0.forward_async(pixels[batch])
                scores = await stage1.rpc_async().forward(hidden)
                loss = nn.functional.cross_entropy(scores, labels[batch])
                await autograd.backward(ctx, [loss])
                # The barrier is asyncio's own, on another worker.  Parameters must not
                # change while a trainer is between its forward and backward pass, ...
                await barrier.rpc_async().wait()
                await optimizer.step(ctx)
                await barrier.rpc_async().wait()  # ... or be used while they change
            losses.append(loss.item())
            if show is not None:
                show(steps, sum(losses) / len(losses))
    return sum(losses) / len(losses)


async def drive(options: argparse.Namespace, console: Console) -> None:
    """Make the stages, let both trainers train them, and say how it went."""
    pids = await asyncio.gather(*(asyncrpc.rpc_async(to, os.getpid) for to in NAMES))
    pairs = zip(NAMES, pids, strict=True)
    console.print("processes:", ", ".join(f"{name} {pid}" for name, pid in pairs))
    stage0 = RemoteModule("stage0/cpu", Front)
    stage1 = asyncrpc.remote("stage1", Back)
    shared = (stage0, stage1, asyncrpc.remote("stage0", asyncio.Barrier, args=(2,)))
    steps_each = -(-EACH // options.batch_size)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=options.epochs * steps_each)

        def show(steps: int, loss: float) -> None:
            epoch = -(-steps // steps_each)
            text = f"epoch {epoch:2} of {options.epochs}, loss {loss:.4f}"
            bars.update(bar, completed=steps, description=text)
            if not console.is_terminal and steps % steps_each == 0:
                console.print(text)

        begun = time.perf_counter()
        losses = await asyncio.gather(
            train(0, options, shared, show),
            asyncrpc.rpc_async("trainer1", train, args=(1, options, shared)),
        )
        speed = 2 * EACH * options.epochs / (time.perf_counter() - begun)
    pixels, labels = digits()[2]
    scores = await stage1.rpc_async().forward(await stage0.forward_async(pixels))
    accuracy = (scores.argmax(1) == labels).float().mean().item()
    table = Table("training loss", "images/s", "accuracy on held-out digits")
    table.add_row(f"{sum(losses) / 2:.4f}", f"{speed:,.0f}", f"{accuracy:.1%}")
    console.print(table)


async def work(rank: int, options: argparse.Namespace) -> None:
    """Be one of the four workers: what each process runs."""
    async with asyncrpc.init_rpc(NAMES[rank]):
        if NAMES[rank] == "trainer0":
            await drive(options, Console())
        await asyncrpc.shutdown()  # waits for the others, and serves them meanwhile


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model split over processes.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="three epochs")
    parser.add_argument(
        "--fail-at", type=int, metavar="STEP", help="see what a failure looks like"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.epochs = 3
    # One process imports this, the last with its first optimizer if nobody else did;
    # the others are forked from it.
    multiprocessing.set_forkserver_preload(
        ["asyncrpc", "rich.progress", "sklearn.datasets", "torch._dynamo"]
    )
    try:
        launch(work, args=(arguments,), nprocs=len(NAMES), method="forkserver")
    except ProcessFailedError as error:
        sys.exit(f"training failed: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")
