"""Train with every communication hook, and compare how the loss falls.

    $ python examples/ddp_hooks.py --plot ddp_hooks.png

Two processes train the same network on handwritten digits, each on its half of every
batch.  A hook decides what is sent for the gradients: all of them, halves, or, by
PowerSGD, two thin matrices for each.  `post-local SGD` sends gradients for a quarter of
the steps, then every fourth time the parameters in their place; `noop` sends nothing,
so the two networks drift apart: it shows what the others are there for.
"""

from __future__ import annotations

import argparse
import multiprocessing
from typing import Any

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import asyncrpc
from asyncrpc import ddp
from asyncrpc.multiprocessing import launch

TRAINING, BATCH, STEPS = 1440, 120, 12  # of the 1,797 digits; in a step; in an epoch
POST_LOCAL, AVERAGE_EVERY = "post-local SGD", 4


def hooks(steps: int) -> dict[str, tuple[Any, Any]]:
    """Return the state and the function of each hook, by name."""
    start = max(2, steps // 10)
    powers = [ddp.PowerSGDState(None, rank, start) for rank in (1, 4, 1, 4)]
    local = ddp.PostLocalSGDState(None, None, steps // 4)
    local.post_local_gradient_allreduce = False
    return {
        "allreduce": (None, ddp.allreduce_hook),
        "fp16": (None, ddp.fp16_compress_hook),
        "bf16": (None, ddp.bf16_compress_hook),
        "PowerSGD": (powers[0], ddp.powerSGD_hook),
        "PowerSGD, rank 4": (powers[1], ddp.powerSGD_hook),
        "PowerSGD in bf16": (powers[2], ddp.bf16_compress_wrapper(ddp.powerSGD_hook)),
        "batched, rank 4": (powers[3], ddp.batched_powerSGD_hook),
        POST_LOCAL: (local, ddp.post_localSGD_hook),
        "noop": (None, ddp.noop_hook),
    }


async def train(group: asyncrpc.Group, name: str, epochs: int) -> list[float]:
    """Train a new network with one hook; return the loss of each epoch."""
    dataset = load_digits()
    draw = torch.Generator().manual_seed(0)
    mixed = torch.randperm(len(dataset.target), generator=draw)
    pixels = torch.tensor(dataset.data, dtype=torch.float32)[mixed] / 16
    labels = torch.tensor(dataset.target)[mixed]
    torch.manual_seed(0)
    hidden = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    network = nn.Sequential(*hidden, nn.Linear(256, 10))
    model = await ddp.DistributedDataParallel(network, group)
    state, hook = hooks(epochs * STEPS)[name]
    model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    losses = torch.zeros(epochs)
    for epoch in range(epochs):
        for step, batch in enumerate(torch.split(torch.randperm(TRAINING), BATCH), 1):
            own = batch[group.rank :: group.size]
            loss = functional.cross_entropy(model(pixels[own]), labels[own])
            optimizer.zero_grad()
            await model.backward(loss)
            optimizer.step()
            losses[epoch] += loss.detach() / STEPS
            if name == POST_LOCAL and step % AVERAGE_EVERY == 0:
                for parameter in model.parameters():
                    await group.all_reduce(parameter.data, "avg")
    await group.all_reduce(losses, "avg")
    right = model(pixels[TRAINING:]).argmax(1) == labels[TRAINING:]
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    first, second = await group.all_gather(flat)
    rate = state.compression_stats().rate if isinstance(state, ddp.PowerSGDState) else 1
    accuracy, apart = right.float().mean(), (first - second).abs().max()
    if group.rank == 0:
        print(f"{name:18}{losses[-1]:8.4f}{accuracy:10.1%}{apart:14.1e}{rate:18.1f}")
    model.close()
    return losses.tolist()


async def work(rank: int, options: argparse.Namespace) -> None:
    """Be one of the two ranks: what each process runs."""
    async with asyncrpc.init_rpc(f"worker{rank}"):
        group = asyncrpc.Group(asyncrpc.current_worker())
        curves = {name: await train(group, name, options.epochs) for name in hooks(0)}
        await asyncrpc.shutdown()
    if rank == 0:
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for number, (name, losses) in enumerate(curves.items()):
            style = ("-", "--", ":", "-.")[number % 4]
            axes.plot(range(1, len(losses) + 1), losses, style, label=name)
        axes.set(yscale="log", xlabel="epoch", ylabel="loss, mean over both ranks")
        axes.set_title("Two processes on handwritten digits, by communication hook")
        axes.legend()
        figure.savefig(options.plot, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train with every communication hook.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--plot", default="ddp_hooks.png", help="where to draw the losses"
    )
    print("hook                  loss  accuracy   ranks apart  elements less by")
    # One process imports what the others need; they are forked from it.
    multiprocessing.set_forkserver_preload(
        ["asyncrpc", "sklearn.datasets", "torch._dynamo"]
    )
    launch(work, args=(parser.parse_args(),), nprocs=2, method="forkserver")
