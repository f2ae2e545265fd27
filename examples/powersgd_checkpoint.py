"""Save a training run that uses PowerSGD, load it, and go on as if nothing had been.

    $ python examples/powersgd_checkpoint.py

What PowerSGD has not sent yet is part of the training, and differs between the ranks.
So each rank saves a file: the parameters, the optimizer, the hook and its state.  The
run goes on, and then once more, from the files, with a new module: the losses are the
same to the last bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import asyncrpc
from asyncrpc.ddp import DistributedDataParallel, PowerSGDState, powerSGD_hook
from asyncrpc.multiprocessing import launch

BEFORE, AFTER = 20, 10  # steps


class SimpleModel(nn.Module):
    """Two layers, from `(n, 24)` to `(n, 12)`."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(24, 24)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc2(self.relu(self.fc1(x)))
        return result


class Training:
    """A module, its optimizer and its hook, at one rank."""

    def __init__(self, rank: int, state: PowerSGDState, hook: Any) -> None:
        self.rank, self.state, self.hook = rank, state, hook
        self.model = SimpleModel()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    async def run(self, group: asyncrpc.Group, steps: range) -> list[float]:
        """Train for some steps; return the loss of each at this rank."""
        ddp_model = await DistributedDataParallel(self.model, group)
        ddp_model.register_comm_hook(self.state, self.hook)
        losses = []
        for step in steps:
            draw = torch.Generator().manual_seed(1000 * self.rank + step)
            x = torch.randn(32, 24, generator=draw)
            loss = nn.functional.mse_loss(ddp_model(x), x[:, :12].sin())
            self.optimizer.zero_grad()
            await ddp_model.backward(loss)
            self.optimizer.step()
            losses.append(loss.item())
        ddp_model.close()
        return losses

    def save(self, path: Path) -> None:
        """Write all of it; the state leaves its group out, and says so."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "comm_hook": self.hook,
            "comm_hook_state": self.state,
        }
        torch.save(parts, path)

    @classmethod
    def load(cls, rank: int, path: Path) -> Training:
        """Read all of it; the next module gives the state a group."""
        with torch.serialization.safe_globals([PowerSGDState, powerSGD_hook]):
            parts = torch.load(path, weights_only=True)
        training = cls(rank, parts["comm_hook_state"], parts["comm_hook"])
        training.model.load_state_dict(parts["model"])
        training.optimizer.load_state_dict(parts["optimizer"])
        return training


async def work(rank: int, folder: str) -> None:
    """Be one rank: what each process runs."""
    torch.manual_seed(0)
    path = Path(folder) / f"checkpoint-{rank}.pt"
    async with asyncrpc.init_rpc(f"worker{rank}"):
        group = asyncrpc.Group(asyncrpc.current_worker())
        state = PowerSGDState(None, start_powerSGD_iter=5)
        first = Training(rank, state, powerSGD_hook)
        await first.run(group, range(BEFORE))
        first.save(path)
        went_on = await first.run(group, range(BEFORE, BEFORE + AFTER))
        again = Training.load(rank, path)
        resumed = await again.run(group, range(BEFORE, BEFORE + AFTER))
        await asyncrpc.shutdown()
    same = "the same" if went_on == resumed else "NOT the same"
    rate, before, after = state.compression_stats()
    print(
        f"rank {rank}: loss {went_on[-1]:.6f} without a break, {resumed[-1]:.6f} "
        f"resumed; all {AFTER} are {same}\n"
        f"rank {rank}: {before} elements compressed to {after}, rate {rate:.2f}\n",
        end="",  # written at once: other ranks print, too
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Save and load a run with PowerSGD.")
    parser.add_argument("--ranks", type=int, default=2)
    with tempfile.TemporaryDirectory() as folder:
        ranks = parser.parse_args().ranks
        # One process imports what the others need; they are forked from it.
        multiprocessing.set_forkserver_preload(["asyncrpc", "torch._dynamo"])
        launch(work, args=(folder,), nprocs=ranks, method="forkserver")
