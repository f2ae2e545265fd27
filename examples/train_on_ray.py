"""Train the split model of train_split_model.py on a Ray cluster, and survive a loss.

    $ python examples/train_on_ray.py                 # on nodes that it makes here
    $ python examples/train_on_ray.py --address auto  # on the cluster of this host
    $ python examples/train_on_ray.py --kill-in 2     # kill a trainer in the 2nd round

Ray reserves four bundles, and a worker starts in each: two own one half each of the
network, two train it.  They call each other as always; Ray has no part in that.  When
a worker is lost, all four start again.  References to the former ones fail, so the
program makes the two halves anew, from the parameters that it saved after the last
round.
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
from asyncrpc import RestartLimits, RRef
from asyncrpc.errors import AsyncRpcError
from asyncrpc.nn import RemoteModule

State = dict[str, torch.Tensor]


async def state_of(module: RRef[Any]) -> State:
    """Return the parameters of a module; called on its owner."""
    state: State = (await module.to_here()).state_dict()
    return state


async def load(module: RRef[Any], state: State) -> None:
    """Set the parameters of a module; called on its owner."""
    (await module.to_here()).load_state_dict(state)


async def one_round(
    cluster: asyncrpc.Cluster, saved: list[State], options: Any
) -> list[State]:
    """Train for a few epochs, from the saved parameters; return the new ones."""
    stages, trainers = cluster.peers[:2], cluster.peers[2:]
    stage0 = RemoteModule("stage0/cpu", Front)
    halves = [stage0.get_module_rref(), stages[1].remote(Back)]
    for peer, half, state in zip(stages, halves, saved, strict=False):
        await peer.call(load, half, state)
    shared = (stage0, halves[1], stages[0].remote(asyncio.Barrier, 2))
    training = [
        asyncio.create_task(peer.call(train, index, options, shared))
        for index, peer in enumerate(trainers)
    ]
    if options.kill:  # the nodes are on this host
        os.kill(await trainers[1].call(os.getpid), signal.SIGKILL)
    losses = await asyncio.gather(*training)
    print(f"loss {sum(losses) / 2:.4f}", flush=True)
    return [
        await peer.call(state_of, half)
        for peer, half in zip(stages, halves, strict=True)
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
    limits = RestartLimits(restarts_max=3, backoff_s=0.1, together=True)
    bundles = [{"CPU": 1.0}] * 4
    async with asyncrpc.Cluster.ray(bundles, names=NAMES, restart=limits) as cluster:
        done = 0
        while done < rounds:
            options = SimpleNamespace(
                epochs=4, batch_size=32, fail_at=None, kill=done + 1 == kill_in
            )
            try:
                saved = await one_round(cluster, saved, options)
            except AsyncRpcError as error:
                print(f"round {done + 1} is lost: {type(error).__name__}")
                kill_in = 0
                await cluster.ready()
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
