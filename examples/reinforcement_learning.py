"""Learn to balance a pole, with the poles in other processes.

    $ python examples/reinforcement_learning.py
    $ python examples/reinforcement_learning.py --world-size 3 --seed 7

`agent` owns the policy, and each `observer` a CartPole of gymnasium.  In a round every
observer plays one episode, all at the same time, and asks the agent what to do in every
state; it knows the agent by a reference:

    agent -- run_episode(reference) --> observer1, observer2, ...
    agent <-- select_action(state) ---- each of them, at every step

Then the agent takes one step of REINFORCE on what it was asked and what came of it.  A
seed gives one run: no action depends on which observer asked first.

Source: R. J. Williams, "Simple Statistical Gradient-Following Algorithms for
Connectionist Reinforcement Learning", Machine Learning 8, 1992 (REINFORCE).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import sys
import time
from collections.abc import Sequence
from statistics import fmean

import gymnasium
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import asyncrpc
from asyncrpc import RRef
from asyncrpc.errors import ProcessFailedError
from asyncrpc.multiprocessing import launch

SOLVED = 475.0  # what CartPole-v1 asks for; 500 is the most there is
LAST = 40  # episodes whose mean is shown


class Agent:
    """The policy, and what it was asked in this round."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.gamma = options.gamma
        self.policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), options.lr)
        observers = range(options.world_size - 1)
        seeds = (options.seed + observer for observer in observers)
        self.draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.asked: list[list[tuple[torch.Tensor, int]]] = [[] for _ in observers]

    # A coroutine function runs on the loop, where one thing happens at a time: what all
    # observers use needs no lock.
    async def select_action(self, observer: int, state: torch.Tensor) -> int:
        """Draw an action for a `(4,)` state of an observer."""
        with torch.no_grad():
            chances = self.policy(state).softmax(-1)
        action = int(torch.multinomial(chances, 1, generator=self.draws[observer]))
        self.asked[observer].append((state, action))
        return action

    def learn(self, rewards: Sequence[Sequence[float]]) -> None:
        """Take a step of REINFORCE; `rewards` are those of each observer's episode."""
        # The policy was the same for the whole round, so nothing had to be kept for the
        # backward pass: all states go through it again, at once.
        steps = [*itertools.chain(*self.asked)]
        states = torch.stack([state for state, _ in steps])
        actions = torch.tensor([[action] for _, action in steps])
        returns = torch.cat([discounted(each, self.gamma) for each in rewards])
        advantages = (returns - returns.mean()) / (returns.std(correction=0) + 1e-6)
        chosen = self.policy(states).log_softmax(1).gather(1, actions).squeeze(1)
        self.optimizer.zero_grad()
        (-chosen * advantages).mean().backward()
        self.optimizer.step()
        for asked in self.asked:
            asked.clear()


class Observer:
    """A pole, and what happens to it; it does not know the policy."""

    def __init__(self, index: int, seed: int) -> None:
        self.index = index
        self.environment = gymnasium.make("CartPole-v1")
        self.environment.reset(seed=seed + index)

    async def run_episode(self, agent: RRef[Agent]) -> list[float]:
        """Let the agent balance the pole until it falls; return the rewards."""
        state, _ = self.environment.reset()
        rewards, is_over = [], False
        while not is_over:
            asked = agent.rpc_async().select_action(self.index, torch.from_numpy(state))
            state, reward, fell, is_late, _ = self.environment.step(await asked)
            rewards.append(float(reward))
            is_over = fell or is_late
        return rewards


def discounted(rewards: Sequence[float], gamma: float) -> torch.Tensor:
    """Return what is still to come at each step, later rewards counting less."""
    sums = itertools.accumulate(reversed(rewards), lambda rest, now: now + gamma * rest)
    return torch.tensor([*sums]).flip(0)


async def drive(options: argparse.Namespace, console: Console) -> None:
    """Be the agent: let the observers play, learn, and say how it goes."""
    agent = Agent(options)
    reference = RRef(agent)
    observers = [
        asyncrpc.remote(name_of(rank), Observer, args=(rank - 1, options.seed))
        for rank in range(1, options.world_size)
    ]
    totals: list[float] = []  # of each episode; a CartPole gives 1.0 for every step
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    begun = time.perf_counter()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=options.num_episodes)
        shown, mean = 0, 0.0
        while len(totals) < options.num_episodes and mean < options.enough:
            played = await asyncio.gather(
                *(observer.rpc_async().run_episode(reference) for observer in observers)
            )
            agent.learn(played)
            totals += map(sum, played)
            mean = fmean(totals[-LAST:])
            text = f"episode {len(totals):4}, mean reward {mean:5.1f}"
            bars.update(bar, completed=len(totals), description=text)
            if not console.is_terminal and len(totals) >= shown + options.log_interval:
                console.print(text)
                shown = len(totals)
    took_s = time.perf_counter() - begun
    show(console, totals, took_s)


def show(console: Console, totals: Sequence[float], took_s: float) -> None:
    """Print the table at the end."""
    table = Table("which")
    for title in ("episodes", "mean reward"):
        table.add_column(title, justify="right")
    parts = {"first": totals[:LAST], "last": totals[-LAST:], "all": totals}
    for which, part in parts.items():
        table.add_row(which, f"{len(part):,}", f"{fmean(part):.1f}")
    console.print(table)
    steps = sum(totals)
    console.print(
        f"{steps:,.0f} actions in {took_s:.1f} s: {steps / took_s:,.0f} a second"
    )


def name_of(rank: int) -> str:
    """Return the name of a worker."""
    return f"observer{rank}" if rank else "agent"


async def work(rank: int, options: argparse.Namespace) -> None:
    """Be one of the workers: what each process runs."""
    async with asyncrpc.init_rpc(name_of(rank)):
        if rank == 0:
            await drive(options, Console())
        await asyncrpc.shutdown()  # waits for the others, and serves them meanwhile


def main() -> None:
    """Read the options, and start the processes."""
    parser = argparse.ArgumentParser(description="Learn to balance a pole, over RPC.")
    option = parser.add_argument
    option("--world-size", "--world_size", type=int, default=4, help="agent included")
    option("--num-episodes", "--num_episodes", type=int, default=1200, help="at most")
    option("--enough", type=float, default=SOLVED, help="mean reward to end at")
    option("--seed", type=int, default=543)
    option("--gamma", type=float, default=0.99, help="what a reward loses in a step")
    option("--lr", type=float, default=0.01)
    option("--log-interval", "--log_interval", type=int, default=60)
    option("--quick", action="store_true", help="60 episodes")
    options = parser.parse_args()
    if options.world_size < 2 or options.num_episodes < 1:
        parser.error("it takes an agent and an observer, and an episode")
    if options.quick:
        options.num_episodes = 60
    # Imported once, instead of in every process.
    multiprocessing.set_forkserver_preload(["torch", "gymnasium", "asyncrpc"])
    try:
        launch(work, args=(options,), nprocs=options.world_size, method="forkserver")
    except ProcessFailedError as error:
        sys.exit(f"learning failed: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped")


if __name__ == "__main__":
    main()
