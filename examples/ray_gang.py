"""Train the split model of train_split_model.py on a Ray cluster, and survive a loss.

    $ python examples/ray_gang.py                 # on nodes that it makes on this host
    $ python examples/ray_gang.py --address auto  # on the cluster of this host
    $ python examples/ray_gang.py --kill-in 2     # kill a trainer in the second round

Ray places four workers: two own one half each of the network, two train it.  They call
each other as always; Ray has no part in that.  When a worker is lost, all four start
again as a new generation.  References to the old one fail, so the driver makes the two
halves anew, from the parameters that it saved after the last round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

# The scripts lie in one folder, which Ray passes on to the workers.
from train_split_model import NAMES, Back, Front, digits, train

import asyncrpc
from asyncrpc import RRef
from asyncrpc.errors import AsyncRpcError
from asyncrpc.nn import RemoteModule
from asyncrpc.ray import Gang, RestartLimits

State = dict[str, torch.Tensor]


async def state_of(module: RRef[Any]) -> State:
    """Return the parameters of a module; called on its owner."""
    state: State = (await module.to_here()).state_dict()
    return state


async def load(module: RRef[Any], state: State) -> None:
    """Set the parameters of a module; called on its owner."""
    (await module.to_here()).load_state_dict(state)


async def one_round(gang: Gang, saved: list[State], options: Any) -> list[State]:
    """Train for a few epochs, from the saved parameters; return the new ones."""
    stage0 = RemoteModule("stage0/cpu", Front)
    stage1 = gang.peer(1).remote(Back)
    halves = [stage0.get_module_rref(), stage1]
    if saved:
        for rank, (half, state) in enumerate(zip(halves, saved, strict=True)):
            await gang.peer(rank).call(load, half, state)
    shared = (stage0, stage1, gang.peer(0).remote(asyncio.Barrier, 2))
    trainers = [
        asyncio.create_task(gang.peer(2 + index).call(train, index, options, shared))
        for index in range(2)
    ]
    if options.kill:
        os.kill(gang.workers[3].pid, signal.SIGKILL)  # the nodes are on this host
    losses = await asyncio.gather(*trainers)
    print(f"generation {gang.generation}: loss {sum(losses) / 2:.4f}", flush=True)
    return [
        await gang.peer(rank).call(state_of, half) for rank, half in enumerate(halves)
    ]


def accuracy(saved: list[State]) -> float:
    """Return how many of the digits that were held out the model reads."""
    front, back = Front(), Back()
    front.load_state_dict(saved[0])
    back.load_state_dict(saved[1])
    pixels, labels = digits()[2]
    return float((back(front(pixels)).argmax(1) == labels).float().mean())


async def drive(rounds: int, kill_in: int) -> None:
    saved: list[State] = []
    limits = RestartLimits(restarts_max=3, backoff_s=0.1)
    async with Gang([{"CPU": 1}] * 4, names=NAMES, limits=limits) as gang:
        for worker in gang.workers:
            print(f"{worker.name}: process {worker.pid} on node {worker.node_id[:8]}")
        done, generation = 0, gang.generation
        while done < rounds:
            is_struck = generation == 1 and done + 1 == kill_in
            options = SimpleNamespace(
                epochs=4, batch_size=32, fail_at=None, kill=is_struck
            )
            try:
                saved = await one_round(gang, saved, options)
            except AsyncRpcError as error:
                print(f"generation {generation} is lost: {type(error).__name__}")
                generation = await gang.changed(generation)
            else:
                done += 1
    print(f"accuracy on held-out digits: {accuracy(saved):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a split model on Ray.")
    parser.add_argument("--address", help="of a Ray cluster; else it makes one")
    parser.add_argument("--rounds", type=int, default=3, help="of four epochs each")
    parser.add_argument("--kill-in", type=int, default=0, metavar="ROUND")
    options = parser.parse_args()
    address, nodes = options.address, None
    if address is None:
        small = {"num_cpus": 2, "object_store_memory": 100_000_000}
        head = {**small, "include_dashboard": False}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        nodes.add_node(**small)
        address = nodes.address
    ray.init(address=address, log_to_driver=False)
    try:
        asyncrpc.run(drive(options.rounds, options.kill_in))
    finally:
        ray.shutdown()
        if nodes is not None:
            nodes.shutdown()


if __name__ == "__main__":
    main()
