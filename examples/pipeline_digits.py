"""Train a network in two stages on two processes, and watch the pipeline fill.

    $ python examples/pipeline_digits.py

`stage0` and `stage1` own one half each of a network that reads handwritten digits;
`trainer` has the digits.  A batch is cut into micro-batches, so that both stages work
at the same time: while `stage1` has the first one, `stage0` is at the second.

The network is trained once by each schedule.  At the start and the end of a batch one
stage waits for the other: that part of the time, the bubble, is measured and printed
beside what theory says.  By `1f1b` a stage holds the activations of fewer micro-batches
than by `gpipe`, and the gradients are the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import asyncrpc
from asyncrpc.multiprocessing import launch
from asyncrpc.nn import ActionKind, Pipeline, PipelineReport, RemoteModule
from asyncrpc.optim import DistributedOptimizer

NAMES = ("trainer", "stage0", "stage1")  # by rank
SCHEDULES = ("gpipe", "1f1b")
TRAINING, COLUMNS = 1440, 64  # of the 1,797 digits; of the drawing
WIDTH = 768
MEANING = """\
held     micro-batches whose activations each stage held at once
bubble   part of the time in which stages were idle
balance  what that would be if messages took no time
formula  what it would be if, besides, all stages were equally fast"""


def layer(inputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, WIDTH), nn.ReLU()]


class Front(nn.Sequential):
    """The first half of the network, for `(n, 64)` pixels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*layer(64), *layer(WIDTH), *layer(WIDTH))


class Back(nn.Sequential):
    """The second half, which gives `(n, 10)` scores."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(*layer(WIDTH), *layer(WIDTH), nn.Linear(WIDTH, 10))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels and labels, mixed; the first are for training."""
    dataset = load_digits()
    mixed = torch.randperm(
        len(dataset.target), generator=torch.Generator().manual_seed(0)
    )
    pixels = torch.tensor(dataset.data, dtype=torch.float32) / 16
    return pixels[mixed], torch.tensor(dataset.target)[mixed]


def drawn(report: PipelineReport) -> str:
    """Draw a step: forward passes in blue, backward passes in green."""
    lines = [line.split(" ", 1) for line in report.timeline(COLUMNS).splitlines()]
    return "\n".join(f"{name} {coloured(cells)}" for name, cells in lines)


def coloured(cells: str) -> str:
    colours = ["green" if cell.isupper() else "blue" for cell in cells]
    return "".join(
        f"[{colour}]{cell}[/]" if cell.isalpha() else cell
        for colour, cell in zip(colours, cells, strict=True)
    )


@dataclass
class Trained:
    """What came of training by one schedule."""

    schedule: str
    loss: float  # of the last epoch
    accuracy: float  # on digits that it has not seen
    digits_per_s: float  # without the first epoch, in which everything is imported
    report: PipelineReport  # of a step in the middle of the field

    def row(self) -> list[str]:
        held = ", ".join(str(stage.held_max) for stage in self.report.stages)
        bubbles = (self.report.bubble, self.report.balance, self.report.formula)
        return [
            self.schedule,
            f"{self.loss:.4f}",
            f"{self.accuracy:.1%}",
            f"{self.digits_per_s:,.0f}",
            held,
            *(f"{bubble:.1%}" for bubble in bubbles),
        ]

    def caption(self) -> str:
        took_ms = {
            kind: statistics.fmean(
                1e3 * span.duration_s
                for stage in self.report.stages
                for span in stage.spans
                if span.action.kind is kind
            )
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        }
        return (
            f"A step in {1e3 * self.report.duration_s:.0f} ms; forward passes (a, b, "
            f"...) take {took_ms[ActionKind.FORWARD]:.1f} ms, backward passes (A, B, "
            f"...) {took_ms[ActionKind.BACKWARD]:.1f} ms:"
        )


async def train(
    schedule: str, options: argparse.Namespace, console: Console
) -> Trained:
    """Train a new network by one schedule."""
    pixels, labels = digits()
    stages = [RemoteModule("stage0", Front), RemoteModule("stage1", Back)]
    pipe = await Pipeline(stages, schedule=schedule, chunks=options.chunks)
    optimizer = await DistributedOptimizer(
        torch.optim.Adam, await pipe.remote_parameters(), lr=0.001
    )
    order, reports, begun = torch.Generator().manual_seed(0), [], 0.0
    for epoch in range(options.epochs):
        if epoch == 1:
            begun = time.perf_counter()
        losses = []
        mixed = torch.randperm(TRAINING, generator=order)
        for batch in torch.split(mixed, options.batch_size):
            result = await pipe.train_step(
                pixels[batch], labels[batch], functional.cross_entropy, optimizer
            )
            losses.append(result.loss.item())
            reports.append(result.report)
        loss = statistics.fmean(losses)
        console.print(f"{schedule}: epoch {epoch + 1:2}, loss {loss:.4f}")
    speed = (options.epochs - 1) * TRAINING / (time.perf_counter() - begun)
    scores = await pipe.forward(pixels[TRAINING:])
    accuracy = (scores.argmax(1) == labels[TRAINING:]).float().mean().item()
    reports.sort(key=lambda report: report.bubble)
    return Trained(schedule, loss, accuracy, speed, reports[len(reports) // 2])


async def drive(options: argparse.Namespace, console: Console) -> None:
    """Train by each schedule, and compare."""
    names = "schedule loss accuracy digits/s held bubble balance formula"
    table = Table(*names.split())
    for schedule in SCHEDULES:
        trained = await train(schedule, options, console)
        console.print(trained.caption())
        console.print(drawn(trained.report) + "\n", highlight=False)
        table.add_row(*trained.row())
    console.print(table)
    console.print(MEANING, highlight=False)


async def work(rank: int, options: argparse.Namespace) -> None:
    """Be one of the three workers: what each process runs."""
    async with asyncrpc.init_rpc(NAMES[rank]):
        if NAMES[rank] == "trainer":
            await drive(options, Console())
        await asyncrpc.shutdown()  # waits for the others, and serves them meanwhile


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a network in two stages.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=480)
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches")
    parser.add_argument("--quick", action="store_true", help="three epochs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.epochs = 3
    # One process imports this, the last with its first optimizer if nobody else did;
    # the others are forked from it.
    multiprocessing.set_forkserver_preload(
        ["asyncrpc", "rich.progress", "sklearn.datasets", "torch._dynamo"]
    )
    launch(work, args=(arguments,), nprocs=len(NAMES), method="forkserver")
