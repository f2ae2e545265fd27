"""Combine torch's DistributedDataParallel with layers on another worker.

    $ python examples/embedding_trainers.py --trainers 2

A model of two parts reads handwritten digits.  Its embeddings, the large part, are on
the worker `tables`.  The dense part is small, so each trainer has a copy of it, which
torch's DistributedDataParallel keeps equal over a process group of the trainers:

    trainer0: pixels ->  embeddings  -> dense part -> loss     the dense parts average
    trainer1: pixels ->  on `tables` -> dense part -> loss     gradients, over gloo

`backward` runs both in one pass: DDP's hooks fire for the dense part while gradients
for the embeddings go to `tables`.  One optimizer then steps on the two of them.

At the end one process trains the whole model on the same steps, and is compared.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import asyncrpc
from asyncrpc import RRef, autograd
from asyncrpc.multiprocessing import launch
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer

HELD_OUT = 360  # of the 1,797 digits
PIXELS, LEVELS = 64, 17  # of each digit; of each pixel
EXACT = torch.float64  # so that the comparison shows a mistake, and no rounding
Parameters = Sequence[nn.Parameter | RRef[nn.Parameter]]
Batch = tuple[torch.Tensor, torch.Tensor]  # rows of the table (n, 64); labels (n,)


def embeddings(width: int) -> nn.Module:
    """Make the part on `tables`: a row for each level of each pixel.

    Of an image 64 rows add up.  Gradients are sparse: only rows that were looked up.
    """
    torch.manual_seed(0)
    start = 0.02 * torch.randn(PIXELS * LEVELS, width, dtype=EXACT)
    return nn.EmbeddingBag.from_pretrained(start, freeze=False, mode="sum", sparse=True)


def dense(width: int) -> nn.Module:
    """Make the part that every trainer has a copy of."""
    torch.manual_seed(1)
    layers = (nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(*layers).to(EXACT)


def digits() -> tuple[Batch, Batch]:
    """Return the digits to learn from, and those held out, as rows of the table."""
    dataset = load_digits()
    rows = torch.tensor(dataset.data).long() + LEVELS * torch.arange(PIXELS)
    labels = torch.tensor(dataset.target)
    mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    known, held_out = mixed[HELD_OUT:], mixed[:HELD_OUT]
    return (rows[known], labels[known]), (rows[held_out], labels[held_out])


def batches(options: argparse.Namespace, epoch: int) -> Iterator[list[Batch]]:
    """Yield steps: a batch for each trainer, all of the same size."""
    rows, labels = digits()[0]
    mixed = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
    each = options.batch_size // options.trainers
    for step in torch.split(mixed, each * options.trainers):
        if len(step) == each * options.trainers:  # the last may have less
            yield [(rows[part], labels[part]) for part in torch.split(step, each)]


def groups(
    options: argparse.Namespace, table: Parameters, dense_part: Parameters
) -> list[dict[str, Any]]:
    """Return an optimizer's groups of parameters.

    DDP averages the dense gradients.  Those of the embeddings add up on `tables`, a
    step for each trainer, so each step is so much shorter.
    """
    short = {"params": table, "lr": options.lr / options.trainers}
    return [{"params": dense_part}, short]


async def train(
    index: int, options: argparse.Namespace, table: RemoteModule, barrier: RRef[Any]
) -> AsyncIterator[tuple[float, list[torch.Tensor]]]:
    """Be a trainer; yield the loss of each epoch, and the dense parameters.

    torch's collectives block until all trainers have come, so they run in threads.
    """
    await asyncio.to_thread(
        distributed.init_process_group, "gloo", rank=index, world_size=options.trainers
    )
    try:
        copy = dense(options.width)
        model = await asyncio.to_thread(DistributedDataParallel, copy)
        parameters = groups(
            options,
            await table.remote_parameters(),
            [RRef(parameter) for parameter in model.parameters()],
        )
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=options.lr)
        for epoch in range(options.epochs):
            losses = []
            for step in batches(options, epoch):
                rows, labels = step[index]
                async with autograd.context() as ctx:
                    bags = await table.forward_async(rows)
                    scores = await asyncio.to_thread(model, bags)
                    loss = nn.functional.cross_entropy(scores, labels)
                    await autograd.backward(ctx, [loss])
                    await optimizer.step(ctx)
                # DDP has waited for every trainer's forward pass; this waits for their
                # steps on the table, before anyone looks up rows again.
                await barrier.rpc_async().wait()
                losses.append(loss.item())
            values = [parameter.detach().clone() for parameter in copy.parameters()]
            yield sum(losses) / len(losses), values
    finally:
        await asyncio.to_thread(distributed.destroy_process_group)


def train_in_one_process(options: argparse.Namespace) -> list[torch.Tensor]:
    """Train without any of this, on all trainers' digits; return the parameters."""
    table, dense_part = embeddings(options.width), dense(options.width)
    parameters = [*dense_part.parameters(), *table.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=options.lr)
    for epoch in range(options.epochs):
        for step in batches(options, epoch):
            rows, labels = (torch.cat(parts) for parts in zip(*step, strict=True))
            loss = nn.functional.cross_entropy(dense_part(table(rows)), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def apart(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Return the largest difference of two lists of tensors."""
    pairs = zip(some, others, strict=True)
    return max((tensor - other).abs().max().item() for tensor, other in pairs)


async def drive(options: argparse.Namespace, console: Console) -> None:
    """Make the embeddings, let the trainers train, and check; on `tables`."""
    worker = asyncrpc.current_worker()
    table = RemoteModule("tables", embeddings, (options.width,))
    barrier = asyncrpc.remote("tables", asyncio.Barrier, args=(options.trainers,))
    losses: list[list[float]] = [[] for _ in range(options.trainers)]
    dense_parts: dict[int, list[torch.Tensor]] = {}
    shown = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())

    async def follow(index: int) -> None:
        peer = worker.peer(f"trainer{index}")
        async with aclosing(
            peer.stream(train, index, options, table, barrier)
        ) as items:
            async for loss, dense_parts[index] in items:
                losses[index].append(loss)
                text = f"epoch {len(losses[index])}, loss {loss:.4f}"
                bars.update(bar, advance=1 / options.trainers, description=text)

    with Progress(*shown, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=options.epochs)
        begun = time.perf_counter()
        await asyncio.gather(*map(follow, range(options.trainers)))
        took_s = time.perf_counter() - begun
    rows = Table("epoch", *(f"loss, trainer{index}" for index in range(len(losses))))
    for epoch, each in enumerate(zip(*losses, strict=True), start=1):
        rows.add_row(f"{epoch}", *(f"{loss:.4f}" for loss in each))
    console.print(rows)
    copy = dense(options.width)
    for parameter, value in zip(copy.parameters(), dense_parts[0], strict=True):
        parameter.data = value
    held_out, labels = digits()[1]
    right = copy(await table.forward_async(held_out)).argmax(1) == labels
    alone = await asyncio.to_thread(train_in_one_process, options)
    whole = [*dense_parts[0], *(await table.state_dict()).values()]
    lines = Table("accuracy", "time", "trainers apart", "from one process", title="end")
    between = max(apart(dense_parts[0], part) for part in dense_parts.values())
    accuracy = f"{right.float().mean().item():.1%}"
    lines.add_row(
        accuracy, f"{took_s:.1f} s", f"{between:g}", f"{apart(whole, alone):.1g}"
    )
    console.print(lines)


async def work(rank: int, options: argparse.Namespace) -> None:
    """Be one of the workers: what each process runs."""
    name = f"trainer{rank - 1}" if rank else "tables"
    async with asyncrpc.init_rpc(name):
        if name == "tables":
            await drive(options, Console())
        await asyncrpc.shutdown()  # trainers serve until `tables` is here too


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DistributedDataParallel and RPC.")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=60, help="of all trainers")
    parser.add_argument("--width", type=int, default=32, help="of the embeddings")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--quick", action="store_true", help="two epochs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.epochs = 2
    if not 1 <= arguments.trainers <= arguments.batch_size:
        parser.error("--trainers is at least 1, and at most --batch-size")
    # One process imports this, the last with its first optimizer if nobody else did;
    # the others are forked from it.
    multiprocessing.set_forkserver_preload(
        ["asyncrpc", "rich.progress", "sklearn.datasets", "torch._dynamo"]
    )
    launch(work, args=(arguments,), nprocs=1 + arguments.trainers, method="forkserver")
