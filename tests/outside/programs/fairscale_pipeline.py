"""fairscale: a pipeline over three workers, trained with distributed autograd."""

import torch
import torch.distributed.autograd as dist_autograd
from fairscale.experimental.nn.distributed_pipeline import (
    DistributedLoss,
    DistributedPipeline,
    PipelineModulesGraph,
)
from spawning import run_ranks, show
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

WORKERS = 3


class Layer(nn.Module):
    """A layer that is the same on every run."""

    def __init__(self, seed, inputs, outputs):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def train():
    sizes = [(1, 8, 16), (2, 16, 16), (0, 16, 1)]
    graph = PipelineModulesGraph()
    layers = [
        RemoteModule(f"w{seed}/cpu", Layer, (seed, inputs, outputs), {})
        for seed, inputs, outputs in sizes
    ]
    graph.add_sequence(layers, [0])
    # Its checkpoints run a pass inside the pass: in torch such gradients are lost.
    pipe = DistributedPipeline(graph, chunks=4, checkpoint="never")
    optimizer = DistributedOptimizer(torch.optim.SGD, pipe.parameter_rrefs(), lr=0.05)
    loss_of = DistributedLoss(nn.MSELoss)
    torch.manual_seed(7)
    x, y = torch.randn(16, 8), torch.rand(16, 1)
    losses = []
    for _ in range(5):
        with dist_autograd.context() as context_id:
            loss = loss_of(pipe(x), rpc.RRef(y))
            loss.backward(context_id)
            optimizer.step(context_id)
            losses.append(round(loss.to_here().item(), 4))
    show("losses", losses)


def main(rank):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=WORKERS)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    run_ranks(main, WORKERS)
