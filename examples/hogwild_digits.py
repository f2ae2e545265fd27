"""Train one network in many processes at once, without any lock: Hogwild.

    $ python examples/hogwild_digits.py --mode shared --processes 4 --oversubscribe

Every process learns to read handwritten digits, each in an order of its own.  By
`--mode shared` all write to the same parameters all the time; by `--mode periodic` each
has a network of its own, sends its `state_dict` through a queue now and then, and gets
back, in the same memory, the mean of all.

`--oversubscribe` trains again with as many threads in each as there are cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn

from asyncrpc.multiprocessing import Queue, launch

TRAINING, BATCH, EXCHANGE_EVERY = 1440, 48, 5  # of the 1,797 digits; digits; batches
Queues = tuple[Queue[Any], Queue[Any], list[Queue[Any]]]  # to start, states, answers


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels and labels, mixed alike in every process."""
    dataset, chance = load_digits(), torch.Generator().manual_seed(0)
    order = torch.randperm(len(dataset.target), generator=chance)
    pixels = torch.tensor(dataset.data, dtype=torch.float32) / 16
    return pixels[order], torch.tensor(dataset.target)[order]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))


def work(
    rank: int, model: nn.Module, queues: Queues, options: argparse.Namespace
) -> float:
    """Train, from when all are ready; return the seconds that it took."""
    (gate, states, answers), is_periodic = queues, options.mode == "periodic"
    pixels, labels = (part[:TRAINING] for part in digits())
    model = network() if is_periodic else model
    order = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states.put(rank)  # ready
    gate.get()
    begun = time.perf_counter()
    for step in range(1, options.epochs * TRAINING // BATCH + 1):
        batch = torch.randint(TRAINING, (BATCH,), generator=order)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
        torch.autograd.backward(loss)
        optimizer.step()
        if is_periodic and step % EXCHANGE_EVERY == 0:
            states.put(model.state_dict())
            model.load_state_dict(answers[rank].get())
    states.put(None)
    return time.perf_counter() - begun


def average(model: nn.Module, states: Queue[Any], answers: list[Queue[Any]]) -> None:
    """Return to all processes the mean of what they have sent, until they are done."""
    while (batch := [states.get() for _ in answers])[0] is not None:
        for name, own in model.state_dict().items():
            own.copy_(torch.stack([state[name] for state in batch]).mean(0))
            for state in batch:
                state[name].copy_(own)
        for queue, state in zip(answers, batch, strict=True):
            queue.put(state)  # in memory that is shared


def train(options: argparse.Namespace, threads: int) -> tuple[float, float]:
    """Train a new network; return the seconds, and the accuracy on other digits."""
    model, count = network(), options.processes
    queues: Queues = Queue(), Queue(), [Queue() for _ in range(count)]
    with launch(
        *(work, (model, queues, options), count),
        method="forkserver",
        threads_per_process=threads,
        join=False,
    ) as processes:
        for rank in [queues[1].get() for _ in range(count)]:
            queues[0].put(rank)  # all are ready
        average(model, *queues[1:])
        took_s = max(processes.wait())
    pixels, labels = (part[TRAINING:] for part in digits())
    return took_s, (model(pixels).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train without a lock.")
    parser.add_argument("--mode", choices=("shared", "periodic"), default="shared")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--oversubscribe", action="store_true")
    options = parser.parse_args()
    cores, table = multiprocessing.cpu_count(), Table(title=f"Hogwild, {options.mode}")
    for title in ("threads each", "time", "digits/s", "test accuracy"):
        table.add_column(title, justify="right")
    multiprocessing.set_forkserver_preload(["torch", "sklearn.datasets", "asyncrpc"])
    shares = [max(1, cores // options.processes), cores]
    for threads in shares[: 1 + options.oversubscribe]:
        took_s, right = train(options, threads)
        rate = options.processes * options.epochs * TRAINING / took_s
        table.add_row(str(threads), f"{took_s:.2f} s", f"{rate:,.0f}", f"{right:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
