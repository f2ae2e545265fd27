"""Train until told to end; save then, and go on from there at the next start.

    $ asyncrpc run --nproc 2 examples/preemptible_training.py      # or torchrun
    $ srun --nodes 2 python examples/preemptible_training.py       # or sbatch, requeued

Every process runs the same program, whatever starts it, and trains the same network on
its share of each batch.  When the scheduler announces the end (SIGTERM), all finish the
same step, rank 0 saves it, and all exit with code 75: "start me again".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import asyncrpc
from asyncrpc import ddp

TRAINING, BATCH, PRINTED_EVERY = 1440, 120, 50  # of the 1,797 digits; in a step; steps


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels and labels, mixed in the same way in every process."""
    dataset = load_digits()
    mixed = torch.randperm(
        len(dataset.target), generator=torch.Generator().manual_seed(0)
    )
    pixels = torch.tensor(dataset.data, dtype=torch.float32)[mixed] / 16
    return pixels, torch.tensor(dataset.target)[mixed]


def batch_of(step: int, rank: int, size: int) -> torch.Tensor:
    """Return which digits a rank has in a step: the same after a restart."""
    draw = torch.Generator().manual_seed(step)
    return torch.randperm(TRAINING, generator=draw)[:BATCH][rank::size]


class Training:
    """What is saved: the network, its optimizer, and the number of steps made."""

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        self.path, self.steps = path, 0
        self.network = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        )
        self.network.append(nn.Linear(256, 10))
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), lr=0.1, momentum=0.9
        )
        if path.exists():
            saved: Any = torch.load(path, weights_only=True)
            self.steps = saved["steps"]
            self.network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def save(self) -> None:
        """Save all of it, or nothing: a file under another name takes its place."""
        saved = {"steps": self.steps, "network": self.network.state_dict()}
        new = self.path.with_suffix(".new")
        torch.save(saved | {"optimizer": self.optimizer.state_dict()}, new)
        new.replace(self.path)
        print(f"saved step {self.steps}", flush=True)


async def train(worker: asyncrpc.Worker, options: argparse.Namespace) -> None:
    """Train to the end, or until told to end."""
    training, group = Training(options.checkpoint), asyncrpc.Group(worker)
    print(f"rank {worker.rank} starts at step {training.steps}", flush=True)
    model = await ddp.DistributedDataParallel(training.network, group)
    pixels, labels = digits()
    preemption = asyncrpc.Preemption(worker, grace_s=options.grace, lockstep=True)
    if worker.rank == 0:
        preemption.on_preempt(training.save)
    async with preemption:
        while training.steps < options.steps:
            async with preemption.step():  # what is saved is the state after a step
                own = batch_of(training.steps, group.rank, group.size)
                loss = functional.cross_entropy(model(pixels[own]), labels[own])
                training.optimizer.zero_grad()
                await model.backward(loss)
                training.optimizer.step()
                training.steps += 1
            if worker.rank == 0 and training.steps % PRINTED_EVERY == 0:
                print(f"step {training.steps}: loss {loss.item():.4f}", flush=True)
        if worker.rank == 0:
            right = model(pixels[TRAINING:]).argmax(1) == labels[TRAINING:]
            print(f"accuracy on held-out digits: {right.float().mean():.1%}")
            training.save()
        await worker.shutdown(graceful=True)


async def main(options: argparse.Namespace) -> None:
    """Be one of the workers, as the launcher's environment says."""
    async with asyncrpc.Worker() as worker:
        await train(worker, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train; save and leave when told to.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint", type=Path, default=Path("training.pt"))
    parser.add_argument(
        "--grace", type=float, default=25.0, help="seconds from SIGTERM to the end"
    )
    asyncrpc.run(main(parser.parse_args()))
