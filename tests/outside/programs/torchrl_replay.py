"""torchrl: a remote replay buffer, which a collector fills and a trainer samples."""

import torch
from spawning import run_ranks, show
from tensordict import TensorDict
from torch.distributed import rpc
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import RemoteTensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.writers import RoundRobinWriter

NAMES = ("buffer", "collector", "trainer")
STEPS = 64


class Buffer(RemoteTensorDictReplayBuffer):
    def __init__(self, capacity):
        super().__init__(
            storage=LazyTensorStorage(capacity),
            sampler=RandomSampler(),
            writer=RoundRobinWriter(),
            batch_size=16,
        )


def transitions(first):
    steps = torch.arange(first, first + 16, dtype=torch.float32)
    return TensorDict(
        {"observation": steps[:, None].expand(16, 4), "reward": steps}, [16]
    )


def fill(buffer):
    owner = buffer.owner()
    for first in range(0, STEPS, 16):
        rpc.rpc_sync(owner, Buffer.extend, args=(buffer, transitions(first)))
    rpc.rpc_sync(owner, Buffer.add, args=(buffer, transitions(STEPS)[0]))


def train():
    buffer = rpc.remote("buffer", Buffer, args=(1000,))
    rpc.remote("collector", fill, args=(buffer,)).to_here()
    futures = [
        rpc.rpc_async("buffer", Buffer.sample, args=(buffer,)) for _ in range(20)
    ]
    batches = [future.wait() for future in futures]
    rewards = torch.cat([batch["reward"] for batch in batches])
    show("batches of", {tuple(batch.batch_size) for batch in batches})
    show("rewards are steps", bool(((rewards >= 0) & (rewards <= STEPS)).all()))
    matches = [(b["observation"][:, 0] == b["reward"]).all().item() for b in batches]
    show("observations match", all(matches))
    size = rpc.rpc_sync("buffer", Buffer.__len__, args=(buffer.to_here(),))
    show("items", size)


def main(rank):
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES))
    if rank == 2:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    run_ranks(main, len(NAMES))
