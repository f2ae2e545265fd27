"""What `xla_mnist.py` and `xla_resnet50.py` share: ranks, steps, rates and their table.

    $ python examples/xla_mnist.py --fake_data --ddp
    $ python examples/xla_resnet50.py --fake_data --ddp

Every rank is a process with a worker.  A network is trained in two ways, from the same
start: the *native step* computes a backward pass, reduces all gradients at once, and
steps; *DDP* is `asyncrpc.ddp.DistributedDataParallel`.  With fake data blocks of steps
alternate between the two, so that both meet the same noise, and the images per second
of one rank are compared as torch_xla's documentation compares them.

The device is what is here: one of torch_xla, TorchTPU's, or the host.

Source: test/test_train_mp_mnist.py and test/test_train_mp_imagenet.py of torch_xla, of
which options and training are; docs/source/perf/ddp.md there, of which the table is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median, pstdev, quantiles
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import asyncrpc
from asyncrpc import devices, xla
from asyncrpc.ddp import DistributedDataParallel
from asyncrpc.multiprocessing import launch

TRAINING = 1440  # of the 1,797 digits; the others are for the test
WARM_UP = 4  # steps that compile: the optimizer's state and DDP's buckets are new then
COLUMNS = ("mean", "median", "90 %", "std", "CV")
Batch = tuple[torch.Tensor, torch.Tensor]  # (batch, channels, size, size) and (batch,)


@dataclass(frozen=True)
class Program:
    """What is trained, and what torch_xla's documentation says of it.

    Attributes:
        name: of the network.
        network: makes it.
        channels: of an image.
        weight_decay: for SGD.
        compared: which figure tells the two ways apart.
        reported: the gap that torch_xla's DDP had by it.
    """

    name: str
    network: Callable[[], nn.Module]
    channels: int
    weight_decay: float
    compared: str
    reported: float


class Rates(NamedTuple):
    """Images per second, as torch_xla's table has them."""

    mean: float
    median: float
    high: float  # 90 % are not above it
    std: float
    cv: float

    @classmethod
    def of(cls, rates: Sequence[float]) -> Rates:
        """Sum up at least two rates."""
        mean, std = fmean(rates), pstdev(rates)
        high = quantiles(rates, n=10, method="inclusive")[-1]
        return cls(mean, median(rates), high, std, std / mean)


def gap(native: Rates, ddp: Rates, compared: str) -> float:
    """Return by which share DDP is behind the native step; less than 0: ahead."""
    at = COLUMNS.index(compared)
    return 1 - ddp[at] / native[at]


# --- two ways to train ----------------------------------------------------------------


class Native:
    """Backward pass, gradients of all ranks, step."""

    label = "native step"

    def __init__(
        self,
        module: nn.Module,
        group: asyncrpc.Group,
        program: Program,
        options: argparse.Namespace,
    ) -> None:
        self.module, self.device = module, options.device
        self.group = group
        self.optimizer = torch.optim.SGD(
            module.parameters(),
            lr=options.lr * group.size,  # as torch_xla's programs scale it
            momentum=options.momentum,
            weight_decay=program.weight_decay,
        )
        self.is_by_device = self.device.startswith("xla") and (
            group.size == 1 or xla.device_type() == "TPU"
        )

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch of the host; runs where devices may be used."""
        images, labels = (part.to(self.device) for part in batch)
        self.optimizer.zero_grad()
        return functional.cross_entropy(self.module(images), labels)

    async def step(self, batch: Batch) -> None:
        """Train on a batch."""

        def passes() -> None:
            self.loss(batch).backward()  # type: ignore[no-untyped-call]  # torch's
            if self.is_by_device:
                xla.optimizer_step(self.optimizer)

        await devices.run(passes)
        if not self.is_by_device:
            await xla.reduce_gradients(self.optimizer, self.group)
            await devices.run(self.optimizer.step)

    async def settled(self) -> None:
        """Wait until the device has done all that it was given."""
        parameter = next(self.module.parameters()).detach()
        await devices.run(parameter.cpu)

    async def accuracy(self, tests: Batch) -> float:
        """Return the share of test images that are recognized: each rank takes some."""
        images, labels = (test[self.group.rank :: self.group.size] for test in tests)

        def right() -> float:
            self.module.eval()
            with torch.no_grad():
                guess = self.module(images.to(self.device)).argmax(1).cpu()
            self.module.train()
            return float((guess == labels).sum())

        counted = torch.tensor([await devices.run(right), len(labels)])
        correct, total = (await self.group.all_reduce(counted)).tolist()
        return float(correct / total)


class Parallel(Native):
    """DistributedDataParallel: gradients are reduced by the backward pass."""

    label = "DDP"

    async def wrap(self) -> None:
        """Meet the other ranks."""
        # Running means stay each rank's own, as they do without DDP.
        self.module = await DistributedDataParallel(
            self.module, self.group, broadcast_buffers=False
        )

    async def step(self, batch: Batch) -> None:
        """Train on a batch."""
        assert isinstance(self.module, DistributedDataParallel)
        await self.module.backward(partial(self.loss, batch))
        await devices.run(self.optimizer.step)


async def ways(
    program: Program, group: asyncrpc.Group, options: argparse.Namespace
) -> list[Native]:
    """Return the ways that are asked for, each with a network of the same start."""
    chosen_ways: list[Native] = []
    for kind in (Native, Parallel) if options.ddp else (Native,):

        def make() -> nn.Module:
            torch.manual_seed(1)
            return program.network().to(options.device)

        module = await devices.run(xla.with_rng_lock, make)
        way = kind(module, group, program, options)
        if isinstance(way, Parallel):
            await way.wrap()
        else:
            await xla.broadcast_master_param(module, group)
        chosen_ways.append(way)
    return chosen_ways


# --- what they train on ---------------------------------------------------------------


def fake(program: Program, options: argparse.Namespace, rank: int) -> Batch:
    """Return a batch of noise: the same at each step, of its own for each rank."""
    size = options.image_size
    draw = xla.generator(1, replica=rank)
    shape = (options.batch_size, program.channels, size, size)
    labels = torch.randint(10, (options.batch_size,), generator=draw)
    return torch.randn(shape, generator=draw), labels


def digits(program: Program, options: argparse.Namespace) -> tuple[Batch, Batch]:
    """Return scikit-learn's digits, drawn larger: for training and for the test."""
    data = load_digits()
    mixed = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.data, dtype=torch.float32)[mixed].view(-1, 1, 8, 8)
    size = (options.image_size, options.image_size)
    larger = functional.interpolate(pixels / 16, size, mode="bilinear")
    images = (larger - larger.mean()) / larger.std()
    images = images.expand(-1, program.channels, -1, -1)
    labels = torch.tensor(data.target)[mixed]
    return (images[:TRAINING], labels[:TRAINING]), (
        images[TRAINING:],
        labels[TRAINING:],
    )


def batches(
    training: Batch, group: asyncrpc.Group, epoch: int, batch_size: int
) -> Iterator[Batch]:
    """Yield this rank's part of each batch of an epoch, all of the same size."""
    images, labels = training
    draw = torch.Generator().manual_seed(epoch)
    order = torch.randperm(TRAINING, generator=draw)
    for mixed in torch.split(order, batch_size * group.size):
        own = mixed[group.rank :: group.size]
        if len(own) == batch_size:  # XLA would compile anew for another
            yield images[own], labels[own]


# --- one rank -------------------------------------------------------------------------


async def measure(
    chosen_ways: list[Native],
    batch: Batch,
    options: argparse.Namespace,
    advance: Callable[[], None],
) -> dict[str, list[float]]:
    """Return the images per second of each block of steps, by the way of the step."""
    rates: dict[str, list[float]] = {way.label: [] for way in chosen_ways}
    for way in chosen_ways:
        for _ in range(WARM_UP):
            await way.step(batch)
        await way.settled()
    for block in range(_blocks(options)):
        # One goes first, then the other: what drifts is shared out.
        for way in chosen_ways if block % 2 else reversed(chosen_ways):
            begun_s = time.perf_counter()
            for _ in range(options.log_steps):
                await way.step(batch)
            await way.settled()
            took_s = time.perf_counter() - begun_s
            rates[way.label].append(options.batch_size * options.log_steps / took_s)
            advance()
    return rates


async def learn(
    chosen_ways: list[Native],
    program: Program,
    options: argparse.Namespace,
    advance: Callable[[], None],
) -> dict[str, list[float]]:
    """Return the accuracy after each epoch, by the way of the step."""
    training, tests = digits(program, options)
    accuracies: dict[str, list[float]] = {way.label: [] for way in chosen_ways}
    for epoch in range(options.num_epochs):
        for way in chosen_ways:
            for batch in batches(training, way.group, epoch, options.batch_size):
                await way.step(batch)
            accuracies[way.label].append(await way.accuracy(tests))
            advance()
    return accuracies


def wake_tpu() -> None:
    """Have torch know the device of TorchTPU."""
    # TorchTPU takes it for the size of a pod, and this process for a part of one.
    os.environ.pop("WORLD_SIZE", None)
    with contextlib.suppress(RuntimeError):
        torch.device("tpu")
        return
    # Over a PJRT plugin, without a TPU, it does not announce itself.
    loader: Any = importlib.import_module("torch_tpu._loader")
    loader._init_device("tpu")  # noqa: SLF001  (there is no public way)


async def work(rank: int, program: Program, options: argparse.Namespace) -> None:
    """Be one rank: what each process runs."""
    console = Console(quiet=rank != 0)
    if options.device == "xla":
        options.device = xla.device()
    worker = asyncrpc.Worker(
        f"rank{rank}",
        rendezvous="xla://" if options.pjrt_distributed else "env://",
        options=asyncrpc.Options(
            devices=asyncrpc.DeviceOptions(names=(options.device,))
        ),
    )
    if options.device == "tpu":
        wake_tpu()
    async with worker, asyncrpc.Group(worker) as group:
        chosen_ways = await ways(program, group, options)
        console.print(_description(program, chosen_ways[0], options))
        shown = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        hidden = rank != 0 or not console.is_terminal
        with Progress(*shown, console=console, disable=hidden) as bars:
            bar = bars.add_task("training", total=_parts(options) * len(chosen_ways))

            def advance() -> None:
                bars.advance(bar)

            if options.fake_data:
                batch = fake(program, options, group.rank)
                rates = await measure(chosen_ways, batch, options, advance)
            else:
                accuracies = await learn(chosen_ways, program, options, advance)
    if rank == 0 and options.fake_data:
        show_rates(console, program, rates)
    elif rank == 0:
        show_accuracies(console, accuracies)
        draw(program, accuracies, options)


def _description(program: Program, native: Native, options: argparse.Namespace) -> str:
    count = sum(parameter.numel() for parameter in native.module.parameters())
    size, ranks = options.image_size, native.group.size
    meet = "xla://" if options.pjrt_distributed else "env://"
    how = "the device" if native.is_by_device else "the host"
    return (
        f"{program.name} of {count:,} parameters, {size} x {size} images, "
        f"{options.batch_size} a step and rank; {ranks} ranks on {options.device}, "
        f"which met by {meet}; the native step reduces by {how}"
    )


def _parts(options: argparse.Namespace) -> int:
    if not options.fake_data:
        return int(options.num_epochs)
    return _blocks(options)


def _blocks(options: argparse.Namespace) -> int:
    blocks: int = options.num_epochs * options.steps // options.log_steps
    return max(2, blocks)  # one has no deviation


# --- what is shown --------------------------------------------------------------------


def show_rates(
    console: Console, program: Program, rates: dict[str, list[float]]
) -> None:
    """Print torch_xla's table, and its gap beside this one."""
    table = Table("way", *COLUMNS, title="images per second of a rank")
    summaries = {label: Rates.of(those) for label, those in rates.items()}
    for label, summary in summaries.items():
        table.add_row(label, *(f"{figure:,.2f}" for figure in summary))
    console.print(table)
    if len(summaries) == 2:
        native, ddp = summaries.values()
        mine = gap(native, ddp, program.compared)
        console.print(
            f"DDP is behind by {mine:.2%} ({program.compared}); torch_xla's was by "
            f"{program.reported:.2%}, half of which is {program.reported / 2:.2%}",
            highlight=False,
        )


def show_accuracies(console: Console, accuracies: dict[str, list[float]]) -> None:
    """Print how well test images are recognized after each epoch."""
    table = Table("epoch", *accuracies, title="accuracy on test images")
    for epoch, row in enumerate(zip(*accuracies.values(), strict=True), 1):
        table.add_row(f"{epoch}", *(f"{figure:.2%}" for figure in row))
    console.print(table)


def draw(
    program: Program,
    accuracies: dict[str, list[float]],
    options: argparse.Namespace,
) -> None:
    """Save the curves as a picture."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (label, those), style in zip(accuracies.items(), ("o-", "x--"), strict=False):
        axes.plot(range(1, len(those) + 1), those, style, label=label)
    axes.set(xlabel="epoch", ylabel="accuracy on test images")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(f"{program.name} on digits, {options.ranks} ranks, {options.device}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(options.plot, dpi=120)


# --- the program ----------------------------------------------------------------------


def arguments(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return the options that both programs have, with defaults of one of them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fake_data", action="store_true", help="measure, on noise")
    parser.add_argument("--ddp", action="store_true", help="DDP, too")
    parser.add_argument(
        "--pjrt_distributed", action="store_true", help="ranks meet by xla://"
    )
    parser.add_argument("--num_epochs", type=int, default=18)
    parser.add_argument("--steps", type=int, help="of an epoch of fake data")
    parser.add_argument("--log_steps", type=int, help="of which a rate is taken")
    parser.add_argument("--batch_size", type=int, help="of one rank")
    parser.add_argument("--image_size", type=int)
    parser.add_argument("--lr", type=float, help="times the number of ranks")
    parser.add_argument("--momentum", type=float)
    parser.add_argument(
        "--ranks", type=int, help="processes; 2 where the runtime knows of one"
    )
    parser.add_argument(
        "--device", choices=("auto", "xla", "tpu", "cpu"), default="auto"
    )
    parser.add_argument("--plot", help="where to draw the accuracies")
    parser.set_defaults(**defaults)
    return parser


def run(program: Program, options: argparse.Namespace) -> None:
    """Start the ranks, and wait for them."""
    if options.device == "auto":
        here = [
            device
            for device, module in (("xla", "torch_xla"), ("tpu", "torch_tpu"))
            if importlib.util.find_spec(module) is not None
        ]
        options.device = (here or ["cpu"])[0]
        print(f"device {options.device}: of xla, tpu and cpu the first that is here")
    if options.ranks is None:
        options.ranks = max(2, _chips(options.device))
    arguments = (program, options)
    if options.device == "xla":
        xla.launch(work, arguments, nprocs=options.ranks)
    else:
        launch(work, arguments, nprocs=options.ranks)


def _chips(device: str) -> int:
    if device != "xla" or xla.device_type() != "TPU":
        return 1
    internals: Any = importlib.import_module("torch_xla._internal.tpu")
    count: int = internals.num_local_processes()
    return count
