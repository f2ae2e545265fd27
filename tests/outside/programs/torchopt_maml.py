"""TorchOpt: meta-learning, with the inner loops of the tasks on two workers."""

import torch
import torchopt
import torchopt.distributed as todist
from spawning import run_ranks, show
from torch import nn
from torch.nn.functional import mse_loss


def inner_loop(model, x, y):
    """Adapt the model to one task, and return the loss after that."""
    optimizer = torchopt.MetaSGD(model, lr=0.1)
    for _ in range(3):
        optimizer.step(mse_loss(model(x), y))
    return mse_loss(model(x), y)


@todist.auto_init_rpc(lambda: None)
def train():
    if todist.get_rank() != 0:
        return
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    meta_optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(4):
        tasks = [(torch.randn(6, 4), torch.rand(6, 1)) for _ in range(4)]
        meta_optimizer.zero_grad()
        with todist.autograd.context() as context_id:
            futures = [
                todist.remote_async_call(
                    inner_loop, args=(model, x, y), partitioner=number % 2
                )
                for number, (x, y) in enumerate(tasks)
            ]
            loss = torch.stack([torch.stack(f.wait()).sum() for f in futures]).mean()
            todist.autograd.backward(context_id, loss)
        meta_optimizer.step()
        losses.append(round(loss.item(), 4))
    total = todist.remote_sync_call(
        torch.sum,
        args=(torch.arange(12.0),),
        partitioner=todist.batch_partitioner,
        reducer=todist.sum_reducer,
    )
    show("losses", losses, "total", total.item())


def main(_rank):
    train()


if __name__ == "__main__":
    run_ranks(main, 2)
